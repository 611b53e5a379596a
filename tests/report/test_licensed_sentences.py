"""Verdict, scope, membership and notices: exact in a table, and true of drawn audits."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from licensed_audits import (
    REASON,
    Audit,
    build_report,
    list_columns,
    read_audit,
    read_table,
    write_all,
)
from numpy.typing import NDArray

from memguard import records as r
from memguard.records.percent import format_percent

MOST_WORDS = 20
TAUGHT = re.compile(r"\b(?:learn\w*|taught|training raised|trained into)\b", re.IGNORECASE)
COUNT = re.compile(
    r"(?P<num>[\d,]+) of (?:the )?(?P<of>[\d,]+) (?P<what>documents to be forgotten|"
    r"attacked training|training documents|trained documents?|documents trained|documents of '|"
    r"unseen|trained canar|references?|control documents|of its documents|"
    r"documents that should have been trained)"
)


@pytest.mark.parametrize("case", read_table()["cases"])
def test_sentences_of_the_table(case: dict[str, Any]) -> None:
    report = build_report(read_audit(case["audit"]))
    assert write_all(report) == {name: text for name, text in case.items() if name != "audit"}
    assert len(report.verdict.sentence.split()) <= MOST_WORDS


# -- what a sentence may count ---------------------------------------------------------------------


class Counted:
    """Which documents of an audit came out, and how many of each kind."""

    def __init__(self, audit: Audit) -> None:
        self.audit, columns = audit, list_columns(audit)
        role, count = columns["role"], columns["count"]
        no_N = np.zeros(len(role), dtype=bool)
        self.planned_N, self.missed_N = role == "trained", (role == "trained") & (count == 0)
        self.trained_N = self.planned_N & ~self.missed_N
        self.control_N, self.forget_N = role == "control", role == "forget"
        self.bucket_N, self.attacked_N = columns["bucket"], columns["attacked"].astype(bool)
        self.verbatim_N = columns["verbatim"].astype(bool)
        self.near_N = columns["near"].astype(bool) if audit.generated else no_N
        drawn_N = columns["drawn"].astype(bool) if audit.sampled else no_N
        self.greedy_N = self.verbatim_N | self.near_N | drawn_N
        self.attacks_N = (columns["beam_search"] | columns["sampling"]).astype(bool)
        self.any_N = self.greedy_N | self.attacks_N
        self.base_N = no_N
        if audit.base != "none":
            near_N = columns["base_near"] if audit.base_generated else no_N
            self.base_N = (columns["base_verbatim"] | near_N).astype(bool)

    def pair(self, where_N: NDArray[np.bool_], out_N: NDArray[np.bool_]) -> tuple[int, int]:
        return int((where_N & out_N).sum()), int(where_N.sum())

    def pairs(self, where_N: NDArray[np.bool_], *ways: NDArray[np.bool_]) -> set[tuple[int, int]]:
        """Return the counts of documents that came out in each way, of the base's too or not."""
        return {self.pair(where_N, w) for way in ways for w in (way, way & ~self.base_N)}

    def allow(self, what: str) -> set[tuple[int, int]]:
        """Return the pairs that "1 of 2" may be before these words."""
        trained_N, control_N, attacked_N = self.trained_N, self.control_N, self.attacked_N
        by_attack = self.pairs(trained_N & attacked_N, self.attacks_N)
        won, num, refs, of = self.audit.secrets or (0, 0, 0, 0)
        buckets = [trained_N & (self.bucket_N == name) for name in set(self.bucket_N)]
        total = sum(g.too_short + g.not_sampled for g in self.audit.groups if is_fed(g))
        audited = (int(trained_N.sum()), int(trained_N.sum()) + total)
        control = self.pairs(control_N, self.greedy_N, self.any_N)
        return {
            "documents to be forgotten": {self.pair(self.forget_N, self.any_N)},
            "of its documents": {
                self.pair(self.forget_N, self.near_N if self.audit.generated else self.verbatim_N)
            },
            "attacked training": by_attack,
            "training documents": self.pairs(trained_N, self.greedy_N),
            "documents trained": set().union(*(self.pairs(b, self.greedy_N) for b in buckets)),
            "documents of '": set().union(*(self.pairs(b, self.greedy_N) for b in buckets)),
            "trained document": {audited},
            "trained documents": {audited, self.pair(trained_N, self.greedy_N), *by_attack},
            "unseen": control | self.pairs(control_N & attacked_N, self.attacks_N),
            "control documents": self.pairs(control_N, self.verbatim_N, self.near_N),
            "trained canar": {(won, num)},
            "reference": {(refs, of)},
            "references": {(refs, of)},
            "documents that should have been trained": {self.pair(self.planned_N, self.missed_N)},
        }[what]


def is_fed(group: Any) -> bool:
    return group.role == "trained" and set(group.counts) != {0}


def list_texts(written: dict[str, Any]) -> Iterator[str]:
    yield from (written["sentence"], written["scope"], *written["notices"], *written["lead"])


def check_counts(counted: Counted, written: dict[str, Any]) -> None:
    """Every count that a sentence says is a count of the record."""
    for text in list_texts(written):
        for said in COUNT.finditer(text):
            pair = tuple(int(said[name].replace(",", "")) for name in ("num", "of"))
            assert pair in counted.allow(said["what"]), f"{said[0]}: {text}"
        assert not re.search(r"\d of \d", COUNT.sub("", re.sub(r"attacked: .*?\.", "", text))), text
    trained, attacked = counted.pair(counted.trained_N, counted.attacked_N)[::-1]
    attacks = f"attacked: {attacked} of {trained}." if attacked else "none was attacked."
    assert attacks in written["scope"]
    none = re.match(r"None of the (\d+) training", written["sentence"])
    assert none is None or int(none[1]) == trained


def check_not_reassuring(counted: Counted, verdict: r.Verdict, written: dict[str, Any]) -> None:
    """Nothing that was trained or to be forgotten came out where the page says that none did."""
    secrets = counted.audit.secrets
    fed_N = counted.trained_N | counted.forget_N
    came_out = bool((counted.any_N & fed_N).any()) or bool(secrets and secrets[0])
    assert came_out == (verdict.level in ("memorized", "extracted"))
    assert came_out == written["page"].endswith((", Memorized", ", Extracted"))
    assert written["page"].split(",")[0] in (
        ("red", "amber") if came_out else ("green", "grey", "amber")
    )
    if verdict.level == "none-found":
        assert counted.audit.generated
        assert verdict.trained.num_clusters >= 30
    # Control documents that came out are said too.
    unseen = counted.pair(counted.control_N, counted.any_N)[0]
    assert not unseen or re.search(r"unseen", written["sentence"] + written["scope"])


def check_said(report: r.AuditReport, audit: Audit, written: dict[str, Any]) -> None:
    """What was not run, or not there, is said; percentages are those of the intervals."""
    scope, notices = written["scope"], " ".join(written["notices"])
    not_run = [run.name for run in report.probe_runs if run.num_documents is None]
    assert ("Not run:" in scope) == bool(not_run)
    assert f"Not run: {', '.join(not_run)}." in scope or not not_run
    assert ("Near-verbatim text was not generated." in scope) == (not audit.generated)
    assert (f"Near-verbatim extraction was not measured: {REASON}." in notices) == (
        not audit.generated
    )
    assert ("before training was not scored" in notices) == (audit.base == "none")
    control = any(group.role == "control" for group in audit.groups)
    assert ("There is no control" in notices) == (not control)
    for name, what in (
        ("too_short", "too short to audit"),
        ("not_sampled", "not in the sample that"),
    ):
        number = sum(getattr(group, name) for group in audit.groups)
        start = "1 document is" if number == 1 else f"{number} documents are"
        assert f"{start} {what}" in notices or not number
    verdict = report.verdict
    if verdict.level == "none-found":
        assert verdict.trained.ci is not None
        assert f"(true share up to {format_percent(verdict.trained.ci[1])})" in verdict.sentence
    auc = verdict.membership.auc
    if "AUC" in written["membership"]:
        assert auc is not None
        assert auc.ci is not None
        numbers = f"AUC {auc.value:.2f} (95 % CI {auc.ci[0]:.2f}–{auc.ci[1]:.2f};"
        assert numbers in written["membership"]
        assert ("can be told" in written["membership"]) == (not auc.ci[0] <= 0.5 <= auc.ci[1])
    if audit.base == "same":
        # A model that is its own base has learned nothing.
        assert not any(TAUGHT.search(text) for text in list_texts(written))


def cross(audits: Sequence[Audit], rng: np.random.Generator) -> Audit:
    """Draw an audit: groups of each role, and each of the other numbers, of one of the table."""

    def draw(name: str) -> Any:
        return getattr(audits[int(rng.integers(len(audits)))], name)

    drawn = {one.name: draw(one.name) for one in fields(Audit)}
    groups = [
        group
        for role in ("control", "trained", "forget")
        for group in draw("groups")
        if group.role == role
    ]
    fed = [group for group in groups if group.role == "trained" and group.num]
    drawn["groups"] = tuple(groups if fed else drawn["groups"])
    drawn["other_kind"] &= any(group.role == "control" for group in drawn["groups"])
    drawn["base_generated"] &= drawn["generated"]
    return Audit(**drawn)


@pytest.mark.parametrize("num_audits", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_what_is_said_of_drawn_audits_is_true(num_audits: int) -> None:
    rng = np.random.default_rng(num_audits)
    audits = [read_audit(case["audit"]) for case in read_table()["cases"]]
    for number in range(num_audits):
        audit = cross(audits, rng)
        report = build_report(audit)
        written, counted = write_all(report), Counted(audit)
        try:
            check_counts(counted, written)
            check_not_reassuring(counted, report.verdict, written)
            check_said(report, audit, written)
        except AssertionError as error:
            raise AssertionError(f"audit {number}: {audit}: {error}") from error
