"""Paired tests against SciPy and exact fractions."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from memguard.audit.statistics import (
    compute_mcnemar,
    compute_mean_difference,
    compute_paired_difference,
)

COUNTS = st.integers(0, 400)


@given(COUNTS, COUNTS)
def test_mcnemar_is_scipys_binomial_test(first: int, second: int) -> None:
    ours = compute_mcnemar(first, second)
    assert 0 <= ours <= 1
    assert ours == compute_mcnemar(second, first)
    if first + second:
        # Both sum the same binomial terms, in another order: 400 roundings at most.
        assert ours == pytest.approx(
            stats.binomtest(first, first + second, 0.5).pvalue, rel=1e-11, abs=1e-300
        )


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 1), (1, 4), (5, 0), (3, 3), (2, 9)])
def test_mcnemar_by_counting_outcomes(first: int, second: int) -> None:
    """Every way the differing documents could have fallen, by exact fractions."""
    total = first + second
    as_extreme = sum(
        comb(total, k) for k in range(total + 1) if abs(2 * k - total) >= abs(first - second)
    )
    assert compute_mcnemar(first, second) == pytest.approx(
        float(Fraction(as_extreme, 2**total)), rel=1e-14
    )


def test_paired_difference_is_scipys() -> None:
    draw = np.random.default_rng(0)
    hardness = draw.normal(0, 3, 60)
    first, second = hardness + draw.normal(0.5, 1, 60), hardness + draw.normal(0, 1, 60)
    interval = compute_paired_difference(first, second)
    expected = stats.ttest_rel(first, second).confidence_interval()
    assert interval is not None
    assert interval.value == pytest.approx((first - second).mean(), abs=1e-12)
    assert interval.ci == pytest.approx((expected.low, expected.high))
    # Copies of everything are no further evidence.
    copied = compute_paired_difference(
        np.repeat(first, 2), np.repeat(second, 2), clusters=np.repeat(np.arange(60), 2)
    )
    assert copied is not None
    assert copied.ci == pytest.approx(interval.ci)


def test_pairing_cancels_what_makes_a_document_hard() -> None:
    draw = np.random.default_rng(0)
    hardness = draw.normal(0, 3, 60)
    first, second = hardness + draw.normal(0, 1, 60), hardness + draw.normal(0, 1, 60)
    paired = compute_paired_difference(first, second)
    unpaired = compute_mean_difference(first, second)
    assert paired is not None
    assert unpaired is not None
    assert paired.ci is not None
    assert unpaired.ci is not None
    assert paired.value == pytest.approx(unpaired.value)
    # Standard errors are sqrt(2 / 60) and sqrt(20 / 60): about three times.
    assert unpaired.ci[1] - unpaired.ci[0] > 2 * (paired.ci[1] - paired.ci[0])


def test_settings_that_nowhere_differ() -> None:
    interval = compute_paired_difference([1, 0, 1], [1, 0, 1])
    assert interval is not None
    assert (interval.value, interval.ci) == (0.0, None)
    with pytest.raises(AssertionError, match="two values"):
        compute_paired_difference([1, 0], [1])
