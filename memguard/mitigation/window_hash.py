"""Hash of what stands before each token: one pass, however many tokens it looks back.

With r(key) a 64-bit mix of a key, B an odd constant and everything modulo 2^64,

    prefix_t = sum_{i<t} r(x_i) B^i
    window_t = (prefix_t - prefix_{t-n}) B^-t = sum_{j=1..n} r(x_{t-j}) B^-j,  n = min(h, t)
    hash_t   = mix(window_t + n C)

Equal windows hash equally wherever they stand; order matters; a short window at a document's start
differs from a longer one of the same keys.
"""

import numpy as np
from numpy.typing import NDArray

# Odd, so it has an inverse modulo 2^64: 0x9E3779B97F4A7C15 is 2^64 / golden ratio.
_BASE = 0x9E3779B97F4A7C15
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_COUNT_STEP = 0xD1342543DE82EF95


class WindowHash:
    """Hashes windows of keys; holds the powers of B, as many as were needed so far."""

    def __init__(self) -> None:
        """Hold no powers yet."""
        self._powers = (_powers(_BASE, 0), _powers(_BASE_INVERSE, 0))

    def before(
        self, ids: NDArray[np.int64], start: NDArray[np.int64], width: int
    ) -> NDArray[np.uint64]:
        """Hash the ``width`` tokens before each place; fewer at a document's start.

        Args:
            ids: ``[N]`` tokens of documents laid end to end.
            start: ``[N]`` index at which the document of each token starts.
            width: h.
        """
        places = np.arange(ids.size)
        first = places - width
        np.maximum(start, first, out=first)
        return self.windows(ids, first, places)

    def windows(
        self, keys: NDArray[np.int64], first: NDArray[np.int64], end: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """Hash keys ``[M]`` from ``first`` up to ``end``, ``[N]``."""
        powers, inverses = self._powers
        if len(powers) <= keys.size:
            powers = _powers(_BASE, keys.size + 1)
            inverses = _powers(_BASE_INVERSE, keys.size + 1)
            self._powers = (powers, inverses)
        prefix = np.zeros(keys.size + 1, dtype=np.uint64)
        mixed = _mix(keys.astype(np.uint64))
        mixed *= powers[: keys.size]
        np.cumsum(mixed, out=prefix[1:])
        window = prefix[end]
        window -= prefix[first]
        window *= inverses[end]
        num_keys = (end - first).astype(np.uint64)
        num_keys *= np.uint64(_COUNT_STEP)
        window += num_keys
        return _mix(window)


def _mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread 64-bit keys in their place (the finaliser of SplitMix64, Steele et al. 2014)."""
    keys += np.uint64(_BASE)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(factor)
    keys ^= keys >> np.uint64(31)
    return keys


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """Return base^0 ... base^(count-1) modulo 2^64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)
