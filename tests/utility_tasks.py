"""Small benchmark tasks in files, of the words of `cli_examples.make_texts`."""

import json
from pathlib import Path
from typing import Literal

from cli_examples import make_texts

TaskKind = Literal["choice", "rolling", "generation"]

_YAML: dict[TaskKind, str] = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list:
  - metric: acc
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
""",
    "generation": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs:
  until: ["e"]
  max_gen_toks: 5
metric_list:
  - metric: exact_match
""",
}


def write_task(folder: Path, kind: TaskKind, *, name: str = "", count: int = 6) -> Path:
    """Write a task of ``count`` items and its documents; return its YAML."""
    name = name or kind
    texts = make_texts(count, words=9, seed=5)
    rows = [
        {
            "question": " ".join(words[:6]),
            # The first two differ in their last token only, and share a forward.
            "choices": ["a", "b", " ".join(words[6:])],
            "label": number % 3,
        }
        for number, words in enumerate(text.split() for text in texts)
    ]
    documents = folder / f"{name}.jsonl"
    documents.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = folder / f"{name}.yaml"
    path.write_text(
        f"task: {name}\ndataset_path: json\ntest_split: test\ndataset_kwargs:\n"
        f"  data_files: {{test: {documents}}}\n{_YAML[kind].lstrip()}metadata:\n  version: 1\n"
    )
    return path
