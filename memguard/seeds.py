"""Named random streams: every random draw is determined by seed, purpose and index."""

import hashlib

import numpy as np


def derive_seed(seed: int, purpose: str, index: int = 0) -> int:
    """Return a 63-bit seed that depends only on the three arguments.

    Args:
        seed: the run's seed.
        purpose: what the draw is for, e.g. ``"control"`` or ``"row order"``.
        index: position in the stream (epoch, global sample index, ...).
    """
    digest = hashlib.blake2b(f"{seed}\0{purpose}\0{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def derive_generator(seed: int, purpose: str, index: int = 0) -> np.random.Generator:
    """Return a NumPy generator (PCG64) for one purpose; reproducible from its arguments."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, purpose, index)))


def derive_secret_generator(key: int, purpose: str, index: int = 0) -> np.random.Generator:
    """Return a NumPy generator (Philox) with 128 bits of secret state derived from a key.

    A 63-bit seed suffices for reproducible numbers; this generator is for numbers that must not be
    predictable. Philox is not proven secure against an observer of many of its numbers.

    Args:
        key: a secret of 128 bits or more.
        purpose: see `derive_seed`.
        index: see `derive_seed`.
    """
    digest = hashlib.blake2b(f"{key}\0{purpose}\0{index}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
