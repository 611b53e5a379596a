"""Reads the rows of a source: file, pattern, folder, `save_to_disk` folder, hub id or docstrings.

x.jsonl x.json x.csv x.parquet   one row per record
x.npy                            one row per row of token ids [N, T]
x.txt x.md                       one row per file, or per part between <|endoftext|> marks
folder, d/*.jsonl                rows of all files; see `source_files.py`
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
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from memguard.data.parsers import explain_failures
from memguard.data.source_files import (
    expand_pattern,
    find_files,
    list_files,
    name_files,
    refuse_endless,
)
from memguard.data.table_files import (
    NamedFile,
    Table,
    find_suffix,
    read_file,
    read_hub,
    read_saved,
)
from memguard.errors import MAX_PATH, DataError, check_name, shorten
from memguard.records.record import make_private_folder, write_atomically

_DOCSTRINGS = "docstrings:"
_NAME = r"[A-Za-z0-9][\w.-]*"
_HUB_ID = re.compile(
    rf"(?P<id>{_NAME}(/{_NAME})?)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?"
)


def read_sources(
    sources: Sequence[str | Table], *, beside: Sequence[str] = (), setting: str, cache_dir: Path
) -> Iterator[Table]:
    """Yield the tables of sources; the order of those of a source depends on names only.

    No two files give rows the same made ids, those of the sources ``beside`` included. ``setting``
    names the sources in errors, ``cache_dir`` is for derived sources.

    Raises:
        DataError: a source is missing, not readable, invalid or of an unknown type; or a file is
            named twice.
    """
    found: list[Table | NamedFile] = []
    for source in sources:
        found += [source] if isinstance(source, Table) else _find(source, setting)
    files = [file for file in found if isinstance(file, NamedFile)]
    count = Counter(file.place for file in files)
    twice = next((file.shown for file in files if count[file.place] > 1), None)
    if twice is not None:
        raise DataError(f"'{setting}' names '{twice}' twice: remove one of the two.")
    for other in beside:
        with suppress(DataError):  # It is reported when this source is read.
            files += _find(other, setting)
    names = name_files(files)
    for table in found:
        if isinstance(table, Table):
            yield table
            continue
        with explain_failures(setting, table.shown):
            yield _read(dataclasses.replace(table, name=names[table.place]), cache_dir)


def _find(source: str, setting: str) -> Iterator[NamedFile]:
    if source.startswith(_DOCSTRINGS):
        kind: Literal["docstrings"] = "docstrings"
        yield NamedFile(
            path=Path(source), name=kind, origin=kind, shown=source, setting=setting, kind=kind
        )
        return
    check_source(source, setting=setting)
    if missing := describe_missing(source):
        raise DataError(f"'{setting}': {missing}. Correct the path.")
    for path in expand_pattern(source):
        check_name(path, setting, DataError)
        with explain_failures(setting, shorten(path, MAX_PATH)):
            exists = Path(os.path.expanduser(path)).exists()
        if not exists and (match := _HUB_ID.fullmatch(path)):
            name = match["id"].rsplit("/", 1)[-1]
            yield NamedFile(
                path=Path(path), name=name, origin=path, shown=path, setting=setting, kind="hub"
            )
            continue
        for file in find_files(path, setting=setting):
            yield file if path == source else dataclasses.replace(file, origin=Path(source).name)


def _read(file: NamedFile, cache_dir: Path) -> Table:
    match file.kind:
        case "docstrings":
            names = file.shown.removeprefix(_DOCSTRINGS).split(",")
            built = dataclasses.replace(file, path=build_docstring_file(names, cache_dir))
            return dataclasses.replace(read_file(built), format="text")
        case "saved":
            return read_saved(file)
        case "hub" if match := _HUB_ID.fullmatch(file.shown):
            return read_hub(file, match)
        case _:
            return read_file(file)


def list_stamps(sources: Sequence[str], cache_dir: Path) -> dict[str, str]:
    """Return size and modification time (ns) of each file of sources, by path; none is opened.

    A source whose files are not known has an empty one. Files of docstrings are built.
    """
    stamps: dict[str, str] = {}
    for source in sources:
        place, match, own = source, _HUB_ID.fullmatch(source), {source: ""}
        with suppress(DataError, OSError):  # It is reported when this source is read.
            if source.startswith(_DOCSTRINGS):
                names = source.removeprefix(_DOCSTRINGS).split(",")
                place = str(build_docstring_file(names, cache_dir))
            elif match is not None and not os.path.exists(source):
                from huggingface_hub.constants import HF_HUB_CACHE

                place = f"{HF_HUB_CACHE}/datasets--{match['id'].replace('/', '--')}"
            found = [(str(file), file.stat()) for file in list_files(place)]
            own = {name: f"{now.st_size} {now.st_mtime_ns}" for name, now in found} or own
        stamps |= own
    return stamps


def describe_missing(source: str) -> str:
    """Return that a path, or what a pattern names, does not exist; empty for other sources."""
    path, paths = Path(os.path.expanduser(source)), expand_pattern(source)
    if paths != [source]:
        none = f"no file matches the pattern '{shorten(source, MAX_PATH)}'"
        return none if not paths else ""
    try:
        if source.startswith(_DOCSTRINGS) or (source and path.exists()):
            return ""
    except OSError:
        return ""  # The path cannot be examined; reading it reports the reason.
    if _HUB_ID.fullmatch(source) and not find_suffix(path.name):
        return ""
    return f"there is no file or folder '{shorten(source, MAX_PATH)}'"


def check_source(source: str, *, setting: str) -> None:
    """Reject a name that is not UTF-8, and a FIFO, a socket or a device: reading may never end.

    Raises:
        DataError: the source is one of them.
    """
    check_name(source, setting, DataError)
    if not source.startswith(_DOCSTRINGS):
        for path in expand_pattern(source):
            with explain_failures(setting, shorten(path, MAX_PATH)):
                refuse_endless(Path(os.path.expanduser(path)))


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
        make_private_folder(cache_dir)
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
