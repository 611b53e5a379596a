"""Counts of training in an audit: buckets, pieces and what the report says of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_examples import make_texts

from memguard.audit.plan import AuditPlan
from memguard.audit.windows import AuditDocument
from memguard.data.documents import make_table
from memguard.records import AuditReport
from memguard.runtime import Console
from memguard.workflows.auditing.arguments import make_arguments
from memguard.workflows.auditing.audit import audit as audit_checked
from memguard.workflows.auditing.checks import CheckedAudit, check_audit, load_audit_identity
from memguard.workflows.auditing.documents import plan_foreign
from memguard.workflows.auditing.target import Subject
from memguard.workflows.auditing.trained_counts import TrainedCounts, describe_unmatched

NUM, LENGTH = 24, 40
TEXTS = make_texts(NUM)
SETTINGS = {
    "continuation_tokens": 8,
    "min_documents": 4,
    "base": False,
    "cache": False,
    "dtype": "fp32",
}


def check(folder: Path, counts: TrainedCounts | None, unseen: Sequence[str] = ()) -> CheckedAudit:
    members, nonmembers = (
        make_table(list(texts), name=name)
        for texts, name in ((TEXTS, "members"), (unseen or make_texts(NUM, seed=1), "nonmembers"))
    )
    arguments = make_arguments(
        model=folder / "model", out=folder / "report", settings=SETTINGS, counts=counts
    )
    return check_audit(replace(arguments, members=(members,), nonmembers=(nonmembers,)))


def plan(folder: Path, counts: TrainedCounts | None, *unseen: str) -> tuple[AuditPlan, Subject]:
    checked = check(folder, counts, unseen)
    identity = load_audit_identity(checked, lambda _: None)
    assert identity is not None
    return plan_foreign(checked, identity, Console())


def count(repetitions: Sequence[int], **changes: Any) -> TrainedCounts:
    numbers = [*repetitions, *[repetitions[-1]] * (NUM - len(repetitions))]
    return TrainedCounts(
        num_repetitions={f"members-{row:06d}": number for row, number in enumerate(numbers)},
        num_runs=sum(numbers),
        num_unmatched=0,
        num_equal=0,
        **changes,
    )


def select_trained(target: AuditPlan) -> list[AuditDocument]:
    return [document for document in target.documents if document.role == "trained"]


def test_members_are_in_buckets_of_their_repetitions(folder: Path) -> None:
    target, subject = plan(folder, count([3] * 8 + [0] * 2 + [1]))
    trained = select_trained(target)
    assert [d.num_repetitions for d in trained] == [3] * 8 + [1] * 14
    assert [d.bucket for d in trained] == ["members, 3 times"] * 8 + ["members, 1 times"] * 14
    assert [d.id for d in trained] == [f"members-{row:06d}" for row in [*range(8), *range(10, 24)]]
    control = [d for d in target.documents if d.role == "control"]
    assert {(d.bucket, d.num_repetitions) for d in control} == {("nonmembers", None)}
    assert len(control) == NUM
    assert target.tally == "complete"
    # What was given, as its hash says, whether it was trained or not.
    assert subject.data.num_documents == 2 * NUM
    assert subject.data.documents_sha256 == plan(folder, None)[1].data.documents_sha256
    assert list(subject.notes) == [
        "Repetitions were counted during training: 38 of 38 sequences that were trained match "
        "members.",
        "2 of 24 members were not found in full among the sequences that were trained, and not "
        "audited.",
    ]


def test_one_number_of_repetitions_is_one_bucket(folder: Path) -> None:
    target, subject = plan(folder, count([2]))
    assert {d.bucket for d in select_trained(target)} == {"members"}
    assert len(subject.notes) == 1


def test_without_counts_nothing_changes(folder: Path) -> None:
    target, subject = plan(folder, None)
    assert (target.tally, subject.notes) == ("missing", ())
    assert {d.num_repetitions for d in target.documents} == {None}


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        (
            replace(count([1, 2]), reason=describe_unmatched(3, 60, is_in_order=False)),
            "3 of 60 sequences that were trained (5 %) match no member, and at most 1 % may: the "
            "members must be all training documents",
        ),
        (
            replace(count([1]), num_repetitions={"other": 4}),
            "the documents that were counted are not the members",
        ),
    ],
)
def test_counts_that_do_not_hold_are_not_used(
    folder: Path, counts: TrainedCounts, reason: str
) -> None:
    target, subject = plan(folder, counts)
    assert target.tally == "missing"
    assert {d.num_repetitions for d in target.documents} == {None}
    assert len(select_trained(target)) == NUM
    assert list(subject.notes) == [
        f"Repetitions were not counted because {reason}. Members that were never trained, if "
        "there are any, are audited too and lower the rates."
    ]


def test_documents_are_audited_up_to_where_training_cut_them(folder: Path) -> None:
    whole = plan(folder, None)[0].documents
    target, subject = plan(folder, count([1], piece="cut", max_tokens=LENGTH))
    num_longer = sum(document.num_tokens > LENGTH for document in whole)
    assert num_longer > 20
    for before, after in zip(whole, target.documents, strict=True):
        # Of the control too: otherwise it would be prompted with more text than the members.
        begin = before.first_position
        assert begin or after.input_ids.tolist() == before.input_ids[:LENGTH].tolist()
        assert (after.part, after.num_tokens, after.first_position) == (
            "whole",
            before.num_tokens,
            0,
        )
        assert len(after.input_ids) <= LENGTH
        assert after.whole_ids is None
    assert subject.notes[-1] == (
        f"Training cut documents after 40 tokens: {num_longer} of 48, members and control, are "
        "audited up to there only."
    )


def test_documents_are_audited_in_a_piece_that_was_trained(folder: Path) -> None:
    whole = plan(folder, None)[0].documents
    first = {"members-000001": 25}
    counts = count([1], piece="split", max_tokens=LENGTH, first_piece_tokens=first)
    for before, after in zip(whole, plan(folder, counts)[0].documents, strict=True):
        assert after.part == ("piece" if before.num_tokens > LENGTH else "whole")
        assert (after.first_position - first.get(after.id, 0)) % LENGTH == 0
        assert len(after.input_ids) <= LENGTH


def test_spans_are_those_of_truncation_and_packing() -> None:
    cut = count([1], piece="cut", max_tokens=10)
    assert [cut.list_spans("a", size) for size in (9, 10, 25)] == [[(0, 9)], [(0, 10)], [(0, 10)]]
    split = count([1], piece="split", max_tokens=10, first_piece_tokens={"b": 4, "c": 3})
    assert split.list_spans("a", 25) == [(0, 10), (10, 20), (20, 25)]
    assert split.list_spans("a", 20) == [(0, 10), (10, 20)]
    assert split.list_spans("b", 20) == [(0, 4), (4, 14), (14, 20)]
    assert split.list_spans("c", 3) == [(0, 3)]
    assert count([1]).list_spans("a", 25) == [(0, 25)]


def test_near_duplicates_of_what_was_never_trained_stay_in_the_control(folder: Path) -> None:
    copies = [TEXTS[0], TEXTS[1], *make_texts(NUM - 2, seed=1)]
    overlap = plan(folder, count([0, 2]), *copies)[1].data.overlap_with_control
    assert overlap is not None
    assert overlap.num_matched == 1
    both = plan(folder, None, *copies)[1].data.overlap_with_control
    assert both is not None
    assert both.num_matched == 2


# -- the report ------------------------------------------------------------------------------------


def audit(folder: Path, counts: TrainedCounts | None) -> tuple[AuditReport, str]:
    report = audit_checked(check(folder, counts))
    page = (folder / "report" / "report.html").read_text(encoding="utf-8")
    return report, page


def test_a_counted_training_has_a_dose_response(folder: Path) -> None:
    report, page = audit(folder, count([3] * 8 + [1]))
    assert report.dose_response
    buckets = {b.bucket: (b.num_repetitions, b.num_documents) for b in report.tables.buckets}
    assert buckets == {
        "nonmembers": (None, 24),
        "members, 1 times": (1, 16),
        "members, 3 times": (3, 8),
    }
    (trend,) = (t for t in report.tables.tests if t.metric == "verbatim" and t.doses)
    assert trend.doses == (0, 1, 3)
    assert "Documents per position: 24, 16, 8." in page
    assert page.count("40 of 40 sequences that were trained match members") == 1
    assert "not known: no dose-response" not in page


def test_a_training_that_was_not_counted_says_why_once(folder: Path) -> None:
    counts = replace(count([3] * 8 + [1]), reason="no training step has ended")
    report, page = audit(folder, counts)
    assert not report.dose_response
    assert {b.bucket for b in report.tables.buckets} == {"members", "nonmembers"}
    assert page.count("no training step has ended") == 1
    assert page.count("no dose-response is shown") == 1
    assert "Documents per position" not in page
