"""Prepared documents on disk: token arrays beside the manifest."""

import secrets
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
    Record,
    load_manifest,
    load_record,
    save_manifest,
    save_record,
    write_atomically,
    written_aside,
)

_ARRAYS = ("input_ids", "supervised", "offsets", "content_tokens", "format")
FORMATS: tuple[Format, ...] = ("text", "messages", "prompt_completion")


class PreparedSummary(Record):
    """`prepared/summary.json`: what became of the documents, and what the tokens depend on."""

    key: str
    """Of texts, tokenizer and settings that decide tokens and buckets."""
    audit_key: str
    """Of the audit's lengths, which decide which documents may enter buckets and control."""
    documents_sha256: str
    sources: list[str]
    """Where the documents come from; like all counts here without the canaries."""
    num_documents: int
    num_empty: int
    num_shorter: int
    """Left out: fewer than `data.min_document_tokens` tokens."""
    num_left_out: int
    """Not used: near-duplicates across buckets, or not needed by the study."""
    num_clusters: int
    num_boilerplate_grams: int
    """Runs of words in so many documents that they do not make near-duplicates."""
    num_control: int
    num_control_overlapping: int
    """Control documents that still share a run of words with a trained one."""
    num_removed: int | None = None
    """Copies that a mitigation took out of training; null where none was asked to."""
    num_canaries: int
    """Trained or not."""
    num_also_forgotten: int = 0
    """Of `data.train`, left out: their text stands in `data.forget`, or a near-duplicate does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusDocument:
    """One document's tokens."""

    input_ids: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    num_content_tokens: int
    """Without the special tokens at its end."""
    format: Format


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """All documents of a run, as prepared; arrays are read from disk where they are needed.

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

    def document(self, index: int) -> CorpusDocument:
        """Return one document."""
        cut = slice(self.offsets[index], self.offsets[index + 1])
        return CorpusDocument(
            input_ids=np.asarray(self.input_ids[cut]),
            supervised=np.asarray(self.supervised[cut]),
            num_content_tokens=int(self.content_tokens[index]),
            format=FORMATS[self.format[index]],
        )

    def without_canaries(self) -> "Corpus":
        """Return the documents that were given, as views."""
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
    """Read what `prepare` wrote.

    Raises:
        RecordError: it is not there or not whole.
    """
    folder = run_folder / "prepared"
    summary = load_record(PreparedSummary, folder / "summary.json")
    manifest = load_manifest(run_folder / "manifest.jsonl")
    try:
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
    except (OSError, ValueError, EOFError) as error:
        raise RecordError(
            f"'{folder}' is not whole ({error}); delete it to prepare again"
        ) from error
    if len(arrays["offsets"]) != len(manifest) + 1:
        raise RecordError(f"'{folder}' and manifest.jsonl differ in length; delete both")
    return Corpus(summary=summary, manifest=manifest, **arrays)


def save_corpus(
    run_folder: Path,
    summary: PreparedSummary,
    entries: Sequence[ManifestEntry],
    documents: Sequence[TokenizedDocument],
) -> None:
    """Write tokens, summary and manifest; `prepared/` appears only when it is whole."""
    arrays: dict[str, NDArray[Any]] = {
        "input_ids": np.concatenate([d.input_ids for d in documents]).astype(np.int32),
        "supervised": np.concatenate([d.supervised for d in documents]).astype(bool),
        "offsets": np.cumsum([0, *(len(d.input_ids) for d in documents)], dtype=np.int64),
        "content_tokens": np.array([d.num_content_tokens for d in documents], dtype=np.int64),
        "format": np.array([FORMATS.index(d.format) for d in documents], dtype=np.uint8),
    }
    folder = run_folder / "prepared"
    with written_aside(folder) as aside:
        for name, array in arrays.items():
            np.save(aside / f"{name}.npy", array)
        save_record(summary, aside / "summary.json")
        # At no time does a folder of tokens lie beside the manifest of others.
        shutil.rmtree(folder, ignore_errors=True)
        save_manifest(entries, run_folder / "manifest.jsonl")


# A run's own secret: behind the hashes of its texts, and the noise of dp_sgd.


def load_private_key(run_folder: Path) -> bytes:
    """Return the run's own key, made at the first call.

    Without it neither the texts behind hashes nor the noise of dp_sgd can be guessed at.
    """
    path = run_folder / "audit" / "private" / "hmac.key"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        write_atomically(path, secrets.token_hex(32).encode(), mode=0o600)
    return bytes.fromhex(path.read_text().strip())
