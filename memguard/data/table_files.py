"""Reads one file or dataset as rows with the same columns."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memguard.data.parsers import (
    COMPRESSIONS,
    BrokenFile,
    UnusableSource,
    explain_failures,
    open_text,
    parse_csv,
    parse_json,
    refuse_broken,
)

END_OF_TEXT = "<|endoftext|>"
IDS_COLUMN = "input_ids"
"""Column with token ids instead of text; the only column of an array."""
_TABLES, _TEXTS = (".jsonl", ".ndjson", ".json", ".csv"), (".txt", ".md")
_BINARY = (".parquet", ".npy")
TABLE_SUFFIXES = (*(end + more for more in ("", *COMPRESSIONS) for end in _TABLES), *_BINARY)
TEXT_SUFFIXES = tuple(end + more for more in ("", *COMPRESSIONS) for end in _TEXTS)
KNOWN_SUFFIXES = f"{', '.join((*_TABLES, *_BINARY, *_TEXTS))}, and those of text with .gz or .zst"
"""For messages."""
_TEXT_COLUMNS = ("id", "text")


Read = Callable[[Sequence[str]], Iterator[tuple[Any, ...]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows with the same columns."""

    name: str
    """Prefix of the generated ids of rows without an id."""
    origin: str
    """Short name of the source, never a full path, since it is written into manifests."""
    columns: tuple[str, ...]
    read: Read
    """Yields the values of the given columns row by row."""
    has_made_ids: bool = False
    """Whether its column `id` is made of file names and numbers, as for text files."""
    may_lack_header: bool = False
    """Whether its columns may be values of a first row, as in a CSV file without a header."""
    note: str = ""
    """What of its folder is not read, for the user; empty: nothing is left out."""
    format: Literal["text", "input_ids"] | None = None
    """Of a file that has no choice of formats: its column has that name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedFile:
    """A file, or a dataset that is read like one, and its names."""

    path: Path
    name: str
    """Prefix of the ids of its rows."""
    origin: str
    """Short name of its source, see `Table`."""
    shown: str
    """The path as the user wrote it, for errors."""
    setting: str
    """The setting that names it, for errors."""
    kind: Literal["file", "saved", "hub", "docstrings"] = "file"
    note: str = ""
    """What else of its folder is not read, see `Table`."""

    @property
    def place(self) -> str:
        """The whole path, which two files do not share; links are not followed."""
        return os.path.abspath(self.path)

    def make_table(self, columns: Sequence[str], read: Read, **more: Any) -> Table:
        """Return its rows as a table."""
        named: dict[str, Any] = {"name": self.name, "origin": self.origin, "note": self.note}
        return Table(columns=tuple(columns), read=read, **named, **more)


def find_suffix(name: str) -> str:
    """Return the suffix of a file name that says how it is read, as it is written; or ``""``."""
    ends = (end for end in (*TABLE_SUFFIXES, *TEXT_SUFFIXES) if name.lower().endswith(end))
    return name[len(name) - max(map(len, ends), default=0) :]


def read_file(file: NamedFile) -> Table:
    """Read a JSON lines, JSON, CSV, parquet or text file, or an array of token ids.

    Raises:
        DataError: the file cannot be read, or its content does not match its suffix.
    """
    suffix = find_suffix(file.path.name).lower()
    with explain_failures(file.setting, file.shown):
        if suffix == ".parquet":
            return _read_parquet(file)
        if suffix == ".npy":
            return _read_array(file)
        with open_text(file.path) as opened:
            if suffix in TEXT_SUFFIXES:
                return _read_text(file, opened.read().decode("utf-8-sig"))
            is_csv = suffix.startswith(".csv")
            rows = parse_csv(opened) if is_csv else parse_json(opened)
    columns = dict.fromkeys(column for row in rows for column in row)

    def read(columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        return (tuple(map(row.get, columns)) for row in rows)

    return file.make_table(tuple(columns), read, may_lack_header=is_csv)


def _read_text(file: NamedFile, text: str) -> Table:
    """Return one row, or one per part between end-of-text marks; line ends stay as they are."""
    parts, rows = text.split(END_OF_TEXT), [(file.name, text)]
    if len(parts) > 1:
        if not parts[-1].strip():
            del parts[-1]
        rows = [(f"{file.name}-{row:06d}", part.strip("\r\n")) for row, part in enumerate(parts)]

    def read(columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        order = [_TEXT_COLUMNS.index(column) for column in columns]
        return (tuple(row[place] for place in order) for row in rows)

    return file.make_table(_TEXT_COLUMNS, read, has_made_ids=True, format="text")


def wrap_dataset(dataset: Any, file: NamedFile) -> Table:
    """Return a `datasets.Dataset` as a table; damage is detected when rows are read."""

    def read(columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        with (
            explain_failures(file.setting, file.shown),
            refuse_broken("its columns cannot be read"),
        ):
            # Decode only the needed columns: others may contain images.
            chosen = dataset.select_columns(list(columns))
            # A damaged offset would be read beyond the mapped file: a bus error.
            chosen.data.validate(full=True)
            for batch in chosen.iter(batch_size=1000):
                yield from zip(*(batch[column] for column in columns), strict=True)

    return file.make_table(dataset.column_names, read)


def read_saved(folder: NamedFile) -> Table:
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
        others = ", ".join(name for name in loaded if name != "train")
        if "train" not in loaded:
            raise UnusableSource(
                f"has no split 'train' but {others}; name the folder of the split you mean"
            )
        loaded = loaded["train"]
        folder = dataclasses.replace(folder, note=others and f"split {others}")
    return wrap_dataset(loaded, folder)


def read_hub(file: NamedFile, match: re.Match[str]) -> Table:
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
    return wrap_dataset(loaded, file)


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


def _read_parquet(file: NamedFile) -> Table:
    import datasets
    import pyarrow.parquet

    with refuse_broken("it is not a parquet file"), file.path.open("rb") as opened:
        names = pyarrow.parquet.ParquetFile(opened).schema_arrow.names

    def read(columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        # Only the needed columns: `datasets` has no type for some others, such as maps.
        with (
            explain_failures(file.setting, file.shown),
            refuse_broken("its columns cannot be read"),
            file.path.open("rb") as opened,
        ):
            # Not load_dataset, which writes a copy of the user's text into its cache. Page
            # checksums are verified where present; without one only invalid data is detected.
            parquet = pyarrow.parquet.ParquetFile(opened, page_checksum_verification=True)
            # The name `a.b` also reads the part b of a column a.
            table = parquet.read(columns=list(columns)).select(list(columns))
            dataset = datasets.Dataset(table)
        yield from wrap_dataset(dataset, file).read(columns)

    return file.make_table(names, read)


def _read_array(file: NamedFile) -> Table:
    """Read token ids [N, T], one document per row."""
    with file.path.open("rb") as opened:
        try:
            ids_NT = np.lib.format.read_array(opened, allow_pickle=False)
        except Exception as error:  # the header is parsed as Python and may raise anything
            ragged = "Object arrays" in str(error)
            raise BrokenFile(
                "it holds Python objects, as rows of different lengths do; write them as jsonl "
                f"with a column '{IDS_COLUMN}'"
                if ragged
                else "it is not a .npy file"
            ) from error
    if ids_NT.dtype.kind not in "iu" or ids_NT.ndim != 2:
        raise BrokenFile(
            f"it holds {ids_NT.dtype} of shape {ids_NT.shape}; token ids are integers of shape "
            "(documents, tokens)"
        )

    def read(columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        return ((row.tolist(),) * len(columns) for row in ids_NT)

    return file.make_table((IDS_COLUMN,), read, format="input_ids")
