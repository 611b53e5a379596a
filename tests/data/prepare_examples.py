"""Documents prepared as a run's settings say, without a model."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
from cli_examples import write_jsonl

from memguard.config import RunConfig
from memguard.config.mitigations import DeduplicateConfig, find_mitigation
from memguard.data.corpus import Corpus
from memguard.data.prepare import AuditNeeds, prepare
from memguard.runtime import Console

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def draw_texts(count: int, seed: int = 0, words: int = 20) -> list[str]:
    """Return texts of so many random words; no two share a run of 13."""
    draw = np.random.default_rng(seed)
    vocabulary = ["".join(draw.choice(list("abcdefghij"), 4)) for _ in range(300)]
    return [" ".join(draw.choice(vocabulary, words)) for _ in range(count)]


def write_named(path: Path, texts: Iterable[str], prefix: str = "d") -> str:
    """Write texts with numbered ids."""
    return str(write_jsonl(path, ({"id": f"{prefix}{n}", "text": t} for n, t in enumerate(texts))))


def make_run(train: Any, *, name: str = "run", **fields: Any) -> RunConfig:
    """Return the settings of a run; fields of `data` beside those of the run."""
    own = {key: fields.pop(key) for key in list(fields) if key in RunConfig.model_fields}
    data = {"train": train if isinstance(train, list) else str(train), **fields}
    return RunConfig.model_validate({"name": name, "model": {"path": "m"}, **own, "data": data})


def prepare_as(
    config: RunConfig, run_folder: Path, tokenizer: Any, *, fewest_tokens: int = 21
) -> tuple[Corpus, str]:
    """Prepare a run; return its corpus and what was printed.

    Documents of ``fewest_tokens`` are long enough for the audit.
    """
    printed = io.StringIO()
    corpus = prepare(
        config.data,
        run_folder,
        seed=config.seed,
        epochs=config.train.epochs,
        deduplicate=find_mitigation(config.mitigations, DeduplicateConfig),
        audit=AuditNeeds(
            key=config.audit.model_dump_json(),
            is_auditable=lambda document: len(document.input_ids) >= fewest_tokens,
            min_documents=config.audit.min_documents if config.audit.enabled else 0,
        ),
        load_tokenizer=lambda _: tokenizer,
        has_chat_template=lambda: tokenizer.chat_template is not None,
        cache_dir=run_folder.parent / "cache",
        console=Console(rich.console.Console(file=printed, width=200)),
    )
    return corpus, printed.getvalue()
