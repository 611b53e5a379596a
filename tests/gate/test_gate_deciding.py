"""Intervals against limits, and the fewest documents that decide, against SciPy's beta."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from result_examples import make_rate
from scipy.stats import beta

from memguard.audit.statistics import compute_exact_interval
from memguard.gate.deciding import (
    find_documents_by_width,
    find_documents_for_rate,
    find_effective,
    judge_interval,
)
from memguard.records import ResultRow
from memguard.records.gate import EXIT_CODES, Outcome

CODES: dict[Outcome, int] = EXIT_CODES


def find_ends(matched: int, documents: int) -> tuple[float, float]:
    """Return Clopper and Pearson's interval by SciPy's distribution, a second implementation."""
    low = 0.0 if matched == 0 else float(beta.ppf(0.025, matched, documents - matched + 1))
    high = 1.0 if matched == documents else float(beta.ppf(0.975, matched + 1, documents - matched))
    return low, high


def judge(matched: int, documents: int, limit: float) -> str:
    low, high = find_ends(matched, documents)
    return "pass" if high <= limit else "fail" if low > limit else "inconclusive"


def search(matched: int, documents: int, limit: float, most: int) -> int | None:
    """Return the fewest documents that decide, by trying every number."""
    number_M = np.arange(documents, most)
    if matched / documents < limit:
        counted_M = -(-matched * number_M // documents)
        is_decided_M = beta.ppf(0.975, counted_M + 1, number_M - counted_M) <= limit
    else:
        counted_M = matched * number_M // documents
        is_decided_M = beta.ppf(0.025, counted_M, number_M - counted_M + 1) > limit
    found = number_M[is_decided_M]
    return int(found[0]) if len(found) else None


@pytest.mark.parametrize(
    ("matched", "documents", "limit", "code", "needed"),
    [
        (40, 40, 0.10, 10, None),
        (0, 40, 0.10, 0, None),
        (0, 36, 0.10, 0, None),
        (0, 35, 0.10, 11, 36),
        (0, 30, 0.10, 11, 36),
        (0, 20, 0.10, 11, 36),
        (0, 10, 0.10, 11, 36),
        (2, 40, 0.10, 11, 154),
        (4, 40, 0.10, 11, None),
        (0, 40, 0.01, 11, 368),
    ],
)
def test_the_table_of_counts_codes_and_documents(
    matched: int, documents: int, limit: float, code: int, needed: int | None
) -> None:
    ci = compute_exact_interval(matched, documents, documents)
    assert ci is not None
    outcome = judge_interval(*ci, limit)
    assert CODES[outcome] == code
    if outcome == "inconclusive":
        assert find_documents_for_rate(matched, documents, limit) == needed


@given(
    documents=st.integers(2, 60),
    share=st.floats(0, 1),
    limit=st.sampled_from([0.01, 0.1, 0.15, 0.5, 0.9]),
)
@example(documents=40, share=0.05, limit=0.1)
def test_it_is_the_first_number_that_decides(documents: int, share: float, limit: float) -> None:
    matched = round(share * documents)
    if judge(matched, documents, limit) != "inconclusive":
        return
    needed = find_documents_for_rate(matched, documents, limit)
    most = 600
    expected = search(matched, documents, limit, most)
    assert (needed if needed is not None and needed < most else None) == expected


@settings(max_examples=40)
@given(documents=st.integers(2, 200), share=st.floats(0, 1), limit=st.floats(0.01, 0.99))
def test_more_documents_at_no_worse_a_rate_decide_too(
    documents: int, share: float, limit: float
) -> None:
    matched = round(share * documents)
    needed = find_documents_for_rate(matched, documents, limit)
    if needed is None or needed > 10**6:
        return
    for number in (needed, needed + 1, needed + needed // 3, 3 * needed):
        if matched / documents < limit:
            assert find_ends(matched * number // documents, number)[1] <= limit
        else:
            assert find_ends(-(-matched * number // documents), number)[0] > limit


@pytest.mark.parametrize(
    ("low", "high", "at_least", "expected"),
    [
        (0.0, 0.1, False, "pass"),
        (0.1, 0.2, False, "inconclusive"),
        (0.1001, 0.2, False, "fail"),
        (0.1, 0.2, True, "pass"),
        (0.0, 0.1, True, "inconclusive"),
        (0.0, 0.0999, True, "fail"),
    ],
)
def test_an_end_on_the_limit_is_within_it(
    low: float, high: float, at_least: bool, expected: str
) -> None:
    assert judge_interval(low, high, 0.1, at_least=at_least) == expected


def test_a_smallest_value_mirrors_a_largest_one() -> None:
    # k of n at most L is n - k of n at least 1 - L.
    assert find_documents_for_rate(38, 40, 0.9, at_least=True) == 154
    assert find_documents_for_rate(40, 40, 0.99, at_least=True) == 368


@pytest.mark.parametrize(("matched", "effective"), [(0, 13.5), (5, 20.25), (39, 30.0), (40, 7.5)])
def test_the_effective_number_is_read_from_the_interval(matched: int, effective: float) -> None:
    ci = compute_exact_interval(matched, 40, effective)
    assert ci is not None
    row = ResultRow(
        probe="extraction", metric="verbatim", statistic="rate", bucket="r4", num_documents=40,
        num_matched=matched, num_clusters=30, value=matched / 40, low=ci[0], high=ci[1],
        interval="clopper-pearson",
    )  # fmt: skip
    # The interval is known to a double's precision, and so is its inverse.
    assert find_effective(row) == pytest.approx(effective, rel=1e-9)


def test_copies_need_more_documents_in_proportion() -> None:
    # 40 documents that count as 20. None of n: the upper end is 1 - 0.025^(1 / n).
    assert find_documents_for_rate(0, 40, 0.1, effective=20) == 71
    assert 1 - 0.025 ** (1 / 35.5) <= 0.1 < 1 - 0.025 ** (1 / 35)
    assert find_documents_for_rate(0, 40, 0.1, effective=40) == 40


def test_another_estimate_needs_four_times_the_documents_for_half_the_width() -> None:
    assert find_documents_by_width(0.3, 0.2, 50, 0.4) == 200
    assert find_documents_by_width(0.4, 0.2, 50, 0.4) is None
    assert find_documents_by_width(0.4 - 1e-6, 0.2, 50, 0.4) is None


def test_made_up_rates_have_the_same_intervals() -> None:
    # The examples of other tests are drawn from SciPy too, so their rows can be judged.
    assert make_rate(2, 40).ci == pytest.approx(find_ends(2, 40), abs=1e-12)
