"""Hashes of files and records, stored with them and checked when they are read.

    FileSum        size and SHA-256 of one file
    SealedRecord   a record whose JSON ends with the hash of the rest
    find_damage    the files of a folder that are missing or differ from those that were written

Hashes detect damage, not forgery: anyone who can write to a folder can also write its hashes.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from memguard.errors import RecordError
from memguard.records.record import Record, validate_record, write_atomically

_SEAL = "sha256"


class FileSum(Record):
    """Size and hash of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A file that is not what was written."""

    file: str
    """Path relative to the folder it belongs to, with `/`."""
    what: str
    """Predicate of the message: ``is missing``, ``has 12 bytes instead of 20``."""

    def __str__(self) -> str:
        """Return the sentence."""
        return f"{self.file} {self.what}"


def sum_file(path: Path) -> FileSum:
    """Read a file whole and return its size and hash."""
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256")
        return FileSum(num_bytes=content.tell(), sha256=digest.hexdigest())


def find_damage(folder: Path, files: Mapping[str, FileSum]) -> list[Damage]:
    """Return the files that are missing or differ from those that were written.

    Args:
        folder: the folder of the files.
        files: sizes and hashes by file name. A name with a separator counts as damage, because it
            could point outside the folder.
    """
    damages = []
    for name, written in files.items():
        path = folder / name
        if Path(name).name != name or name == "..":
            what = "is not the name of a file in its folder"
        elif not path.is_file():
            what = "is missing"
        elif (num_bytes := path.stat().st_size) != written.num_bytes:
            what = f"has {num_bytes:,} bytes instead of {written.num_bytes:,}"
        elif sum_file(path).sha256 != written.sha256:
            what = "is not what was written (its SHA-256 differs)"
        else:
            continue
        damages.append(Damage(file=name, what=what))
    return damages


class SealedRecord(Record):
    """A record whose file contains its own hash; `load_sealed` checks it."""


SealedT = TypeVar("SealedT", bound=SealedRecord)


def save_sealed(record: SealedRecord, path: Path, mode: int = 0o644) -> None:
    """Write a record as indented JSON with its hash as the last field, whole or not at all.

    ``mode`` is that of the file, before the umask.
    """
    values = record.model_dump(mode="json", by_alias=True)
    text = json.dumps({**values, _SEAL: _hash_values(values)}, indent=2, ensure_ascii=False)
    write_atomically(path, f"{text}\n".encode(), mode)


def load_sealed(kind: type[SealedT], path: Path) -> SealedT:
    """Read a sealed record and check its hash.

    Raises:
        RecordError: missing, not JSON, of another schema, or not what was written.
    """
    try:
        values = json.loads(path.read_bytes())
        seal = values.pop(_SEAL)
    except OSError as error:
        raise RecordError(f"'{path}' cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise RecordError(f"'{path}' is damaged: it is not a JSON object with its hash") from error
    if seal != _hash_values(values):
        raise RecordError(f"'{path}' is damaged: it is not what was written (its SHA-256 differs)")
    return validate_record(kind, json.dumps(values).encode(), path)


def _hash_values(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
