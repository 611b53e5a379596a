"""Prepared documents on disk: token arrays and the manifest."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.data.documents import Format
from memguard.data.tokenization import TokenizedDocument
from memguard.errors import RecordError
from memguard.records import (
    ManifestEntry,
    atomic_folder,
    describe_unread,
    hash_plan,
    load_manifest,
    open_private,
    save_manifest,
)
from memguard.records.run_files import PreparedSummary
from memguard.records.sealed import load_sealed, save_sealed, sum_file

_ARRAYS = ("input_ids", "supervised", "offsets", "content_tokens", "format")
FORMATS: tuple[Format, ...] = ("text", "messages", "prompt_completion")


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """All prepared documents of a run; arrays are memory-mapped.

    Canaries come last.
    """

    summary: PreparedSummary
    manifest: list[ManifestEntry]
    input_ids: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    content_tokens: NDArray[np.int64]
    format: NDArray[np.uint8]

    @property
    def num_documents(self) -> int:
        """Number of documents, canaries included."""
        return len(self.manifest)

    def document(self, index: int) -> TokenizedDocument:
        """Return one document, without its changes."""
        cut = slice(self.offsets[index], self.offsets[index + 1])
        return TokenizedDocument(
            id=self.manifest[index].id,
            source=self.manifest[index].source,
            input_ids=np.asarray(self.input_ids[cut]),
            supervised=np.asarray(self.supervised[cut]),
            num_content_tokens=int(self.content_tokens[index]),
            format=FORMATS[self.format[index]],
            unknown_id=self.summary.unknown_id,
        )

    def without_canaries(self) -> "Corpus":
        """Return the corpus without canaries; arrays are views."""
        is_canary = [entry.role == "canary" for entry in self.manifest]
        count = len(is_canary) - sum(is_canary)
        assert not any(is_canary[:count]), "canaries come last"
        end = int(self.offsets[count])
        return replace(
            self,
            manifest=self.manifest[:count],
            input_ids=self.input_ids[:end],
            supervised=self.supervised[:end],
            offsets=self.offsets[: count + 1],
            content_tokens=self.content_tokens[:count],
            format=self.format[:count],
        )


def load_corpus(run_folder: Path) -> Corpus:
    """Load the output of `prepare`.

    Raises:
        UnreadableError: this user may not read it.
        RecordError: it is missing or incomplete.
    """
    folder = run_folder / "prepared"
    summary = load_sealed(PreparedSummary, folder / "summary.json")
    manifest = load_manifest(run_folder / "manifest.jsonl")
    try:
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
        if len(arrays["offsets"]) != len(manifest) + 1:
            raise ValueError("it and manifest.jsonl differ in length")
    except PermissionError as error:
        raise describe_unread(Path(error.filename or folder), error) from error
    except (OSError, ValueError, EOFError) as error:
        raise RecordError(
            f"'{folder}' is incomplete ({error}): run memguard train again to prepare it"
        ) from error
    return Corpus(summary=summary, manifest=manifest, **arrays)


def save_corpus(
    run_folder: Path,
    summary: PreparedSummary,
    entries: Sequence[ManifestEntry],
    documents: Sequence[TokenizedDocument],
    tokenizer: Any = None,
) -> None:
    """Write tokens, summary and manifest; `prepared/` appears only when it is complete.

    Only their owner can read tokens and tokenizer. The summary stores the hashes of all files.
    """
    arrays: dict[str, NDArray[Any]] = {
        "input_ids": np.concatenate([d.input_ids for d in documents]).astype(np.int32),
        "supervised": np.concatenate([d.supervised for d in documents]).astype(bool),
        "offsets": np.cumsum([0, *(len(d.input_ids) for d in documents)], dtype=np.int64),
        "content_tokens": np.array([d.num_content_tokens for d in documents], dtype=np.int64),
        "format": np.array([FORMATS.index(d.format) for d in documents], dtype=np.uint8),
    }
    folder = run_folder / "prepared"
    private = ["tokenizer.json", *(f"{name}.npy" for name in arrays)]
    with atomic_folder(folder, private=private) as temporary:
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        for name, array in arrays.items():
            with open_private(temporary / f"{name}.npy") as file:
                np.save(file, array)
        sums = {
            "arrays": {path.name: sum_file(path) for path in sorted(temporary.iterdir())},
            "manifest_sha256": hash_plan(entries),
        }
        save_sealed(summary.model_copy(update=sums), temporary / "summary.json")
        # Tokens must never be next to a manifest of other documents.
        shutil.rmtree(folder, ignore_errors=True)
        save_manifest(entries, run_folder / "manifest.jsonl")
