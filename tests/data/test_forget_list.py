"""Texts of a finished run, read again: what is to be forgotten, retained, and was never seen."""

import json
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from corpus_examples import summarise
from record_examples import make_entry

from memguard.config import RunConfig
from memguard.data.documents import load_documents
from memguard.data.forget_list import ForgetList, read_texts, write_forget_list
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
    """Write documents of three forms, and the manifest of a run that trained them.

    d0 and d1 are near-duplicates; d5 was removed as a copy, or never drawn.
    """
    paths = []
    for form in ("text", "messages", "prompt", "input_ids"):
        rows = [row for row in ROWS if form in row]
        if not rows:
            continue
        path = folder / f"{form}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        paths.append(str(path))
    config = RunConfig.model_validate(
        {"name": "run", "model": {"path": "m"}, "data": {"train": paths}}
    )
    run = folder / "run"
    key = load_identity_key(None).key
    documents = load_documents(paths, setting="data.train", cache_dir=folder).documents
    entries = [
        make_entry(
            document.id,
            text_hmac=hmac_text(key, document),
            source=document.source,
            role=role,
            num_repetitions=1,
            num_tokens=10 + number,
            cluster=0 if document.id in ("d0", "d1") else number,
        )
        for number, (document, role) in enumerate(zip(documents, ROLES, strict=True))
        if document.id != "d5"
    ]
    save_manifest(entries, run / "manifest.jsonl")
    return config, run


def judge(*recited: str, unknown: str = "") -> dict[str, bool]:
    """Say of each trained document whether it comes back; nothing of one that was not asked."""
    trained = {row["id"] for row, role in zip(ROWS, ROLES, strict=True) if role == "trained"}
    return {name: name in recited for name in sorted(trained - {unknown})}


def make_list(folder: Path, recited: dict[str, bool]) -> ForgetList:
    config, run = write_run(folder)
    return write_forget_list(config.data, run, recited, seed=config.seed, cache_dir=folder)


def read_ids(paths: tuple[str, ...], folder: Path) -> set[str]:
    loaded = load_documents(paths, setting="data.train", cache_dir=folder)
    return {document.id for document in loaded.documents}


def test_near_duplicates_are_forgotten_too_and_never_retained(tmp_path: Path) -> None:
    lists = make_list(tmp_path, judge("d0", "chat"))
    assert read_ids(lists.forget, tmp_path) == {"d0", "d1", "chat"}
    assert read_ids(lists.train, tmp_path) == {"d2", "pair"}
    assert read_ids(lists.control, tmp_path) == {"d3"}
    assert read_ids(lists.heldout, tmp_path) == {"d4"}
    assert (lists.forgotten, lists.num_retained) == ({"d0", "d1", "chat"}, 2)


def test_what_was_not_asked_about_or_never_trained_is_not_retained(tmp_path: Path) -> None:
    # It may be recited as well as the others.
    lists = make_list(tmp_path, judge("d0", unknown="d2"))
    assert read_ids(lists.train, tmp_path) == {"chat", "pair"}
    config, run = write_run(tmp_path)
    path = run / "manifest.jsonl"
    entries = [
        entry.model_copy(update={"num_repetitions": 0}) if entry.id == "pair" else entry
        for entry in load_manifest(path)
    ]
    save_manifest(entries, path)
    lists = write_forget_list(config.data, run, judge("d0"), seed=config.seed, cache_dir=tmp_path)
    assert read_ids(lists.train, tmp_path) == {"chat", "d2"}


def test_without_the_runs_key_nothing_is_taken_for_changed(tmp_path: Path) -> None:
    config, run = write_run(tmp_path)
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
            write_forget_list(data, run, judge("d0"), seed=config.seed, cache_dir=tmp_path)
    assert not missing.exists()
    write_forget_list(config.data, run, judge("d0"), seed=config.seed, cache_dir=tmp_path)


def test_documents_come_back_as_they_were(tmp_path: Path) -> None:
    config, run = write_run(tmp_path)
    lists = write_forget_list(
        config.data, run, judge("d0", "chat", "pair"), seed=config.seed, cache_dir=tmp_path
    )
    key = load_identity_key(None).key
    hmacs = {entry.id: entry.text_hmac for entry in load_manifest(run / "manifest.jsonl")}
    for document in load_documents(lists.forget, setting="x", cache_dir=tmp_path).documents:
        assert hmac_text(key, document) == hmacs[document.id]
    assert {Path(path).stat().st_mode & 0o777 for path in lists.forget} == {0o600}
    assert (run / "audit" / "private").stat().st_mode & 0o777 == 0o700


def test_what_has_changed_since_is_named(tmp_path: Path) -> None:
    config, run = write_run(tmp_path)
    entries = load_manifest(run / "manifest.jsonl")
    assert set(read_texts(config.data, run, entries, cache_dir=tmp_path)) == {e.id for e in entries}
    path = tmp_path / "text.jsonl"
    path.write_text(path.read_text().replace("text number 2", "another text"))
    with pytest.raises(
        DataError, match=r"1 of the documents of .* have changed since training \(d2\)"
    ):
        read_texts(config.data, run, entries, cache_dir=tmp_path)
    unchanged = [entry for entry in entries if entry.id != "d2"]
    assert len(read_texts(config.data, run, unchanged, cache_dir=tmp_path)) == len(entries) - 1


def test_something_must_be_left_to_retain(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document is left to be retained"):
        make_list(tmp_path, judge("d0", "d2", "chat", "pair"))


def test_no_more_is_retained_than_is_needed(tmp_path: Path) -> None:
    rows = [{"id": f"d{n}", "text": f"text number {n}"} for n in range(200)]
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    values = {"name": "run", "model": {"path": "m"}, "data": {"train": str(path)}}
    config, run = RunConfig.model_validate(values), tmp_path / "run"
    key = load_identity_key(None).key
    documents = load_documents([str(path)], setting="x", cache_dir=tmp_path).documents
    entries = [
        make_entry(
            document.id, text_hmac=hmac_text(key, document), num_repetitions=1, cluster=number
        )
        for number, document in enumerate(documents)
    ]
    save_manifest(entries, run / "manifest.jsonl")
    few, many = (
        write_forget_list(
            config.data,
            run,
            {f"d{n}": n < count for n in range(200)},
            seed=config.seed,
            cache_dir=tmp_path,
        )
        for count in (2, 20)
    )
    assert (few.num_retained, many.num_retained) == (64, 80)
    requested = {f"d{n}": n < 2 for n in range(200)}
    again = write_forget_list(config.data, run, requested, seed=config.seed, cache_dir=tmp_path)
    assert read_ids(again.train, tmp_path) == read_ids(few.train, tmp_path)


def test_token_ids_are_written_as_token_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [{"id": f"i{n}", "input_ids": [n, n + 1]} for n in range(4)]
    monkeypatch.setattr(sys.modules[__name__], "ROWS", [*ROWS[:2], *ids])
    monkeypatch.setattr(sys.modules[__name__], "ROLES", ("trained",) * 6)
    lists = make_list(tmp_path, judge("d0", "i3"))
    loaded = load_documents(lists.forget, setting="data.forget", cache_dir=tmp_path)
    assert {(d.id, d.text, d.input_ids) for d in loaded.documents if d.text} == {
        ("d0", "text number 0", None),
        ("d1", "text number 1", None),
    }
    assert [(d.id, d.input_ids) for d in loaded.documents if not d.text] == [
        ("i3", array("i", [3, 4]))
    ]
