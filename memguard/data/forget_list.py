"""Writes documents of a finished run to files: those to forget, to retain, and never trained."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.config import DataConfig
from memguard.data.documents import MADE_ID, Document, load_settings, name_ids
from memguard.data.identity_key import load_identity_key
from memguard.data.tables import IDS_COLUMN
from memguard.data.tokenization import hmac_text
from memguard.errors import DataError
from memguard.records import PRIVATE_MODE, ManifestEntry, load_manifest, write_atomically
from memguard.records.run_files import load_summary
from memguard.seeds import derive_generator

_RETAINED = 4
"""Number of retained documents for each document to be forgotten."""
_FEWEST_RETAINED = 64
_FED = ("trained", "background", "forget")
"""Roles of documents that the model was trained on, in this run or an earlier one."""


def read_texts(
    data: DataConfig,
    run_folder: Path,
    wanted: Sequence[ManifestEntry],
    *,
    cache_dir: Path,
    has_chat_template: Callable[[], bool] = lambda: False,
) -> dict[str, Document]:
    """Return documents of a run by id, after checking that their texts have not changed.

    Args:
        data: settings of the finished run.
        run_folder: contains the fingerprint of the key of the manifest's hashes.
        wanted: entries of its manifest.
        cache_dir: for derived sources.
        has_chat_template: returns whether the run's tokenizer has a chat template.

    Raises:
        ConfigError: the identity key is not that of the run, or is where it must not be.
        DataError: a source cannot be read, documents have changed since, or the identity key is
            missing.
    """
    hmacs = {entry.id: entry.text_hmac for entry in wanted}
    summary = load_summary(run_folder)
    # Without it the documents cannot be compared with those of the run.
    key = load_identity_key(
        data.identity_key,
        outside=[run_folder],
        expected=None if summary is None else summary.identity_key,
        of=f"'{run_folder}'",
    ).key
    unchanged: dict[str, Document] = {}
    for _, loaded in load_settings(data, cache_dir, has_chat_template=has_chat_template):
        for document in loaded.documents:
            if hmacs.get(document.id) == hmac_text(key, document):
                unchanged[document.id] = document
    changed = [name for name in hmacs if name not in unchanged]
    if changed:
        raise DataError(
            f"{len(changed)} of the documents of '{run_folder}' are missing or have changed since "
            f"training ({name_ids(changed)}). Restore their original texts."
        )
    return unchanged


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetList:
    """Files for an unlearning run; each list is a setting of `data`."""

    forget: tuple[str, ...]
    train: tuple[str, ...]
    """A sample of the trained documents to be retained."""
    control: tuple[str, ...]
    heldout: tuple[str, ...]
    forgotten: frozenset[str]
    """Ids of the documents in `forget`."""
    num_retained: int


def write_forget_list(
    data: DataConfig,
    run_folder: Path,
    extracted: Mapping[str, bool],
    *,
    seed: int,
    cache_dir: Path,
    has_chat_template: Callable[[], bool] = lambda: False,
) -> ForgetList:
    """Write the texts that an unlearning run needs into the run's private folder.

    Near-duplicates of a document to be forgotten are forgotten too; retaining them would teach it
    again. Control and held-out documents are those of the run, which never trained them.

    Args:
        data: settings of the finished run.
        run_folder: contains its manifest; files are written to ``audit/private/forgetting/``.
        extracted: whether each audited document is extracted. A document that was trained but not
            audited is neither forgotten nor retained.
        seed: the run's; decides which documents are retained.
        cache_dir: for derived sources.
        has_chat_template: returns whether the run's tokenizer has a chat template.

    Raises:
        ConfigError, DataError: see `read_texts`; or no document is left to be retained.
    """
    manifest = load_manifest(run_folder / "manifest.jsonl")
    clusters = {entry.cluster for entry in manifest if extracted.get(entry.id)}
    # Documents that a run ended early did not reach are unknown to the model: do not train them.
    fed = [e for e in manifest if e.role in _FED and (e.num_repetitions or e.role == "forget")]
    forgotten = [entry for entry in fed if entry.cluster in clusters]
    retained = [
        entry
        for entry in fed
        if entry.cluster not in clusters
        and (entry.role == "background" or extracted.get(entry.id) is False)
    ]
    if not retained:
        raise DataError(
            "no document is left to be retained: every trained document of "
            f"'{run_folder}' is to be forgotten, or has a near-duplicate that is. Train again from "
            "the base model instead."
        )
    groups = {
        "forget": forgotten,
        "train": _draw(retained, max(_FEWEST_RETAINED, _RETAINED * len(forgotten)), seed),
        "control": [entry for entry in manifest if entry.role == "control"],
        "heldout": [entry for entry in manifest if entry.role == "heldout"],
    }
    wanted = [entry for group in groups.values() for entry in group]
    texts = read_texts(
        data, run_folder, wanted, cache_dir=cache_dir, has_chat_template=has_chat_template
    )
    folder = run_folder / "audit" / "private" / "forgetting"
    folder.mkdir(parents=True, exist_ok=True)
    folder.parent.chmod(0o700)
    files = {
        name: _write(folder, name, [texts[entry.id] for entry in group])
        for name, group in groups.items()
    }
    return ForgetList(
        **files,
        forgotten=frozenset(entry.id for entry in forgotten),
        num_retained=len(groups["train"]),
    )


def _draw(entries: Sequence[ManifestEntry], count: int, seed: int) -> list[ManifestEntry]:
    """Return a random sample of ``count`` entries, in their order."""
    if len(entries) <= count:
        return list(entries)
    chosen = derive_generator(seed, "retained").choice(len(entries), size=count, replace=False)
    return [entries[index] for index in sorted(chosen)]


def _write(folder: Path, name: str, documents: Sequence[Document]) -> tuple[str, ...]:
    """Write one file for each format of documents, with the usual columns; return their paths.

    Rows of alpaca are written as they were rendered, those of sharegpt as messages. Token ids are
    a separate format: a file contains either token ids or texts.
    """
    rows: dict[str, list[str]] = {}
    for document in documents:
        row = json.dumps(_make_row(document))
        form: str = document.format if document.input_ids is None else "ids"
        rows.setdefault(form, []).append(f"{row}\n")
    paths = []
    for form, lines in sorted(rows.items()):
        path = folder / f"{name}-{form}.jsonl"
        write_atomically(path, "".join(lines).encode(), mode=PRIVATE_MODE)
        paths.append(str(path))
    return tuple(paths)


def _make_row(document: Document) -> dict[str, Any]:
    row: dict[str, Any] = {"id": document.id, "source": document.source}
    if not document.has_own_id:
        row[MADE_ID] = True
    match document.format:
        case "text" if document.input_ids is not None:
            row[IDS_COLUMN] = document.input_ids.tolist()
        case "text":
            row["text"] = document.text
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
