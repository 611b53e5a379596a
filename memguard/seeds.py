"""Named random streams: every draw has an owner (seed, purpose, index)."""

import hashlib

import numpy as np


def derive_seed(seed: int, purpose: str, index: int = 0) -> int:
    """Return a 63-bit seed that depends on all three arguments and nothing else.

    Args:
        seed: the run's seed.
        purpose: what the draw is for, e.g. ``"control"`` or ``"row order"``.
        index: position in the stream (epoch, global sample index, ...).
    """
    digest = hashlib.blake2b(f"{seed}\0{purpose}\0{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def derive_generator(seed: int, purpose: str, index: int = 0) -> np.random.Generator:
    """Return a NumPy generator (PCG64) for one purpose; same arguments, same numbers."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, purpose, index)))


def derive_secret_generator(key: int, purpose: str, index: int = 0) -> np.random.Generator:
    """Return a NumPy generator (Philox) of which 128 bits stay unknown to who lacks the key.

    A seed is for numbers that come out the same, and 63 bits do for that; these are for numbers
    that nobody may guess. Philox has no proof against who sees many of its numbers.

    Args:
        key: a secret of 128 bits or more.
        purpose: as of `derive_seed`.
        index: as of `derive_seed`.
    """
    digest = hashlib.blake2b(f"{key}\0{purpose}\0{index}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
