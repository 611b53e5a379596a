"""Numbers of documents, cached on disk so that an interrupted or repeated audit resumes.

    scores/FINGERPRINT/PART.parquet     key (16 bytes) | one float64 column per number
    rows [N, len(names)]                of N documents under one model; NaN if missing

The fingerprint identifies everything the numbers depend on except the document: weights,
arithmetic, device, versions, probe and parameters. The key is a hash of the document's tokens. No
text and no token is written. A part is written atomically when its documents are done. Its name is
a hash of its bytes, so that corruption is detected. Parts are only added, so several audits can
share a folder.
"""

import hashlib
import io
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow
from numpy.typing import ArrayLike, NDArray
from pyarrow import parquet

from memguard.records import PRIVATE_MODE, write_atomically
from memguard.records.record import make_private_folder

if TYPE_CHECKING:
    from memguard.runtime import Runtime

KEY_BYTES = 16


def compute_fingerprint(parts: Mapping[str, Any]) -> str:
    """Return a name for everything that numbers depend on; ``parts`` must be JSON."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def compute_key(*arrays: NDArray[Any]) -> bytes:
    """Return a document's key from its tokens and the other inputs of its measurement."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{len(array)}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()[:KEY_BYTES]


class PartFolder:
    """Folders of files that are named by their content; several audits can share them."""

    loss: ClassVar[str]
    """Warning if nothing can be written; {} is the folder and why."""

    def __init__(self, folder: Path) -> None:
        """Use a folder, which the first `write` creates."""
        self.folder = folder
        self._is_writable = True

    def read(self, name: str, suffix: str) -> Iterator[bytes]:
        """Yield the readable files of a folder whose name is the hash of their bytes."""
        for path in sorted((self.folder / name).glob(f"*{suffix}")):
            with suppress(OSError):
                content = path.read_bytes()
                if path.name == _name_part(content, suffix):
                    yield content

    def write(self, name: str, content: bytes, suffix: str) -> None:
        """Add a file to a folder; only the owner can read it and list the folder."""
        if not self._is_writable:
            return  # Said once.
        try:
            make_private_folder(self.folder / name)
            # With read access, anyone who has a document could test whether it was scored.
            os.chmod(self.folder / name, 0o700)
            path = self.folder / name / _name_part(content, suffix)
            write_atomically(path, content, mode=PRIVATE_MODE)
        except OSError as error:
            place = f"'{self.folder}' ({error.strerror})"
            warnings.warn(self.loss.format(place), stacklevel=2)
            self._is_writable = False


def _name_part(content: bytes, suffix: str) -> str:
    return f"{hashlib.sha256(content).hexdigest()[:16]}{suffix}"


class RecordCache(PartFolder):
    """Numbers of documents; files that are unreadable or damaged are ignored."""

    loss = "scores cannot be cached in {}: an interrupted audit would start from the beginning"

    def load(self, fingerprint: str, names: Sequence[str]) -> dict[bytes, NDArray[np.float64]]:
        """Return ``[len(names)]`` numbers for each cached key; NaN is a missing number."""
        cached: dict[bytes, NDArray[np.float64]] = {}
        for content in self.read(fingerprint, ".parquet"):
            try:
                table = parquet.read_table(io.BytesIO(content), columns=["key", *names])
            except (OSError, pyarrow.ArrowException):
                continue
            if table.num_rows == 0 or table.column_names != ["key", *names]:
                continue
            rows = np.column_stack(
                [np.zeros((table.num_rows, 0)), *(table.column(n).to_numpy() for n in names)]
            )
            cached.update(zip(table.column("key").to_pylist(), rows, strict=True))
        return cached

    def store(
        self,
        fingerprint: str,
        names: Sequence[str],
        keys: Sequence[bytes],
        rows: NDArray[np.float64],
    ) -> None:
        """Add a part: ``[N, len(names)]`` rows of documents with ``[N]`` keys (`compute_key`)."""
        fields = {"key": pyarrow.array(keys, pyarrow.binary(KEY_BYTES))}
        fields |= {name: rows[:, column] for column, name in enumerate(names)}
        buffer = io.BytesIO()
        parquet.write_table(pyarrow.table(fields), buffer, compression="zstd")
        self.write(fingerprint, buffer.getvalue(), ".parquet")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreMatrix:
    """Numbers of documents, one row per document."""

    names: tuple[str, ...]
    rows: NDArray[np.float64]
    """[N, len(names)]"""

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        """Return [N]."""
        return self.rows[:, self.names.index(name)]

    def __contains__(self, name: str) -> bool:
        return name in self.names


class StoredNumbers:
    """The numbers of N items by one request: from the cache, and those that are measured now.

    Every rank has the same items and measures the same missing ones; only the main rank reads and
    writes the cache.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        keys: Sequence[bytes | None],
        *,
        cache: RecordCache | None,
        fingerprint: str | None,
        peers: "Runtime",
        known: dict[bytes, NDArray[np.float64]] | None = None,
    ) -> None:
        """Read the cache.

        Args:
            names: names of the numbers.
            keys: ``[N]``, see `compute_key`; equal keys are measured once. None for items without
                numbers, whose rows stay NaN.
            cache: None disables caching.
            fingerprint: see `compute_fingerprint`; None disables caching, because the identity of
                the model is not known.
            peers: this rank and the process group.
            known: numbers by key that were measured before; receives those of this request too.
        """
        self._names, self._keys, self._peers = names, keys, peers
        self._cache, self._fingerprint = cache, fingerprint
        self._cached: dict[bytes, NDArray[np.float64]] = {} if known is None else known
        if peers.is_main and cache is not None and fingerprint is not None:
            self._cached |= cache.load(fingerprint, names)
        firsts: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            if key is not None and key not in self._cached:
                firsts.setdefault(key, index)
        self.missing = frozenset(peers.broadcast_object(sorted(firsts.values())))
        """First item of each key that is not cached."""

    def add(self, items: Sequence[int], rows: ArrayLike) -> None:
        """Keep and store the rows ``[n, names]`` of measured items."""
        measured = np.array(rows, dtype=np.float64).reshape(len(items), len(self._names))
        keys = [key for item in items if (key := self._keys[item]) is not None]
        self._cached.update(zip(keys, measured, strict=True))
        if self._peers.is_main and self._cache is not None and self._fingerprint is not None:
            self._cache.store(self._fingerprint, self._names, keys, measured)

    def finish(self) -> ScoreMatrix:
        """Return the numbers of all items, on every rank."""
        rows = np.full((len(self._keys), len(self._names)), np.nan)
        if self._peers.is_main:
            for index, key in enumerate(self._keys):
                if key is not None and (numbers := self._cached.get(key)) is not None:
                    rows[index] = numbers
        return ScoreMatrix(names=self._names, rows=self._peers.broadcast_object(rows))
