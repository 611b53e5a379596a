"""Shares of documents, their difference, and how many documents show a rate."""

import math

from scipy import special

from memguard.records import Interval, Rate

_TAIL = 0.025
_Z = float(special.ndtri(1 - _TAIL))


def clopper_pearson(num_matched: int, num_documents: int) -> Rate:
    """Return a share with the exact binomial interval (Clopper & Pearson 1934).

    The rate is null without documents, the interval null below two.
    """
    assert 0 <= num_matched <= num_documents, f"{num_matched} of {num_documents} is no share"
    misses = num_documents - num_matched
    ci = None
    if num_documents >= 2:
        low = special.betaincinv(num_matched, misses + 1, _TAIL) if num_matched else 0.0
        high = special.betaincinv(num_matched + 1, misses, 1 - _TAIL) if misses else 1.0
        ci = (float(low), float(high))
    return Rate(
        num_documents=num_documents,
        num_matched=num_matched,
        rate=num_matched / num_documents if num_documents else None,
        ci=ci,
    )


def compute_difference(first: Rate, second: Rate) -> Interval | None:
    """Return first minus second with Newcombe's hybrid score interval (1998, method 10).

    None where one of them has no documents; no interval where one has fewer than two.
    """
    if first.rate is None or second.rate is None:
        return None
    difference = first.rate - second.rate
    if min(first.num_documents, second.num_documents) < 2:
        return Interval(value=difference, ci=None)
    low_1, high_1 = _score_interval(first.rate, first.num_documents)
    low_2, high_2 = _score_interval(second.rate, second.num_documents)
    low = difference - math.hypot(first.rate - low_1, high_2 - second.rate)
    high = difference + math.hypot(high_1 - first.rate, second.rate - low_2)
    return Interval(value=difference, ci=(max(low, -1.0), min(high, 1.0)))


def num_needed_to_see(rate: float, power: float = 0.95) -> int | None:
    """Return how many documents show a true rate at least once, with probability ``power``.

    The smallest n with ``1 - (1 - rate)^n >= power``; None for a rate of 0, which never shows.

    Args:
        rate: the true share of documents, 0 to 1.
        power: between 0 and 1, both excluded.
    """
    assert 0 <= rate <= 1, f"{rate} is no share"
    assert 0 < power < 1, f"no number of documents has power {power}"
    if rate == 0:
        return None
    if rate == 1:
        return 1
    count = math.log1p(-power) / math.log1p(-rate)
    # A count that is whole but for rounding (rate 0.1, power 0.19: exactly 2) is not rounded up.
    return max(1, math.ceil(count * (1 - 2**-50)))


def _score_interval(share: float, count: int) -> tuple[float, float]:
    centre = share + _Z**2 / (2 * count)
    spread = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    # At a share of 0 or 1 centre and spread are equal but for rounding.
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
