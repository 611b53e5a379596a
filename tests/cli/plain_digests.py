"""Finds hashes of known contents in files: whole or cut to 8 bytes or more, in hex or in binary."""

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet
from numpy.typing import NDArray

_PREFIX = 8
"""Bytes of a digest that are compared; by chance one position in 10^15 agrees with one of 10^4."""
_HEX = re.compile(rb"[0-9a-fA-F]{%d,}" % (2 * _PREFIX))
_ALGORITHMS = (
    hashlib.md5,
    hashlib.sha1,
    hashlib.sha256,
    hashlib.blake2s,
    # The length is part of what BLAKE2 hashes.
    *(partial(hashlib.blake2b, digest_size=size) for size in (8, 16, 20, 32, 64)),
    *(partial(hashlib.blake2s, digest_size=size) for size in (8, 16, 20)),
)


def list_contents(text: str, ids: Sequence[int]) -> Iterator[bytes]:
    """Yield what a program may have hashed of a document: text, lines, tokens."""
    for part in {text, *text.splitlines()}:
        yield part.encode()
        yield f"{part}\n".encode()
    for some in (ids, ids[:-1]):  # With and without the token that ends a document.
        for kind in ("<i2", "<u2", "<i4", "<i8"):
            yield np.asarray(some, kind).tobytes()
        yield json.dumps(list(some)).encode()
        yield json.dumps(list(some), separators=(",", ":")).encode()


def hash_contents(contents: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return the beginnings of all hashes of all contents, sorted."""
    starts = b"".join(
        algorithm(content).digest()[:_PREFIX] for content in contents for algorithm in _ALGORITHMS
    )
    return np.unique(np.frombuffer(starts, "<u8"))


def find_digests(folder: Path, known: NDArray[np.uint64]) -> list[str]:
    """Return the files below a folder, relative to it, that contain one of the hashes."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        path.relative_to(folder).as_posix()
        for path in paths
        if _contains(path.read_bytes(), known, is_parquet=path.suffix == ".parquet")
    ]


def _contains(content: bytes, known: NDArray[np.uint64], *, is_parquet: bool) -> bool:
    if is_parquet:
        # Its pages are compressed.
        rows = pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
        values = [value for row in rows for value in row.values()]
        content += b"\0".join(
            value if isinstance(value, bytes) else str(value).encode() for value in values
        )
    runs = (match[0] for match in _HEX.finditer(content))
    decoded = [bytes.fromhex(run[at : at + (len(run) - at) // 2 * 2].decode())
               for run in runs for at in (0, 1)]  # fmt: skip
    return any(_has_window(each, known) for each in (content, *decoded))


def _has_window(content: bytes, known: NDArray[np.uint64]) -> bool:
    for start in range(min(_PREFIX, len(content) - _PREFIX + 1)):
        count = (len(content) - start) // _PREFIX
        windows = np.frombuffer(content, "<u8", count=count, offset=start)
        places = np.searchsorted(known, windows).clip(max=len(known) - 1)
        if (known[places] == windows).any():
            return True
    return False
