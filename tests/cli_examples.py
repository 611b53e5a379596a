"""The command line in this process, and tiny checkpoints and documents to give it."""

import contextlib
import io
import json
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tiny_llama import TINY_LLAMA

from memguard.cli.errors import run_app
from memguard.data.tokenization import train_bpe
from memguard.hf.from_config import build_scratch_model

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str


def run_cli(*arguments: object) -> Outcome:
    """Run `memguard ARGUMENTS` in this process."""
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    hook = sys.unraisablehook
    code: object = None
    with (
        mock.patch.object(sys, "argv", ["memguard", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            run_app()
        except SystemExit as stop:
            code = stop.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            sys.unraisablehook = hook
    assert isinstance(code, int), "the command line ends with a number"
    return Outcome(code=code, out=out.getvalue(), err=err.getvalue())


def succeed(*arguments: object) -> Outcome:
    """Run a command that must end with exit code 0."""
    outcome = run_cli(*arguments)
    assert outcome.code == 0, outcome.err
    return outcome


def make_texts(count: int, *, words: int = 40, seed: int = 0) -> list[str]:
    """Return texts of random words; no two share a run of 13."""
    draw = np.random.default_rng(seed)
    vocabulary = ["".join(draw.choice(list("abcdefghij"), 4)) for _ in range(300)]
    return [" ".join(draw.choice(vocabulary, words + number % 7)) for number in range(count)]


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write_texts(path: Path, count: int = 60, *, seed: int = 0, words: int = 40) -> Path:
    texts = make_texts(count, words=words, seed=seed)
    return write_jsonl(path, ({"id": f"d{n}", "text": text} for n, text in enumerate(texts)))


def save_tiny_model(folder: Path, **changes: Any) -> Path:
    """Write a random Llama with a byte-level BPE that knows the chat template above."""
    tokenizer = train_bpe(make_texts(60), vocab_size=400)
    tokenizer.chat_template = CHAT_TEMPLATE
    model = build_scratch_model(
        {**TINY_LLAMA, **changes}, vocab_size=len(tokenizer), tokenizer=tokenizer, seed=0, attn=None
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_run(folder: Path, **changes: Any) -> Path:
    """Write a run's YAML; `changes` replace or extend its sections. JSON is YAML."""
    values: dict[str, Any] = {
        "name": "run",
        "output_dir": str(folder / "runs"),
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "documents.jsonl"), "seq_len": 128},
        "optim": {"lr": 3e-3},
        "train": {"batch_size": 8},
        "audit": {"continuation_tokens": 8},
    }
    for section, change in changes.items():
        merged = isinstance(change, dict) and isinstance(values.get(section), dict)
        values[section] = {**values[section], **change} if merged else change
    path = folder / f"{values['name']}.yaml"
    path.write_text(json.dumps(values, indent=2))
    return path


def write_sweep(
    folder: Path, settings: list[dict[str, Any]], *, num_repetitions: list[int], **run: Any
) -> Path:
    """Write a sweep of a tiny study on `texts.jsonl`; `run` has more sections of its runs."""
    texts = str(folder / "texts.jsonl")
    values = {
        "name": "small",
        "output_dir": str(folder),
        "pretrain": {
            "model": {"scratch": {"vocab_size": 400, "config": TINY_LLAMA}},
            "data": {"train": texts, "seq_len": 64, "control_fraction": 0},
            "train": {"max_steps": 2},
        },
        "run": {
            "data": {
                "train": texts,
                "study": {"num_repetitions": num_repetitions, "documents_per_bucket": 6},
                "background": "remainder",
                "heldout_documents": 6,
                "seq_len": 128,
            },
            "audit": {"continuation_tokens": 8},
            **run,
        },
        "settings": settings,
    }
    path = folder / "sweep.yaml"
    path.write_text(json.dumps(values, indent=2))
    return path


def read_json(path: Path) -> Any:
    """Read JSON as strict readers do: NaN and Infinity are errors."""

    def refuse(name: str) -> None:
        raise ValueError(f"{path} holds {name}")

    return json.loads(path.read_text(), parse_constant=refuse)
