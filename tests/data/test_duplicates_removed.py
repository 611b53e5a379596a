"""Copies that are removed: against a naive comparison of every pair, and through `prepare`."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_examples import draw_texts, make_run, prepare_as, write_named

from memguard.config.mitigations import DeduplicateConfig
from memguard.data.corpus import Corpus
from memguard.data.duplicates import find_copies
from memguard.data.tokenization import train_bpe
from memguard.errors import ConfigError

pytest.importorskip("rensa", reason="of the extra 'dedup'")

WORDS = ["ab", "Ba", "aB,", "c1", "é", "d", "-"]


def config(similarity: Any = 0.8, **settings: Any) -> DeduplicateConfig:
    return DeduplicateConfig(name="deduplicate", similarity=similarity, **settings)


def list_runs(text: str, size: int) -> set[Any]:
    words = "".join(c if c.isalnum() else " " for c in text.casefold()).split()
    if len(words) < size:
        return {tuple(words)} if words else {text}
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def compare(one: str, other: str, size: int) -> float:
    a, b = list_runs(one, size), list_runs(other, size)
    return len(a & b) / len(a | b)


texts = st.lists(st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join), max_size=12)


@given(texts, st.integers(1, 4), st.sampled_from([0.2, 0.5, 0.8, 1.0]))
def test_what_is_removed_has_an_equal_that_stays(
    documents: list[str], size: int, similarity: float
) -> None:
    is_copy = find_copies(documents, config(similarity, num_words=size))
    assert is_copy.shape == (len(documents),)
    for number in np.flatnonzero(is_copy):
        kept = [documents[other] for other in np.flatnonzero(~is_copy[:number])]
        assert max(compare(documents[number], each, size) for each in kept) >= similarity
    # Equal sets of runs are never passed over.
    kept = [frozenset(list_runs(documents[n], size)) for n in np.flatnonzero(~is_copy)]
    assert len(kept) == len(set(kept))


@pytest.mark.parametrize("similarity", [0.3, 0.6, 0.8, 0.9])
def test_few_copies_are_passed_over(similarity: float) -> None:
    draw = np.random.default_rng(0)
    vocabulary = [f"w{number}" for number in range(5000)]
    documents = [list(draw.choice(vocabulary, 100)) for _ in range(300)]
    for number in range(300):
        copy = list(documents[number])
        for place in draw.choice(100, number % 12, replace=False):
            copy[place] = f"x{place}"
        documents.append(copy)
    texts = [" ".join(words) for words in documents]
    is_copy = find_copies(texts, config(similarity))
    assert not is_copy[:300].any()
    expected = [
        compare(one, other, 5) >= similarity
        for one, other in zip(texts[:300], texts[300:], strict=True)
    ]
    assert 0 < sum(expected) < 300 or similarity == 0.3
    assert not (is_copy[300:] & ~np.array(expected)).any()
    # One in a hundred of those just as similar as asked, fewer of the others.
    assert is_copy[300:].sum() >= 0.99 * sum(expected)


def test_exact_is_the_same_text() -> None:
    # In one form: white space, case and Unicode spelling do not count, punctuation does.
    documents = ["é b", "e\u0301  b", "É b", "é, b", "é b", ""]
    assert find_copies(documents, config("exact")).tolist() == [
        False, True, True, False, True, False,
    ]  # fmt: skip


def test_near_copies_need_rensa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(ConfigError, match=r"pip install 'rensa>=0.5'"):
        find_copies(["a"], config())
    assert find_copies(["a"], config("exact")).tolist() == [False]


def prepare_run(
    folder: Path,
    name: str,
    texts: list[str],
    mitigations: list[dict[str, Any]],
    *,
    num_canaries: int = 0,
) -> tuple[Corpus, str]:
    source = write_named(folder / "documents.jsonl", texts)
    count = {"count": num_canaries}
    config = make_run(source, name=name, seq_len=128, canaries=count, mitigations=mitigations)
    tokenizer = train_bpe(texts[:40], vocab_size=400)
    return prepare_as(config, folder / name, tokenizer, fewest_tokens=0)


@pytest.fixture
def copied() -> list[str]:
    """100 documents; every fifth once more with one word changed, at the end."""
    first = draw_texts(100, words=60)
    return [*first, *(f"{text} once more" for text in first[::5])]


def test_only_trained_copies_go_and_nothing_else_moves(tmp_path: Path, copied: list[str]) -> None:
    plain, _ = prepare_run(tmp_path, "plain", copied, [])
    corpus, said = prepare_run(tmp_path, "apart", copied, [{"name": "deduplicate"}])
    removed = {entry.id for entry in corpus.manifest if entry.role == "removed"}
    # Control and held-out documents are those of the run without it.
    for entry, without in zip(corpus.manifest, plain.manifest, strict=True):
        if entry.id in removed:
            assert without.role == "trained"
            assert (entry.bucket, entry.planned_repetitions) == ("removed", 0)
        else:
            assert entry.model_copy(update={"text_hmac": ""}) == without.model_copy(
                update={"text_hmac": ""}
            )
    trained = {entry.id for entry in plain.manifest if entry.role == "trained"}
    # Clusters are held back whole: either both are trained, or neither.
    assert removed == {f"d{number}" for number in range(100, 120)} & trained
    assert corpus.summary.num_removed == len(removed) > 10
    assert plain.summary.num_removed is None
    assert corpus.summary.documents_sha256 == plain.summary.documents_sha256
    assert f"documents: {len(removed)} of {len(trained)} removed" in said


def test_the_same_secrets_are_drawn_with_and_without_it(tmp_path: Path, copied: list[str]) -> None:
    # Of one canary in 20 trained documents, the copies that go are more than one.
    many = [*copied, *(f"{text} yet again" for text in copied[:100])]
    plain, with_it = (
        prepare_run(tmp_path, name, many, mitigations, num_canaries=32)[0]
        for name, mitigations in (("plain", []), ("apart", [{"name": "deduplicate"}]))
    )
    assert with_it.summary.num_removed > 60
    assert with_it.summary.num_canaries == plain.summary.num_canaries >= 8
    assert with_it.summary.documents_sha256 == plain.summary.documents_sha256


def test_other_settings_prepare_again(tmp_path: Path, copied: list[str]) -> None:
    first, _ = prepare_run(tmp_path, "run", copied, [{"name": "deduplicate"}])
    exact = [{"name": "deduplicate", "similarity": "exact"}]
    second, said = prepare_run(tmp_path, "run", copied, exact)
    assert first.summary.num_removed
    assert second.summary.num_removed == 0
    assert "has no effect: no two of" in said
    assert "are identical. Remove it" in said


def test_a_study_refuses_it() -> None:
    told = r"deduplicate cannot be combined with 'data.study', which already takes"
    with pytest.raises(ValueError, match=told):
        make_run(["t.jsonl"], study={}, mitigations=[{"name": "deduplicate"}])
    with pytest.raises(ValueError, match="'num_words' does nothing with 'similarity: exact'"):
        config("exact", num_words=7)
