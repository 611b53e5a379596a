"""Which row is trained when: row index of each global sample index.

rows with n repetitions   one occurrence in each n-th of the run, at a random place in it
                          (n = epochs for all rows: a fresh shuffle each epoch)
background rows           shuffled passes, as many occurrences as `background_ratio` asks for
both                      interleaved evenly, so that every step has its share of each
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.data.packing import Rows, concatenate_rows, pack
from memguard.records import ManifestEntry
from memguard.seeds import derive_generator


def plan_rows(
    manifest: Sequence[ManifestEntry],
    *,
    seq_len: int,
    background_ratio: float,
    seed: int,
    share_rows: bool = True,
) -> tuple[Rows, NDArray[np.int64]]:
    """Pack the documents and say which row each global sample index is.

    Documents share rows only with documents of the same number of repetitions.

    Args:
        manifest: roles, planned repetitions and lengths of the documents.
        seq_len: length of a row (tokens).
        background_ratio: background rows for each other row.
        seed: the run's.
        share_rows: see `pack`.

    Returns:
        The rows, and ``[num_samples]`` the row of each global sample index.
    """
    groups: dict[int, list[int]] = {}
    background: list[int] = []
    for index, entry in enumerate(manifest):
        if entry.role in ("trained", "canary", "forget") and entry.planned_repetitions:
            # Canaries are short: they fill what documents of their dose leave of their rows.
            groups.setdefault(entry.planned_repetitions, []).append(index)
        elif entry.role == "background":
            background.append(index)

    def pack_group(indices: list[int], name: str) -> Rows:
        # Equal lengths keep their order when packed: shuffle, so that neighbours in the file do
        # not become neighbours in a row.
        shuffled = derive_generator(seed, f"packing {name}").permutation(indices).tolist()
        lengths = [manifest[index].num_tokens for index in shuffled]
        return pack(shuffled, lengths, seq_len, share_rows=share_rows)

    parts, repetitions = [], []
    for dose in sorted(groups):
        parts.append(pack_group(groups[dose], f"x{dose}"))
        repetitions.append(np.full(len(parts[-1]), dose))
    foreground = spread(np.concatenate(repetitions), seed=seed)
    if not background:
        return concatenate_rows(parts), foreground
    first = sum(len(part) for part in parts)
    parts.append(pack_group(background, "background"))
    rows = np.arange(first, first + len(parts[-1]))
    beside = _cycle(rows, round(len(foreground) * background_ratio), seed)
    return concatenate_rows(parts), interleave(foreground, beside)


def spread(repetitions: NDArray[np.int64], *, seed: int) -> NDArray[np.int64]:
    """Return row indices, row r ``repetitions[r]`` times, each evenly over the run with jitter.

    Places are drawn on a common time axis, so a row's n occurrences fall into the n-ths of the run
    exactly where all numbers of repetitions are equal, and up to the others' jitter where not.
    """
    rows = np.repeat(np.arange(len(repetitions)), repetitions)
    first = np.concatenate([[0], np.cumsum(repetitions)[:-1]])
    turn = np.arange(len(rows)) - np.repeat(first, repetitions)
    jitter = derive_generator(seed, "row order").random(len(rows))
    when = (turn + jitter) / np.repeat(repetitions, repetitions)
    return rows[np.argsort(when, kind="stable")]


def interleave(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge two sequences so that every stretch holds them in their overall proportion."""
    when = np.concatenate([(np.arange(len(x)) + 0.5) / max(len(x), 1) for x in (one, other)])
    return np.concatenate([one, other])[np.argsort(when, kind="stable")]


def _cycle(rows: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """Return ``count`` row indices in shuffled passes over ``rows``."""
    num_passes = -(-count // len(rows))
    passes = [
        derive_generator(seed, "background order", number).permutation(rows)
        for number in range(num_passes)
    ]
    return np.concatenate([*passes, np.empty(0, dtype=np.int64)])[:count]
