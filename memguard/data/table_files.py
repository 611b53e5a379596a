"""Reads one file or dataset as rows with the same columns.

JSON lines and CSV are parsed here instead of by `datasets`, which reads strings that look like
dates as timestamps, `007` as 7 and `NA` as missing, and cannot name the line with an error.
"""

import csv
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memguard.errors import DataError

END_OF_TEXT = "<|endoftext|>"
TABLE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".npy")
IDS_COLUMN = "input_ids"
"""Column with token ids instead of text; the only column of an array."""
TEXT_SUFFIXES = (".txt", ".md")
_TEXT_COLUMNS = ("id", "text")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows with the same columns."""

    name: str
    """Prefix of the generated ids of rows without an id."""
    origin: str
    """Short name of the source, never a full path, since it is written into manifests."""
    columns: tuple[str, ...]
    read: Callable[[Sequence[str]], Iterator[tuple[Any, ...]]]
    """Yields the values of the given columns row by row."""
    has_made_ids: bool = False
    """Whether its column `id` is made of file names and numbers, as for text files."""
    format: Literal["text", "input_ids"] | None = None
    """Of a file that has no choice of formats: its column has that name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedFile:
    """A file and its names."""

    path: Path
    name: str
    """Prefix of the ids of its rows."""
    shown: str
    """The path as the user wrote it, for errors."""


def read_table(file: NamedFile, *, origin: str, setting: str) -> Table:
    """Read a JSON lines, JSON, CSV or parquet file, or an array of token ids.

    Raises:
        DataError: the file cannot be read, or its content does not match its suffix.
    """
    with explain_failures(setting, file.shown):
        suffix = file.path.suffix.lower()
        if suffix == ".parquet":
            return _read_parquet(file, origin, setting)
        if suffix == ".npy":
            return _read_array(file, origin)
        _refuse_wide_characters(file.path)
        rows = _parse_csv(file.path) if suffix == ".csv" else _parse_json(file.path)
    columns = dict.fromkeys(column for row in rows for column in row)

    def read(columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        return (tuple(map(row.get, columns)) for row in rows)

    return Table(name=file.name, origin=origin, columns=tuple(columns), read=read)


def read_texts(files: Sequence[NamedFile], *, origin: str, setting: str) -> Table:
    """Read text files as one table, with one row per file or per part between end-of-text marks.

    Raises:
        DataError: a file cannot be read, or is not UTF-8.
    """
    rows: list[tuple[str, str]] = []
    for file in files:
        with explain_failures(setting, file.shown):
            _refuse_wide_characters(file.path)
            text = file.path.read_text(encoding="utf-8-sig")
        parts = text.split(END_OF_TEXT)
        if len(parts) == 1:
            rows.append((file.name, text))
            continue
        if not parts[-1].strip():
            del parts[-1]
        rows += [(f"{file.name}-{row:06d}", part.strip("\n")) for row, part in enumerate(parts)]

    def read(columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        order = [_TEXT_COLUMNS.index(column) for column in columns]
        return (tuple(row[place] for place in order) for row in rows)

    return Table(
        name=origin,
        origin=origin,
        columns=_TEXT_COLUMNS,
        read=read,
        has_made_ids=True,
        format="text",
    )


def wrap_dataset(dataset: Any, *, file: NamedFile, origin: str, setting: str) -> Table:
    """Return a `datasets.Dataset` as a table; damage is detected when rows are read."""

    def read(columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        with explain_failures(setting, file.shown), _refuse_broken("its columns cannot be read"):
            # Decode only the needed columns: others may contain images.
            chosen = dataset.select_columns(list(columns))
            # A damaged offset would be read beyond the mapped file: a bus error.
            chosen.data.validate(full=True)
            for batch in chosen.iter(batch_size=1000):
                yield from zip(*(batch[column] for column in columns), strict=True)

    return Table(name=file.name, origin=origin, columns=tuple(dataset.column_names), read=read)


def read_saved(folder: NamedFile, name: str, setting: str) -> Table:
    """Read a dataset of `save_to_disk`, or its split `train`.

    Raises:
        UnusableSource: it cannot be read.
    """
    import datasets

    try:
        with _quiet_datasets():
            loaded = datasets.load_from_disk(str(folder.path))
    except Exception as error:  # an incomplete folder makes the library raise various errors
        raise UnusableSource(
            f"looks like a save_to_disk folder but cannot be read ({type(error).__name__}); save "
            "it again"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            others = ", ".join(loaded)
            raise UnusableSource(
                f"has no split 'train' but {others}; name the folder of the split you mean"
            )
        loaded = loaded["train"]
    named = dataclasses.replace(folder, name=name)
    return wrap_dataset(loaded, file=named, origin=name, setting=setting)


def read_hub(source: str, match: re.Match[str], setting: str) -> Table:
    """Load a dataset of the hub through the cache of `datasets`, which also works offline.

    Raises:
        UnusableSource: it cannot be loaded.
    """
    import datasets

    try:
        with _quiet_datasets():
            loaded = datasets.load_dataset(
                match["id"], match["config"], revision=match["revision"], split="train"
            )
    except OSError as error:
        raise UnusableSource(
            "is neither a file or folder here nor a dataset that could be loaded from the hub "
            f"({type(error).__name__}). Correct the path, or log in and connect to the internet"
        ) from error
    except Exception as error:  # no such split, no such configuration, a broken repository
        reason = (str(error).splitlines() or [""])[0][:200]
        raise UnusableSource(
            f"cannot be used: {reason} Write 'ID:CONFIG' for a configuration, or save the split "
            "you mean to disk"
        ) from error
    name = match["id"].rsplit("/", 1)[-1]
    file = NamedFile(path=Path(source), name=name, shown=source)
    return wrap_dataset(loaded, file=file, origin=source, setting=setting)


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    import datasets

    shows_bars = not datasets.are_progress_bars_disabled()
    verbosity = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if shows_bars:
            datasets.enable_progress_bars()


def _read_parquet(file: NamedFile, origin: str, setting: str) -> Table:
    import datasets
    import pyarrow
    import pyarrow.parquet

    with _refuse_broken("it is not a parquet file"):
        # Not load_dataset, which writes a copy of the user's text into its cache. Page checksums
        # are verified where present; without one only invalid data is detected.
        table = pyarrow.parquet.read_table(file.path, page_checksum_verification=True)
        dataset = datasets.Dataset(table)
    return wrap_dataset(dataset, file=file, origin=origin, setting=setting)


def _read_array(file: NamedFile, origin: str) -> Table:
    """Read token ids [N, T], one document per row."""
    with file.path.open("rb") as opened:
        try:
            ids_NT = np.lib.format.read_array(opened, allow_pickle=False)
        except Exception as error:  # the header is parsed as Python and may raise anything
            ragged = "Object arrays" in str(error)
            raise _BrokenFile(
                "it holds Python objects, as rows of different lengths do; write them as jsonl "
                f"with a column '{IDS_COLUMN}'"
                if ragged
                else "it is not a .npy file"
            ) from error
    if ids_NT.dtype.kind not in "iu" or ids_NT.ndim != 2:
        raise _BrokenFile(
            f"it holds {ids_NT.dtype} of shape {ids_NT.shape}; token ids are integers of shape "
            "(documents, tokens)"
        )

    def read(columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        return ((row.tolist(),) * len(columns) for row in ids_NT)

    return Table(
        name=file.name, origin=origin, columns=(IDS_COLUMN,), read=read, format="input_ids"
    )


def _refuse_wide_characters(path: Path) -> None:
    """Refuse UTF-16 and UTF-32 without their mark, which are valid UTF-8 with NUL characters.

    Raises:
        UnicodeDecodeError: a NUL is among the first bytes.
    """
    with path.open("rb") as file:
        head = file.read(4)
    if b"\0" in head:
        raise UnicodeDecodeError("utf-8", head, 0, len(head), "UTF-16 or UTF-32")


def _parse_json(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines, or one array of objects."""
    unit, rows = "line", []
    with path.open("rb") as file:
        start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        file.seek(start)
        while (first := file.read(1)).isspace():
            pass
        file.seek(start)
        if first == b"[":
            try:
                unit, rows = "entry", json.loads(file.read().decode())
            except json.JSONDecodeError as error:
                raise _BrokenFile(f"line {error.lineno} is not JSON") from error
        else:
            for number, line in enumerate(file, start=1):
                try:
                    # A blank line is kept here for its line number and removed below.
                    rows.append(None if line.isspace() else json.loads(line.decode()))
                except UnicodeDecodeError:
                    raise
                except (ValueError, RecursionError) as error:
                    raise _BrokenFile(f"line {number} is not JSON") from error
                if rows[-1] is None and not line.isspace():
                    raise _BrokenFile(f"line {number} is not a JSON object")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) and (row is not None or unit == "entry"):
            raise _BrokenFile(f"{unit} {number} is not a JSON object")
    return [row for row in rows if row is not None]


def _parse_csv(path: Path) -> list[dict[str, Any]]:
    # The csv module limits a field to 131,072 characters, for the whole process.
    limit, rows = csv.field_size_limit(sys.maxsize), []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            try:
                header = next(reader, [])
                for other in ";\t":
                    if len(header) == 1 and other in header[0]:
                        raise _BrokenFile(
                            f"its header separates columns by {other!r}; only commas are read"
                        )
                for row in filter(None, reader):
                    if len(row) != len(header):
                        ends = f"line {reader.line_num} ends a row of {len(row)} fields"
                        raise _BrokenFile(f"{ends}, not {len(header)}")
                    rows.append(dict(zip(header, row, strict=True)))
            except csv.Error as error:
                raise _BrokenFile(f"line {reader.line_num}: {error}") from error
    finally:
        csv.field_size_limit(limit)
    if len(set(header)) != len(header):
        raise _BrokenFile("its header names a column twice")
    return rows


class UnusableSource(Exception):
    """A source cannot be read; the message is the reason, without its name."""


class _BrokenFile(UnusableSource):
    """A file's content does not match its suffix."""


@contextmanager
def _refuse_broken(problem: str) -> Iterator[None]:
    """Turn what a library raises for damage, which may be any error, into `_BrokenFile`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # An error of the file system.
        raise _BrokenFile(f"{problem} ({type(error).__name__})") from error


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
                reason = f"is broken: {error}" if isinstance(error, _BrokenFile) else f"{error}"
        raise DataError(f"'{setting}': '{shown}' {reason}.") from error
