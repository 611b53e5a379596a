"""Run the same work by two checkouts and compare every number: the proof that a change is none.

    python scripts/same_results.py BEFORE AFTER             all cases, some minutes of each side
    python scripts/same_results.py BEFORE AFTER --only gate adapter
    python scripts/same_results.py BEFORE AFTER --keep DIR  keep the folders of both sides in DIR

A case is a list of commands. Each side runs them in a working folder, home and cache of its own,
because one side would take the scores that the other has cached. Both have one identity key, so
that equal texts have equal hashes. BEFORE and AFTER are folders of checkouts; packages are those
of the Python that runs this script.

    results   by key: counts are equal, values and ends of intervals within 1e-6
    records   by document, canary or item: the same
    verdict, decisions of gates, comparisons and training: equal
    weights   bit by bit
    metrics   every line of the training, without times

Rows and fields that only one side has are listed with their count and are no difference: a change
that drops something is read there. The exit code is 1 if anything that both sides have differs.
"""

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pyarrow.parquet
import yaml

TOLERANCE = 1e-6
_KEY = ("setting", "seed", "variant", "step", "model", "against", "probe", "parameters", "metric")
_KEYS = {
    "results.parquet": (*_KEY, "statistic", "bucket"),
    "comparison.parquet": (*_KEY, "statistic", "bucket"),
    "records.parquet": ("id",),
    "canaries.parquet": ("id",),
    "utility.parquet": ("task", "item"),
}
"""Columns that name a row of a table."""
_JSON = ("report.json", "comparison.json", "gate.json")
_OF_THE_MOMENT = {
    *("created", "code_sha256", "environment", "peak_memory_bytes", "num_bytes"),
    *("sha256", "report_sha256", "weights_sha256", "schema", "tables"),
}
"""Fields that differ between two runs of one checkout, beside those in seconds: hashes of files
that have such a field, or the working folder, as an adapter has; weights are compared. The tables
of a report are in results.parquet, by key."""


def is_of_the_moment(name: str) -> bool:
    """Tell whether a field is a time, or a hash that depends on one."""
    return name in _OF_THE_MOMENT or name.endswith(("_s", "_per_s"))


MODEL = "runs/quickstart/base/model"
_LORA = {"name": "lora", "r": 16}
_RUN: dict[str, Any] = {
    "model": {"path": MODEL},
    "data": {
        "train": ["texts.jsonl"],
        "seq_len": 128,
        "max_document_tokens": 128,
        "study": {"num_repetitions": [0, 4, 48], "documents_per_bucket": 12},
        "heldout_documents": 8,
    },
    "optim": {"lr": 8e-3},
    "train": {"batch_size": 8, "checkpoint_every_steps": 10, "log_every_steps": 1},
}
_BUDGET = {"budget": {"limit": 0.2}, "train": {**_RUN["train"], "audit_every_steps": 10}}
_POLICY = {
    "gate": [
        {"metric": "near_verbatim", "on": "trained", "at_most": 0.1},
        {"metric": "token_accuracy", "probe": "extraction", "on": "trained", "above_control": 0.3},
        {"metric": "auc", "probe": "membership", "on": "(members)", "at_most": 0.7},
        {"metric": "findings", "at_most": 3},
    ],
    "verdict": ["none-found", "extracted"],
}
_FILES: dict[str, Any] = {
    "adapter.yaml": {**_RUN, "name": "adapter", "adapter": _LORA},
    "budget.yaml": {**_RUN, "name": "budget", **_BUDGET},
    "policy.yaml": _POLICY,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Commands of `memguard`, and the exit codes that are no failure."""

    name: str
    commands: Sequence[str]
    codes: Sequence[int] = (0,)


_GIVEN = "--members members.jsonl --nonmembers nonmembers.jsonl"
CASES = (
    Case(name="quickstart", commands=["compare quickstart --jobs 2"]),
    Case(
        name="foreign",
        commands=[
            f"audit --model runs/quickstart/plain/model --base {MODEL} {_GIVEN} --suite attacks"
            " --out foreign",
            f"audit --model {MODEL} --members pairs.jsonl --nonmembers other_pairs.jsonl"
            ' --format {"template":"stanford"} --out pairs',
        ],
    ),
    Case(name="adapter", commands=["train adapter.yaml"]),
    Case(name="budget", commands=["train budget.yaml"]),
    Case(
        name="comparison",
        commands=["compare runs/quickstart/plain runs/quickstart/goldfish-k3-k8 --out comparison"],
    ),
    Case(
        name="gate",
        commands=[
            "gate runs/quickstart/plain --policy policy.yaml",
            "gate runs/quickstart/goldfish-k3-k8 --policy policy.yaml",
        ],
        codes=(0, 10, 11, 12),
    ),
)


@dataclass(kw_only=True, slots=True)
class Comparison:
    """What two sides have in common, and what only one has."""

    num_equal: Counter[str] = field(default_factory=Counter)
    different: list[str] = field(default_factory=list)
    only: dict[str, Counter[str]] = field(
        default_factory=lambda: {"before": Counter(), "after": Counter()}
    )

    def add(self, kind: str, place: str, one: Any, other: Any) -> None:
        """Compare a value of both sides."""
        if is_equal(one, other):
            self.num_equal[kind] += 1
        else:
            self.different.append(f"{place}: {_shorten(one)} | {_shorten(other)}")

    def add_missing(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Count names that one side has and the other has not."""
        first, second = Counter(one), Counter(other)
        self.only["before"] += first - second
        self.only["after"] += second - first


def is_equal(one: Any, other: Any) -> bool:
    """Tell whether two values are equal; numbers with a fraction, within 1e-6 of the larger."""
    if isinstance(one, float) and isinstance(other, float):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def write_inputs(folder: Path) -> None:
    """Write configurations, and texts from Python's documentation: the same in each call."""
    for name, values in _FILES.items():
        (folder / name).write_text(yaml.safe_dump(values, sort_keys=False))
    words = " ".join(topics[name] for name in sorted(topics)).split()
    texts = [" ".join(words[start : start + 90]) for start in range(0, len(words) - 90, 90)]
    random.Random(0).shuffle(texts)
    write = _write_rows
    write(folder / "texts.jsonl", "t", [{"text": text} for text in texts[:300]])
    write(folder / "members.jsonl", "m", [{"text": text} for text in texts[:40]])
    write(folder / "nonmembers.jsonl", "n", [{"text": text} for text in texts[300:340]])
    pairs = [
        {"instruction": " ".join(text.split()[:6]), "output": " ".join(text.split()[6:70])}
        for text in texts[:24]
    ]
    write(folder / "pairs.jsonl", "p", pairs[:12])
    write(folder / "other_pairs.jsonl", "q", pairs[12:])


def _write_rows(path: Path, prefix: str, rows: Sequence[Mapping[str, str]]) -> None:
    lines = (json.dumps({"id": f"{prefix}{number}", **row}) for number, row in enumerate(rows))
    path.write_text("".join(f"{line}\n" for line in lines))


def run_side(checkout: Path, home: Path, cases: Sequence[Case]) -> Path:
    """Run the commands of a side in `home`; returns the working folder.

    Raises:
        SystemExit: a command ended with another code than its case allows.
    """
    work = home / "work"
    if not work.is_dir():
        work.mkdir(parents=True)
        write_inputs(work)
        key = home / "config" / "memguard" / "memguard-identity.key"
        key.parent.mkdir(parents=True, mode=0o700)
        key.touch(mode=0o600)
        key.write_text("5e" * 32)
    environment = {
        **os.environ,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / "config"),
        "MEMGUARD_CACHE": str(home / "cache"),
        "PYTHONPATH": str(checkout),
        "SOURCE_DATE_EPOCH": "1700000000",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    for case in cases:
        for command in case.commands:
            print(f"{home.name}: memguard {command}", flush=True)
            done = subprocess.run(
                [sys.executable, "-m", "memguard", *command.split()],
                cwd=work,
                env=environment,
                capture_output=True,
                text=True,
            )
            (home / "log").open("a").write(f"$ {command}\n{done.stdout}{done.stderr}\n")
            if done.returncode not in case.codes:
                raise SystemExit(
                    f"{home.name}: 'memguard {command}' ended with {done.returncode}:\n"
                    f"{done.stderr[-2000:]}"
                )
    return work


def compare_sides(before: Path, after: Path) -> Comparison:
    """Compare every table, JSON file, log and weight of two working folders."""
    comparison = Comparison()
    kept = [
        {p.relative_to(side).as_posix(): p for p in sorted(side.rglob("*")) if _is_compared(p)}
        for side in (before, after)
    ]
    comparison.add_missing(*([f"file {Path(name).name}" for name in side] for side in kept))
    for name in sorted(kept[0].keys() & kept[1].keys()):
        one, other = kept[0][name], kept[1][name]
        if one.suffix == ".safetensors":
            comparison.add("weights", name, _sum_file(one), _sum_file(other))
        elif one.suffix == ".parquet":
            _compare_rows(comparison, name, _read_table(one), _read_table(other))
        elif one.suffix == ".jsonl":
            _compare_rows(comparison, name, _read_lines(one), _read_lines(other))
        else:
            fields = [dict(_flatten(json.loads(path.read_text()))) for path in (one, other)]
            _compare_rows(
                comparison, name, *({(k,): {"value": v} for k, v in f.items()} for f in fields)
            )
    return comparison


def _is_compared(path: Path) -> bool:
    if path.suffix in (".safetensors", ".parquet"):
        return path.suffix != ".parquet" or path.name in _KEYS
    return path.name in (*_JSON, "metrics.jsonl", "manifest.jsonl")


def _sum_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


Rows = Mapping[tuple[Any, ...], Mapping[str, Any]]


def _read_table(path: Path) -> Rows:
    rows = pyarrow.parquet.read_table(path).to_pylist()
    names = [name for name in _KEYS[path.name] if rows and name in rows[0]]
    # A column that one side lacks, such as one that went, is no part of a name where it is empty.
    return {tuple((n, row[n]) for n in names if row[n] not in (None, "")): row for row in rows}


def _read_lines(path: Path) -> Rows:
    lines = map(json.loads, path.read_text().splitlines())
    return {(number,): dict(_flatten(line)) for number, line in enumerate(lines)}


def _flatten(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of JSON with their places, without what is of the moment."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not is_of_the_moment(name):
                yield from _flatten(inner, f"{place}.{name}" if place else name)
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for number, inner in enumerate(value):
            yield from _flatten(inner, f"{place}[{number}]")
    else:
        yield place, value


def _compare_rows(comparison: Comparison, name: str, one: Rows, other: Rows) -> None:
    kind = Path(name).name
    comparison.add_missing(
        (f"{kind}: {_name_kind(key)}" for key in one.keys() - other.keys()),
        (f"{kind}: {_name_kind(key)}" for key in other.keys() - one.keys()),
    )
    for key in one.keys() & other.keys():
        first, second = one[key], other[key]
        names = [n for n in first if n in second and not is_of_the_moment(n)]
        comparison.add_missing(
            (f"{kind}: field {n}" for n in first.keys() - second.keys()),
            (f"{kind}: field {n}" for n in second.keys() - first.keys()),
        )
        place = f"{name} {' '.join(str(part) for part in key)}"
        for n in names:
            comparison.add(kind, f"{place} {n}", first[n], second[n])


def _name_kind(key: tuple[Any, ...]) -> str:
    """Return what rows of a kind have in common: of a result its probe, metric and variant."""
    if key and isinstance(key[0], tuple):
        parts = [f"{n}={v}" for n, v in key if n in ("probe", "metric", "variant", "parameters")]
        return " ".join(parts) or "rows"
    return f"{key[0]}" if isinstance(key[0], str) else "lines"


def print_comparison(comparison: Comparison) -> None:
    """Print what is equal, what only one side has, and every difference."""
    for kind, count in sorted(comparison.num_equal.items()):
        print(f"equal  {count:>8,}  {kind}")
    for side, names in comparison.only.items():
        for name, count in sorted(names.items()):
            print(f"only {side}  {count:>6,}  {name}")
    for line in comparison.different[:200]:
        print(f"DIFFERENT  {line}")
    print(
        f"{len(comparison.different):,} differences, {sum(comparison.num_equal.values()):,} equal"
    )


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--keep", type=Path, help="keep both sides here; a finished side is not run again"
    )
    arguments = parser.parse_args()
    # Every other case reads the models of the first.
    cases = [case for case in CASES if case.name in ("quickstart", *arguments.only)]
    keep = arguments.keep or Path(tempfile.mkdtemp(prefix="same-results-"))
    try:
        works = []
        for name in ("before", "after"):
            checkout = getattr(arguments, name).resolve()
            done = keep / name / "done"
            if not done.is_file():
                shutil.rmtree(keep / name, ignore_errors=True)
                run_side(checkout, (keep / name).resolve(), cases)
                done.touch()
            works.append(keep / name / "work")
        comparison = compare_sides(*works)
    finally:
        if arguments.keep is None:
            shutil.rmtree(keep)
    print_comparison(comparison)
    return 1 if comparison.different else 0


if __name__ == "__main__":
    sys.exit(main())
