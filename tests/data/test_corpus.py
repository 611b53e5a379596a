"""Prepared documents on disk: what is written is what is read."""

from pathlib import Path

import numpy as np
import pytest
from corpus_examples import enter, make_corpus, summarise, tokenized
from hypothesis import given
from hypothesis import strategies as st

from memguard.data.corpus import load_corpus, save_corpus
from memguard.data.tokenization import TokenizedDocument
from memguard.errors import RecordError
from memguard.records.folders import RunFiles


def save(folder: Path, documents: list[TokenizedDocument]) -> None:
    save_corpus(folder, summarise(len(documents)), [enter(d) for d in documents], documents)


@pytest.fixture
def documents() -> list[TokenizedDocument]:
    return [
        tokenized(0, [5, 6, 7], [0, 1, 1], content=2),
        tokenized(1, [1, 2]),
        tokenized(2, [2**31 - 1, 0, 200_000, 9], [0, 0, 1, 0], content=3),
    ]


@given(
    contents=st.lists(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=20),
        min_size=1,
        max_size=10,
    )
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, contents: list[list[tuple[int, bool]]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    documents = [
        tokenized(index, *zip(*pairs, strict=True), content=len(pairs) // 2)
        for index, pairs in enumerate(contents)
    ]
    save(folder, documents)
    corpus = load_corpus(folder)
    assert corpus.num_documents == len(documents)
    for field, value in summarise(len(documents)):
        if field not in ("arrays", "manifest_sha256"):
            assert getattr(corpus.summary, field) == value
    assert corpus.manifest == [enter(d) for d in documents]
    for index, document in enumerate(documents):
        read = corpus.document(index)
        np.testing.assert_array_equal(read.input_ids, document.input_ids)
        np.testing.assert_array_equal(read.supervised, document.supervised)
        assert read.num_content_tokens == document.num_content_tokens
        assert read.format == document.format
        assert read.input_ids.dtype == np.int32
        assert read.supervised.dtype == bool


def test_saving_again_replaces_what_was_there(
    tmp_path: Path, documents: list[TokenizedDocument]
) -> None:
    save(tmp_path, documents)
    save(tmp_path, documents[:1])
    assert load_corpus(tmp_path).num_documents == 1
    assert RunFiles(tmp_path).find_damage("prepared") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.jsonl", "prepared"]


def test_documents_without_canaries_are_views(documents: list[TokenizedDocument]) -> None:
    fields = [{}, {}, {"role": "canary"}]
    corpus = make_corpus(documents, fields)
    given = corpus.without_canaries()
    assert given.manifest == corpus.manifest[:2]
    assert given.input_ids.tolist() == [5, 6, 7, 1, 2]
    assert given.supervised.tolist() == [False, True, True, True, True]
    assert given.offsets.tolist() == [0, 3, 5]
    assert np.shares_memory(given.input_ids, corpus.input_ids)
    assert len(given.format) == len(given.content_tokens) == given.num_documents == 2
    with pytest.raises(AssertionError, match="canaries come last"):
        make_corpus(documents, fields[::-1]).without_canaries()


def test_an_interrupted_save_leaves_nothing_that_looks_prepared(
    tmp_path: Path, documents: list[TokenizedDocument], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memguard.data.corpus.save_manifest", fail)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, documents)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["input_ids", "supervised", "offsets", "content_tokens", "format"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_a_damaged_folder_is_named(
    tmp_path: Path, documents: list[TokenizedDocument], name: str, damage: str
) -> None:
    save(tmp_path, documents)
    file = tmp_path / "prepared" / f"{name}.npy"
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(b"" if damage == "empty" else content[:-1])
    with pytest.raises(RecordError, match=r"prepared.* is incomplete"):
        load_corpus(tmp_path)


def test_a_run_that_was_never_prepared_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"summary\.json"):
        load_corpus(tmp_path)


def test_tokens_and_manifest_of_different_length_are_refused(
    tmp_path: Path, documents: list[TokenizedDocument]
) -> None:
    save(tmp_path, documents)
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text("".join(manifest.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(RecordError, match="differ in length"):
        load_corpus(tmp_path)
