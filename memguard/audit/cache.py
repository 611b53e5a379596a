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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
from numpy.typing import ArrayLike, NDArray
from pyarrow import parquet

from memguard.records import PRIVATE_MODE, write_atomically

if TYPE_CHECKING:
    from memguard.runtime import Runtime

KEY_BYTES = 16
# Documents measured at a time: this limits the token results in memory, and each part is stored
# before the next one starts.
_SHARD_DOCUMENTS = 2048


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


class RecordCache:
    """A folder of parts; files that are unreadable or damaged are ignored."""

    def __init__(self, folder: Path) -> None:
        """Use a folder, which the first `store` creates."""
        self.folder = folder

    def load(self, fingerprint: str, names: Sequence[str]) -> dict[bytes, NDArray[np.float64]]:
        """Return ``[len(names)]`` numbers for each cached key; NaN is a missing number."""
        cached: dict[bytes, NDArray[np.float64]] = {}
        for path in sorted((self.folder / fingerprint).glob("*.parquet")):
            try:
                content = path.read_bytes()
                if path.name != _name_part(content):
                    continue
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
        """Add a part.

        Args:
            fingerprint: see `compute_fingerprint`.
            names: names of the numbers.
            keys: ``[N]``, see `compute_key`.
            rows: ``[N, len(names)]``.
        """
        fields = {"key": pyarrow.array(keys, pyarrow.binary(KEY_BYTES))}
        fields |= {name: rows[:, column] for column, name in enumerate(names)}
        buffer = io.BytesIO()
        parquet.write_table(pyarrow.table(fields), buffer, compression="zstd")
        content = buffer.getvalue()
        folder = self.folder / fingerprint
        folder.mkdir(parents=True, exist_ok=True)
        # With read access, anyone who has a document could test whether it was scored.
        os.chmod(folder, 0o700)
        write_atomically(folder / _name_part(content), content, mode=PRIVATE_MODE)


def _name_part(content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()[:16]}.parquet"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSlot:
    """The part of a cache that stores numbers of one kind."""

    cache: RecordCache | None
    """None disables caching; only the main rank uses it."""
    fingerprint: str | None
    """See `compute_fingerprint`; None, which disables caching, if the model's identity is not
    known."""


def collect_scores(
    names: tuple[str, ...],
    keys: Sequence[bytes],
    sizes: Sequence[int],
    measure: Callable[[Sequence[int]], ArrayLike],
    *,
    slot: CacheSlot,
    peers: "Runtime",
    on_progress: Callable[[int, int], None] | None = None,
) -> ScoreMatrix:
    """Return the numbers of all documents, measuring only those that are not cached.

    Every rank calls this with the same keys and gets all numbers.

    Args:
        names: names of the numbers.
        keys: ``[N]``, see `compute_key`; equal keys are measured once.
        sizes: ``[N]`` tokens; the longest are measured first, grouped with similar lengths.
        measure: returns the rows of documents, given by index; all ranks call it with the same
            indices.
        slot: the cache to read, and to add new numbers to.
        peers: this rank and the process group.
        on_progress: called with the documents done and all documents.
    """
    rows = np.full((len(keys), len(names)), np.nan)
    cached: dict[bytes, NDArray[np.float64]] = {}
    if peers.is_main and slot.cache is not None and slot.fingerprint is not None:
        cached = slot.cache.load(slot.fingerprint, names)
    firsts: dict[bytes, int] = {}
    for index, key in enumerate(keys):
        if key not in cached:
            firsts.setdefault(key, index)
    longest_first = sorted(firsts.values(), key=lambda index: -sizes[index])
    missing = peers.broadcast_object(longest_first)
    num_cached = len(keys) - len(missing)
    if on_progress is not None and num_cached:
        on_progress(num_cached, len(keys))
    is_storable = True
    for start in range(0, len(missing), _SHARD_DOCUMENTS):
        shard = missing[start : start + _SHARD_DOCUMENTS]
        measured = np.array(measure(shard), dtype=np.float64).reshape(len(shard), len(names))
        rows[shard] = measured
        if peers.is_main and is_storable:
            is_storable = _store(slot, names, [keys[index] for index in shard], measured)
        if on_progress is not None:
            on_progress(num_cached + start + len(shard), len(keys))
    if peers.is_main:
        for index, key in enumerate(keys):
            rows[index] = cached[key] if key in cached else rows[firsts[key]]
    return ScoreMatrix(names=names, rows=peers.broadcast_object(rows))


def _store(
    slot: CacheSlot, names: Sequence[str], keys: Sequence[bytes], rows: NDArray[np.float64]
) -> bool:
    """Store measured numbers; return False, with a warning, if they cannot be stored."""
    if slot.cache is None or slot.fingerprint is None:
        return True
    try:
        slot.cache.store(slot.fingerprint, names, keys, rows)
    except OSError as error:
        warnings.warn(
            f"scores cannot be cached in '{slot.cache.folder}' ({error.strerror}): an interrupted "
            "audit would start from the beginning",
            stacklevel=2,
        )
        return False
    return True
