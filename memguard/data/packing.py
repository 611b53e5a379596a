"""Packs pieces of documents into rows of ``seq_len`` tokens, best fit, and orders the rows.

    document of 7 tokens, seq_len 4      pieces [0, 4) [4, 7)
    pieces a(3) b(2) c(2) d(1), seq_len 4

        row 0   a a a d     position_ids 0 1 2 0
        row 1   b b c c     position_ids 0 1 0 1

Every piece starts at position 0 and attends only to itself. `plan_rows` returns the order of
training, as the row index of each global sample index:

    rows with n repetitions   one occurrence in each of n equal parts of the run, at a random
                              position (n = epochs for all rows: a new shuffle each epoch)
    background rows           shuffled passes, as many occurrences as `background_ratio` sets
    both                      interleaved evenly, so that every step has its share of each
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memguard.errors import ConfigError
from memguard.records import ManifestEntry
from memguard.seeds import derive_generator

MAX_SCHEDULED = 50_000_000
"""Maximum number of rows of a run, counted with repetitions; scheduling takes 64 bytes per row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """R rows of P pieces; the pieces of row r are ``row_start[r] : row_start[r + 1]``."""

    row_start: NDArray[np.int64]
    """[R + 1]"""
    document: NDArray[np.int64]
    """[P] index of the document."""
    start: NDArray[np.int64]
    """[P] first token of the piece in its document."""
    stop: NDArray[np.int64]
    """[P] one past the last."""

    def __len__(self) -> int:
        return len(self.row_start) - 1


def split_points(num_tokens: int, seq_len: int) -> list[int]:
    """Return the ends of the pieces of one document: as few as possible, of nearly equal length.

    The lengths are equal because the audit predicts the end of the last piece, and a piece of a few
    tokens would leave no prefix.
    """
    num_pieces = max(1, -(-num_tokens // seq_len))
    return [num_tokens * (piece + 1) // num_pieces for piece in range(num_pieces)]


def pack(
    documents: Sequence[int], lengths: Sequence[int], seq_len: int, *, share_rows: bool = True
) -> Rows:
    """Cut documents into pieces and pack these into rows, longest first, by best fit.

    Without ``share_rows`` every piece has its own row, for models that cannot mask attention
    between documents of one row.
    """
    pieces = []
    for document, length in zip(documents, lengths, strict=True):
        begin = 0
        for end in split_points(length, seq_len):
            pieces.append((document, begin, end))
            begin = end
    if not share_rows:
        rows = [[piece] for piece in pieces]
    else:
        # The sort is stable: of equal lengths the earlier document comes first.
        rows = _best_fit(sorted(pieces, key=lambda piece: piece[1] - piece[2]), seq_len)
    flat = [piece for row in rows for piece in row]
    columns = np.array(flat, dtype=np.int64).reshape(-1, 3)
    return Rows(
        row_start=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        document=columns[:, 0],
        start=columns[:, 1],
        stop=columns[:, 2],
    )


def _best_fit(
    pieces: Sequence[tuple[int, int, int]], seq_len: int
) -> list[list[tuple[int, int, int]]]:
    """Put each piece where it leaves least space; bit n of ``spaces``: a row has n tokens free."""
    rows: list[list[tuple[int, int, int]]] = []
    by_space: list[list[int]] = [[] for _ in range(seq_len + 1)]
    spaces = 0
    for piece in pieces:
        length = piece[2] - piece[1]
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = by_space[space].pop()
            if not by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, row = seq_len, len(rows)
            rows.append([])
        rows[row].append(piece)
        left = space - length
        if left:
            by_space[left].append(row)
            spaces |= 1 << left
    return rows


def concatenate_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenate several sets of rows."""
    starts = [np.zeros(1, dtype=np.int64)]
    for part in parts:
        starts.append(part.row_start[1:] + starts[-1][-1])
    return Rows(
        row_start=np.concatenate(starts),
        document=np.concatenate([part.document for part in parts]),
        start=np.concatenate([part.start for part in parts]),
        stop=np.concatenate([part.stop for part in parts]),
    )


def plan_rows(
    manifest: Sequence[ManifestEntry],
    *,
    seq_len: int,
    background_ratio: float,
    seed: int,
    share_rows: bool = True,
) -> tuple[Rows, NDArray[np.int64]]:
    """Pack the documents and return the row of each global sample index, ``[num_samples]``.

    Documents share rows only with documents of the same number of repetitions. There are
    ``background_ratio`` background rows for each other row; see `pack` for ``share_rows``.
    """
    groups: dict[int, list[int]] = {}
    background: list[int] = []
    for index, entry in enumerate(manifest):
        if entry.role in ("trained", "canary", "forget") and entry.planned_repetitions:
            # Canaries are short and fill rows of documents with the same repetitions.
            groups.setdefault(entry.planned_repetitions, []).append(index)
        elif entry.role == "background":
            background.append(index)

    def pack_group(indices: list[int], name: str) -> Rows:
        # Packing keeps the order of equal lengths: shuffle, so that neighbours in the file are not
        # packed into the same row.
        shuffled = derive_generator(seed, f"packing {name}").permutation(indices).tolist()
        lengths = [manifest[index].num_tokens for index in shuffled]
        return pack(shuffled, lengths, seq_len, share_rows=share_rows)

    parts, repetitions = [], []
    for dose in sorted(groups):
        parts.append(pack_group(groups[dose], f"x{dose}"))
        repetitions.append(np.full(len(parts[-1]), dose))
    num_rows = int(np.concatenate(repetitions).sum())
    num_scheduled = round(num_rows * (1 + (background_ratio if background else 0)))
    if num_scheduled > MAX_SCHEDULED:
        raise ConfigError(
            f"the run would feed {num_scheduled:,} rows, more than {MAX_SCHEDULED:,}: lower "
            "'train.epochs', the repetitions of 'data.study' or 'data.background_ratio', or raise "
            "'data.seq_len'"
        )
    foreground = spread(np.concatenate(repetitions), seed=seed)
    if not background:
        return concatenate_rows(parts), foreground
    first = sum(len(part) for part in parts)
    parts.append(pack_group(background, "background"))
    rows = np.arange(first, first + len(parts[-1]))
    count = round(len(foreground) * background_ratio)
    passes = [
        derive_generator(seed, "background order", number).permutation(rows)
        for number in range(-(-count // len(rows)))
    ]
    beside = np.concatenate([*passes, np.empty(0, dtype=np.int64)])[:count]
    return concatenate_rows(parts), interleave(foreground, beside)


def spread(repetitions: NDArray[np.int64], *, seed: int) -> NDArray[np.int64]:
    """Return row indices: row r occurs ``repetitions[r]`` times, evenly over the run with jitter.

    Times are drawn on a common axis. If all rows have the same number of repetitions n, each of n
    equal parts of the run has exactly one occurrence of a row; otherwise this holds up to the
    jitter of the other rows.
    """
    rows = np.repeat(np.arange(len(repetitions)), repetitions)
    first = np.concatenate([[0], np.cumsum(repetitions)[:-1]])
    turn = np.arange(len(rows)) - np.repeat(first, repetitions)
    jitter = derive_generator(seed, "row order").random(len(rows))
    when = (turn + jitter) / np.repeat(repetitions, repetitions)
    return rows[np.argsort(when, kind="stable")]


def interleave(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge two sequences so that every part has them in their overall proportion."""
    when = np.concatenate([(np.arange(len(x)) + 0.5) / max(len(x), 1) for x in (one, other)])
    return np.concatenate([one, other])[np.argsort(when, kind="stable")]
