"""Pieces of documents into rows of ``seq_len`` tokens, best fit.

    document of 7 tokens, seq_len 4      pieces [0, 4) [4, 7)
    pieces a(3) b(2) c(2) d(1), seq_len 4

        row 0   a a a d     position_ids 0 1 2 0
        row 1   b b c c     position_ids 0 1 0 1

Every piece starts at position 0 and sees nothing but itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
    """Return the ends of the pieces of one document: as few as fit, of nearly equal length.

    Equal, because the audit continues the end of the last piece and a piece of a few tokens would
    have no prefix to continue from.
    """
    num_pieces = max(1, -(-num_tokens // seq_len))
    return [num_tokens * (piece + 1) // num_pieces for piece in range(num_pieces)]


def pack(
    documents: Sequence[int], lengths: Sequence[int], seq_len: int, *, share_rows: bool = True
) -> Rows:
    """Cut documents into pieces and put these into rows, longest first, each where it fits best.

    Args:
        documents: indices of the documents to pack.
        lengths: their lengths (tokens).
        seq_len: length of a row (tokens).
        share_rows: False gives every piece a row of its own, for models that cannot keep documents
            of one row apart.
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
        # Stable: of equal lengths the earlier document comes first.
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
    """Put each piece where least space is left over; the bits of ``spaces`` say which exist."""
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
    """Lay several sets of rows end to end."""
    starts = [np.zeros(1, dtype=np.int64)]
    for part in parts:
        starts.append(part.row_start[1:] + starts[-1][-1])
    return Rows(
        row_start=np.concatenate(starts),
        document=np.concatenate([part.document for part in parts]),
        start=np.concatenate([part.start for part in parts]),
        stop=np.concatenate([part.stop for part in parts]),
    )
