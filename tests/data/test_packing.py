"""Pieces of documents into rows: nothing lost, nothing too long, little left over."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.data.packing import Rows, concatenate_rows, pack, split_points

lengths_lists = st.lists(st.integers(1, 200), min_size=1, max_size=60)
seq_lens = st.integers(8, 64)


def row_lengths(rows: Rows) -> list[int]:
    sizes = rows.stop - rows.start
    return [int(sizes[rows.row_start[r] : rows.row_start[r + 1]].sum()) for r in range(len(rows))]


@given(num_tokens=st.integers(1, 5000), seq_len=seq_lens)
def test_pieces_are_as_few_as_fit_and_of_nearly_equal_length(num_tokens: int, seq_len: int) -> None:
    ends = split_points(num_tokens, seq_len)
    sizes = np.diff([0, *ends])
    assert ends[-1] == num_tokens
    assert len(ends) == -(-num_tokens // seq_len)
    assert sizes.max() <= seq_len
    assert sizes.max() - sizes.min() <= 1


def test_the_examples_of_the_module_docstring() -> None:
    assert split_points(7, 4) == [3, 7]
    rows = pack([0, 1, 2, 3], [3, 2, 2, 1], 4)
    assert rows.row_start.tolist() == [0, 2, 4]
    assert rows.document.tolist() == [0, 3, 1, 2]


@given(lengths=lengths_lists, seq_len=seq_lens, share_rows=st.booleans())
def test_every_token_is_in_exactly_one_piece_and_rows_fit(
    lengths: list[int], seq_len: int, share_rows: bool
) -> None:
    names = [10 * index + 3 for index in range(len(lengths))]
    rows = pack(names, lengths, seq_len, share_rows=share_rows)
    seen = {name: np.zeros(length, dtype=int) for name, length in zip(names, lengths, strict=True)}
    for document, start, stop in zip(rows.document, rows.start, rows.stop, strict=True):
        seen[int(document)][start:stop] += 1
    assert all((count == 1).all() for count in seen.values())
    assert rows.row_start[0] == 0
    assert rows.row_start[-1] == len(rows.document)
    assert all(0 < length <= seq_len for length in row_lengths(rows))
    if not share_rows:
        assert np.diff(rows.row_start).tolist() == [1] * len(rows)


@given(cuts=st.lists(st.sets(st.integers(1, 63), max_size=9), min_size=1, max_size=40))
def test_rows_are_within_the_bound_of_best_fit_decreasing(cuts: list[set[int]]) -> None:
    # Full rows cut into pieces: the best packing has as many rows as there were.
    lengths = [int(n) for cut in cuts for n in np.diff([0, *sorted(cut), 64])]
    rows = pack(range(len(lengths)), lengths, 64)
    # Best fit decreasing, as first fit decreasing, needs at most 11/9 OPT + 6/9 rows (Dosa 2007).
    assert len(cuts) <= len(rows) <= 11 / 9 * len(cuts) + 6 / 9


@given(lengths=lengths_lists, seq_len=seq_lens)
def test_each_piece_goes_where_it_leaves_the_least_space(lengths: list[int], seq_len: int) -> None:
    sizes = sorted(
        (int(s) for n in lengths for s in np.diff([0, *split_points(n, seq_len)])), reverse=True
    )
    spaces: list[int] = []
    for size in sizes:
        fitting = [space for space in spaces if space >= size]
        if fitting:
            spaces.remove(min(fitting))
            spaces.append(min(fitting) - size)
        else:
            spaces.append(seq_len - size)
    rows = pack(range(len(lengths)), lengths, seq_len)
    assert sorted(row_lengths(rows)) == sorted(seq_len - space for space in spaces)


def test_a_hard_case_of_many_small_pieces_fills_all_rows() -> None:
    lengths = [33] * 20 + [31] * 20 + [1] * 64
    rows = pack(range(len(lengths)), lengths, 64)
    assert row_lengths(rows) == [64] * 21


def test_of_equal_lengths_the_earlier_document_comes_first() -> None:
    rows = pack([5, 3, 9, 1], [4, 4, 4, 4], 8)
    assert rows.document.tolist() == [5, 3, 9, 1]


def test_rows_laid_end_to_end_keep_their_pieces() -> None:
    parts = [pack([0, 1], [5, 9], 8), pack([2], [3], 8), pack([3, 4, 5], [2, 2, 20], 8)]
    whole = concatenate_rows(parts)
    assert len(whole) == sum(map(len, parts))
    expected = [
        (int(part.document[p]), int(part.start[p]), int(part.stop[p]))
        for part in parts
        for p in range(len(part.document))
    ]
    pieces = zip(whole.document.tolist(), whole.start.tolist(), whole.stop.tolist(), strict=True)
    assert list(pieces) == expected
    assert row_lengths(whole) == [length for part in parts for length in row_lengths(part)]


@pytest.mark.timeout(20)
def test_a_hundred_thousand_pieces_take_seconds() -> None:
    lengths = np.random.default_rng(0).integers(1, 512, 100_000).tolist()
    rows = pack(range(len(lengths)), lengths, 2048)
    # With this many small pieces hardly a row has space left.
    assert sum(lengths) / (len(rows) * 2048) > 0.999
