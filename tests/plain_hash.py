"""The hash of a goldfish by its formula, in unbounded integers."""

_MASK = (1 << 64) - 1
_BASE, _COUNT_STEP = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95


def plain_mix(key: int) -> int:
    """SplitMix64's finaliser."""
    key = (key + 0x9E3779B97F4A7C15) & _MASK
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
    return key ^ (key >> 31)


def plain_hash(before: list[int]) -> int:
    """Hash of the tokens before a label, the nearest last."""
    inverse = pow(_BASE, -1, 1 << 64)
    window = sum(
        plain_mix(token) * pow(inverse, j, 1 << 64) for j, token in enumerate(before[::-1], 1)
    )
    return plain_mix((window + len(before) * _COUNT_STEP) & _MASK)
