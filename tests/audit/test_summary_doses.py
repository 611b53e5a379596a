"""Rates against repetitions and copies: which buckets count, and what cannot be told."""

from collections.abc import Callable
from typing import Any

import pytest
from audit_examples import build_evidence, build_rows, tabulate
from hypothesis import given
from hypothesis import strategies as st

from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import compute_trend
from memguard.audit.summary import COPIES, compute_trends, count_copies
from memguard.records import BucketScores, DocumentScore

MakeScore = Callable[..., DocumentScore]


def _buckets(
    make_score: MakeScore, kinds: list[tuple[str, Any, int | None, list[int]]]
) -> list[BucketScores]:
    """Buckets of (name, role, repetitions, right tokens of each document)."""
    outlines = [
        BucketOutline(
            bucket=name, role=role, num_repetitions=count, num_too_short=0, num_not_sampled=0
        )
        for name, role, count, _ in kinds
    ]
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
    assert expected is not None
    assert (verbatim.z, verbatim.p_value) == (expected.z, expected.p_value)
    assert verbatim.z is not None
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
