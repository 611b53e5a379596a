"""Reads the rows of a source: file, folder, `save_to_disk` folder, hub id or docstrings.

x.jsonl x.json x.csv x.parquet   one row per record
x.npy                            one row per row of token ids [N, T]
x.txt x.md                       one row per file, or per part between <|endoftext|> marks
folder                           rows of its tables; if it has none, of its text files
save_to_disk folder, hub id      rows of the dataset, or of its split `train` if it has splits
docstrings:PACKAGE[,PACKAGE]     rows of `docstrings.build_docstring_file`

JSON lines and CSV are parsed here instead of by `datasets`, which reads strings that look like
dates as timestamps, `007` as 7 and `NA` as missing, and cannot name the line with an error.
"""

import csv
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memguard.data.docstrings import build_docstring_file
from memguard.data.file_kinds import check_file_kind
from memguard.errors import MAX_PATH, DataError, check_name, shorten

END_OF_TEXT = "<|endoftext|>"
TABLE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".npy")
IDS_COLUMN = "input_ids"
"""Column with token ids instead of text; the only column of an array."""
TEXT_SUFFIXES = (".txt", ".md")
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


def read_texts(files: Sequence[NamedFile], *, origin: str, setting: str, text_column: str) -> Table:
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
        order = [("id", text_column).index(column) for column in columns]
        return (tuple(row[place] for place in order) for row in rows)

    return Table(name=origin, origin=origin, columns=("id", text_column), read=read)


def wrap_dataset(dataset: Any, *, file: NamedFile, origin: str, setting: str) -> Table:
    """Return a `datasets.Dataset` as a table; damage is detected when rows are read."""

    def read(columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        try:
            # Decode only the needed columns: others may contain images.
            chosen = dataset.select_columns(list(columns))
            # A damaged offset would be read beyond the mapped file: a bus error.
            chosen.data.validate(full=True)
            for batch in chosen.iter(batch_size=1000):
                yield from zip(*(batch[column] for column in columns), strict=True)
        except Exception as error:  # damaged columns make the libraries raise various errors
            raise DataError(
                f"'{setting}': '{file.shown}' is broken: its columns cannot be read "
                f"({type(error).__name__})."
            ) from error

    return Table(name=file.name, origin=origin, columns=tuple(dataset.column_names), read=read)


def _read_parquet(file: NamedFile, origin: str, setting: str) -> Table:
    import datasets
    import pyarrow
    import pyarrow.parquet

    try:
        # Not load_dataset, which writes a copy of the user's text into its cache. Page checksums
        # are verified where present; without one only invalid data is detected.
        table = pyarrow.parquet.read_table(file.path, page_checksum_verification=True)
        dataset = datasets.Dataset(table)
    except Exception as error:  # a damaged file makes the library raise various errors
        if isinstance(error, OSError) and error.errno is not None:
            raise  # An error of the file system.
        raise _BrokenFile(f"it is not a parquet file ({type(error).__name__})") from error
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

    return Table(name=file.name, origin=origin, columns=(IDS_COLUMN,), read=read)


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
    limit = csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            try:
                header = next(reader, [])
                rows = [_label_fields(header, row, reader.line_num) for row in reader if row]
            except csv.Error as error:
                raise _BrokenFile(f"line {reader.line_num}: {error}") from error
    finally:
        csv.field_size_limit(limit)
    if len(set(header)) != len(header):
        raise _BrokenFile("its header names a column twice")
    return rows


def _label_fields(header: Sequence[str], row: Sequence[str], line: int) -> dict[str, Any]:
    if len(row) != len(header):
        raise _BrokenFile(f"line {line} ends a row of {len(row)} fields, not {len(header)}")
    return dict(zip(header, row, strict=True))


class _BrokenFile(Exception):
    """A file's content does not match its suffix."""


@contextmanager
def explain_failures(setting: str, shown: str) -> Iterator[None]:
    """Turn errors of the file system and the parsers into one line that quotes no text."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"'{setting}': '{shown}' cannot be read: {error.strerror or 'no reason given'}."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"'{setting}': '{shown}' is not UTF-8; convert it.") from error
    except _BrokenFile as error:
        raise DataError(f"'{setting}': '{shown}' is broken: {error}.") from error
    except RecursionError as error:
        raise DataError(f"'{setting}': '{shown}' is broken: nested too deeply.") from error


_KNOWN_SUFFIXES = (*TABLE_SUFFIXES, *TEXT_SUFFIXES)
_DOCSTRINGS = "docstrings:"
_SAVED_MARKS = ("dataset_info.json", "state.json", "dataset_dict.json")
_NAME = r"[A-Za-z0-9][\w.-]*"
_HUB_ID = re.compile(
    rf"(?P<id>{_NAME}(/{_NAME})?)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?"
)
_SPLITS = {"train": "train", "test": "test", "eval": "test", "dev": "validation"} | dict.fromkeys(
    ("val", "valid", "validation"), "validation"
)


def read_source(source: str, *, setting: str, text_column: str, cache_dir: Path) -> Iterator[Table]:
    """Yield the tables of one source, in an order that depends on names only.

    Args:
        source: see the module's docstring.
        setting: name of the source in errors.
        text_column: name of the column for the text of text files.
        cache_dir: folder for derived sources.

    Raises:
        DataError: the source is missing, not readable, invalid or of an unknown type.
    """
    if source.startswith(_DOCSTRINGS):
        built = build_docstring_file(source.removeprefix(_DOCSTRINGS).split(","), cache_dir)
        file = NamedFile(path=built, name="docstrings", shown=source)
        yield read_table(file, origin="docstrings", setting=setting)
        return
    check_source(source, setting=setting)
    path, shown = Path(os.path.expanduser(source)), shorten(source, MAX_PATH)
    file = NamedFile(path=path, name=path.stem, shown=shown)
    suffix = path.suffix.lower()
    with explain_failures(setting, shown):
        is_folder, exists = path.is_dir(), path.exists()
    if is_folder and source:
        yield from _read_folder(file, setting, text_column)
    elif exists and suffix in TEXT_SUFFIXES:
        yield read_texts([file], origin=path.name, setting=setting, text_column=text_column)
    elif exists and suffix in TABLE_SUFFIXES:
        yield read_table(file, origin=path.name, setting=setting)
    elif exists and source:
        raise DataError(
            f"'{setting}': '{shown}' has an unknown file type; supported are "
            f"{', '.join(_KNOWN_SUFFIXES)}."
        )
    elif is_missing(source):
        raise DataError(f"'{setting}': there is no file or folder '{shown}'. Correct the path.")
    else:
        yield _read_hub(source, setting)


def is_missing(source: str) -> bool:
    """Return whether a source is a path that does not exist; hub ids and ``docstrings:`` pass."""
    if source.startswith(_DOCSTRINGS):
        return False
    path = Path(os.path.expanduser(source))
    try:
        if source and path.exists():
            return False
    except OSError:
        return False  # The path cannot be examined; reading it reports the reason.
    return path.suffix.lower() in _KNOWN_SUFFIXES or not _HUB_ID.fullmatch(source)


def check_source(source: str, *, setting: str) -> None:
    """Reject a name that is not UTF-8, and a FIFO, a socket or a device: reading may never end.

    Raises:
        DataError: the source is one of them.
    """
    check_name(source, setting, DataError)
    if not source.startswith(_DOCSTRINGS):
        path = Path(os.path.expanduser(source))
        check_file_kind(path, shown=shorten(source, MAX_PATH), setting=setting)


def _read_folder(folder: NamedFile, setting: str, text_column: str) -> Iterator[Table]:
    origin = folder.path.resolve().name
    check_name(origin, setting, DataError)
    if any((folder.path / mark).is_file() for mark in _SAVED_MARKS):
        yield _read_saved(folder, origin, setting)
        return
    with explain_failures(setting, folder.shown):
        inside = sorted(_walk(folder.path))
    for name in inside:
        check_name(name, setting, DataError)
        check_file_kind(folder.path / name, shown=f"{folder.shown}/{name}", setting=setting)
    # A README in the folder of the tables is not a document.
    tables = [name for name in inside if name.lower().endswith(TABLE_SUFFIXES)]
    if tables:
        _check_one_split(tables, folder, setting)
        for name in tables:
            file = _inside(folder, name, name.rsplit(".", 1)[0])
            yield read_table(file, origin=origin, setting=setting)
    elif inside:
        files = [_inside(folder, name, name) for name in inside]
        yield read_texts(files, origin=origin, setting=setting, text_column=text_column)
    else:
        raise DataError(
            f"'{setting}': '{folder.shown}' has no file that ends in one of "
            f"{', '.join(_KNOWN_SUFFIXES)}."
        )


def _walk(path: Path) -> Iterator[str]:
    """Yield relative paths of files with known suffixes, hidden files left out."""

    def stop(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(path, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and name.lower().endswith(_KNOWN_SUFFIXES):
                yield Path(folder, name).relative_to(path).as_posix()


def _inside(folder: NamedFile, name: str, stem: str) -> NamedFile:
    return NamedFile(path=folder.path / name, name=stem, shown=f"{folder.shown}/{name}")


def _check_one_split(names: list[str], folder: NamedFile, setting: str) -> None:
    words = {word for name in names for word in re.split(r"[^a-z]+", name.lower())}
    splits = sorted({_SPLITS[word] for word in words if word in _SPLITS})
    if len(splits) > 1:
        raise DataError(
            f"'{setting}': '{folder.shown}' holds the splits {', '.join(splits)}; name the files "
            "you mean."
        )


def _read_saved(folder: NamedFile, name: str, setting: str) -> Table:
    import datasets

    try:
        with _quiet_datasets():
            loaded = datasets.load_from_disk(str(folder.path))
    except Exception as error:  # an incomplete folder makes the library raise various errors
        raise DataError(
            f"'{setting}': '{folder.shown}' looks like a save_to_disk folder but cannot be read "
            f"({type(error).__name__}); save it again."
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            raise DataError(
                f"'{setting}': '{folder.shown}' has no split 'train' but {', '.join(loaded)}; "
                "name the folder of the split you mean."
            )
        loaded = loaded["train"]
    named = dataclasses.replace(folder, name=name)
    return wrap_dataset(loaded, file=named, origin=name, setting=setting)


def _read_hub(source: str, setting: str) -> Table:
    """Load a dataset of the hub through the cache of `datasets`, which also works offline."""
    import datasets

    match = _HUB_ID.fullmatch(source)
    assert match is not None, "checked by the caller"
    try:
        with _quiet_datasets():
            loaded = datasets.load_dataset(
                match["id"], match["config"], revision=match["revision"], split="train"
            )
    except OSError as error:
        raise DataError(
            f"'{setting}': '{shorten(source, MAX_PATH)}' is neither a file or folder here nor a "
            f"dataset that could be loaded from the hub ({type(error).__name__}). Correct the "
            "path, or log in and connect to the internet."
        ) from error
    except Exception as error:  # no such split, no such configuration, a broken repository
        reason = (str(error).splitlines() or [""])[0][:200]
        raise DataError(
            f"'{setting}': hub dataset '{source}' cannot be used: {reason} "
            "Write 'ID:CONFIG' for a configuration, or save the split you mean to disk."
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
