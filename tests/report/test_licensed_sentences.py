"""Verdict, scope, membership and notices: exact in a table, and true of drawn audits."""

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, get_args

import numpy as np
import pytest
import report_examples as examples
from licensed_audits import (
    REASON,
    Audit,
    build_report,
    list_columns,
    read_audits,
    read_table,
    write_all,
)
from numpy.typing import NDArray

from memguard import records as r
from memguard.records.texts import format_at_most
from memguard.report.next_steps import write_next_steps

AUDITS = read_audits()
Flags = NDArray[np.bool_]
MOST_WORDS = 20
TAUGHT = re.compile(r"\b(?:learn\w*|taught|training raised|trained into)\b", re.IGNORECASE)
COUNT = re.compile(
    r"(?P<num>[\d,]+) of (?:the )?(?P<of>[\d,]+) (?P<what>documents to be forgotten|"
    r"attacked training|training documents(?! could)|audited documents|trained documents?|"
    r"documents trained|documents of '|unseen|trained canar|references?|control documents|"
    r"of its documents|documents that should|were not audited|training documents could not)"
)


@pytest.mark.parametrize("number", range(len(AUDITS)))
def test_sentences_of_the_table(number: int) -> None:
    report = build_report(AUDITS[number])
    case = read_table()["cases"][number]
    assert {"audit": case["audit"], **write_all(report)} == case
    assert len(report.verdict.sentence.split()) <= MOST_WORDS


# -- what a sentence may count ---------------------------------------------------------------------


class Counted:
    """The counts of an audit, computed from its documents alone."""

    def __init__(self, audit: Audit) -> None:
        columns = list_columns(audit)
        role_N, no_N = columns["role"], columns["verbatim"] & False
        missed_N = (role_N == "trained") & (columns["count"] == 0)
        trained_N = (role_N == "trained") & ~missed_N
        control_N, forget_N, tried_N = role_N == "control", role_N == "forget", columns["attacked"]
        verbatim_N = columns["verbatim"]
        near_N = columns["near"] if audit.generated else verbatim_N
        out_N = verbatim_N | near_N | (columns["drawn"] if audit.sampled else no_N)
        attack_N = columns["beam_search"] | columns["sampling"]
        base_near_N = columns["base_near"] if audit.base_generated else no_N
        base_N = (columns["base_verbatim"] | base_near_N) if audit.base != "none" else no_N

        def count(where_N: Flags, *ways: Flags) -> set[tuple[int, int]]:
            """Return the documents that came out in each way, and all; with the base's or not."""
            both = [one for way_N in ways for one in (way_N, way_N & ~base_N)]
            return {(int((where_N & way_N).sum()), int(where_N.sum())) for way_N in both}

        self.came_out = bool(((out_N | attack_N) & (trained_N | forget_N)).any())
        self.num_unseen = int(((out_N | attack_N) & control_N).sum())
        self.num_trained, self.num_attacked = int(trained_N.sum()), int((trained_N & tried_N).sum())
        fed = [one for one in audit.groups if one.role == "trained" and set(one.counts) != {0}]
        total = self.num_trained + sum(one.too_short + one.not_sampled for one in fed)
        unaudited = sum(one.too_short for one in fed)
        won, num, refs, of = audit.secrets or (0, 0, 0, 0)
        buckets = [trained_N & (columns["bucket"] == one.bucket) for one in audit.groups]
        of_bucket = set().union(*(count(here_N, out_N) for here_N in buckets))
        by_attack = count(trained_N & tried_N, attack_N)
        self.allowed = {
            "documents to be forgotten": count(forget_N, out_N | attack_N),
            "of its documents": count(forget_N, near_N),
            "attacked training": by_attack,
            "training documents": count(trained_N, out_N),
            "audited documents": count(trained_N, out_N),
            "documents trained": of_bucket,
            "documents of '": of_bucket,
            "trained document": {(self.num_trained, total)},
            "trained documents": {(self.num_trained, total), *by_attack}
            | count(trained_N, out_N, out_N | attack_N),
            "unseen": count(control_N, out_N, out_N | attack_N)
            | count(control_N & tried_N, attack_N),
            "control documents": count(control_N, near_N),
            "trained canar": {(won, num)},
            "reference": {(refs, of)},
            "references": {(refs, of)},
            "were not audited": {(unaudited, total)},
            "training documents could not": {(unaudited, total)},
            "documents that should": {(int(missed_N.sum()), int((role_N == "trained").sum()))},
        }
        """What "1 of 2" may be before these words."""


def list_texts(written: dict[str, Any]) -> Iterator[str]:
    yield from (written["sentence"], written["scope"], *written["notices"], *written["lead"])


def check_counts(counted: Counted, written: dict[str, Any]) -> None:
    """Every count that a sentence says is a count of the record."""
    for text in list_texts(written):
        for said in COUNT.finditer(text):
            pair = tuple(int(said[name].replace(",", "")) for name in ("num", "of"))
            assert pair in counted.allowed[said["what"]], f"{said[0]}: {text}"
        assert not re.search(r"\d of \d", COUNT.sub("", re.sub(r"attacked: .*?\.", "", text))), text
    trained, tried = counted.num_trained, counted.num_attacked
    attacks = f"attacked: {tried} of {trained}." if tried else "none was attacked."
    assert attacks in written["scope"]
    none = re.match(r"0 of (\d+) training", written["sentence"])
    assert none is None or int(none[1]) == trained


def check_not_reassuring(
    audit: Audit, counted: Counted, verdict: r.Verdict, written: dict[str, Any]
) -> None:
    """No level, colour or label is milder than what came out."""
    came_out = counted.came_out or bool(audit.secrets and audit.secrets[0])
    assert came_out == (verdict.level in ("memorized", "extracted"))
    assert came_out == written["badges"].startswith(("red, Text: Memo", "amber, Text: Extracted"))
    is_judged = verdict.membership.lack is None
    assert is_judged == (
        "violet, Membership" in written["badges"] or "green, M" in written["badges"]
    )
    if verdict.level == "none-found":
        assert audit.generated
        assert verdict.trained.num_clusters >= 30
    # Control documents that came out are said too.
    assert not counted.num_unseen or "unseen" in written["sentence"] + written["scope"]


def check_said(report: r.AuditReport, audit: Audit, written: dict[str, Any]) -> None:
    """What was not run, or not there, is said; percentages are those of the intervals."""
    scope, notices = written["scope"], " ".join(written["notices"])
    not_run = [run.name for run in report.probe_runs if run.num_documents is None]
    assert ("Not run:" in scope) == bool(not_run)
    names = re.sub(r" \(not needed: [^)]*\)", "", scope)
    assert f"Not run: {', '.join(not_run)}." in names or not not_run
    assert ("Near-verbatim text was not generated." in scope) != audit.generated
    assert (f"extraction was not measured: {REASON}." in notices) != audit.generated
    assert ("before training was not scored" in notices) == (audit.base == "none")
    control = any(group.role == "control" for group in audit.groups)
    assert ("There is no control" in notices) == (not control)
    for name, what in (("too_short", "too short to"), ("not_sampled", "not in the sample that")):
        number = sum(getattr(group, name) for group in audit.groups)
        start = "1 document is" if number == 1 else f"{number} documents are"
        assert f"{start} {what}" in notices or not number
    verdict = report.verdict
    if verdict.level == "none-found":
        assert verdict.trained.ci is not None
        fed = [one for one in audit.groups if one.role == "trained" and set(one.counts) != {0}]
        total = verdict.trained.num_documents + sum(one.too_short + one.not_sampled for one in fed)
        missing = sum(one.too_short for one in fed) / total
        true_share = missing + (1 - missing) * verdict.trained.ci[1]
        assert f"({format_at_most(true_share)} could be)" in verdict.sentence
        assert true_share <= 0.2
    auc = verdict.membership.auc
    if "AUC" in written["membership"]:
        assert auc is not None
        assert auc.ci is not None
        numbers = f"AUC {auc.value:.2f} (95 % CI {auc.ci[0]:.2f}–{auc.ci[1]:.2f};"
        assert numbers in written["membership"]
        assert ("An outsider" in written["membership"]) == (not auc.ci[0] <= 0.5 <= auc.ci[1])
    if audit.base == "same":
        # A model that is its own base has learned nothing.
        assert not any(TAUGHT.search(text) for text in list_texts(written))


def cross(rng: np.random.Generator) -> Audit:
    """Draw an audit: groups of each role, and each of the other numbers, of one of the table."""

    def draw(name: str) -> Any:
        return getattr(AUDITS[int(rng.integers(len(AUDITS)))], name)

    drawn = {one.name: draw(one.name) for one in fields(Audit)}
    roles = ("control", "trained", "forget")
    groups = [group for role in roles for group in draw("groups") if group.role == role]
    if rng.integers(2):
        # Many with nothing that came out, and large enough to say so.
        none = {"verbatim": 0, "near": 0, "drawn": 0, "beam_search": 0, "sampling": 0}
        groups = [one if one.role == "control" else replace(one, **none) for one in groups]
        drawn["secrets"] = None
    fed = [group for group in groups if group.role == "trained" and group.num]
    drawn["groups"] = tuple(groups if fed else drawn["groups"])
    drawn["other_kind"] &= any(group.role == "control" for group in drawn["groups"])
    drawn["base_generated"] &= drawn["generated"]
    return Audit(**drawn)


@pytest.mark.slow
@pytest.mark.parametrize("num_audits", [60, pytest.param(300, marks=pytest.mark.long)])
def test_what_is_said_of_drawn_audits_is_true(num_audits: int) -> None:
    rng = np.random.default_rng(num_audits)
    for number in range(num_audits):
        audit = cross(rng)
        report = build_report(audit)
        written, counted = write_all(report), Counted(audit)
        try:
            check_counts(counted, written)
            check_not_reassuring(audit, counted, report.verdict, written)
            check_said(report, audit, written)
        except AssertionError as error:
            raise AssertionError(f"audit {number}: {audit}: {error}") from error


def test_every_reason_of_a_verdict_has_a_next_step() -> None:
    for reason in get_args(r.Reason):
        level = "memorized" if reason in ("control", "canaries") else "extracted"
        steps, others = (
            write_next_steps(
                examples.make_report().model_copy(
                    update={"verdict": examples.make_verdict(level=level, reason=one)}
                ),
                "runs/a",
            )
            for one in (reason, None)
        )
        assert steps[0] != others[0], reason
        assert not any("Keep this page" in step for step in steps), "nothing reassuring"


@pytest.mark.parametrize(("too_short", "unknown"), [(9, 0), (0, 9), (2, 7)])
def test_the_step_for_unaudited_documents_fits_their_reason(too_short: int, unknown: int) -> None:
    report = examples.make_report()
    counts = {"num_too_short": too_short, "num_unknown": unknown}
    rows = (replace(row, **counts) for row in report.tables.buckets if row.role == "trained")
    changes = {
        "tables": report.tables.model_copy(update={"buckets": tuple(rows)}),
        "verdict": examples.make_verdict(level="inconclusive", reason="unaudited"),
    }
    step = write_next_steps(report.model_copy(update=changes), "runs/a")[0]
    assert ("long enough" in step) == bool(too_short)
    assert ("letters" in step) == bool(unknown)
