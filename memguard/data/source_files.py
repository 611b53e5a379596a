"""Finds the files of sources, and gives each the name that begins the ids of its rows.

    x.jsonl d/*.jsonl    the file; the files that match, in the order of their names
    folder               its tables; if it has none, its text files; hidden files are left out
    save_to_disk folder  the dataset, as one part

A folder is read whole: one that also holds documents in files that are not read is refused, and
files of other types are named in a note. A README or a licence beside tables is no document.

    given                                   names, which are unique among all sources
    x.jsonl                                 x
    2023/x.jsonl, 2024/x.jsonl              2023/x, 2024/x
    folder with x.jsonl, x.csv, sub/y.csv   x.jsonl, x.csv, sub/y
"""

import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memguard.data.parsers import UnusableSource, explain_failures
from memguard.data.table_files import (
    KNOWN_SUFFIXES,
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
    NamedFile,
    find_suffix,
)
from memguard.errors import MAX_PATH, DataError, check_name, shorten

_SAVED_MARKS = ("dataset_info.json", "state.json", "dataset_dict.json")
_SPLITS = {"train": "train", "test": "test", "eval": "test", "dev": "validation"} | dict.fromkeys(
    ("val", "valid", "validation"), "validation"
)
_UNREAD_DATA = re.compile(
    r"\.(tsv|gz|zst|xz|bz2|lz4|zip|7z|tar|tgz|arrow|feather|npz|xlsx?|orc|avro)", re.IGNORECASE
)
"""Suffixes of files that are likely to hold documents, and are not read."""
_ABOUT = re.compile(
    r"(readme|licen[cs]e|notice|changelog|contributing|citation|requirements)([^a-z].*)?",
    re.IGNORECASE,
)
"""Text files beside tables that hold no documents."""
_ROW = re.compile(r"-\d{6,}$")
"""End of the id of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFiles:
    """What of a source is read together, as one table."""

    kind: Literal["table", "texts", "saved", "hub", "docstrings"]
    files: Sequence[NamedFile]
    origin: str
    """Short name of the source, never a full path, since it is written into manifests."""
    note: str = ""
    """What of the folder is not read; empty: nothing is left out."""


def expand_pattern(source: str) -> list[str]:
    """Return the paths that match a pattern, sorted; the source itself if it is none.

    A folder that matches is read whole, so that what matches inside it is left out.
    """
    path = os.path.expanduser(source)
    if not glob.has_magic(path) or os.path.lexists(path):
        return [source]
    matches = sorted(match.rstrip("/") for match in glob.iglob(path, recursive=True))
    folders = tuple(f"{match}/" for match in matches if os.path.isdir(match))
    return [match for match in dict.fromkeys(matches) if not match.startswith(folders)]


def list_files(source: str) -> Iterator[Path]:
    """Yield the local files that a source may read, sorted; none of other sources.

    Raises:
        OSError: a folder cannot be read.
    """
    for path in expand_pattern(source):
        place = os.path.expanduser(path)
        # Unlike Path, os.path returns False for names that are too long to be a path, such as
        # 'docstrings:' with a hundred packages.
        if os.path.isfile(place):
            yield Path(place)
        elif os.path.isdir(place):
            files = (Path(place, name) for name in sorted(_walk(Path(place))))
            yield from filter(os.path.isfile, files)  # no FIFO, whose reading may never end


def find_files(source: str, *, setting: str) -> Iterator[FoundFiles]:
    """Yield what is read of a path that exists, in an order that depends on names only.

    ``setting`` names the source in errors.

    Raises:
        DataError: it cannot be examined, is of an unknown type, or holds what would be left out.
    """
    path, shown = Path(os.path.expanduser(source)), shorten(source, MAX_PATH)
    suffix = find_suffix(path.name).lower()
    name = path.name[: len(path.name) - len(suffix)]
    with explain_failures(setting, shown):
        file = NamedFile(path=path, name=name, shown=shown)
        if path.is_dir():
            yield from _look_into(file, setting)
        elif suffix:
            kind: Literal["table", "texts"] = "texts" if suffix in TEXT_SUFFIXES else "table"
            yield FoundFiles(kind=kind, files=[file], origin=path.name)
        else:
            raise UnusableSource(f"has an unknown file type; supported are {KNOWN_SUFFIXES}")


def _look_into(folder: NamedFile, setting: str) -> Iterator[FoundFiles]:
    origin = folder.path.resolve().name
    check_name(origin, setting, DataError)
    if any((folder.path / mark).is_file() for mark in _SAVED_MARKS):
        named = NamedFile(path=folder.path, name=origin, shown=folder.shown)
        yield FoundFiles(kind="saved", files=[named], origin=origin)
        return
    inside = sorted(_walk(folder.path))
    for name in inside:
        check_name(name, setting, DataError)
        with explain_failures(setting, f"{folder.shown}/{name}"):
            refuse_endless(folder.path / name)
    tables = [name for name in inside if name.lower().endswith(TABLE_SUFFIXES)]
    texts = [name for name in inside if name.lower().endswith(TEXT_SUFFIXES)]
    others = [n for n in inside if not find_suffix(n) and not _ABOUT.fullmatch(Path(n).name)]
    if not tables and not texts:
        held = f", but {_count(others)}" if others else ""
        raise UnusableSource(f"has no file that ends in one of {KNOWN_SUFFIXES}{held}")
    lost = [name for name in others if _UNREAD_DATA.fullmatch(Path(name).suffix)]
    if tables:
        lost += [name for name in texts if not _ABOUT.fullmatch(Path(name).name)]
    if lost:
        read = (tables or texts)[0]
        example = f"{glob.escape(folder.shown)}/*{find_suffix(read)}"
        raise UnusableSource(
            f"holds {_count(lost)} that would not be read beside its "
            f"{'tables' if tables else 'texts'}: convert or move what you need, or name the files "
            f"you mean, for example '{example}'"
        )
    words = {word for name in tables for word in re.split(r"[^a-z]+", name.lower())}
    splits = sorted({_SPLITS[word] for word in words if word in _SPLITS})
    if len(splits) > 1:
        raise UnusableSource(f"holds the splits {', '.join(splits)}; name the files you mean")
    note = _count(others) if others else ""
    for name in tables:
        file = _inside(folder, name, name[: -len(find_suffix(name))])
        yield FoundFiles(kind="table", files=[file], origin=origin, note=note)
    if not tables:
        files = [_inside(folder, name, name) for name in texts]
        yield FoundFiles(kind="texts", files=files, origin=origin, note=note)


def _walk(path: Path) -> Iterator[str]:
    """Yield relative paths of files, each folder once; hidden files and folders are left out."""

    def stop(error: OSError) -> None:
        raise error

    seen = set[str]()
    for folder, folders, files in os.walk(path, onerror=stop, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = sorted(n for n in folders if not n.startswith(".") and real not in seen)
        for name in files if real not in seen else ():
            if not name.startswith("."):
                yield Path(folder, name).relative_to(path).as_posix()
        seen.add(real)


def _inside(folder: NamedFile, name: str, stem: str) -> NamedFile:
    return NamedFile(path=folder.path / name, name=stem, shown=f"{folder.shown}/{name}")


def _count(names: Sequence[str]) -> str:
    """Return how many files there are of each suffix: ``2 files (.html 1, .png 1)``."""
    suffixes = (Path(name).suffix.lower() for name in names)
    known = Counter(end if re.fullmatch(r"\.\w{1,9}", end) else "other" for end in suffixes)
    kinds = ", ".join(f"{end} {count}" for end, count in known.most_common(5))
    return f"{len(names)} file{'s' if len(names) > 1 else ''} ({kinds})"


_ENDLESS = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"} | dict.fromkeys(
    (stat.S_IFCHR, stat.S_IFBLK), "device"
)


def refuse_endless(path: Path) -> None:
    """Refuse a FIFO, a socket or a device; what cannot be examined is reported when it is read.

    Raises:
        UnusableSource: it is one of them.
    """
    try:
        kind = _ENDLESS.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):
        return
    if kind is not None:
        raise UnusableSource(
            f"is a {kind}; documents must be in regular files. Write its content to a file"
        )


def locate(file: NamedFile) -> Path:
    """Return the whole path of a file, which two files do not share; links are not followed."""
    return Path(os.path.abspath(file.path))


def name_files(files: Iterable[NamedFile]) -> dict[Path, str]:
    """Return a name for each path that no other has, and whose rows have no other's ids.

    A file keeps its own name where it can; else it gets its suffix or more of its path, until the
    names differ.
    """
    own = {locate(file): file.name for file in files}
    level = dict.fromkeys(own, 0)
    while True:
        names = {path: _name(path, name, level[path]) for path, name in own.items()}
        count = Counter(names.values())
        clashing = [
            path
            for path, name in names.items()
            if count[name] > 1 or (_ROW.search(name) and _ROW.sub("", name) in count)
        ]
        if not clashing:
            return names
        for path in clashing:
            level[path] += 1


def _name(path: Path, name: str, level: int) -> str:
    if level == 0:
        return name
    parts = path.as_posix().split("/")
    num = name.count("/") + 1 + level // 2
    end = "/".join(parts[-num:])
    has_suffix = level % 2 == 1 or num > len(parts)
    return end if has_suffix else end[: len(end) - len(find_suffix(end))]
