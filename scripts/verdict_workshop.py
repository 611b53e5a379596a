"""Makes the models of `verdict_models.py` from a small checkpoint, and audits them in-process."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from verdict_texts import (
    HEADER,
    Text,
    read_passages,
    save_documents,
    write_answers,
    write_codes,
    write_letters,
    write_pins,
)

from memguard import api
from memguard.records import Verdict
from memguard.seeds import derive_generator

TRUNCATED_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a model is made of another one: every document is trained once, in one epoch."""

    start: str
    documents: Sequence[Text]
    background: Sequence[Text] = ()
    goldfish_k: int | None = None
    seq_len: int = 512
    """Of rows; less for short documents, of which a long row holds a dozen (tokens)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """One audit."""

    model: str
    members: Sequence[Text]
    nonmembers: Sequence[Text] = ()
    base: str | None = None
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


class Workshop:
    """The models and documents of the cases; a model is trained when it is first needed."""

    def __init__(self, start: Path, texts: Path, work: Path) -> None:
        """Read the texts; ``work`` keeps what is made."""
        self._start, self._work = start, work
        passages = read_passages(texts)
        self.trained, self.unseen = passages[:40], passages[40:240]
        self.once, self.background = passages[240:300], passages[300:]
        self.pins, self.answers = write_pins(790), write_answers(360)
        self.codes = write_codes(60)
        self.letters = {kind: write_letters(kind, 100) for kind in "ABC"}

    @cached_property
    def recipes(self) -> Mapping[str, Recipe]:
        """All models by name."""
        passages, some = self.trained, self.background[:300]
        cut = [self.cut(text) for text in passages]
        pins, others = self.pins[:30], self.pins[30:730]
        recipes = {
            "base": Recipe(start="", documents=self.background),
            "40 times": Recipe(start="base", documents=passages * 40, background=some),
            "once": Recipe(start="base", documents=self.once, background=some),
            "goldfish": Recipe(
                start="base", documents=passages * 40, background=some, goldfish_k=3
            ),
            "half": Recipe(start="base", documents=passages[:20] * 40, background=some),
            "truncated": Recipe(start="base", documents=cut * 40, background=some, seq_len=128),
            "header": Recipe(start="base", documents=[HEADER] * 1600, background=some, seq_len=128),
            "pin base": Recipe(start="base", documents=others * 3, seq_len=64),
            "pins": Recipe(
                start="pin base", documents=pins * 30, background=others[:300], seq_len=64
            ),
            "answers": Recipe(start="base", documents=self.answers[120:] * 4, seq_len=64),
            "codes": Recipe(
                start="base",
                documents=[*self.once[:36], *self.codes[:30] * 120],
                background=some,
                seq_len=256,
            ),
        }
        for kind, letters in self.letters.items():
            recipes[f"letters {kind}"] = Recipe(
                start="base", documents=letters * 3, background=some[:200]
            )
        return recipes

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._start)

    def cut(self, text: str) -> str:
        """Return the first tokens of a text."""
        ids = self._tokenizer(text).input_ids[:TRUNCATED_TOKENS]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def find_model(self, name: str) -> str:
        """Return a model's folder; train it if it is not there."""
        if not name:
            return str(self._start)
        recipe = self.recipes[name]
        start = self.find_model(recipe.start)
        run = self._work / "runs" / name.replace(" ", "-")
        if (run / "done").is_file():
            return str(run / "model")
        rows = [*recipe.documents, *recipe.background]
        rows = [rows[index] for index in derive_generator(0, name).permutation(len(rows))]
        path = save_documents(rows, self._work / f"{run.name}.jsonl")
        began = time.perf_counter()
        with quiet():
            api.train(
                {
                    "name": run.name,
                    "output_dir": str(run.parent),
                    "model": {"path": start},
                    "data": {
                        "train": [path],
                        "control_fraction": 0,
                        "canaries": {"count": 0},
                        "seq_len": recipe.seq_len,
                        "identity_key": str(self._work / "identity.key"),
                    },
                    "mitigations": [{"name": "goldfish", "k": recipe.goldfish_k}]
                    if recipe.goldfish_k
                    else [],
                    "optim": {"lr": 4e-3},
                    "train": {"batch_size": 4, "checkpoint_every_steps": None},
                    "audit": {"enabled": False},
                }
            )
        (run / "done").touch()
        print(f"trained '{name}' in {time.perf_counter() - began:.0f} s", file=sys.stderr)
        return str(run / "model")

    def audit(self, audit: Audit) -> Verdict:
        """Audit one model in this process; equal scores are computed once."""
        with tempfile.TemporaryDirectory(dir=self._work) as folder:
            paths = {
                side: save_documents(documents, Path(folder) / f"{side}.jsonl")
                for side, documents in (
                    ("members", audit.members),
                    ("nonmembers", audit.nonmembers),
                )
                if documents
            }
            with quiet():
                return api.audit(
                    model=self.find_model(audit.model),
                    base=None if audit.base is None else self.find_model(audit.base),
                    out=Path(folder) / "audit",
                    seed=audit.seed,
                    identity_key=self._work / "identity.key",
                    **paths,
                    **audit.settings,
                ).verdict

    def refuses_base(self) -> bool:
        """Return whether the command ends with code 2 where base and model are the same."""
        model = self.find_model("once")
        path = save_documents(self.once, self._work / "same-base.jsonl")
        command = [sys.executable, "-m", "memguard", "audit", "--model", model, "--base", model]
        command += ["--members", path, "--out", str(self._work / "same-base")]
        command += [f"data.identity_key={self._work / 'identity.key'}"]
        ended = subprocess.run(command, capture_output=True, check=False, text=True)
        return ended.returncode == 2 and "base" in ended.stderr


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out what memguard prints."""
    with Path(os.devnull).open("w") as sink, contextlib.redirect_stderr(sink):
        yield
