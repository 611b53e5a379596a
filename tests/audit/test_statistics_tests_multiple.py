"""Holm's correction by hand and against the procedure itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.audit.statistics import correct_holm

P_VALUES = st.lists(st.floats(0, 1), max_size=12)


def test_holm_by_hand() -> None:
    # Smallest times 3, next times 2, last times 1, never falling.
    assert correct_holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert correct_holm([0.5, 0.9]) == [1.0, 1.0]
    assert correct_holm([0.02]) == [0.02]
    assert correct_holm([]) == []


@given(P_VALUES)
def test_holm_rejects_what_step_down_rejects(p_values: list[float]) -> None:
    adjusted = correct_holm(p_values)
    assert all(p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))
    for level in (0.01, 0.05, 0.3):
        # The procedure itself: from the smallest on, stop at the first that fails its own level.
        rejected = [False] * len(p_values)
        order = sorted(range(len(p_values)), key=lambda index: p_values[index])
        for rank, index in enumerate(order):
            if (len(order) - rank) * p_values[index] > level:
                break
            rejected[index] = True
        assert [a <= level for a in adjusted] == rejected


@given(P_VALUES, st.randoms(use_true_random=False))
def test_holm_does_not_depend_on_the_order(p_values: list[float], random) -> None:
    pairs = list(zip(p_values, correct_holm(p_values), strict=True))
    random.shuffle(pairs)
    assert correct_holm([p for p, _ in pairs]) == [a for _, a in pairs]
