"""Of a text of which the first tokens are kept, no more is encoded than decides these."""

import random
from typing import Any

import numpy as np
import pytest
from document_examples import document, pair, tokenize, turns
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from memguard.data import encoding
from memguard.data.documents import Document
from memguard.data.encoding import Shortener, check_lengths
from memguard.data.tokenization import train_bpe
from memguard.errors import DataError

pytestmark = pytest.mark.slow

DRAW = random.Random(0)
WORDS = ["".join(DRAW.choice("abcde") for _ in range(DRAW.randrange(1, 9))) for _ in range(400)]
PROSE = " ".join(DRAW.choices(WORDS, k=20_000))
TEXTS = {
    "prose": PROSE,
    "one word": PROSE.replace(" ", ""),
    "spaces": " " * 50_000,
    "one letter": "a" * 50_000,
    "spaces, then prose": " " * 20_000 + PROSE,
    "lines": "a\n\n \t" * 10_000,
    "other letters": "é\u4e2d\U0001f600\u0301" * 9_000,
    "never seen": "\u2603" * 50_000,
}


def wrap(tokenizer: Tokenizer, **special: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def build_spaceless_bpe() -> Any:
    """As SentencePiece's: no words, spaces collapsed, what it does not know is one token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False, max_token_length=9
    )
    tokenizer.train_from_iterator([PROSE[:2000]], trainer)
    return wrap(tokenizer, unk_token="<unk>", eos_token="</s>")


def build_unigram() -> Any:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([PROSE[:20_000]], trainer)
    return wrap(tokenizer, unk_token="<unk>", eos_token="</s>")


@pytest.fixture(scope="module", params=["byte-level BPE", "BPE without words", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "byte-level BPE":
        return train_bpe([PROSE], vocab_size=400)
    return build_unigram() if request.param == "unigram" else build_spaceless_bpe()


@pytest.mark.quick
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("max_tokens", [8, 61])
def test_the_first_tokens_are_those_of_the_whole(
    tokenizer: Any, kind: str, max_tokens: int
) -> None:
    text = TEXTS[kind]
    whole = tokenizer(text, verbose=False)["input_ids"]
    whole = [*whole, tokenizer.eos_token_id][:max_tokens]
    [tokens] = tokenize([document(text)], tokenizer, max_tokens=max_tokens)
    assert tokens.input_ids.tolist() == whole
    # As ever, a text counts as cut off when it has as many tokens as are kept.
    assert len(tokens.input_ids) == min(max_tokens, len(whole))


def test_a_completion_is_cut_behind_its_prompt(tokenizer: Any) -> None:
    for prompt in ("abc ab", "", "a" * 30):
        [tokens], [whole] = (
            tokenize([pair(prompt, PROSE)], tokenizer, max_tokens=most) for most in (40, None)
        )
        np.testing.assert_array_equal(tokens.input_ids, whole.input_ids[:40])
        np.testing.assert_array_equal(tokens.supervised, whole.supervised[:40])


def test_no_more_is_encoded_than_decides_the_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_bpe([PROSE], vocab_size=400)
    encoded: list[int] = []
    real = Shortener._encode

    def encode(self: Shortener, text: str) -> list[int]:
        encoded.append(len(text))
        return real(self, text)

    monkeypatch.setattr(Shortener, "_encode", encode)
    cut = Shortener(tokenizer, 8).shorten(PROSE * 200)
    assert len(cut) < 2_000
    assert sum(encoded) < 3_000
    short = PROSE[:500]
    assert Shortener(tokenizer, 8).shorten(short) is short


def test_what_would_be_encoded_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MAX_CHARACTERS", 1000)
    long, short = "secret " * 200, "short"

    def check(given: Document, *, max_tokens: int | None, setting: str = "data") -> None:
        check_lengths([given], max_tokens=max_tokens, setting=setting)

    with pytest.raises(DataError) as error:
        check(document(long), max_tokens=None)
    assert str(error.value) == (
        "'data' has 1 of 1 documents of more than 1,000 characters, too long to be encoded: "
        "d. Set 'data.max_document_tokens' or cut them into several documents."
    )
    with pytest.raises(DataError, match=r"encoded: d\. Cut them into several documents\.$"):
        check(document(long), max_tokens=None, setting="--members")
    for refused in (pair(short, long), pair(long, short)):
        with pytest.raises(DataError, match="too long to be encoded"):
            check(refused, max_tokens=None)
    for accepted in (document(long), pair(short, long)):
        check(accepted, max_tokens=8)
    for refused in (pair(long, short), document(turns(long))):
        with pytest.raises(DataError, match=r"encoded: d\. Cut them"):
            check(refused, max_tokens=8)


@pytest.mark.long
def test_a_line_of_a_hundred_megabytes() -> None:
    tokenizer = train_bpe([PROSE], vocab_size=400)
    long = document(PROSE * 1000)
    assert len(tokenize([long], tokenizer, max_tokens=64)[0].input_ids) == 64
    with pytest.raises(DataError, match=r"Set 'data\.max_document_tokens'"):
        tokenize([long], tokenizer)
