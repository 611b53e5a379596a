"""Hash of what stands before each token or letter; formatting does not change that of letters."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from plain_hash import plain_hash, plain_mix
from pydantic import ValidationError

from memguard.config import GoldfishConfig
from memguard.mitigation import Goldfish, build_mitigations
from memguard.mitigation.goldfish import WindowHash
from memguard.mitigation.letters import TokenLetters

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


TEXTS = ["", "\n", " the", "The", ", ", "ß", " ", "cat", "-", "7", "Ⅳ", "!!", "sat  down"]
LETTERS = TokenLetters(TEXTS)
SPELLED = ["", "", "the", "the", "", "ss", "", "cat", "", "7", "ⅳ", "", "satdown"]
_ids = st.lists(st.integers(0, len(TEXTS) - 1), max_size=40)


def goldfish(k: int = 3, width: int = 2) -> Goldfish:
    config = GoldfishConfig(name="goldfish", k=k, context_width=width, normalise="text")
    return Goldfish(config, letters=LETTERS)


@given(ids=_ids)
def test_tokens_are_spelled_as_their_texts(ids: list[int]) -> None:
    codes, begins = LETTERS.spell(np.array(ids, dtype=np.int64), np.zeros(len(ids), dtype=np.int64))
    assert "".join(map(chr, codes)) == "".join(SPELLED[id] for id in ids)
    assert begins.tolist() == [
        len("".join(SPELLED[id] for id in ids[:n])) for n in range(len(ids) + 1)
    ]


@given(documents=st.lists(_ids.filter(bool), min_size=1, max_size=4), width=st.integers(1, 5))
def test_equal_letters_before_have_equal_hashes_and_others_do_not(
    documents: list[list[int]], width: int
) -> None:
    ids = np.array([id for document in documents for id in document], dtype=np.int64)
    sizes = [len(document) for document in documents]
    starts = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
    hashes = goldfish(width=width).hash_contexts(ids, starts).tolist()
    windows = []
    for start, place in zip(starts, range(len(ids)), strict=True):
        spelled = "".join(SPELLED[id] for id in ids[start:place])
        windows.append(spelled[-4 * width :])
    # 64 bits: of a few dozen windows no two differ and collide.
    assert len(set(hashes)) == len(set(windows))
    assert len(set(zip(windows, hashes, strict=True))) == len(set(windows))


def test_what_is_between_words_changes_no_decision_about_them() -> None:
    """Ids 2 and 3, " the" and "The", are one word; 0, 1, 4, 6, 8 and 11 have no letters."""
    draw = np.random.default_rng(0)
    words = draw.choice([2, 5, 7, 9, 10, 12], 400)
    mask = goldfish().drop_mask(words, None, draw)
    between = [draw.choice([0, 1, 4, 6, 8, 11], draw.integers(0, 3)) for _ in words]
    formatted, places = [], []
    for word, gap in zip(np.where(words == 2, 3, words), between, strict=True):
        formatted += [*gap, word]
        places.append(len(formatted) - 1)
    other = goldfish().drop_mask(np.array(formatted), None, draw)
    assert (other[places] == mask).all()
    # Where tokens are hashed the two have little to do with each other.
    plain = Goldfish(GoldfishConfig(name="goldfish", k=3, context_width=2))
    one, two = (plain.drop_mask(np.array(ids), None, draw) for ids in (words, formatted))
    assert (one != two[places]).mean() > 0.2


@pytest.mark.parametrize("k", [2, 4])
def test_one_label_in_k_is_dropped(k: int) -> None:
    draw = np.random.default_rng(1)
    texts = ["".join(draw.choice(list("abcdefghij"), draw.integers(1, 6))) for _ in range(500)]
    config = GoldfishConfig(name="goldfish", k=k, normalise="text")
    mitigations = build_mitigations([config], special_ids=[3], token_texts=lambda: texts)
    ids = draw.integers(0, 500, 40_000)
    labels = mitigations.mask_labels(ids, ids, generator=draw)
    share = (labels == -100).mean()
    # Three standard deviations of a binomial share.
    assert abs(share - 1 / k) < 3 * np.sqrt((1 / k) * (1 - 1 / k) / len(ids)) + 1 / 500
    assert (labels[ids == 3] == 3).all()


@given(documents=st.lists(_ids.filter(bool), min_size=1, max_size=4))
def test_packed_documents_are_masked_as_if_alone(documents: list[list[int]]) -> None:
    draw = np.random.default_rng(0)
    packed = np.array([id for document in documents for id in document])
    numbers = np.repeat(np.arange(len(documents)), [len(each) for each in documents])
    together = goldfish().drop_mask(packed, numbers, draw)
    alone = [goldfish().drop_mask(np.array(each), None, draw) for each in documents]
    assert together.tolist() == np.concatenate(alone).tolist()


@pytest.mark.parametrize("mode", ["hash_reference", "static", "random"])
def test_other_modes_do_not_look_at_the_text(mode: Any) -> None:
    with pytest.raises(ValidationError, match="'normalise: text' is for mode 'hash'"):
        GoldfishConfig(name="goldfish", mode=mode, normalise="text")
