"""Base class of all records, and functions to write files, folders and records atomically."""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from memguard.errors import ConfigError, RecordError, UnreadableError, shorten

# Files and folders that appear under their name only when they are complete.
#
#     make_temporary_folder(folder)   creates .memguard-tmp-NAME.RANDOM in the same parent folder
#     commit(temporary, folder)       renames it to NAME and replaces an older one
#     atomic_folder(folder)           both, on one process; the temporary one is locked, and deleted
#                                     after an error
#     clear_left_folders(folder)      deletes those of killed processes, whose locks are free
#     list_left_folders(folder)       those that they left beside it, for other names
#
# A process that is killed leaves only names that begin with `TEMPORARY`. In a run the next process
# that locks the run deletes them.
#
# Files that contain texts, or with which a guessed text can be confirmed, are private: mode 0600
# when they are created (`PRIVATE_MODE`, `open_private`). The umask decides who can read the others.

TEMPORARY = ".memguard-tmp-"
"""Start of the names of files and folders that are not complete, or about to be deleted."""
PRIVATE_MODE = 0o600
AS_OWNER = "Run this command as the user whom the file belongs to"
"""What a user who may not read a file can do."""


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file under a temporary name, then rename it: readers see all of it or none.

    ``mode`` is the mode of a new file, before the umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _name_temporary(path)
    # The umask applies, as to every other file.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_new(path: Path, text: str) -> None:
    """Write a file of the user's; ConfigError if it exists."""
    if os.path.lexists(path):
        raise ConfigError(f"'{path}' exists already; choose another name or delete it")
    write_atomically(path, text.encode())


def open_private(path: Path) -> BinaryIO:
    """Create a file that only its owner can read, and open it for writing."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_MODE)
    return os.fdopen(handle, "wb")


def make_private_folder(folder: Path) -> None:
    """Create a folder and those above it that are missing, mode 0700 whatever the umask."""
    for path in (*reversed(folder.parents), folder):
        path.mkdir(mode=0o700, exist_ok=True)


def make_temporary_folder(folder: Path) -> Path:
    """Create an empty temporary folder (mode 0755 less the umask) to commit as ``folder``."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = _name_temporary(folder)
    temporary.mkdir(mode=0o755)
    return temporary


def _name_temporary(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY}{path.name}.{secrets.token_hex(4)}")


def commit(temporary: Path, folder: Path, *, private: Collection[str] = ()) -> None:
    """Rename a complete temporary folder to ``folder``, then delete an older one of that name.

    Its files get mode 0644 less the umask, because some libraries write files that only their owner
    can read; files at the paths ``private`` stay readable for their owner only.
    """
    readable = stat.S_IMODE(temporary.stat().st_mode) & 0o644
    for path in temporary.rglob("*"):
        if path.is_file() and not path.is_symlink():
            is_private = path.relative_to(temporary).as_posix() in private
            path.chmod(PRIVATE_MODE if is_private else readable)
    replaced = hide(folder) if folder.exists() else None
    os.rename(temporary, folder)
    flush(folder.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def hide(folder: Path) -> Path:
    """Rename a folder to a hidden name in one step and return that path, for later deletion."""
    hidden = folder.with_name(f"{TEMPORARY}{folder.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(folder, hidden)
    return hidden


@contextmanager
def cleared_on_error(temporary: Path | None) -> Iterator[None]:
    """Delete a temporary folder if the block fails; None on ranks that did not create it."""
    try:
        yield
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def atomic_folder(folder: Path, *, private: Collection[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder that `commit` names ``folder`` at the end of the block.

    A link is kept: its target is replaced.
    """
    folder = Path(os.path.realpath(folder)) if folder.is_symlink() else folder
    temporary, handle = _make_locked_folder(folder)
    try:
        with cleared_on_error(temporary):
            yield temporary
            commit(temporary, folder, private=private)
    finally:
        os.close(handle)


def _make_locked_folder(folder: Path) -> tuple[Path, int]:
    """Create a temporary folder and lock it until the returned handle is closed."""
    while True:
        temporary = make_temporary_folder(folder)
        handle = os.open(temporary, os.O_RDONLY)
        # Without locks of the file system, `clear_left_folders` deletes nothing.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        # Another process may have deleted it before it was locked.
        if temporary.exists():
            return temporary, handle
        os.close(handle)


def clear_left_folders(folder: Path) -> tuple[list[Path], list[Path]]:
    """Delete temporary folders of `atomic_folder` that killed processes have left.

    Returns:
        The folders that were deleted, and those that remain because the file system has no locks or
        they cannot be deleted. One that another process is writing is in neither.
    """
    deleted, kept = [], []
    for path, name in _find_temporary_folders(folder.parent).items():
        if name != folder.name:
            continue
        try:
            with _locked_folder(path):
                shutil.rmtree(path)
            deleted.append(path)
        except BlockingIOError:
            continue
        except OSError:
            kept.append(path)
    return deleted, kept


def list_left_folders(folder: Path) -> list[Path]:
    """Return temporary folders with files beside a folder, for other names, that no process locks.

    Nothing proves that this package made them, so that they are for a person to delete.
    """
    left = []
    for path, name in _find_temporary_folders(folder.parent).items():
        with contextlib.suppress(OSError), _locked_folder(path):
            if name != folder.name and any(path.iterdir()):
                left.append(path)
    return left


def _find_temporary_folders(parent: Path) -> dict[Path, str]:
    """Return folders that `make_temporary_folder` may have made, with the names they are for."""
    inside: list[Path] = []
    with contextlib.suppress(OSError):  # There is no such folder, or it may not be listed.
        inside = sorted(parent.iterdir())
    pattern = re.compile(rf"{re.escape(TEMPORARY)}(.+)\.[0-9a-f]{{8}}")
    return {
        path: match[1]
        for path in inside
        if (match := pattern.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    }


@contextmanager
def _locked_folder(path: Path) -> Iterator[None]:
    """Lock a temporary folder; BlockingIOError if a process is writing it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


RecordT = TypeVar("RecordT", bound="Record")


class Record(BaseModel):
    """Frozen model without unknown fields and without NaN; `schema_name` is stored as `schema`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        populate_by_name=True,
        serialize_by_alias=True,
    )


def format_now() -> str:
    """Return the time in UTC; SOURCE_DATE_EPOCH fixes it for byte-equal records."""
    fixed = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        moment = datetime.fromtimestamp(int(fixed), UTC) if fixed else datetime.now(UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise ConfigError(
            "the environment variable SOURCE_DATE_EPOCH must be a whole number of seconds since "
            f"1970, up to the year 9999; got '{shorten(ascii(fixed)[1:-1])}'. Correct it or unset "
            "it"
        ) from error
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def save_record(record: Record, path: Path) -> None:
    """Write a record as indented JSON, whole or not at all."""
    values = record.model_dump(mode="json")
    write_atomically(path, f"{format_json(values)}\n".encode())


def format_json(value: Any, indent: str = "") -> str:
    """Return indented JSON in which a list of numbers and texts, such as a column, is one line."""
    inner = f"{indent}  "
    if isinstance(value, dict) and value:
        items = (
            f"{inner}{json.dumps(key, ensure_ascii=False)}: {format_json(item, inner)}"
            for key, item in value.items()
        )
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        items = (f"{inner}{format_json(item, inner)}" for item in value)
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ": "))


def load_record(
    kind: type[RecordT], path: Path, *, convert: Callable[[dict[str, Any]], Any] | None = None
) -> RecordT:
    """Read a record from its file; UnreadableError or RecordError if it cannot be had.

    ``convert`` changes each object as soon as it is parsed, to hold large ones in another form.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise describe_unread(path, error) from error
    if convert is not None:
        # What is wrong with the file is reported below.
        with contextlib.suppress(ValueError, RecursionError):
            return validate_record(kind, json.loads(content, object_hook=convert), path)
    return validate_record(kind, content, path)


def describe_unread(path: Path, error: OSError) -> RecordError:
    """Return the error to raise for a file that could not be read."""
    if isinstance(error, PermissionError):
        return UnreadableError(f"'{path}' cannot be read: no permission. {AS_OWNER}")
    return RecordError(f"'{path}' cannot be read: {error.strerror}")


def validate_record(kind: type[RecordT], content: bytes | Mapping[str, Any], path: Path) -> RecordT:
    """Return the record that the JSON of a file, parsed or not, holds; RecordError names it."""
    try:
        if isinstance(content, bytes):
            return kind.model_validate_json(content)
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("schema",):
            raise RecordError(
                f"'{path}' was written by another version of memguard ({first['input']}), which "
                "this one cannot read"
            ) from error
        place = ".".join(str(part) for part in first["loc"]) or "top level"
        raise RecordError(
            f"'{path}' is not a {kind.__name__} this version reads ({place}: {first['msg']}). "
            "Make it again, or use the version that wrote it."
        ) from error
