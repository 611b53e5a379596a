"""Numbers of documents that were scored before, so that an audit goes on and is not repeated.

    scores/FINGERPRINT/PART.parquet     key (16 bytes) | one float64 column a number

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import parquet

from memguard.records import write_atomically

KEY_BYTES = 16


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
