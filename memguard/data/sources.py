"""Rows of whatever a source names: file, folder, `save_to_disk` folder, hub id, docstrings.

x.jsonl x.json x.csv x.parquet   one row a record
x.npy                            one row a row of token ids [N, T]
x.txt x.md                       one row a file, or one for each part between <|endoftext|>
folder                           rows of its tables; where it has none, of its text files
save_to_disk folder, hub id      rows of the dataset, of its split `train` where it has splits
docstrings:PACKAGE[,PACKAGE]     rows of `docstrings.build_docstring_file`
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memguard.data.docstrings import build_docstring_file
from memguard.data.files import (
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
    NamedFile,
    Table,
    explain_failures,
    read_table,
    read_texts,
    wrap_dataset,
)
from memguard.errors import DataError

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
        source: see the module.
        setting: what to call it in errors.
        text_column: column that the text of text files appears in.
        cache_dir: where derived sources are kept.

    Raises:
        DataError: not there, not readable, broken, or of a kind that is not known.
    """
    if source.startswith(_DOCSTRINGS):
        built = build_docstring_file(source.removeprefix(_DOCSTRINGS).split(","), cache_dir)
        file = NamedFile(path=built, name="docstrings", shown=source)
        yield read_table(file, origin="docstrings", setting=setting)
        return
    path = Path(os.path.expanduser(source))
    file = NamedFile(path=path, name=path.stem, shown=source)
    suffix = path.suffix.lower()
    with explain_failures(setting, source):
        is_folder, exists = path.is_dir(), path.exists()
    if is_folder and source:
        yield from _read_folder(file, setting, text_column)
    elif exists and suffix in TEXT_SUFFIXES:
        yield read_texts([file], origin=path.name, setting=setting, text_column=text_column)
    elif exists and suffix in TABLE_SUFFIXES:
        yield read_table(file, origin=path.name, setting=setting)
    elif exists and source:
        raise DataError(
            f"'{setting}': '{source}' is of no known kind; known are {', '.join(_KNOWN_SUFFIXES)}."
        )
    elif is_missing(source):
        raise DataError(f"'{setting}': there is no file or folder '{source}'. Correct the path.")
    else:
        yield _read_hub(source, setting)


def is_missing(source: str) -> bool:
    """Tell whether a source is a path where nothing is; hub ids and ``docstrings:`` pass."""
    if source.startswith(_DOCSTRINGS):
        return False
    path = Path(os.path.expanduser(source))
    try:
        if source and path.exists():
            return False
    except OSError:
        return False  # It cannot be looked at: reading it will say why.
    return path.suffix.lower() in _KNOWN_SUFFIXES or not _HUB_ID.fullmatch(source)


def _read_folder(folder: NamedFile, setting: str, text_column: str) -> Iterator[Table]:
    origin = folder.path.resolve().name
    if any((folder.path / mark).is_file() for mark in _SAVED_MARKS):
        yield _read_saved(folder, origin, setting)
        return
    with explain_failures(setting, folder.shown):
        inside = sorted(_walk(folder.path))
    # A README beside the tables is not a document.
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
            f"'{setting}': '{folder.shown}' holds no file that ends in one of "
            f"{', '.join(_KNOWN_SUFFIXES)}."
        )


def _walk(path: Path) -> Iterator[str]:
    """Yield files of known kinds, relative, hidden ones left out."""

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
    except Exception as error:  # whatever a half-written folder makes of the library
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
    return wrap_dataset(loaded, name=name, origin=name)


def _read_hub(source: str, setting: str) -> Table:
    """Load a hub id through the cache of `datasets`, where earlier downloads are found offline."""
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
            f"'{setting}': '{source}' is neither a file or folder here nor a dataset that could be "
            f"got from the hub ({type(error).__name__}). Correct the path, or log in and connect."
        ) from error
    except Exception as error:  # no such split, no such configuration, a broken repository
        reason = (str(error).splitlines() or [""])[0][:200]
        raise DataError(
            f"'{setting}': hub dataset '{source}' cannot be used: {reason} "
            "Write 'ID:CONFIG' for a configuration, or save the split you mean to disk."
        ) from error
    return wrap_dataset(loaded, name=match["id"].rsplit("/", 1)[-1], origin=source)


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
