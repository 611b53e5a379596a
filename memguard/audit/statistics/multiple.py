"""Many tests on one page."""

from collections.abc import Sequence


def correct_holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's step-down adjusted p-values, in the order given. Source: Holm 1979.

    All of them together have a chance of at most 5 % to give one below 0.05 where nothing differs,
    however the tests depend on each other.
    """
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
