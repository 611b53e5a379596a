"""A probe of another package: its errors end it alone, and its risk counts only where asked for."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from audit_examples import Held, Scripted, audit, build_documents, build_suite, know, say_known
from pydantic import Field

from memguard.audit.metrics import Evidence, Metric
from memguard.audit.passages import ScoreSelection, TokenResult
from memguard.audit.plugins import Guard
from memguard.audit.probe import Probe, Summary
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.requests import Inputs, Measured, Rounds, Score, View, key_of_window
from memguard.audit.run import AuditOutcome
from memguard.audit.windows import AuditDocument
from memguard.records import ProbeRun, ResultRow

PACKAGE = "mine 1.2"


SECRET = "Ilse Aichinger, 12 Lindenweg"


class Unprintable(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError(SECRET)


FAULTS: dict[str, Callable[[], object]] = {
    "int": lambda: int(SECRET),
    "float": lambda: float(SECRET),
    "key": lambda: {}[SECRET],
    "exit": lambda: sys.exit(SECRET),
    "unprintable": lambda: _raise(Unprintable()),
    "surrogate": lambda: _raise(ValueError(f"\udc80{SECRET}")),
    "attribute": lambda: getattr(SECRET, SECRET),
    "cause": lambda: _raise(ValueError(SECRET), KeyError(SECRET)),
    "memory": lambda: _raise(MemoryError(SECRET)),
    "encoding": lambda: f"{SECRET}\udc80".encode(),
}


def _raise(error: BaseException, cause: BaseException | None = None) -> None:
    raise error from cause


class FoundProbe(Probe):
    """Finds every document of one bucket, on all documents or on every other one."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(name="found", meaning="Found.", unit="documents", statistic="rate", risk_rank=9),
    )

    in_variants = ("found",)  # Accepted, and not read.

    name: Literal["found"] = Field("found", description="Which probe.")
    bucket: str = "x4"
    every: int = 1
    fails: str = ""

    def bound(self, sizes: Any) -> Any:
        """Of an earlier version of memguard; nothing calls it."""
        raise AssertionError

    def _fail(self, place: str) -> None:
        if self.fails.startswith(f"{place} "):
            FAULTS[self.fails.split()[1]]()

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        self._fail("measuring")
        if self.fails == "measure":
            raise ValueError("no\nluck")
        windows = inputs.windows

        def reduce(items: Sequence[int], results: Sequence[TokenResult]) -> list[list[float]]:
            self._fail("reducing")
            assert all(result.rank is not None for result in results)
            if self.fails == "reduce":
                raise KeyError("x")
            if self.fails == "exit":
                sys.exit(0)
            kept = [float(windows[item].document.bucket == self.bucket) for item in items]
            return [
                [v if i % self.every == 0 else np.nan] for i, v in zip(items, kept, strict=True)
            ]

        keys = [key_of_window(window) for window in windows]
        (numbers,) = yield [
            Score(
                items=windows,
                passages=[window.passage() for window in windows],
                keys=keys[1:] if self.fails == "lengths" else keys,
                names=("found",),
                reduce=reduce,
                parameters={"kind": "found"},
                selection=ScoreSelection(
                    needs=frozenset({"mean_logprob" if self.fails == "needs" else "rank"})
                ),
            )
        ]
        self._fail("ending")
        if self.fails == "second round":
            raise RuntimeError("it ends later")
        return Measured(columns=numbers)

    def tabulate(self, evidence: Evidence) -> Summary:
        self._fail("tabulating")
        if self.fails == "tabulate":
            raise TypeError("no table")
        summary = super().tabulate(evidence)
        rows = list(summary.rows)
        changes: dict[str, list[ResultRow]] = {
            "owner": [*rows, replace(rows[0], probe="extraction")] if rows else rows,
            "key": [*rows, *rows[:1]],
            "nan": [replace(row, value=float("nan")) for row in rows],
        }
        return replace(summary, rows=changes.get(self.fails, rows))


@cache
def _list_documents() -> tuple[AuditDocument, ...]:
    return tuple(build_documents(12))


def _audit(*probes: Probe, in_verdict: bool = False) -> AuditOutcome:
    """Audit a model that says nothing of the documents by heart, with probes of the package."""
    suite = build_suite(ExtractionProbe(), *probes, MembershipProbe(scores=("loss",))).model_copy(
        update={
            "packages": {probe.name: PACKAGE for probe in probes},
            "in_verdict": frozenset(probe.name for probe in probes if in_verdict),
        }
    )
    documents = _list_documents()
    say = say_known(lambda _: False)
    # With the losses of the model it would be none.
    base = Held(Scripted(lambda ids: replace(say(ids), logprob=-4.0)))
    return audit(documents, Held(know(documents, "none")), base, suite=suite)


def _get_run(outcome: AuditOutcome) -> ProbeRun:
    (run,) = (run for run in outcome.summary.probe_runs if run.name == "found")
    return run


@pytest.mark.parametrize("place", ["measuring", "reducing", "ending", "tabulating"])
@pytest.mark.parametrize(
    "fault",
    [name if name == "int" else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS],
)
def test_no_message_of_a_probe_is_shown(
    place: str, fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = _audit(FoundProbe(fails=f"{place} {fault}"), in_verdict=True)
    reason = _get_run(outcome).reason_not_run or ""
    assert reason.startswith(f"the probe of package {PACKAGE} failed (")
    assert ".py:" in reason
    said = "".join((outcome.summary.model_dump_json(), *capfd.readouterr()))
    assert "Lindenweg" not in said


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("measure", "ValueError at test_foreign_probes.py:"),
        ("reduce", "KeyError at test_foreign_probes.py:"),
        ("exit", "SystemExit at test_foreign_probes.py:"),
        ("lengths", "the items, passages or prompts, and keys"),
        ("needs", "the needs of its requests must be of entropy, is_best, rank"),
        ("second round", "RuntimeError at test_foreign_probes.py:"),
        ("tabulate", "TypeError at test_foreign_probes.py:"),
        ("owner", "every row must have the probe 'found'"),
        ("key", "two rows have one key"),
        ("nan", "a row has neither a number nor a reason"),
    ],
)
def test_an_error_ends_only_the_probe(fails: str, reason: str) -> None:
    outcome, without = _audit(FoundProbe(fails=fails), in_verdict=True), _audit()
    run = _get_run(outcome)
    assert run.num_documents is None
    assert run.reason_not_run.startswith(f"the probe of package {PACKAGE} failed ({reason}")
    assert "\n" not in run.reason_not_run
    found, expected = outcome.summary, without.summary
    assert found.tables == expected.tables
    assert (found.findings, found.banners) == (expected.findings, expected.banners)
    assert found.verdict == expected.verdict.model_copy(update={"scope": found.verdict.scope})
    assert found.verdict.scope.endswith("Not run: found.")
    assert list(outcome.scores.columns) == list(without.scores.columns)


def test_its_rows_have_base_control_and_package() -> None:
    outcome, without = _audit(FoundProbe()), _audit()
    tables = outcome.summary.tables
    assert _get_run(outcome).num_documents == 36
    row = tables.find("found", "found", "x4")
    assert (row.num_matched, row.num_documents, row.minus_control) == (12, 12, 1)
    assert tables.find("found", "found", "x4", model="base").num_matched == 12
    assert tables.find("found", "found", "x4", against="base").value == 0
    assert tables.find_metric("found", "found").package == PACKAGE
    own = [row for row in tables.results if row.probe != "found"]
    assert tuple(own) == without.summary.tables.results
    assert {"found.found", "base.found.found"} <= set(outcome.scores.columns)


def test_its_risk_does_not_count_unless_asked_for() -> None:
    outcome, without = _audit(FoundProbe()), _audit()
    assert outcome.summary.verdict == without.summary.verdict
    assert "found.found" not in outcome.summary.tables.risks("x4")
    assert outcome.summary.tables.find_metric("found", "found").risk_rank is None


class OnlyTrained(FoundProbe):
    """The same, of the audited model alone."""

    models: ClassVar[tuple[Any, ...]] = ("trained",)


def test_its_risk_joins_the_union_where_it_ran_on_all_documents() -> None:
    verdict = _audit(OnlyTrained(), in_verdict=True).summary.verdict
    assert (verdict.level, verdict.bucket, verdict.metric) == ("memorized", "x4", "found.found")
    assert (verdict.test.documents, verdict.trained.num_matched) == ("bucket", 12)
    # What it finds with the base model too does not count.
    known = _audit(FoundProbe(), in_verdict=True).summary.verdict
    assert (known.level, known.reason) == ("extracted", "base-too")


def test_its_risk_has_the_share_of_the_attacks_where_it_ran_on_a_sample() -> None:
    verdict = _audit(OnlyTrained(every=2), in_verdict=True).summary.verdict
    assert (verdict.level, verdict.reason) == ("extracted", "too-few")
    assert (verdict.test.documents, verdict.test.level) == ("attacked", 0.01)
    assert (verdict.trained.num_matched, verdict.trained.num_documents) == (6, 12)
    assert "attacked: 12 of 24" in verdict.scope


def test_a_failure_on_another_rank_ends_it_here() -> None:
    peers: Any = SimpleNamespace(agree_any=lambda _: True)
    guard = Guard(packages={"found": PACKAGE}, peers=peers)
    assert guard.advance("found", list) is None
    assert guard.failed == {"found": f"the probe of package {PACKAGE} failed"}
    # Errors of memguard's own probes are not contained.
    with pytest.raises(ZeroDivisionError):
        guard.advance("extraction", lambda: [1 // 0])  # type: ignore[list-item]
