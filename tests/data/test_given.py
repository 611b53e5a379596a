"""Texts of a finished run, read again: unchanged ones, under the key of the run."""

from pathlib import Path
from typing import Any

import pytest
from cli_examples import write_jsonl
from corpus_examples import summarise
from prepare_examples import make_run
from record_examples import make_entry

from memguard.config import RunConfig
from memguard.data.documents import load_documents
from memguard.data.given import read_texts
from memguard.data.identity_key import load_identity_key
from memguard.data.tokenization import hmac_text
from memguard.errors import ConfigError, DataError
from memguard.records import load_manifest, save_manifest
from memguard.records.sealed import save_sealed

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
ROWS: list[dict[str, Any]] = [
    *({"id": f"d{n}", "text": f"text number {n}"} for n in range(6)),
    {"id": "chat", **CHAT},
    {"id": "pair", "prompt": "who?", "completion": "nobody"},
]
ROLES = ("trained", "trained", "trained", "control", "heldout", "trained", "trained", "trained")


def write_run(folder: Path) -> tuple[RunConfig, Path]:
    """Write documents of three forms, and the manifest of a run on them without d5."""
    paths = []
    for form in ("text", "messages", "prompt"):
        rows = [row for row in ROWS if form in row]
        paths.append(str(write_jsonl(folder / f"{form}.jsonl", rows)))
    config = make_run(paths)
    run = folder / "run"
    key = load_identity_key(None).key
    documents = load_documents(paths, setting="data.train", cache_dir=folder).documents
    entries = [
        make_entry(
            document.id, text_hmac=hmac_text(key, document), source=document.source, role=role
        )
        for document, role in zip(documents, ROLES, strict=True)
        if document.id != "d5"
    ]
    save_manifest(entries, run / "manifest.jsonl")
    return config, run


def test_without_the_runs_key_nothing_is_taken_for_changed(tmp_path: Path) -> None:
    config, run = write_run(tmp_path)
    entries = load_manifest(run / "manifest.jsonl")
    expected = load_identity_key(None).fingerprint
    (run / "prepared").mkdir()
    save_sealed(summarise(7, identity_key=expected), run / "prepared" / "summary.json")
    missing, other = tmp_path / "missing.key", tmp_path / "other.key"
    other_key = load_identity_key(other, say=lambda _: None)
    for path, kind, told in (
        (missing, DataError, rf"{expected}\) is missing: '{missing}'"),
        (other, ConfigError, rf"'{other}' has the fingerprint {other_key.fingerprint}.*{expected}"),
    ):
        data = config.data.model_copy(update={"identity_key": str(path)})
        with pytest.raises(kind, match=told):
            read_texts(data, run, entries, cache_dir=tmp_path)
    assert not missing.exists()
    assert len(read_texts(config.data, run, entries, cache_dir=tmp_path)) == len(entries)


def test_what_has_changed_since_is_named(tmp_path: Path) -> None:
    config, run = write_run(tmp_path)
    entries = load_manifest(run / "manifest.jsonl")
    assert set(read_texts(config.data, run, entries, cache_dir=tmp_path)) == {e.id for e in entries}
    path = tmp_path / "text.jsonl"
    path.write_text(path.read_text().replace("text number 2", "another text"))
    told = r"1 of the documents of .* have changed since training \(d2\)"
    with pytest.raises(DataError, match=told):
        read_texts(config.data, run, entries, cache_dir=tmp_path)
    unchanged = [entry for entry in entries if entry.id != "d2"]
    assert len(read_texts(config.data, run, unchanged, cache_dir=tmp_path)) == len(entries) - 1
