"""Canaries: fair coins, secrets of full entropy, the same for the same run and no other."""

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import document_examples
import numpy as np
import pytest
from scipy.stats import binom, binomtest, chi2_contingency, chisquare
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from memguard.config import DataConfig
from memguard.data.canaries import (
    Canary,
    choose_repetitions,
    count_canaries,
    draw_canary,
    draw_of_one_length,
    explain_absence,
)
from memguard.data.documents import document_text
from memguard.data.duplicates import WordGrams
from memguard.data.tokenization import TokenizedDocument, train_bpe

pytestmark = pytest.mark.slow

# All draws here have fixed seeds: a p-value below this would be found once, and then always.
RARE = 1e-3


def draw(
    count: int = 32, *, seed: int = 0, texts: str = "aa", num_digits: int = 12
) -> list[Canary]:
    return [
        draw_canary(index, num_digits=num_digits, seed=seed, texts_sha256=texts)
        for index in range(count)
    ]


def tokenize(canaries: list[Canary], tokenizer: Any, **settings: Any) -> list[TokenizedDocument]:
    return document_examples.tokenize([c.document for c in canaries], tokenizer, **settings)


def draw_alike(
    tokenizer: Any, count: int = 32, *, append_eos: bool = True, **settings: Any
) -> tuple[list[Canary], list[TokenizedDocument]]:
    values = {"num_digits": 12, "seed": 0, "texts_sha256": "aa", **settings}
    return draw_of_one_length(
        count, lambda some: tokenize(list(some), tokenizer, append_eos=append_eos), **values
    )


def key_of(canary: Canary) -> str:
    assert isinstance(canary.document.prompt, str)
    return canary.document.prompt.split()[4]


def digits_of(canary: Canary) -> str:
    assert isinstance(canary.document.completion, str)
    return canary.document.completion.replace(" ", "")


@pytest.fixture(scope="module")
def many() -> list[list[Canary]]:
    """The canaries of 250 runs that differ in their seed or in their texts."""
    return [draw(seed=number // 2, texts="ab"[number % 2]) for number in range(250)]


# -- coins ----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_coins_are_fair(many: list[list[Canary]]) -> None:
    coins = np.array([[canary.is_in for canary in run] for run in many])
    assert binomtest(int(coins.sum()), coins.size).pvalue > RARE
    # Not only on the whole: each number of the list, and each run.
    for axis, size in ((0, len(many)), (1, 32)):
        sums = coins.sum(axis=axis)
        outside = 2 * binom.sf(np.abs(sums - size / 2) + size / 2 - 1, size, 0.5)
        assert outside.min() > RARE / len(sums), "no number or run stands out (Bonferroni)"


def test_runs_have_as_many_winners_as_independent_coins_give(many: list[list[Canary]]) -> None:
    winners = [sum(canary.is_in for canary in run) for run in many]
    edges = [0, 12, 14, 15, 16, 17, 18, 20, 33]
    observed, _ = np.histogram(winners, bins=edges)
    # Of Binomial(32, 1/2); a shuffle of 16 and 16 would put all into one bin.
    expected = np.diff(binom.cdf(np.array(edges) - 1, 32, 0.5)) * len(many)
    assert chisquare(observed, expected).pvalue > RARE


def tables(many: list[list[Canary]]) -> dict[str, list[tuple[int, int]]]:
    """Pairs of binary facts that must not depend on each other."""
    runs = [[(int(c.is_in), key_of(c), digits_of(c)) for c in run] for run in many]
    flat = [canary for run in runs for canary in run]
    return {
        "neighbours": [(a[0], b[0]) for run in runs for a, b in itertools.pairwise(run)],
        # Runs 2n and 2n+1 share the seed, 2n and 2n+2 the texts.
        "same seed": [
            (a[0], b[0])
            for one, other in zip(runs[::2], runs[1::2], strict=True)
            for a, b in zip(one, other, strict=True)
        ],
        "same texts": [
            (a[0], b[0])
            for one, other in zip(runs[:-2], runs[2:], strict=True)
            for a, b in zip(one, other, strict=True)
        ],
        "coin and secret": [(coin, int(digits[0]) % 2) for coin, _, digits in flat],
        "coin and last digit": [(coin, int(digits[-1]) // 5) for coin, _, digits in flat],
        "coin and key": [(coin, ord(key[0]) % 2) for coin, key, _ in flat],
        "key and secret": [(ord(key[0]) % 2, int(digits[0]) % 2) for _, key, digits in flat],
    }


def test_coins_depend_on_nothing(many: list[list[Canary]]) -> None:
    for name, pairs in tables(many).items():
        count = Counter(pairs)
        table = np.array([[count[a, b] for b in (0, 1)] for a in (0, 1)])
        assert chi2_contingency(table).pvalue > RARE, name


# -- secrets and keys -----------------------------------------------------------------------------


def test_secrets_have_full_entropy(many: list[list[Canary]]) -> None:
    digits = np.array([[int(d) for d in digits_of(c)] for run in many for c in run])
    assert digits.shape == (8000, 12)
    for place in range(12):
        assert chisquare(np.bincount(digits[:, place], minlength=10)).pvalue > RARE / 12
    # Neighbouring digits say nothing of each other.
    for place in range(11):
        pairs = np.bincount(digits[:, place] * 10 + digits[:, place + 1], minlength=100)
        assert chisquare(pairs).pvalue > RARE / 11
    # 8,000 of 10^12: two alike happen once in 30,000 times.
    assert len({tuple(row) for row in digits.tolist()}) == len(digits)


def test_keys_are_unique(many: list[list[Canary]]) -> None:
    keys = [key_of(canary) for run in many for canary in run]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch("[a-z]{10}", key) for key in keys)
    letters = Counter("".join(keys))
    assert chisquare([letters[letter] for letter in "abcdefghijklmnopqrstuvwxyz"]).pvalue > RARE


@pytest.mark.parametrize("num_digits", [6, 7, 12, 13, 60])
def test_a_secret_has_its_digits_in_pairs(num_digits: int) -> None:
    for canary in draw(num_digits=num_digits):
        text = canary.document.completion
        assert isinstance(text, str)
        assert re.fullmatch(r"( \d\d)*( \d)?", text)
        assert len(digits_of(canary)) == num_digits


def test_ids_are_numbered() -> None:
    assert [canary.document.id for canary in draw(3)] == [f"canary-000{n}" for n in range(3)]


# -- the same and others --------------------------------------------------------------------------


def test_the_same_run_has_the_same_canaries() -> None:
    assert draw() == draw()
    assert draw(8) == draw(32)[:8], "fewer are the first of more"


@pytest.mark.parametrize("other", [{"seed": 1}, {"texts": "ab"}])
def test_another_seed_or_other_texts_have_others(other: dict[str, Any]) -> None:
    one, two = draw(200), draw(200, **other)
    assert not {key_of(c) for c in one} & {key_of(c) for c in two}
    assert not {digits_of(c) for c in one} & {digits_of(c) for c in two}


# -- as documents ---------------------------------------------------------------------------------


def test_canaries_are_no_near_duplicates() -> None:
    texts = [document_text(canary.document) for canary in draw(500)]
    assert max(len(re.findall(r"[^\W_]+", text)) for text in texts) < 13
    # Nor of documents that quote the template and a good part of a secret.
    quotes = [f"{text.rpartition(' ')[0]} and other words {n}" for n, text in enumerate(texts[:20])]
    clusters = WordGrams([*quotes, *texts]).cluster()
    assert len(set(clusters.tolist())) == len(texts) + len(quotes)


@pytest.mark.parametrize("append_eos", [True, False])
def test_only_the_secret_is_supervised(append_eos: bool) -> None:
    tokenizer = train_bpe(["some words and a code 12 34 56"] * 3, vocab_size=300)
    canaries = draw()
    for canary, tokens in zip(
        canaries, tokenize(canaries, tokenizer, append_eos=append_eos), strict=True
    ):
        learnt = tokens.input_ids[tokens.supervised]
        assert (learnt[-1] == tokenizer.eos_token_id) == append_eos
        assert tokenizer.decode(learnt[: len(learnt) - append_eos]) == canary.document.completion
        assert tokens.num_content_tokens == len(tokens.input_ids) - append_eos
        assert tokenizer.decode(tokens.input_ids[~tokens.supervised]) == canary.document.prompt


def cut_alike(folder: Path, num_tokens: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    canaries = draw(500)
    lengths = {int(t.supervised.sum()) for t in tokenize(canaries, tokenizer, append_eos=False)}
    assert lengths == {num_tokens}
    # None is drawn again: runs keep the canaries they have always had.
    assert draw_alike(tokenizer, 500)[0] == canaries


def test_gpt2_cuts_all_secrets_alike(shared_data: Path) -> None:
    cut_alike(shared_data / "tokenizers" / "gpt2", 6)


def test_llamas_sentencepiece_cuts_all_secrets_alike(shared_data: Path) -> None:
    # A space, then digit by digit: three tokens a pair.
    cut_alike(shared_data / "checkpoints" / "stories260K", 18)


@pytest.fixture(scope="module")
def merging() -> PreTrainedTokenizerFast:
    """A tokenizer that has merged some pairs of digits and not others."""
    rng = np.random.default_rng(0)
    texts = [" ".join(str(n) for n in rng.integers(0, 60, 50)) for _ in range(50)]
    return train_bpe(texts, vocab_size=360)


def lengths_of(tokenized: list[TokenizedDocument], *, append_eos: bool) -> Counter[int]:
    return Counter(int(tokens.supervised.sum()) - append_eos for tokens in tokenized)


@pytest.mark.parametrize("num_digits", [7, 12])
@pytest.mark.parametrize("append_eos", [True, False])
def test_secrets_have_one_length_under_any_tokenizer(
    merging: PreTrainedTokenizerFast, num_digits: int, append_eos: bool
) -> None:
    before = draw(64, num_digits=num_digits)
    first = tokenize(before, merging, append_eos=append_eos)
    lengths = lengths_of(first, append_eos=append_eos)
    assert len(lengths) > 1, "else this tests nothing"
    canaries, tokenized = draw_alike(merging, 64, num_digits=num_digits, append_eos=append_eos)
    # The tokens are those of the canaries that are returned.
    again = tokenize(canaries, merging, append_eos=append_eos)
    for one, other in zip(tokenized, again, strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)
    (length,) = lengths_of(tokenized, append_eos=append_eos)
    assert lengths[length] == max(lengths.values())
    settings = {"num_trained": 5000, "seq_len": 512}
    assert explain_absence(canaries, tokenized, **settings) is None
    why = explain_absence(before, first, **settings)
    assert why is not None
    assert f"secrets have {min(lengths)} to {max(lengths)} tokens" in why
    for old, new, tokens in zip(before, canaries, first, strict=True):
        for one, other in ((key_of(new), key_of(old)), (new.document.id, old.document.id)):
            assert one == other
        assert new.is_in == old.is_in
        kept = int(tokens.supervised.sum()) - append_eos == length
        assert (new == old) == kept, "only what has another length is drawn again"


def test_fewer_of_one_length_are_the_first_of_more(merging: PreTrainedTokenizerFast) -> None:
    many = draw_alike(merging, 100)[0]
    for count in (0, 8, 32, 64):
        assert draw_alike(merging, count)[0] == many[:count]
    assert draw_alike(merging, 32)[0] != draw_alike(merging, 32, seed=1)[0]


def test_secrets_of_one_length_are_uniform_whatever_the_coin(
    merging: PreTrainedTokenizerFast,
) -> None:
    """What was drawn again is drawn like what was kept, and like references."""
    # Six digits have few enough secrets to list those of each length.
    sizes = np.array([len(merging(f" {n:02}")["input_ids"]) for n in range(100)])
    pairs = np.arange(10**6)
    size_of = sizes[pairs // 10000] + sizes[pairs // 100 % 100] + sizes[pairs % 100]
    found: dict[int, list[tuple[int, bool]]] = {}
    for seed in range(60):
        canaries, tokenized = draw_alike(merging, 64, num_digits=6, seed=seed)
        (length,) = lengths_of(tokenized, append_eos=True)
        for canary in canaries:
            number = int(digits_of(canary))
            assert size_of[number] == length
            found.setdefault(length, []).append((number, canary.is_in))
    length = max(found, key=lambda size: len(found[size]))
    numbers = np.array([number for number, _ in found[length]])
    coins = np.array([coin for _, coin in found[length]])
    allowed = np.flatnonzero(size_of == length)
    # Ten equally large stretches of all secrets of this length.
    place = np.searchsorted(allowed, numbers) * 10 // len(allowed)
    assert chisquare(np.bincount(place, minlength=10)).pvalue > RARE
    table = np.array([np.bincount(place[coins == coin], minlength=10) for coin in (True, False)])
    assert chi2_contingency(table).pvalue > RARE


# -- how many and how often -----------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("wanted", "num_trained", "count"),
    [
        (32, 0, 0),
        (32, 159, 0),
        (32, 160, 8),
        (32, 179, 8),
        (32, 640, 32),
        (32, 10**7, 32),
        (8, 10**7, 8),
        (500, 9_999, 499),
    ],
)
def test_how_many(wanted: int, num_trained: int, count: int) -> None:
    assert count_canaries(wanted, num_trained=num_trained) == count


@pytest.mark.parametrize(
    ("data", "repetitions"),
    [
        ({}, 3),
        ({"study": {"num_repetitions": [4, 0, 64, 16]}}, 64),
        ({"canaries": {"num_repetitions": 7}}, 7),
        ({"canaries": {"num_repetitions": 7}, "study": {}}, 7),
    ],
)
def test_how_often(data: dict[str, Any], repetitions: int) -> None:
    settings = DataConfig.model_validate({"train": "a", **data})
    assert choose_repetitions(settings, epochs=3) == repetitions


def test_canaries_must_fit_into_a_row() -> None:
    tokenizer = train_bpe(["some words"], vocab_size=300)
    canaries = draw(8)
    tokenized = tokenize(canaries, tokenizer)
    longest = max(len(tokens.input_ids) for tokens in tokenized)
    assert explain_absence(canaries, tokenized, num_trained=500, seq_len=longest) is None
    why = explain_absence(canaries, tokenized, num_trained=500, seq_len=longest - 1)
    assert why == f"which have up to {longest} tokens: 'data.seq_len' is {longest - 1}"


def test_a_tokenizer_without_digits_is_told() -> None:
    words = {"[unk]": 0, "the": 1, "is": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="[unk]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[unk]")
    canaries = draw(8)
    why = explain_absence(canaries, tokenize(canaries, tokenizer), num_trained=500, seq_len=512)
    assert why == "whose digits the tokenizer does not distinguish"


def test_too_few_documents_are_told() -> None:
    why = explain_absence([], [], num_trained=159, seq_len=512)
    assert why == "which need at least 160 trained documents: there are 159"
