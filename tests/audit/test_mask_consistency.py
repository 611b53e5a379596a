"""Which dropped tokens a copy teaches: by hand, against plain loops, and with real masks."""

import json
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_examples import make_document
from transformers import AutoTokenizer

from memguard.audit.metrics import Evidence
from memguard.audit.passages import Codec
from memguard.audit.probe import Summary
from memguard.audit.probes.mask_consistency import MaskConsistencyProbe
from memguard.audit.probes.masks import (
    NEAR_DUPLICATES,
    REWRITINGS,
    MaskChange,
    MaskComparison,
    MaskedText,
    compare_masks,
    fold_text,
    measure_mask_consistency,
)
from memguard.audit.requests import Inputs
from memguard.audit.windows import AuditDocument, Window
from memguard.config import GoldfishConfig
from memguard.data.tokenization import train_bpe
from memguard.errors import ModelError
from memguard.mitigation import Mitigations, build_mitigations
from memguard.records import TRAINED

pytestmark = pytest.mark.slow


def _masked(*tokens: str) -> MaskedText:
    """A text from its tokens; a star before one means that it is dropped."""
    texts = [token.removeprefix("*") for token in tokens]
    ends = np.cumsum([len(text) for text in texts])
    return MaskedText(
        folded=fold_text("".join(texts)),
        spans_T2=np.stack([ends - [len(text) for text in texts], ends], axis=1),
        dropped_T=np.array([token.startswith("*") for token in tokens]),
    )


def _compare(original: Sequence[str], copy: Sequence[str]) -> tuple[int, int]:
    comparison = compare_masks(_masked(*original), _masked(*copy))
    return comparison.num_leaked, comparison.num_dropped


def test_example_of_the_module() -> None:
    original = ["The", "* cat", " sat", " on", "* the", " mat", " of the house"]
    copy = ["> ", "The", "* cat", " sat", "* on", " the", " mat", " of the house"]
    assert _compare(original, copy) == (1, 2)
    assert _compare(copy, original) == (1, 2)


@pytest.mark.parametrize(
    ("copy", "num_leaked"),
    [
        (["Then", "\n", "*Pen", "*elope"], 0),
        (["Then", "\n", "*Pen", "elope"], 1),
        (["Then", "*Penelope"], 0),
        (["Then", " Penelope"], 1),
        (["The", "*nPenelope"], 0),  # joined to the word before
        (["The", "nPenelope"], 1),
        (["THEN", "* PENELOPE"], 0),
    ],
)
def test_tokens_that_are_cut_otherwise(copy: list[str], num_leaked: int) -> None:
    assert _compare(["Then", "* Penelope"], copy) == (num_leaked, 1)


def test_what_no_mask_decides_on_does_not_count() -> None:
    # The first token is never predicted, white space has no like in a copy.
    assert _compare(["*One", "*\n", " two"], ["One", " ", " two"]) == (0, 0)
    # Nor does the copy teach its own first token.
    assert _compare([" ", "*One", "*  ", "*two"], ["One", " ", " two"]) == (1, 2)
    # Special tokens span nothing.
    marked = MaskedText(
        folded=fold_text("a b"),
        spans_T2=np.array([[0, 0], [0, 1], [1, 3], [0, 0]]),
        dropped_T=np.array([True, True, False, True]),
    )
    assert compare_masks(marked, _masked(" ", "a", " b")) == MaskComparison(
        num_dropped=1, num_leaked=1
    )


def test_tokens_that_share_a_character_match_in_their_order() -> None:
    def pieces(*dropped: bool) -> MaskedText:
        """Three tokens with a byte or two of one character, after another token."""
        return MaskedText(
            folded=fold_text("a 😀"),
            spans_T2=np.array([[0, 1]] + [[1, 3]] + [[2, 3]] * (len(dropped) - 1)),
            dropped_T=np.array([False, *dropped]),
        )

    first, second = pieces(True, False, False), pieces(False, True, False)
    assert compare_masks(first, first).num_leaked == 0
    assert compare_masks(first, second).num_leaked == 1
    # Cut into another number of pieces: any of them.
    assert compare_masks(first, pieces(True, False)).num_leaked == 1
    assert compare_masks(first, pieces(True, True)).num_leaked == 0


def test_short_runs_are_no_copies() -> None:
    ours = ["An", " apple", " a day", " keeps", " the", "* doctor", " away"]
    other = ["Of", " the", " doctor", " nothing", " was", " heard", " since"]
    assert _compare(ours, other) == (0, 0)
    quoting = ["They say that", " an", " apple", " a day", " keeps", " the", " doctor", " off"]
    assert _compare(ours, quoting) == (1, 1)
    assert compare_masks(_masked(*ours), _masked(*other)).leak_share is None


_words = st.lists(st.tuples(st.text("abcß’", min_size=1, max_size=4), st.booleans(), st.booleans()))


@given(words=_words, blanks=st.lists(st.sampled_from([" ", "\n", "  "]), min_size=1))
def test_words_with_other_spaces(words: list[tuple[str, bool, bool]], blanks: list[str]) -> None:
    original = ["Go", *(("* " if ours else " ") + word for word, ours, _ in words)]
    copy = ["Go"]
    for place, (word, _, theirs) in enumerate(words):
        copy += [blanks[place % len(blanks)], ("*" if theirs else "") + word.upper()]
    # As casefold has it, ß and SS are alike.
    expected = sum(ours and not theirs for _, ours, theirs in words)
    assert _compare(original, copy) == (expected, sum(ours for _, ours, _ in words))


@given(tokens=st.lists(st.sampled_from(["a", " b", "* b", "\n", "*\n", "*ß", "İ", "*c“"])))
def test_a_text_never_leaks_to_itself(tokens: list[str]) -> None:
    num_leaked, num_dropped = _compare(["Go", *tokens], ["Go", *tokens])
    assert num_leaked == 0
    assert num_dropped == sum(token.startswith("*") and token != "*\n" for token in tokens)


_NUM_WORDS = 150


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Nonsense of 150 words, sentences of ten, a paragraph of five of them."""
    rng = np.random.default_rng(0)
    vocabulary = ["".join(rng.choice(list("etaoins"), rng.integers(2, 6))) for _ in range(60)]
    texts = []
    for _ in range(12):
        words = [str(word) for word in rng.choice(vocabulary, _NUM_WORDS)]
        for start in range(0, _NUM_WORDS, 10):
            words[start] = ("\n" if start % 50 == 0 and start else "") + words[start].capitalize()
            words[start + 9] += "."
        texts.append(" ".join(words).replace(" \n", "\n"))
    return texts


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> Any:
    return train_bpe(texts, vocab_size=500)


def _goldfish(mode: str, k: int = 4) -> Mitigations:
    config = GoldfishConfig.model_validate({"name": "goldfish", "mode": mode, "k": k})
    return build_mitigations([config], special_ids=[0])


def _measure(*arguments: Any, **settings: Any) -> dict[str, MaskChange]:
    changes = measure_mask_consistency(*arguments, **settings)
    return {change.rewriting: change for change in changes}


def test_a_random_mask_leaks_all_but_one_in_k(texts: list[str], tokenizer: Any) -> None:
    found = _measure(texts, tokenizer, _goldfish("random"), pairs=[(text, text) for text in texts])
    for name in ("leading_space", "wrapped_60", "single_line", NEAR_DUPLICATES):
        # About 450 dropped tokens, independent: standard error of .02, here four of them.
        assert found[name].mean_leaked_share == pytest.approx(0.75, abs=0.08), name
    assert found[NEAR_DUPLICATES].num_changed == len(texts)


@pytest.mark.parametrize("mode", ["hash", "hash_reference", "static"])
def test_equal_texts_are_masked_alike(texts: list[str], tokenizer: Any, mode: str) -> None:
    found = _measure(texts, tokenizer, _goldfish(mode), pairs=[(text, text) for text in texts])
    assert found[NEAR_DUPLICATES].num_changed == 0
    assert found[NEAR_DUPLICATES].mean_leaked_share == 0


@pytest.mark.parametrize(("num_more", "leak_share"), [(1, 1.0), (4, 0.0)])
def test_a_static_mask_follows_the_place(
    texts: list[str], tokenizer: Any, num_more: int, leak_share: float
) -> None:
    """Every fourth token: one more before them moves it off all of them, four more back."""
    pairs = [(f"~{text}", f"~{'~' * num_more}{text}") for text in texts]
    for one, other in pairs:
        assert len(tokenizer(other)["input_ids"]) == len(tokenizer(one)["input_ids"]) + num_more
    found = _measure([], tokenizer, _goldfish("static"), pairs=pairs)
    assert found[NEAR_DUPLICATES].mean_leaked_share == leak_share


def test_a_hash_leaks_near_what_was_changed(texts: list[str], tokenizer: Any) -> None:
    found = _measure(texts, tokenizer, _goldfish("hash"))
    shares = {
        name: change.mean_leaked_share
        for name, change in found.items()
        if change.mean_leaked_share is not None
    }
    # The 13 tokens after the first of hundreds; those after each of two and of a dozen line breaks.
    assert 0 < shares["leading_space"] < 0.1
    assert shares["leading_space"] < shares["single_line"] < shares["wrapped_60"] <= 0.75
    # Nothing to change in texts of one line.
    one_line = [text.replace("\n", " ") for text in texts]
    unchanged = _measure(one_line, tokenizer, _goldfish("hash"))["single_line"]
    assert (unchanged.num_passages, unchanged.mean_leaked_share) == (0, None)
    assert list(found) == list(REWRITINGS)


def test_same_sample_same_numbers(texts: list[str], tokenizer: Any) -> None:
    def measure(**settings: Any) -> Any:
        return _measure(
            iter(texts), tokenizer, _goldfish("random"), pairs=pairwise(texts), **settings
        )

    few = measure(max_passages=3)
    assert few == measure(max_passages=3)
    assert few != measure(max_passages=3, seed=1)
    assert few["leading_space"].num_passages == 3
    assert few[NEAR_DUPLICATES].num_passages == 0  # different texts


def test_without_a_mask_nothing_leaks(texts: list[str], tokenizer: Any) -> None:
    found = _measure(texts[:2], tokenizer, build_mitigations([], special_ids=[]))
    assert {each.mean_leaked_share for each in found.values()} == {None}
    assert NEAR_DUPLICATES not in found
    empty = _measure([""], tokenizer, _goldfish("hash"), pairs=[("", "a")])
    assert {each.num_passages for each in empty.values()} == {0}


_CODEC = Codec(decode=lambda ids: "".join(map(chr, ids)), encode=lambda text: [*map(ord, text)])


def _tabulate(
    documents: list[AuditDocument], changes: list[MaskChange] | None, codec: Codec | None = _CODEC
) -> tuple[Summary, list[Any]]:
    """Return what the probe finds, and the texts and pairs that it compared."""
    compared: list[Any] = []

    def compare(*texts: Any) -> list[MaskChange]:
        compared.extend(texts)
        return changes or []

    windows = [
        Window(document=document, start=0, prefix_tokens=1, continuation_tokens=2)
        for document in documents
    ]
    inputs = Inputs(
        windows=windows,
        max_edit_share=0.1,
        seed=0,
        tiny_margin=1e-3,
        codec=codec,
        compare_masks=None if changes is None else compare,
    )
    return PROBE.tabulate(Evidence(inputs=inputs, buckets=[], trained={})), compared


PROBE = MaskConsistencyProbe(max_passages=2)


def _documents(*texts: str, **fields: Any) -> list[AuditDocument]:
    return [make_document([*map(ord, text)], name=text, **fields) for text in texts]


def test_the_probe_compares_trained_plain_texts_and_their_near_duplicates() -> None:
    copies = _documents("one", "two", cluster=3)
    more = [*_documents("six", cluster=3), *_documents("ten", cluster=4)]
    others = [
        *_documents("never", role="control", cluster=3),
        *_documents("chat", format="messages", cluster=3),
    ]
    changes = [
        MaskChange(rewriting="wrapped_60", num_passages=2, num_changed=1, mean_leaked_share=0.25),
        MaskChange(rewriting="single_line", num_passages=0, num_changed=0, mean_leaked_share=None),
    ]
    found, compared = _tabulate([*others, *copies, *more], changes)
    assert compared == [["one", "two"], [("one", "two")]]
    assert (found.num_items, PROBE.counted) == (2, "texts")
    values = [(row.metric, row.parameters, row.value, row.num_matched) for row in found.rows]
    assert values == [
        ("mask_changed", "rewriting=wrapped_60", 0.5, 1),
        ("leaked_share", "rewriting=wrapped_60", 0.25, None),
        ("mask_changed", "rewriting=single_line", None, 0),
        ("leaked_share", "rewriting=single_line", None, None),
    ]
    assert {row.bucket for row in found.rows} == {TRAINED}
    assert found.rows[3].missing_because == "no passage differs"
    assert [(m.metric, m.parameters) for m in found.metrics] == [row[:2] for row in values]


def test_the_probe_says_why_nothing_was_compared() -> None:
    chats = _documents("chat", format="messages")
    for documents, changes in ((chats, []), (_documents("one"), None)):
        found, compared = _tabulate(documents, changes)
        assert (found.rows, found.num_items, compared) == ((), 0, [])
        assert found.reason == "no trained document is plain text"
    assert _tabulate(_documents("one"), [], codec=None)[0].num_items == 0


def test_a_slow_tokenizer_is_refused() -> None:
    slow: Any = SimpleNamespace(is_fast=False)
    with pytest.raises(ModelError, match="fast tokenizer"):
        measure_mask_consistency(["a"], slow, _goldfish("hash"))


def test_real_texts_with_other_line_breaks_escape_the_mask(shared_data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "gpt2")
    with (shared_data / "text" / "documents.jsonl").open() as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, 0, 200, 20)]
    found = _measure(texts, tokenizer, _goldfish("hash"))
    wrapped, spaced = found["wrapped_60"], found["leading_space"]
    assert wrapped.num_changed == len(texts)
    # A line of 60 columns has about as many tokens as decide on a label: next to no mask is left.
    assert 0.5 < wrapped.mean_leaked_share < 0.8
    assert spaced.mean_leaked_share < 0.05


_TEXT = 'He said "it\'s \'fine\' ("no")".  And? Yes.\n  So it was.\n\nThe end, my friend.'

EXPECTED = {
    "leading_space": " " + _TEXT,
    "wrapped_60": 'He said "it\'s \'fine\' ("no")".  And? Yes.   So it was.\n\nThe end, my friend.',
    "single_line": 'He said "it\'s \'fine\' ("no")". And? Yes. So it was. The end, my friend.',
}


@pytest.mark.parametrize("name", REWRITINGS)
def test_rewritings_by_hand(name: str) -> None:
    assert REWRITINGS[name](_TEXT) == EXPECTED[name]


def test_wrapped_lines_are_as_long_as_words_allow() -> None:
    text = "words and well-known ones, " * 20 + "x" * 80
    lines = REWRITINGS["wrapped_60"](text).split("\n")
    assert max(map(len, lines[:-1])) <= 60
    assert lines[-1] == "x" * 80
    assert all(len(line) + 1 + len(after.split()[0]) > 60 for line, after in pairwise(lines))


# Whatever has case, is white space or a quotation mark, and what surrounds it.
_texts = st.one_of(st.text(), st.text(st.sampled_from("aA ß İΣ.?!\"'“”‘’(-\n\r\t\u2028\u00a0>—")))


@given(text=_texts)
def test_rewritings_keep_the_words(text: str) -> None:
    words = fold_text(text).characters
    for name, rewrite in REWRITINGS.items():
        assert fold_text(rewrite(text)).characters == words, name


@given(text=_texts)
def test_folded_characters_know_their_places(text: str) -> None:
    folded = fold_text(text)
    assert len(folded.characters) == len(folded.places_F)
    assert (folded.places_F[1:] >= folded.places_F[:-1]).all()
    kept = set(folded.places_F.tolist())
    assert kept == {place for place, character in enumerate(text) if not character.isspace()}


def test_fold_by_hand() -> None:
    folded = fold_text("Er  aß\n“Ä”")
    assert folded.characters == 'erass"ä"'
    assert folded.places_F.tolist() == [0, 1, 4, 5, 5, 7, 8, 9]
