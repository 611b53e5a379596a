"""The identity key of a run: made for its first documents, and the same ever after."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_examples import make_texts, write_jsonl
from prepare_examples import make_run, prepare_as

from memguard.data.corpus import Corpus
from memguard.data.documents import load_documents
from memguard.data.identity_key import RunIdentity, load_identity_key
from memguard.data.tokenization import hmac_text, train_bpe
from memguard.errors import ConfigError, DataError
from memguard.records.run_files import has_begun

TEXTS = make_texts(40)
Prepare = Callable[..., tuple[Corpus, str]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe(TEXTS, vocab_size=400)


@pytest.fixture
def prepared(tokenizer: Any, tmp_path: Path) -> Prepare:
    """Prepares 40 texts, the last of which is the first again; every second one has an id."""
    texts = [*TEXTS[:39], TEXTS[0]]
    rows = [{"text": text} | ({"id": f"d{n}"} if n % 2 else {}) for n, text in enumerate(texts)]
    source = write_jsonl(tmp_path / "documents.jsonl", rows)

    def run(key: str | None = "my.key", **data: Any) -> tuple[Corpus, str]:
        named = None if key is None else str(tmp_path / key)
        config = make_run(source, seq_len=128, identity_key=named, **data)
        return prepare_as(config, tmp_path / "run", tokenizer)

    return run


def test_the_manifest_has_keyed_hashes_of_the_texts(prepared: Prepare, tmp_path: Path) -> None:
    corpus, said = prepared()
    identity = load_identity_key(tmp_path / "my.key")
    assert f"identity key: made {identity.path}, keep it" in said
    documents = load_documents(
        [str(tmp_path / "documents.jsonl")], setting="x", cache_dir=tmp_path
    ).documents
    expected = {document.id: hmac_text(identity.key, document) for document in documents}
    assert {entry.id: entry.text_hmac for entry in corpus.manifest} == expected
    assert {e.id for e in corpus.manifest if e.has_own_id} == {f"d{n}" for n in range(1, 40, 2)}
    assert len(set(expected.values())) == 39
    assert corpus.summary.identity_key == identity.fingerprint
    # A key is in no file of a run.
    held = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(identity.key in data or identity.key.hex().encode() in data for data in held)


def test_the_same_key_elsewhere_prepares_nothing_again(prepared: Prepare, tmp_path: Path) -> None:
    prepared()
    (tmp_path / "my.key").rename(tmp_path / "moved.key")
    assert "40 prepared before, unchanged" in prepared("moved.key")[1]


def test_another_key_is_refused_with_both_fingerprints(prepared: Prepare, tmp_path: Path) -> None:
    prepared()
    one = load_identity_key(tmp_path / "my.key").fingerprint
    two = load_identity_key(tmp_path / "other.key", say=lambda _: None).fingerprint
    with pytest.raises(ConfigError) as refused:
        prepared("other.key")
    (line,) = str(refused.value).splitlines()
    assert f"has the fingerprint {two}, and '{tmp_path}/run' the key of fingerprint {one}" in line
    assert "name that key in 'data.identity_key'; if it is lost, train again" in line


def test_without_its_key_nothing_is_prepared_again(prepared: Prepare, tmp_path: Path) -> None:
    prepared()
    fingerprint = load_identity_key(tmp_path / "my.key").fingerprint
    (tmp_path / "my.key").unlink()
    said = prepared()[1]
    assert f"(fingerprint {fingerprint}) is missing: '{tmp_path}/my.key'. The run goes on" in said
    told = rf"of '{tmp_path}/run' \(fingerprint {fingerprint}\) is missing: '{tmp_path}/my.key'"
    with pytest.raises(DataError, match=told):
        prepared(min_document_tokens=3)
    assert not (tmp_path / "my.key").exists()
    assert not has_begun(tmp_path / "run")


def test_it_is_refused_inside_the_run(prepared: Prepare, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"must not be in '{tmp_path}/run'"):
        prepared("run/my.key")
    assert not (tmp_path / "run" / "my.key").exists()


def test_documents_that_are_not_kept_have_a_key_that_is_not_kept(tmp_path: Path) -> None:
    identity = RunIdentity(str(tmp_path / "my.key"), tmp_path / "run")
    said: Any = None  # Nothing is said.
    drawn = [identity.find(said, makes_key=False, needs_key=False) for _ in range(2)]
    assert all(key is not None and key.path == Path("/dev/null") for key in drawn)
    assert drawn[0] != drawn[1]
    assert not (tmp_path / "my.key").exists()
    # The key that training would use, where it is there.
    made = load_identity_key(tmp_path / "my.key", say=lambda _: None)
    assert identity.find(said, makes_key=False, needs_key=False) == made
