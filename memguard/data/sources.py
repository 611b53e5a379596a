"""Reads the rows of a source: file, folder, `save_to_disk` folder, hub id or docstrings.

x.jsonl x.json x.csv x.parquet   one row per record
x.npy                            one row per row of token ids [N, T]
x.txt x.md                       one row per file, or per part between <|endoftext|> marks
folder                           rows of its tables; if it has none, of its text files
save_to_disk folder, hub id      rows of the dataset, or of its split `train` if it has splits
docstrings:PACKAGE[,PACKAGE]     rows of `docstrings.build_docstring_file`

`tables.py` reads the files.
"""

import dataclasses
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memguard.data.docstrings import build_docstring_file
from memguard.data.file_kinds import check_file_kind
from memguard.data.table_files import (
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
    NamedFile,
    Table,
    explain_failures,
    read_table,
    read_texts,
    wrap_dataset,
)
from memguard.errors import MAX_PATH, DataError, check_name, shorten

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


def read_source(source: str, *, setting: str, cache_dir: Path) -> Iterator[Table]:
    """Yield the tables of one source, in an order that depends on names only.

    Args:
        source: see the module's docstring.
        setting: name of the source in errors.
        cache_dir: folder for derived sources.

    Raises:
        DataError: the source is missing, not readable, invalid or of an unknown type.
    """
    if source.startswith(_DOCSTRINGS):
        built = build_docstring_file(source.removeprefix(_DOCSTRINGS).split(","), cache_dir)
        file = NamedFile(path=built, name="docstrings", shown=source)
        yield dataclasses.replace(
            read_table(file, origin="docstrings", setting=setting), format="text"
        )
        return
    check_source(source, setting=setting)
    path, shown = Path(os.path.expanduser(source)), shorten(source, MAX_PATH)
    file = NamedFile(path=path, name=path.stem, shown=shown)
    suffix = path.suffix.lower()
    with explain_failures(setting, shown):
        is_folder, exists = path.is_dir(), path.exists()
    if is_folder and source:
        yield from _read_folder(file, setting)
    elif exists and suffix in TEXT_SUFFIXES:
        yield read_texts([file], origin=path.name, setting=setting)
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


def _read_folder(folder: NamedFile, setting: str) -> Iterator[Table]:
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
        yield read_texts(files, origin=origin, setting=setting)
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
