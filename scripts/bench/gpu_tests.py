"""The tests with the mark `gpu`, by file: a step of the GPU check.

The files are named, because the collection of all of tests/ imports packages that a machine with a
GPU may lack, and takes longer than the tests.
"""

import importlib.util
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gpu_facts import Place, fact

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "tests/train/test_step_gpu.py",
    "tests/parallel/test_attention_gpu.py",
    "tests/train/test_train_gpu.py",
    "tests/audit/test_decoding_gpu.py",
    "tests/parallel/test_norm_gpu.py",
    "tests/parallel/test_nf4.py",
    "tests/parallel/test_parity_gpu.py",
)
MAX_WORKERS = 6


class Facts:
    """Prints what pytest finds: each file when its last test has run, each failure at once."""

    def __init__(self) -> None:
        """Begin without results."""
        self.left: Counter[str] = Counter()
        self.results: dict[str, Counter[str]] = {}
        self.total: Counter[str] = Counter()

    def _begin(self, ids: list[str]) -> None:
        if not self.left:
            self.left = Counter(each.partition("::")[0] for each in ids)
            fact("collected", tests=len(ids), files=len(self.left))

    def pytest_collection_finish(self, session: Any) -> None:
        """One process: all tests are known."""
        if session.items:
            self._begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """Several processes: one of them knows all tests."""
        self._begin(ids)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported."""
        if report.failed:
            fact(f"collect {report.nodeid}", failed=_last_line(report), ok=False)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test has begun, run or ended."""
        file = report.nodeid.partition("::")[0]
        result = self.results.setdefault(file, Counter())
        if report.failed:
            fact(report.nodeid.removeprefix("tests/"), failed=_last_line(report), ok=False)
        if report.failed or report.skipped or report.when == "call":
            outcome = "failed" if report.failed else report.outcome
            result[outcome] += 1
            self.total[outcome] += 1
        if report.when == "teardown":
            self.left[file] -= 1
            if self.left[file] == 0:
                fact(file, **result)


def _last_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    return (lines[0] if crash is not None else lines[-1])[:160]


def tests(place: Place) -> None:
    """Run the tests; on a dry run they are collected, and skip themselves."""
    # What a test prints is not captured, as facts would be too.
    arguments = ["-q", "-s", "-m", "gpu", "-o", "addopts=", "-p", "no:cacheprovider"]
    workers = min(MAX_WORKERS, (os.cpu_count() or 1) // 2)
    if workers > 1 and importlib.util.find_spec("xdist") is not None:
        arguments += ["-n", str(workers)]
    facts = Facts()
    os.chdir(ROOT)
    code = int(pytest.main([*arguments, *FILES], plugins=[facts]))
    words = {name: facts.total[name] for name in ("passed", "failed", "skipped")}
    fact("tests", **words, exit_code=code, ok=code == 0)
