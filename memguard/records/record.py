"""What every record is, and how it is written and read back."""

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from memguard.errors import RecordError

# Files and folders that appear under their name only when they are complete.
#
#     make_aside(folder)           .NAME.RANDOM beside it: what is written there is not seen yet
#     commit(aside, folder)        renamed to NAME; an older one is replaced
#     written_aside(folder)        both, on one process; nothing is left after an error
#
# A process that is killed leaves only names that begin with a dot; who locks the folder deletes
# them.


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file under another name, then rename it: readers see all of it or none.

    ``mode`` is that of a new file, less the umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _name_aside(path)
    # The umask takes from the mode, as from that of every other file.
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


def make_aside(folder: Path) -> Path:
    """Make an empty folder, mode 0755 less the umask, to be committed as ``folder``."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = _name_aside(folder)
    aside.mkdir(mode=0o755)
    return aside


def _name_aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def commit(aside: Path, folder: Path) -> None:
    """Give a complete folder its name; an older one of that name is deleted after that.

    Its files get mode 0644 less the umask: some libraries write theirs for their owner alone.
    """
    for path in aside.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(stat.S_IMODE(aside.stat().st_mode) & 0o644)
    replaced = hide(folder) if folder.exists() else None
    os.rename(aside, folder)
    flush(folder.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def hide(folder: Path) -> Path:
    """Take a folder's name away in one step; return what it is called until it is deleted."""
    hidden = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(folder, hidden)
    return hidden


@contextmanager
def cleared_on_error(aside: Path | None) -> Iterator[None]:
    """Delete what was written aside if the block fails; None on ranks that did not make it."""
    try:
        yield
    except BaseException:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        raise


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to, which becomes ``folder`` at the end of the block."""
    aside = make_aside(folder)
    with cleared_on_error(aside):
        yield aside
        commit(aside, folder)


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


RecordT = TypeVar("RecordT", bound="Record")


class Record(BaseModel):
    """Frozen, closed, without NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


def format_now() -> str:
    """Return the time in UTC; SOURCE_DATE_EPOCH fixes it for byte-equal records."""
    fixed = os.environ.get("SOURCE_DATE_EPOCH")
    moment = datetime.fromtimestamp(int(fixed), UTC) if fixed else datetime.now(UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def save_record(record: Record, path: Path) -> None:
    """Write a record as indented JSON, whole or not at all."""
    write_atomically(path, (record.model_dump_json(indent=2, by_alias=True) + "\n").encode())


def load_record(kind: type[RecordT], path: Path) -> RecordT:
    """Read a record back.

    Raises:
        RecordError: missing, not JSON, or of another schema.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordError(f"'{path}' cannot be read: {error.strerror}") from error
    return validate_record(kind, content, path)


def validate_record(kind: type[RecordT], content: bytes, path: Path) -> RecordT:
    """Return the record that the JSON of a file holds.

    Raises:
        RecordError: not JSON, or of another schema; names ``path``.
    """
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "top level"
        raise RecordError(
            f"'{path}' is not a {kind.__name__} this version reads ({place}: {first['msg']}). "
            "Make it again, or use the version that wrote it."
        ) from error
