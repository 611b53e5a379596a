"""Goldfish drops its share in any script, whatever a tokenizer makes of its letters."""

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from corpus_examples import make_corpus, tokenized
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from plain_hash import plain_hash
from script_texts import KINDS, SCRIPTS, draw_texts, wrap
from transformers import AutoTokenizer

from memguard.config import GoldfishConfig
from memguard.data.encoding import find_special_ids
from memguard.data.tokenization import list_token_texts
from memguard.mitigation import build_mitigations
from memguard.mitigation.k_schedule import build_k_schedule
from memguard.mitigation.letters import TokenLetters
from memguard.planner.drop_shares import check_drop_shares
from memguard.records import IGNORE_LABEL

pytestmark = pytest.mark.slow
NUM_TEXTS, MIN_LABELS = 12, 200
GPT2 = "GPT-2"
_WIDTH = 13
QUICK = {("byte BPE", "Thai", 4), ("byte fallback", "Hindi", 2), ("characters", "Japanese", 4)}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {}


@pytest.fixture
def tokenizer(kind: str, tokenizers: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    if kind not in tokenizers:
        if kind == GPT2:
            shared: Path = request.getfixturevalue("shared_data")
            tokenizers[kind] = AutoTokenizer.from_pretrained(shared / "tokenizers" / "gpt2")
        else:
            tokenizers[kind] = KINDS[kind]()
    return tokenizers[kind]


def build_mask(tokenizer: Any, k: int, normalise: Literal["text", "none"]) -> Any:
    """Return what gives the ids of a text, and which of them are dropped as labels."""
    config = GoldfishConfig(name="goldfish", k=k, normalise=normalise, context_width=_WIDTH)
    mitigations = build_mitigations(
        [config],
        special_ids=sorted(find_special_ids(tokenizer)),
        token_texts=lambda: list_token_texts(tokenizer),
    )

    def mask(text: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        ids = np.array(tokenizer(text, verbose=False)["input_ids"])
        labels = mitigations.mask_labels(ids, ids, generator=np.random.default_rng(0))
        return ids, labels == IGNORE_LABEL

    return mask


def read_letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def spell_before(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return the letters that are complete before each token, as the tokenizer decodes them."""
    before, known = [], ""
    for end in range(len(ids)):
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
        # A letter that is not complete is a replacement character; with byte fallback so are all
        # letters that stand directly before it.
        known = max(known, read_letters(text), key=len)
        before.append(known)
    return before


_CASES = [
    pytest.param(kind, script, k, marks=[pytest.mark.quick] * ((kind, script, k) in QUICK))
    for kind in (*KINDS, GPT2)
    for script in SCRIPTS
    for k in (2, 4)
]


@pytest.mark.parametrize(("kind", "script", "k"), _CASES)
@pytest.mark.parametrize("normalise", ["text", "none"])
def test_one_label_in_k_is_dropped_in_every_script(
    script: str, k: int, normalise: Literal["text", "none"], tokenizer: Any
) -> None:
    mask = build_mask(tokenizer, k, normalise)
    masks = [mask(text)[1][1:] for text in draw_texts(script, NUM_TEXTS)]
    assert min(map(len, masks)) >= MIN_LABELS
    assert abs(np.concatenate(masks).mean() - 1 / k) < 0.04
    assert all(dropped.any() for dropped in masks)


@pytest.mark.parametrize(("kind", "script", "k"), _CASES)
def test_a_decision_is_that_of_the_letters_before_in_any_wrapping(
    script: str, k: int, tokenizer: Any
) -> None:
    """So that a letter is dropped in all copies in which a token begins with it."""
    mask = build_mask(tokenizer, k, "text")
    for text in draw_texts(script, 2, words=60):
        copies = [text, wrap(text), wrap(text, seed=1)]
        assert len({read_letters(copy) for copy in copies}) == 1
        assert len(set(copies)) == 3
        decisions: dict[str, bool] = {}
        for copy in copies:
            ids, dropped = mask(copy)
            for before, is_dropped in zip(
                spell_before(tokenizer, ids.tolist()), dropped.tolist(), strict=True
            ):
                assert decisions.setdefault(before, is_dropped) == is_dropped
        for before, is_dropped in decisions.items():
            window = [ord(letter) for letter in before[-4 * _WIDTH :]]
            assert is_dropped == (plain_hash(window) < (1 << 64) // k)
        # A token may hold several letters of a script that the tokenizer knows.
        assert len(decisions) > len(read_letters(text)) * (0.3 if script == "English" else 0.6)


@pytest.mark.parametrize("kind", ["byte BPE"])
def test_a_few_texts_of_another_script_are_masked_among_many(tokenizer: Any) -> None:
    texts = draw_texts("English", 300) + draw_texts("Thai", 8)
    ids = tokenizer(texts)["input_ids"]
    corpus = make_corpus([tokenized(number, each) for number, each in enumerate(ids)])
    k_schedule = build_k_schedule(
        [GoldfishConfig(name="goldfish", k=2, normalise="text")],
        corpus.manifest,
        can_tighten=False,
        special_ids=sorted(find_special_ids(tokenizer)),
        token_texts=lambda: list_token_texts(tokenizer),
    )
    (remark,) = check_drop_shares(corpus, k_schedule)
    assert remark.level == "info"
    for number in range(300, 308):
        plain = corpus.document(number).input_ids.astype(np.int64)
        labels = k_schedule.mask_labels(number, plain, plain, np.random.default_rng(0))
        assert abs((labels == IGNORE_LABEL).mean() - 0.5) < 0.15


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.quick) for kind in KINDS])
def test_the_texts_of_tokens_are_the_bytes_of_a_text(tokenizer: Any) -> None:
    texts = list_token_texts(tokenizer)
    for script in SCRIPTS:
        (text,) = draw_texts(script, 1)
        spelled = "".join(texts[id] for id in tokenizer(text)["input_ids"])
        read = spelled.encode("utf-8", "surrogateescape").decode()
        # The word boundary of SentencePiece may be lost where a token is decoded alone.
        assert "".join(read.split()) == "".join(text.split())


_characters = st.characters(exclude_categories=["Cs"])


@pytest.mark.quick
@given(
    texts=st.lists(st.text(_characters, min_size=1, max_size=12), min_size=1, max_size=3),
    data=st.data(),
)
def test_letters_are_joined_from_bytes_wherever_tokens_end(
    texts: list[str], data: st.DataObject
) -> None:
    """The documents, too, may begin and end within a letter."""
    pieces, starts, expected, ends = [], [], [], []
    for text in texts:
        raw = text.encode()
        cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), min_size=2, max_size=20)))
        whole = raw[cuts[0] : cuts[-1]]
        starts += [len(pieces)] * (len(cuts) - 1)
        for begin, end in pairwise(cuts):
            done = "".join(expected) + read_letters(raw[cuts[0] : begin].decode(errors="ignore"))
            ends.append(len(done))
            pieces.append(raw[begin:end].decode("utf-8", "surrogateescape"))
        expected.append(read_letters(whole.decode(errors="ignore")))
    codes, begins = TokenLetters(pieces).spell(np.arange(len(pieces)), np.array(starts))
    assert "".join(map(chr, codes)) == "".join(expected)
    assert begins.tolist() == [*ends, len(codes)]


@pytest.mark.quick
def test_no_letter_is_beyond_the_planes_that_are_folded() -> None:
    assert not any(chr(code).isalnum() for code in range(0x3FFFF, 0x110000))
