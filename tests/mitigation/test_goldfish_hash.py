"""Hash of what stands before each token, against its formula in big integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from plain_hash import plain_hash, plain_mix

from memguard.mitigation.goldfish import WindowHash

ids_lists = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 200_000), st.just(2**31 - 1)), max_size=60
)


def hash_alone(ids: NDArray[np.int64], width: int) -> NDArray[np.uint64]:
    return WindowHash().before(ids, np.zeros(len(ids), dtype=np.int64), width)


def test_the_plain_mix_is_splitmix64() -> None:
    # First outputs of SplitMix64 seeded with 1234567, as its reference implementation prints them.
    step = 0x9E3779B97F4A7C15
    outputs = [plain_mix((1234567 + i * step) & ((1 << 64) - 1)) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(documents=st.lists(ids_lists, min_size=1, max_size=4), width=st.integers(1, 20))
def test_hash_is_its_formula(documents: list[list[int]], width: int) -> None:
    hasher = WindowHash()
    packed = np.array([token for document in documents for token in document], dtype=np.int64)
    sizes = [len(document) for document in documents]
    starts = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
    expected = [
        [plain_hash(document[max(0, t - width) : t]) for t in range(len(document))]
        for document in documents
    ]
    hashes = hasher.before(packed, starts, width).tolist()
    assert hashes == [each for document in expected for each in document]
    # What it holds of one stream serves shorter and longer ones.
    for document, alone in zip(documents, expected, strict=True):
        ids = np.array(document, dtype=np.int64)
        assert hasher.before(ids, np.zeros_like(ids), width).tolist() == alone


@given(data=st.data(), ids=ids_lists)
def test_windows_of_any_width_are_hashed_as_what_stands_in_them(
    data: st.DataObject, ids: list[int]
) -> None:
    """As of letters: several windows may end at one key, and some hold none."""
    places = st.integers(0, len(ids))
    pairs = data.draw(st.lists(st.tuples(places, places).map(sorted), max_size=10))
    first, end = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    hashes = WindowHash().windows(np.array(ids, dtype=np.int64), first, end)
    assert hashes.tolist() == [plain_hash(ids[begin:stop]) for begin, stop in pairs]


def test_hash_sees_each_of_the_h_tokens_and_their_order() -> None:
    h, ids = 7, np.random.default_rng(0).integers(0, 50_000, 40)
    before = hash_alone(ids, h)
    for place in range(len(ids) - h):
        changed = ids.copy()
        changed[place] += 1
        assert (hash_alone(changed, h) != before)[place + 1 : place + h + 1].all()
    swapped = ids.copy()
    swapped[[10, 11]] = ids[[11, 10]]
    # Windows that hold both: the same tokens in another order.
    assert (hash_alone(swapped, h) != before)[12 : 10 + h + 1].all()


def test_a_short_window_differs_from_a_longer_one_of_the_same_tokens() -> None:
    hashes = hash_alone(np.zeros(30, dtype=np.int64), 13)
    # 0..12 predecessors all differ, from 13 on the window is the same.
    assert len(set(hashes[:14].tolist())) == 14
    assert len(set(hashes[13:].tolist())) == 1


def test_what_is_hashed_is_left_as_it_was() -> None:
    ids = np.arange(50)
    hash_alone(ids, 3)
    np.testing.assert_array_equal(ids, np.arange(50))
