"""Letters of tokens, and a mask made of them that formatting does not change."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from memguard.config import GoldfishConfig
from memguard.mitigation import Goldfish, build_mitigations
from memguard.mitigation.goldfish import TokenLetters

TEXTS = ["", "\n", " the", "The", ", ", "ß", " ", "cat", "-", "7", "Ⅳ", "!!", "sat  down"]
LETTERS = TokenLetters.of(TEXTS)
SPELLED = ["", "", "the", "the", "", "ss", "", "cat", "", "7", "ⅳ", "", "satdown"]
_ids = st.lists(st.integers(0, len(TEXTS) - 1), max_size=40)


def goldfish(k: int = 3, width: int = 2) -> Goldfish:
    config = GoldfishConfig(name="goldfish", k=k, context_width=width, normalise="text")
    return Goldfish(config, letters=LETTERS)


@given(ids=_ids)
def test_tokens_are_spelled_as_their_texts(ids: list[int]) -> None:
    codes, begins = LETTERS.spell(np.array(ids, dtype=np.int64))
    assert "".join(map(chr, codes)) == "".join(SPELLED[id] for id in ids)
    assert begins.tolist() == [
        len("".join(SPELLED[id] for id in ids[:n])) for n in range(len(ids) + 1)
    ]
    assert LETTERS.count(np.array(ids, dtype=np.int64)).tolist() == [len(SPELLED[i]) for i in ids]


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
