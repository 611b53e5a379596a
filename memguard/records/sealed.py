"""Hashes of files and records, stored with them and checked when they are read.

    FileSum        size and SHA-256 of one file
    SealedRecord   a record whose JSON ends with the hash of the rest
    find_damage    the files of a folder that are missing or differ from those that were written

A file that this user may not read is among the damages, marked as unreadable: it was not compared.

Hashes detect damage, not forgery: anyone who can write to a folder can also write its hashes.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from memguard.errors import RecordError
from memguard.records.record import (
    Record,
    describe_unread,
    format_json,
    validate_record,
    write_atomically,
)

_SEAL = "sha256"


class FileSum(Record):
    """Size and hash of one file."""

    num_bytes: int
    sha256: str


SumFile = Callable[[Path], FileSum]
"""Returns the sum of a file, like `sum_file`; perhaps one that was computed before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A file that is not what was written."""

    file: str
    """Path relative to the folder it belongs to, with `/`."""
    what: str
    """Predicate of the message: ``is missing``, ``has 12 bytes instead of 20``."""
    is_unreadable: bool = False
    """Whether this user may not read the file: it was not compared and may be whole."""

    def __str__(self) -> str:
        """Return the sentence."""
        return f"{self.file} {self.what}"


def sum_file(path: Path) -> FileSum:
    """Read a file whole and return its size and hash; an OSError names it."""
    try:
        with path.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256")
            return FileSum(num_bytes=content.tell(), sha256=digest.hexdigest())
    except OSError as error:
        # An error in the middle of a file does not name it.
        error.filename = str(path)
        raise


def mark_unreadable(file: str) -> Damage:
    """Return the entry of a file that this user may not read."""
    return Damage(file=file, what="cannot be read: no permission", is_unreadable=True)


def describe_unread_file(file: str, error: OSError) -> Damage:
    """Return the entry of a file that could not be opened."""
    if isinstance(error, PermissionError):
        return mark_unreadable(file)
    is_missing = isinstance(error, FileNotFoundError)
    return Damage(
        file=file, what="is missing" if is_missing else f"cannot be read: {error.strerror}"
    )


def find_damage(
    folder: Path, files: Mapping[str, FileSum], *, shown_in: str = "", read: SumFile = sum_file
) -> list[Damage]:
    """Return the files that are missing or differ from those that were written.

    A path that leads out of the folder counts as damage. ``shown_in`` stands before the names in
    the result, as in ``model/``; ``read`` sums a file of the right size.
    """
    damages = []
    for name, written in files.items():
        shown = f"{shown_in}{name}"
        if Path(name).is_absolute() or ".." in Path(name).parts:
            damages.append(Damage(file=shown, what="is not the name of a file in its folder"))
            continue
        try:
            what = _compare(folder / name, written, read)
        except OSError as error:
            damages.append(describe_unread_file(shown, error))
        else:
            if what is not None:
                damages.append(Damage(file=shown, what=what))
    return damages


def _compare(path: Path, written: FileSum, read: SumFile) -> str | None:
    """Return what is wrong with a file; None if it is what was written."""
    if not is_file(path):
        return "is missing"
    if (num_bytes := path.stat().st_size) != written.num_bytes:
        return f"has {num_bytes:,} bytes instead of {written.num_bytes:,}"
    if read(path).sha256 != written.sha256:
        return "is not what was written (its SHA-256 differs)"
    return None


def refuse_damage(folder: Path, damages: Sequence[Damage], repair: str, *, said: str = "") -> None:
    """Refuse damage; if there is none, what this user may not read (UnreadableError).

    ``repair`` is the sentence that ends the message, ``said`` stands before the predicate.
    """
    if damages:
        first = min(damages, key=lambda damage: damage.is_unreadable)
        if first.is_unreadable:
            raise describe_unread(folder / first.file, PermissionError())
        more = f" (and {len(damages) - 1:,} more)" if len(damages) > 1 else ""
        raise RecordError(f"'{folder / first.file}' {said}{first.what}{more}. {repair}")


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file, with one answer on all versions of Python.

    Below a folder that this user may not enter, `Path.is_file` raises an error or returns False,
    depending on the version; this raises PermissionError.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except PermissionError:
        raise
    except OSError:
        return False


def is_closed(folder: Path) -> bool:
    """Return whether a folder exists whose files this user may not list or read."""
    try:
        return folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK)
    except PermissionError:  # A link into a folder that is closed.
        return True


class SealedRecord(Record):
    """A record whose file contains its own hash; `load_sealed` checks it."""


SealedT = TypeVar("SealedT", bound=SealedRecord)


def save_sealed(record: SealedRecord, path: Path, mode: int = 0o644) -> None:
    """Write a record as indented JSON with its hash as the last field, whole or not at all.

    ``mode`` is that of the file, before the umask.
    """
    values = record.model_dump(mode="json")
    text = format_json({**values, _SEAL: _hash_values(values)})
    write_atomically(path, f"{text}\n".encode(), mode)


def load_sealed(kind: type[SealedT], path: Path) -> SealedT:
    """Read a sealed record and check its hash; UnreadableError or RecordError if it fails."""
    try:
        values = json.loads(path.read_bytes())
        seal = values.pop(_SEAL)
    except OSError as error:
        raise describe_unread(path, error) from error
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise RecordError(f"'{path}' is damaged: it is not a JSON object with its hash") from error
    if seal != _hash_values(values):
        raise RecordError(f"'{path}' is damaged: it is not what was written (its SHA-256 differs)")
    return validate_record(kind, json.dumps(values).encode(), path)


def _hash_values(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
