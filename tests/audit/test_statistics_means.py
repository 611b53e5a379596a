"""Means against SciPy, and where they claim nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from memguard.audit.statistics import compute_mean


@given(st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=2, max_size=30))
def test_mean_interval_is_scipys(values: list[float]) -> None:
    interval = compute_mean(np.array(values))
    assert interval is not None
    assert interval == compute_mean(values)
    # Values are at most 1: rounding of the sums stays far below this.
    assert interval.value == pytest.approx(np.mean(values), abs=1e-12)
    if min(values) == max(values):
        assert interval.ci is None
        return
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    expected = (np.mean(values) - half, np.mean(values) + half)
    assert interval.ci == pytest.approx(expected, abs=1e-12)


def test_mean_by_hand() -> None:
    # Mean 0, standard error 1, t(1) at 97.5 % is tan(0.475 pi).
    two = compute_mean([-1.0, 1.0])
    assert two is not None
    assert two.ci == pytest.approx((-np.tan(0.475 * np.pi), np.tan(0.475 * np.pi)))


def test_mean_equals_scipy() -> None:
    values = np.random.default_rng(0).normal(size=17).tolist()
    interval = compute_mean(values)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert interval is not None
    assert interval.value == pytest.approx(np.mean(values))
    assert interval.ci == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_mean_claims_no_certainty() -> None:
    assert compute_mean([]) is None
    for values in ([0.5], [1.0, 1.0, 1.0]):
        interval = compute_mean(values)
        assert interval is not None
        assert (interval.value, interval.ci) == (values[0], None)
    bounded = compute_mean([0.2, 1.0, 1.0], bounds=(0, 1))
    assert bounded is not None
    assert bounded.ci == (0, 1)
