"""Documents of a finished run as files: what it shall forget, retain, and never saw."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.config import DataConfig
from memguard.data.corpus import load_private_key
from memguard.data.documents import Document, load_settings, name_ids
from memguard.data.sources import IDS_COLUMN
from memguard.data.tokenization import hmac_text
from memguard.errors import DataError
from memguard.records import ManifestEntry, load_manifest, write_atomically
from memguard.seeds import derive_generator

_RETAINED = 4
"""Documents retained for each that is to be forgotten."""
_FEWEST_RETAINED = 64
_FED = ("trained", "background", "forget")
"""Roles of documents that a model has been shown, now or in a run before."""


def read_texts(
    data: DataConfig, run_folder: Path, wanted: Sequence[ManifestEntry], *, cache_dir: Path
) -> dict[str, Document]:
    """Return documents of a run by id, and see that they are what it was given.

    Args:
        data: settings of the finished run.
        run_folder: with the key under which the manifest's hashes were made.
        wanted: entries of its manifest.
        cache_dir: for derived sources.

    Raises:
        DataError: a source cannot be read, documents have changed since, or the key is gone.
    """
    hmacs = {entry.id: entry.text_hmac for entry in wanted}
    if not (run_folder / "audit" / "private" / "hmac.key").exists():
        raise DataError(
            f"'{run_folder}/audit/private/hmac.key' is missing: nothing else tells whether "
            "documents are those of the run. Bring it back."
        )
    key = load_private_key(run_folder)
    found: dict[str, Document] = {}
    for _, loaded in load_settings(data, cache_dir):
        for document in loaded.documents:
            if hmacs.get(document.id) == hmac_text(key, document):
                found[document.id] = document
    changed = [name for name in hmacs if name not in found]
    if changed:
        raise DataError(
            f"{len(changed)} of the documents of '{run_folder}' are gone or have other texts now "
            f"({name_ids(changed)}). Bring them back as they were trained."
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetList:
    """Files for a run that forgets; each list is a setting of `data`."""

    forget: tuple[str, ...]
    train: tuple[str, ...]
    """A sample of what was trained and shall be retained."""
    control: tuple[str, ...]
    heldout: tuple[str, ...]
    forgotten: frozenset[str]
    """Ids of the first."""
    num_retained: int


def write_forget_list(
    data: DataConfig,
    run_folder: Path,
    recited: Mapping[str, bool],
    *,
    seed: int,
    cache_dir: Path,
) -> ForgetList:
    """Write the texts a run that forgets needs into the run's private folder.

    Near-duplicates of what is to be forgotten are forgotten with it: retained, they would teach it
    again. Control and held-out documents are the run's own; nothing has trained them.

    Args:
        data: settings of the finished run.
        run_folder: with its manifest; the files go to ``audit/private/forgetting/``.
        recited: whether each document that was audited comes back. One that was not, and was
            trained as often as those, is neither forgotten nor retained.
        seed: the run's; decides which documents are retained.
        cache_dir: for derived sources.

    Raises:
        DataError: documents have changed since, or nothing is left to be retained.
    """
    manifest = load_manifest(run_folder / "manifest.jsonl")
    clusters = {entry.cluster for entry in manifest if recited.get(entry.id)}
    # What a run that was ended early has not reached is not known, and must not be taught now.
    fed = [e for e in manifest if e.role in _FED and (e.num_repetitions or e.role == "forget")]
    forgotten = [entry for entry in fed if entry.cluster in clusters]
    retained = [
        entry
        for entry in fed
        if entry.cluster not in clusters
        and (entry.role == "background" or recited.get(entry.id) is False)
    ]
    if not retained:
        raise DataError(
            "nothing is left that the model could retain: every trained document of "
            f"'{run_folder}' is to be forgotten, or a near-duplicate is. Train again instead."
        )
    groups = {
        "forget": forgotten,
        "train": _draw(retained, max(_FEWEST_RETAINED, _RETAINED * len(forgotten)), seed),
        "control": [entry for entry in manifest if entry.role == "control"],
        "heldout": [entry for entry in manifest if entry.role == "heldout"],
    }
    wanted = [entry for group in groups.values() for entry in group]
    texts = read_texts(data, run_folder, wanted, cache_dir=cache_dir)
    folder = run_folder / "audit" / "private" / "forgetting"
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        name: _write(folder, name, [texts[entry.id] for entry in group], data.text_column)
        for name, group in groups.items()
    }
    return ForgetList(
        **files,
        forgotten=frozenset(entry.id for entry in forgotten),
        num_retained=len(groups["train"]),
    )


def _draw(entries: Sequence[ManifestEntry], count: int, seed: int) -> list[ManifestEntry]:
    """Return so many of the entries, in their order."""
    if len(entries) <= count:
        return list(entries)
    chosen = derive_generator(seed, "retained").choice(len(entries), size=count, replace=False)
    return [entries[index] for index in sorted(chosen)]


def _write(
    folder: Path, name: str, documents: Sequence[Document], text_column: str
) -> tuple[str, ...]:
    """Write one file for each form of documents; return their paths.

    Token ids are a form of their own: a file holds them or texts, not both.
    """
    rows: dict[str, list[str]] = {}
    for document in documents:
        row = json.dumps(_make_row(document, text_column))
        form: str = document.format if document.input_ids is None else "ids"
        rows.setdefault(form, []).append(f"{row}\n")
    paths = []
    for form, lines in sorted(rows.items()):
        path = folder / f"{name}-{form}.jsonl"
        write_atomically(path, "".join(lines).encode(), mode=0o600)
        paths.append(str(path))
    return tuple(paths)


def _make_row(document: Document, text_column: str) -> dict[str, Any]:
    row: dict[str, Any] = {"id": document.id, "source": document.source}
    match document.format:
        case "text" if document.input_ids is not None:
            row[IDS_COLUMN] = document.input_ids.tolist()
        case "text":
            row[text_column] = document.text
        case "messages":
            row["messages"] = _make_content(document.messages)
        case "prompt_completion":
            row["prompt"] = _make_content(document.prompt)
            row["completion"] = _make_content(document.completion)
    return row


def _make_content(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content
    return [{"role": message.role, "content": message.content} for message in content]
