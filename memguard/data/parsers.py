"""Parses the text of tables, JSON lines and CSV, and says in one line what of a file is damaged.

They are parsed here instead of by `datasets`, which reads strings that look like dates as
timestamps, `007` as 7 and `NA` as missing, and cannot name the line with an error.
"""

import csv
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from memguard.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Last suffix of a compressed file of text -> compression."""
_BOM = b"\xef\xbb\xbf"


def open_text(path: Path) -> IO[bytes]:
    """Open a file of text, decompressed if its suffix says that it is compressed.

    Raises:
        UnicodeDecodeError: a NUL is among the first bytes: UTF-16 and UTF-32 without their mark
            are valid UTF-8 with NUL characters.
        UnusableSource: the compressed file is damaged.
    """
    opened: IO[bytes] = path.open("rb")
    if compression := COMPRESSIONS.get(path.suffix.lower()):
        import pyarrow

        with opened, refuse_broken(f"it is no whole {compression} file"):
            content = pyarrow.input_stream(opened, compression=compression).read()
        opened = io.BytesIO(content)
    head = opened.read(4)
    if b"\0" in head:
        opened.close()
        raise UnicodeDecodeError("utf-8", head, 0, len(head), "UTF-16 or UTF-32")
    opened.seek(0)
    return opened


def parse_json(file: IO[bytes]) -> list[dict[str, Any]]:
    """Read JSON lines; or one array of objects, or one object, over any number of lines.

    Raises:
        UnusableSource: it is neither.
        UnicodeDecodeError: it is not UTF-8.
    """
    start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
    file.seek(start)
    while (first := file.read(1)).isspace():
        pass
    file.seek(start)
    unit, rows = "entry", dict(enumerate(_load(file.read()), 1)) if first == b"[" else {}
    if first != b"[":
        unit = "line"
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                rows[number] = _load(line, number)
            except BrokenFile:
                if rows:
                    raise
                rows[number] = _load(line + file.read(), number, f"text of lines {number} to")
    for number, row in rows.items():
        if not isinstance(row, dict):
            raise BrokenFile(f"{unit} {number} is not a JSON object")
    return list(rows.values())


def _load(content: bytes, first: int = 1, what: str = "line") -> Any:
    """Read one value; ``first`` is the number of its first line, ``what`` is before its last."""
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError:
        raise
    except RecursionError as error:
        raise BrokenFile(f"line {first} is nested too deeply") from error
    except ValueError as error:
        last = first + getattr(error, "lineno", 1) - 1
        raise BrokenFile(f"{what if last > first else 'line'} {last} is not JSON") from error


def parse_csv(file: IO[bytes]) -> list[dict[str, Any]]:
    """Read rows under a header, with commas between.

    Raises:
        UnusableSource: it is damaged, or other characters separate its columns.
    """
    # The csv module limits a field to 131,072 characters, for the whole process.
    limit, rows = csv.field_size_limit(sys.maxsize), []
    try:
        with io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
            reader = csv.reader(text, strict=True)
            try:
                header = next(reader, [])
                for other in ";\t":
                    if len(header) == 1 and other in header[0]:
                        raise BrokenFile(
                            f"its header separates columns by {other!r}; only commas are read"
                        )
                for row in filter(None, reader):
                    if len(row) != len(header):
                        ends = f"line {reader.line_num} ends a row of {len(row)} fields"
                        raise BrokenFile(f"{ends}, not {len(header)}")
                    rows.append(dict(zip(header, row, strict=True)))
            except csv.Error as error:
                raise BrokenFile(f"line {reader.line_num}: {error}") from error
    finally:
        csv.field_size_limit(limit)
    if len(set(header)) != len(header):
        raise BrokenFile("its header names a column twice")
    return rows


class UnusableSource(Exception):
    """A source cannot be read; the message is the reason, without its name."""


class BrokenFile(UnusableSource):
    """A file's content does not match its suffix."""


@contextmanager
def refuse_broken(problem: str) -> Iterator[None]:
    """Turn what a library raises for damage, which may be any error, into `BrokenFile`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # An error of the file system.
        raise BrokenFile(f"{problem} ({type(error).__name__})") from error


@contextmanager
def explain_failures(setting: str, shown: str) -> Iterator[None]:
    """Turn errors of the file system and the parsers into one line that quotes no text."""
    try:
        yield
    except (OSError, UnicodeDecodeError, RecursionError, UnusableSource) as error:
        match error:
            case OSError():
                reason = f"cannot be read: {error.strerror or 'no reason given'}"
            case UnicodeDecodeError():
                reason = "is not UTF-8; convert it"
            case RecursionError():
                reason = "is broken: nested too deeply"
            case _:
                reason = f"is broken: {error}" if isinstance(error, BrokenFile) else f"{error}"
        raise DataError(f"'{setting}': '{shown}' {reason}.") from error
