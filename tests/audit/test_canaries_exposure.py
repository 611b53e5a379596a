"""Exposure against published examples and counting."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.audit.probes.canary_results import compute_exposures

_nlls = st.lists(st.integers(-3, 3).map(float), max_size=12)


def test_by_rank_golden() -> None:
    # Ranks as TensorFlow Privacy's secret_sharer counts them; the third is log2(16 / 17).
    found = compute_exposures([0, 0.1, 20, 3.5], np.arange(1, 17))
    assert found == pytest.approx([4, 4, -0.087463, 2], abs=5e-7)  # six digits


@given(_nlls, _nlls)
def test_rank_by_counting(canaries: list[float], references: list[float]) -> None:
    found = compute_exposures(canaries, references)
    if not references:
        assert found is None
        return
    ranks = [1 + sum(reference <= canary for reference in references) for canary in canaries]
    expected = [math.log2(len(references) / rank) for rank in ranks]
    assert found == pytest.approx(expected, abs=1e-12)  # log of quotients


def test_a_canary_never_trained_has_one_bit() -> None:
    draw = np.random.default_rng(0)
    bits = []
    for _ in range(400):
        found = compute_exposures(draw.normal(size=5), draw.normal(size=63))
        bits += found.tolist()
    # Rank is uniform on 1..64: median of log2(63 / rank) about 1, its error over 2,000 about 0.05.
    assert np.median(bits) == pytest.approx(1, abs=0.2)
    # At least 3 bits: rank 1 to 7 of 64.
    assert np.mean(np.array(bits) >= 3) == pytest.approx(7 / 64, abs=0.03)


def test_nothing_among_references_is_no_exposure() -> None:
    none = compute_exposures([], np.arange(1, 17))
    assert none is not None
    assert none.size == 0


def test_a_missing_nll_is_refused() -> None:
    with pytest.raises(AssertionError, match="missing nll"):
        compute_exposures([math.nan], [1.0])
    with pytest.raises(AssertionError, match="missing nll"):
        compute_exposures([1.0], [math.inf, 1.0])
    with pytest.raises(AssertionError, match="one-dimensional"):
        compute_exposures([[1.0]], [1.0])
