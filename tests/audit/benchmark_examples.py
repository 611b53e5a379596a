"""A real model with a short context, tasks of lm-eval's kinds in files, and lm-eval's answers."""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memguard.audit.benchmarks.answers import Evaluation
from memguard.audit.benchmarks.isolation import OTHER_SEED
from memguard.audit.benchmarks.tasks import OpenedTask
from memguard.config.utility import UtilityTask
from memguard.hf.checkpoint import load_tokenizer
from memguard.hf.load import load_model

CONTEXT = 128
"""Positions of the model; most prompts with solved examples are longer."""
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_CONFIGS: Mapping[str, str] = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list:
  - metric: acc
  - metric: acc_norm
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
generation_kwargs: {until: ["."], max_gen_toks: 24}
metric_list:
  - metric: exact_match
filter_list:
  - name: whole
    filter: [{function: take_first}]
  - name: word
    filter: [{function: regex, regex_pattern: "([a-z]+)"}, {function: take_first}]
""",
}


def export_model(folder: Path, shared_data: Path) -> Path:
    """Write a trained model of 128 positions, whose tokenizer adds a first token; return folder."""
    source = str(shared_data / "checkpoints" / "stories260K")
    model, tokenizer = load_model(source), load_tokenizer(source)
    model.config.max_position_embeddings = CONTEXT
    # A text ends with this token as with the end of text.
    model.generation_config.eos_token_id = [2, tokenizer.convert_tokens_to_ids("▁and")]
    tokenizer.chat_template = CHAT
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def read_rows(shared_data: Path) -> list[dict[str, Any]]:
    """Return items made from real texts."""
    with (shared_data / "text" / "documents.jsonl").open(encoding="utf-8") as lines:
        return make_rows([json.loads(line)["text"] for line in islice(lines, 11)])


def make_rows(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return items: a beginning of some length, and four ways in which it goes on."""
    rows = []
    for number, text in enumerate(texts):
        begin, end = text[: 40 + 30 * number], text[40 + 30 * number :][:24].strip()
        choices = [end, "a", "b", f"{end} and then"]
        rows.append({"question": begin.strip(), "choices": choices, "label": number % 4})
    return rows


def write_task(
    folder: Path,
    kind: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    name: str = "",
    change: tuple[str, str] = ("", ""),
    split: str = "test_split: test\nfewshot_split: train",
) -> Path:
    """Write a task and its documents; return its YAML.

    Args:
        folder: of the files.
        kind: ``choice``, ``rolling`` or ``generation``.
        rows: its documents; the first three are the solved examples.
        name: its name; empty: its kind.
        change: text of the YAML that is replaced, and by what.
        split: splits of the task.
    """
    name = name or kind
    files = {"train": folder / f"{name}-train.jsonl", "test": folder / f"{name}-test.jsonl"}
    files["train"].write_text("".join(f"{json.dumps(row)}\n" for row in rows[:3]))
    files["test"].write_text("".join(f"{json.dumps(row)}\n" for row in rows[3:]))
    data = json.dumps({key: str(path) for key, path in files.items()})
    text = (
        f"task: {name}\ndataset_path: json\n{split}\n"
        f"dataset_kwargs:\n  data_files: {data}{_CONFIGS[kind]}metadata: {{version: 2.0}}\n"
    )
    path = folder / f"{name}.yaml"
    path.write_text(text.replace(*change) if change[0] else text)
    return path


def make_settings(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[UtilityTask]:
    """Write the tasks of the tests; return their settings."""

    def write(kind: str, name: str, **settings: Any) -> UtilityTask:
        return UtilityTask(task=str(write_task(folder, kind, rows, name=name)), **settings)

    return [
        write("choice", "choice"),
        write("choice", "shots", num_fewshot=2, limit=4),
        write("choice", "chat", num_fewshot=1, limit=4, chat=True, metric="acc_norm"),
        write("rolling", "rolling"),
        write("generation", "generation", metric="exact_match,word"),
    ]


# -- lm-eval's own answers -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What lm-eval says, and what it ran."""

    values: Mapping[str, Any]
    samples: list[dict[str, Any]]
    num_forwards: int
    num_decoded_tokens: int


def ask_lm_eval(folder: Path, tasks: Iterable[OpenedTask]) -> dict[str, Reference]:
    """Return the answers of the model of a folder by lm-eval's `HFLM`, one row at a time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        class Counting(HFLM):  # type: ignore[misc]
            num_forwards = num_decoded_tokens = 0

            def _model_call(self, inps: Any, *args: Any, **kwargs: Any) -> Any:
                self.num_forwards += len(inps)
                return super()._model_call(inps, *args, **kwargs)

            def _model_generate(self, context: Any, *args: Any, **kwargs: Any) -> Any:
                written = super()._model_generate(context, *args, **kwargs)
                self.num_forwards += 1
                self.num_decoded_tokens += written.shape[1] - context.shape[1]
                return written

        model = Counting(pretrained=str(folder), batch_size=1, device="cpu")
        references = {}
        for task in tasks:
            model.num_forwards = model.num_decoded_tokens = 0
            task.task.set_fewshot_seed(seed=OTHER_SEED)
            found = evaluate(
                lm=model,
                task_dict={"tasks": {task.name: task.task}, "groups": {}, "group_map": {}},
                limit=task.settings.limit,
                apply_chat_template=task.settings.chat,
                fewshot_as_multiturn=True,
                bootstrap_iters=1,
            )
            references[task.name] = Reference(
                values=found["results"][task.name],
                samples=found["samples"][task.name],
                num_forwards=model.num_forwards,
                num_decoded_tokens=model.num_decoded_tokens,
            )
    return references


def check_items(evaluation: Evaluation, reference: Reference) -> None:
    """Check that every answer to every item is lm-eval's."""
    assert len(evaluation.samples) == len(reference.samples) > 0
    for found, expected in zip(evaluation.samples, reference.samples, strict=True):
        for key in ("doc_id", "doc", "filter", "doc_hash", "prompt_hash", "target_hash"):
            assert found[key] == expected[key]
        for (one,), (other,) in zip(found["resps"], expected["resps"], strict=True):
            if isinstance(other, str):
                assert one == other
                continue
            ones, others = np.atleast_1d(one), np.atleast_1d(other)
            # Sums of up to 300 fp32 log-probabilities of order 1 to 10, in batches of other shapes.
            assert ones[0] == pytest.approx(others[0], abs=1e-4, rel=2e-7)
            assert ones[1:].tolist() == others[1:].tolist()  # whether all are greedy
