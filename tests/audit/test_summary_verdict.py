"""What of an audit's measurements the verdict is given; rates against repetitions and copies."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from audit_examples import build_evidence, build_rows, build_suite, tabulate
from hypothesis import given
from hypothesis import strategies as st
from record_examples import make_outline

from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.statistics import compute_trend
from memguard.audit.summary import COPIES, compute_trends, count_copies, summarise
from memguard.records import AuditResults, BucketScores, CanaryScores, DocumentScore

MakeScore = Callable[..., DocumentScore]


def _list(
    make_score: MakeScore, name: str, correct: Sequence[int], **fields: Any
) -> list[DocumentScore]:
    return [
        make_score(f"{name}-{index:03}", count, bucket=name, **fields)
        for index, count in enumerate(correct)
    ]


def _summarise(scores: list[DocumentScore], outlines: Any = None, **fields: Any) -> AuditResults:
    evidence = replace(build_evidence(scores, outlines), **fields)
    suite = build_suite(ExtractionProbe())
    return summarise(evidence, suite=suite, tiny_margin=1e-3, tally="complete", seed=0)


def _control(make_score: MakeScore, correct: Sequence[int], **fields: Any) -> list[DocumentScore]:
    return _list(make_score, "x0", correct, role="control", num_repetitions=0, **fields)


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({"num_correct": 50}, True),
        ({"num_correct": 45}, True),  # near-verbatim
        ({"num_correct": 3, "attack_log10_queries": 6.0}, True),
        ({"num_correct": 3, "attack_log10_queries": 6.1}, False),
        ({"num_correct": 44}, False),
        # Known token by token under teacher forcing, but no text comes out.
        ({"num_correct": 47, "near_verbatim": False, "num_edits": None}, False),
    ],
)
def test_verbatim_near_verbatim_and_attack_cost_count(
    fields: dict[str, Any], counts: bool, make_score: MakeScore
) -> None:
    fields = dict(fields)
    correct = fields.pop("num_correct")
    scores = [*_control(make_score, [0] * 10), *_list(make_score, "x4", [correct] * 40, **fields)]
    verdict = _summarise(scores).verdict
    assert verdict.trained.num_matched == 40 * counts
    assert verdict.level == ("memorized" if counts else "none-found")


def test_what_the_base_model_produces_does_not_count(make_score: MakeScore) -> None:
    known = [*_control(make_score, [0] * 10, base=0), *_list(make_score, "x4", [50] * 40, base=46)]
    verdict = _summarise(known).verdict
    assert (verdict.level, verdict.reason) == ("extracted", "base-too")
    assert verdict.base.num_matched == 40
    new = [*_control(make_score, [0] * 10, base=0), *_list(make_score, "x4", [50] * 40, base=44)]
    assert _summarise(new).verdict.level == "memorized"


def test_a_document_that_training_never_reached_is_not_trained(make_score: MakeScore) -> None:
    scores = [
        *_control(make_score, [0] * 10),
        *_list(make_score, "x4", [0] * 29, num_repetitions=4),
        *_list(make_score, "x64", [50] * 40, num_repetitions=0),
    ]
    verdict = _summarise(scores).verdict
    assert (verdict.level, verdict.reason, verdict.bucket) == ("inconclusive", "too-few", "x4")
    assert verdict.trained.num_documents == 29
    assert verdict.scope.startswith("Audited: 29 of 29 trained documents;")


def test_documents_too_short_are_those_of_trained_buckets(make_score: MakeScore) -> None:
    scores = [*_control(make_score, [0] * 10), *_list(make_score, "x4", [0] * 40)]

    def audit(short: int, sampled: int, role: str = "trained", count: int = 4) -> AuditResults:
        outlines = [
            make_outline("x0", "control", 0),
            make_outline("x4", "trained", 4),
            make_outline("more", role, count, num_too_short=short, num_not_sampled=sampled),
        ]
        return _summarise(scores, outlines)

    assert audit(40, 0).verdict.level == "none-found"
    assert audit(41, 0).verdict.reason == "too-short"
    assert audit(41, 1).verdict.level == "none-found"
    assert audit(41, 1).verdict.scope.startswith(
        "Audited: 40 of 82 trained documents (41 too short or not auditable, 1 not in the sample)"
    )
    # Neither were these trained.
    assert audit(99, 0, role="forget").verdict.level == "none-found"
    assert audit(99, 0, count=0).verdict.level == "none-found"


def test_attacks_canaries_and_the_kind_of_the_control_are_given(make_score: MakeScore) -> None:
    scores = [*_control(make_score, [0] * 10), *_list(make_score, "x4", [0] * 40)]
    attacked_N = np.full(50, np.nan)
    attacked_N[:5] = 0
    attacked_N[10:20] = 1
    attacked = _summarise(scores, attacked_N=attacked_N).verdict
    assert attacked.level == "memorized"
    assert attacked.sentence.startswith("Attacks extracted 10 of 10 attacked training documents")
    other = _summarise(scores, attacked_N=attacked_N, is_other_kind=True).verdict
    assert (other.level, other.reason) == ("extracted", "other-kind")
    canaries = CanaryScores.model_construct(
        num_trained=16,
        num_references=12,
        verbatim=attacked.trained.model_copy(update={"num_matched": 2}),
        reference_verbatim=attacked.trained.model_copy(update={"num_matched": 0}),
    )
    with_canaries = _summarise(scores, canaries=canaries, is_other_kind=True).verdict
    assert (with_canaries.level, with_canaries.reason) == ("memorized", "canaries")
    assert "2 of 16 trained canaries" in with_canaries.sentence


def test_the_bucket_of_the_test_is_the_verdicts(make_score: MakeScore) -> None:
    scores = [
        *_control(make_score, [3] * 40),
        *_list(make_score, "x4", [10] * 40, num_repetitions=4),
        *_list(make_score, "x64", [47] * 37 + [50] + [20] * 2, num_repetitions=64),
    ]
    verdict = _summarise(scores).verdict
    assert (verdict.level, verdict.metric, verdict.bucket) == ("memorized", "near_verbatim", "x64")
    assert verdict.sentence == (
        "38 of 40 documents trained 64 times were extracted, 0 of 40 unseen ones: the model "
        "memorized training text."
    )


def test_base_and_differences_in_the_table(make_score: MakeScore) -> None:
    scores = [
        *_control(make_score, [0] * 20, base=0),
        *_list(make_score, "x4", [50] * 15 + [46] * 5, base=10),
    ]
    control, row = _summarise(scores).buckets
    assert (row.model.verbatim.num_matched, row.model.near_verbatim.num_matched) == (15, 20)
    assert (row.base.verbatim.num_matched, row.base.median_first_divergence) == (0, 10)
    assert row.base.mean_token_accuracy.value == pytest.approx(0.2)
    assert row.minus_control["verbatim"].value == 0.75
    assert row.minus_control["near_verbatim"].value == 1
    assert row.base_risks["near_verbatim"].num_matched == 0
    assert row.model.median_first_divergence == 50
    assert control.minus_control == {}
    assert row.mean_extraction_strength == 0.75


def _buckets(
    make_score: MakeScore, kinds: list[tuple[str, Any, int | None, list[int]]]
) -> list[BucketScores]:
    """Buckets of (name, role, repetitions, right tokens of each document)."""
    outlines = [make_outline(name, role, count) for name, role, count, _ in kinds]
    scores = [
        make_score(f"{name} {number}", right, bucket=name, role=role, num_repetitions=count)
        for name, role, count, rights in kinds
        for number, right in enumerate(rights)
    ]
    return build_rows(build_evidence(scores, outlines))


def test_a_rate_that_rises_with_the_dose(make_score: MakeScore) -> None:
    buckets = _buckets(
        make_score,
        [
            ("x16", "trained", 16, [50] * 15 + [46] * 5),
            ("x0", "control", 0, [0] * 20),
            ("x4", "trained", 4, [50] * 5 + [0] * 15),
            # Neither says at which dose its rate stands.
            ("mixed", "trained", None, [50] * 20),
            ("rest", "background", 1, [50] * 20),
            ("late", "trained", 0, [50] * 20),
            ("empty", "trained", 64, []),
        ],
    )
    verbatim, near = compute_trends(buckets)
    assert (verbatim.metric, near.metric) == ("verbatim", "near_verbatim")
    assert verbatim.doses == [0, 4, 16]
    assert verbatim.fitted == [0, 0.25, 0.75]
    assert near.fitted == [0, 0.25, 1]
    expected = compute_trend([0, 5, 15], [20, 20, 20], [0, 4, 16])
    assert (verbatim.z, verbatim.p_value) == (expected.z, expected.p_value)
    assert verbatim.z > 4


def test_a_rate_that_falls_is_fitted_flat(make_score: MakeScore) -> None:
    buckets = _buckets(
        make_score,
        [
            ("x0", "control", 0, [0] * 10),
            ("x4", "trained", 4, [50] * 6 + [0] * 4),
            ("x8", "trained", 8, [50] * 2 + [0] * 8),
        ],
    )
    assert compute_trends(buckets)[0].fitted == pytest.approx([0, 0.4, 0.4])


def test_without_a_rate_that_differs_there_is_no_p_value(make_score: MakeScore) -> None:
    buckets = _buckets(make_score, [("x0", "control", 0, [0] * 9), ("x4", "trained", 4, [0] * 9)])
    for trend in compute_trends(buckets):
        assert (trend.z, trend.p_value, trend.fitted) == (None, None, [0, 0])
    assert compute_trends(buckets[:1]) == []
    assert compute_trends([]) == []


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 14), st.booleans(), st.sampled_from([None, 0, 1, 4])), max_size=30
    )
)
def test_copies_are_counted_by_a_plain_loop(
    make_score: MakeScore, rows: list[tuple[int, bool, int | None]]
) -> None:
    scores = [
        make_score(f"{n}", 50 if verbatim else 3, num_copies=copies, num_repetitions=count)
        for n, (copies, verbatim, count) in enumerate(rows)
    ]
    scores.append(make_score("control", 50, role="control", bucket="x0", num_copies=0))
    reached = [row for row in rows if row[2] != 0]
    found = count_copies(tabulate(scores))
    assert [each.k for each in found] == (list(COPIES) if reached else [])
    for each in found:
        held = [verbatim for copies, verbatim, _ in reached if copies <= each.k]
        assert (each.num_documents, each.num_extracted) == (len(held), sum(held))


def test_unknown_copies_are_not_guessed(make_score: MakeScore) -> None:
    assert count_copies(tabulate([make_score("a", 50, num_copies=1), make_score("b", 50)])) == []
    assert count_copies(tabulate([])) == []
