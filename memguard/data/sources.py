"""Reads the rows of a source: file, folder, `save_to_disk` folder, hub id or docstrings.

x.jsonl x.json x.csv x.parquet   one row per record
x.npy                            one row per row of token ids [N, T]
x.txt x.md                       one row per file, or per part between <|endoftext|> marks
folder                           rows of its tables; if it has none, of its text files
save_to_disk folder, hub id      rows of the dataset, or of its split `train` if it has splits
docstrings:NAME[,NAME]           reference documentation of installed packages; NAME may be
                                 `topics` (`help('assert')`) and `stdlib` (Python's own modules)

`table_files.py` reads the files. For docstrings, source files are parsed, never imported. Each
document is the docstring of a module, class, function or method with at least 200 characters. Its
id is the dotted path; exact copies are left out.
"""

import ast
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import re
import stat
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from memguard.data.table_files import (
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
    NamedFile,
    Table,
    UnusableSource,
    explain_failures,
    read_hub,
    read_saved,
    read_table,
    read_texts,
)
from memguard.errors import MAX_PATH, DataError, check_name, shorten
from memguard.records import write_atomically

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

    ``setting`` names the source in errors, ``cache_dir`` is for derived sources.

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
    if is_missing(source):
        shown = shorten(source, MAX_PATH)
        raise DataError(f"'{setting}': there is no file or folder '{shown}'. Correct the path.")
    with _explain(source, setting) as file:
        yield from _read(source, file, setting)


def _read(source: str, file: NamedFile, setting: str) -> Iterator[Table]:
    path, suffix = file.path, file.path.suffix.lower()
    is_folder, exists = path.is_dir(), path.exists()
    if is_folder and source:
        yield from _read_folder(file, setting)
    elif exists and suffix in TEXT_SUFFIXES:
        yield read_texts([file], origin=path.name, setting=setting)
    elif exists and suffix in TABLE_SUFFIXES:
        yield read_table(file, origin=path.name, setting=setting)
    elif exists and source:
        known = ", ".join(_KNOWN_SUFFIXES)
        raise UnusableSource(f"has an unknown file type; supported are {known}")
    else:
        match = _HUB_ID.fullmatch(source)
        assert match is not None, "`is_missing` refuses others"
        yield read_hub(source, match, setting)


@contextmanager
def _explain(source: str, setting: str) -> Iterator[NamedFile]:
    """Give the file or folder of a source; name both in what is raised because of it."""
    path, shown = Path(os.path.expanduser(source)), shorten(source, MAX_PATH)
    with explain_failures(setting, shown):
        yield NamedFile(path=path, name=path.stem, shown=shown)


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
        with _explain(source, setting) as file:
            _refuse_endless(file.path)


def _read_folder(folder: NamedFile, setting: str) -> Iterator[Table]:
    origin = folder.path.resolve().name
    check_name(origin, setting, DataError)
    if any((folder.path / mark).is_file() for mark in _SAVED_MARKS):
        yield read_saved(folder, origin, setting)
        return
    inside = sorted(_walk(folder.path))
    for name in inside:
        check_name(name, setting, DataError)
        with explain_failures(setting, f"{folder.shown}/{name}"):
            _refuse_endless(folder.path / name)
    # A README in the folder of the tables is not a document.
    tables = [name for name in inside if name.lower().endswith(TABLE_SUFFIXES)]
    if tables:
        words = {word for name in tables for word in re.split(r"[^a-z]+", name.lower())}
        splits = sorted({_SPLITS[word] for word in words if word in _SPLITS})
        if len(splits) > 1:
            raise UnusableSource(f"holds the splits {', '.join(splits)}; name the files you mean")
        for name in tables:
            file = _inside(folder, name, name.rsplit(".", 1)[0])
            yield read_table(file, origin=origin, setting=setting)
    elif inside:
        files = [_inside(folder, name, name) for name in inside]
        yield read_texts(files, origin=origin, setting=setting)
    else:
        raise UnusableSource(f"has no file that ends in one of {', '.join(_KNOWN_SUFFIXES)}")


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


_ENDLESS = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"} | dict.fromkeys(
    (stat.S_IFCHR, stat.S_IFBLK), "device"
)


def _refuse_endless(path: Path) -> None:
    """Refuse a FIFO, a socket or a device; what cannot be examined is reported when it is read."""
    try:
        kind = _ENDLESS.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):
        return
    if kind is not None:
        raise UnusableSource(
            f"is a {kind}; documents must be in regular files. Write its content to a file"
        )


# -- docstrings ------------------------------------------------------------------------------------

_MIN_CHARACTERS = 200
# Part of the cached file's name: increase it when the selection or the ids of documents change.
_FORM = 1
# Tests, vendored packages, and internal parts of the standard library.
_SKIPPED_FOLDER = re.compile(
    r"tests?|testing|_?vendor(ed)?|externals|third_party|_bundled|idlelib|lib2to3|turtledemo"
    r"|__pycache__"
)
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# Files without a long triple-quoted string need no parsing; they are a third of all files.
_LONG_STRING = re.compile(
    rf'"""(?:(?!""").){{{_MIN_CHARACTERS}}}|\'\'\'(?:(?!\'\'\').){{{_MIN_CHARACTERS}}}', re.DOTALL
)
# Half of a pair of UTF-16, which a docstring can contain as an escape and no file can.
_SURROGATE = re.compile("[\ud800-\udfff]")


def build_docstring_file(names: Sequence[str], cache_dir: Path) -> Path:
    """Write the documentation of ``names`` as JSON lines {id, text, source}; return the file.

    The file's name depends on the names, Python's version and the packages' versions; an existing
    file is reused.

    Raises:
        DataError: a name is not installed, or `cache_dir` cannot be written.
    """
    names = [name.strip() for name in names]
    roots = {name: _find_root(name) for name in names if name != "topics"}
    parts = [str(_FORM), platform.python_version(), *(f"{n}={_find_version(n)}" for n in names)]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    path = cache_dir / f"docstrings-{key}.jsonl"
    if path.is_file():
        return path
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        place = cache_dir / f".{path.name}.lock"
        with place.open("w") as lock:
            # Runs of a sweep start at the same time: one builds the file, the others wait for it.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                write_atomically(path, "".join(_list_rows(names, roots)).encode())
            place.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"the docstrings cannot be saved in '{cache_dir}': {error.strerror}. Set "
            "MEMGUARD_CACHE to a folder that can be written to."
        ) from error
    return path


def _list_rows(names: Sequence[str], roots: Mapping[str, Path]) -> Iterator[str]:
    """Yield a JSON line for each distinct text."""
    seen_texts: set[str] = set()
    num_of_id: dict[str, int] = {}
    for name in names:
        texts = _list_topics() if name == "topics" else _walk_package(name, roots[name])
        for identifier, text in texts:
            if text in seen_texts:
                continue
            seen_texts.add(text)
            num = num_of_id[identifier] = num_of_id.get(identifier, 0) + 1
            # Overloads and branches may define a name twice.
            unique = identifier if num == 1 else f"{identifier}#{num}"
            yield json.dumps({"id": unique, "text": text, "source": name}) + "\n"


def _find_root(name: str) -> Path:
    """Return a package's folder, or a module's file, without running any of its code."""
    if name == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    # For a dotted name find_spec would import the parent package.
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except ValueError:  # `__main__` and its like have no spec
        spec = None
    if spec is not None:
        for folder in spec.submodule_search_locations or ():
            return Path(folder)
        if spec.origin is not None and spec.origin.endswith(".py"):
            return Path(spec.origin)
    reason = "has no Python source" if spec is not None else "is not installed"
    raise DataError(
        f"'docstrings:{name[:60]}': '{name[:60]}' {reason}; name top-level packages that can be "
        "imported, 'stdlib' or 'topics', with commas between."
    )


def _find_version(name: str) -> str:
    if name in ("topics", "stdlib"):
        return platform.python_version()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # The distribution's name may differ from the imported name (yaml: PyYAML).
        owners = importlib.metadata.packages_distributions().get(name, ())
        return ",".join(f"{owner}={importlib.metadata.version(owner)}" for owner in sorted(owners))


def _list_topics() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        text = inspect.cleandoc(topics[name])
        if len(text) >= _MIN_CHARACTERS:
            yield f"topics.{name}", text


def _walk_package(name: str, root: Path) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, docstring) in the order of files and lines."""
    if root.is_file():
        yield from _read_module(root, name)
        return
    prefix = [] if name == "stdlib" else [name]
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name.isidentifier() and not _SKIPPED_FOLDER.fullmatch(name)
        )
        inside = Path(folder).relative_to(root).parts
        for file in sorted(files):
            stem, suffix = os.path.splitext(file)
            if suffix == ".py" and not stem.startswith("test_"):
                last = [] if stem == "__init__" else [stem]
                yield from _read_module(Path(folder, file), ".".join([*prefix, *inside, *last]))


def _read_module(path: Path, module: str) -> Iterator[tuple[str, str]]:
    try:
        with tokenize.open(path) as file:
            source = file.read()
        if not _LONG_STRING.search(source):
            return
        with warnings.catch_warnings():
            # Suppress warnings about invalid escapes in the parsed source.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # Templates, files for other Python versions, files without read permission.
    pending: list[tuple[str, ast.Module | _Definition]] = [(module, tree)]
    while pending:
        place, node = pending.pop()
        text = ast.get_docstring(node)
        if text is not None and len(text) >= _MIN_CHARACTERS and not _SURROGATE.search(text):
            yield place, text
        if isinstance(node, ast.Module | ast.ClassDef):
            inner = [(f"{place}.{n.name}", n) for n in node.body if isinstance(n, _Definition)]
            pending += reversed(inner)
