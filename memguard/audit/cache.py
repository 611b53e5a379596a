"""Numbers of documents, kept on disk: an audit that was interrupted or repeated goes on.

    scores/FINGERPRINT/PART.parquet     key (16 bytes) | one float64 column a number
    rows [N, len(names)]                of N documents under one model; NaN where one is missing

The fingerprint names everything the numbers depend on but the document: weights, arithmetic,
device, versions, probe and parameters. The key is a hash of the document's tokens. No text and no
token is written. A part is written whole or not at all, when its documents are done, and is named
by a hash of its bytes, so that a flipped bit is seen; parts are only ever added, so several audits
may share a folder.
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

from memguard.records import write_atomically

if TYPE_CHECKING:
    from memguard.runtime import Runtime

KEY_BYTES = 16
# Documents measured at a time: token results of more are never held, and each part is stored before
# the next begins.
_SHARD_DOCUMENTS = 2048


def compute_fingerprint(parts: Mapping[str, Any]) -> str:
    """Return a name for everything that numbers depend on; ``parts`` must be JSON."""
    said = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def compute_key(*arrays: NDArray[Any]) -> bytes:
    """Return a document's key from its tokens and whatever else decides what is asked of it."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{len(array)}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()[:KEY_BYTES]


class RecordCache:
    """A folder of parts; a file that cannot be read, or is damaged, counts as not there."""

    def __init__(self, folder: Path) -> None:
        """Take the folder; it is made when something is stored."""
        self.folder = folder

    def load(self, fingerprint: str, names: Sequence[str]) -> dict[bytes, NDArray[np.float64]]:
        """Return ``[len(names)]`` numbers for each key that is known; NaN is a missing number."""
        known: dict[bytes, NDArray[np.float64]] = {}
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
            known.update(zip(table.column("key").to_pylist(), rows, strict=True))
        return known

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
            names: of the numbers.
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
        # Whoever knows a document could ask these files whether it was scored.
        os.chmod(folder, 0o700)
        write_atomically(folder / _name_part(content), content, mode=0o600)


def _name_part(content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()[:16]}.parquet"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Numbers:
    """One row a document."""

    names: tuple[str, ...]
    rows: NDArray[np.float64]
    """[N, len(names)]"""

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        """Return [N]."""
        return self.rows[:, self.names.index(name)]

    def __contains__(self, name: str) -> bool:
        return name in self.names


@dataclass(frozen=True, kw_only=True, slots=True)
class Shelf:
    """Where numbers of one kind are kept between audits."""

    cache: RecordCache | None
    """None keeps nothing, as do the ranks that are not the first."""
    fingerprint: str | None
    """See `compute_fingerprint`; None where it is not known what was measured."""


def collect_numbers(
    names: tuple[str, ...],
    keys: Sequence[bytes],
    sizes: Sequence[int],
    measure: Callable[[Sequence[int]], ArrayLike],
    *,
    shelf: Shelf,
    peers: "Runtime",
    on_progress: Callable[[int, int], None] | None = None,
) -> Numbers:
    """Return the numbers of all documents, measuring only those that are not on the shelf.

    Every rank calls it with the same keys, and gets all numbers.

    Args:
        names: of the numbers.
        keys: ``[N]``, see `compute_key`; of equal keys one is measured.
        sizes: ``[N]`` tokens; the longest are measured first, beside others as long.
        measure: given indices of documents, returns their rows; called by all ranks alike.
        shelf: where to look, and to put what is new.
        peers: this rank among all.
        on_progress: called with the documents done and all documents.
    """
    rows = np.full((len(keys), len(names)), np.nan)
    known: dict[bytes, NDArray[np.float64]] = {}
    if peers.is_main and shelf.cache is not None and shelf.fingerprint is not None:
        known = shelf.cache.load(shelf.fingerprint, names)
    firsts: dict[bytes, int] = {}
    for index, key in enumerate(keys):
        if key not in known:
            firsts.setdefault(key, index)
    longest_first = sorted(firsts.values(), key=lambda index: -sizes[index])
    missing = peers.broadcast_object(longest_first)
    num_found = len(keys) - len(missing)
    if on_progress is not None and num_found:
        on_progress(num_found, len(keys))
    is_storable = True
    for start in range(0, len(missing), _SHARD_DOCUMENTS):
        shard = missing[start : start + _SHARD_DOCUMENTS]
        measured = np.array(measure(shard), dtype=np.float64).reshape(len(shard), len(names))
        rows[shard] = measured
        if peers.is_main and is_storable:
            is_storable = _store(shelf, names, [keys[index] for index in shard], measured)
        if on_progress is not None:
            on_progress(num_found + start + len(shard), len(keys))
    if peers.is_main:
        for index, key in enumerate(keys):
            rows[index] = known[key] if key in known else rows[firsts[key]]
    return Numbers(names=names, rows=peers.broadcast_object(rows))


def _store(
    shelf: Shelf, names: Sequence[str], keys: Sequence[bytes], rows: NDArray[np.float64]
) -> bool:
    """Keep what was measured; an audit does not fail because it cannot be kept."""
    if shelf.cache is None or shelf.fingerprint is None:
        return True
    try:
        shelf.cache.store(shelf.fingerprint, names, keys, rows)
    except OSError as error:
        warnings.warn(
            f"scores cannot be kept in '{shelf.cache.folder}' ({error.strerror}): an interrupted "
            "audit would begin anew",
            stacklevel=2,
        )
        return False
    return True
