"""Finds the files of sources, and gives each the name that begins the ids of its rows.

    given                                   names, which are unique among all sources
    x.jsonl                                 x
    2023/x.jsonl, 2024/x.jsonl              2023/x, 2024/x
    folder with x.jsonl, x.csv, sub/y.csv   x.jsonl, x.csv, sub/y

A folder gives its tables, or its text files if it has no table; hidden files are left out. It is
refused if it also holds documents in files that would not be read; files of other types are named
in a note. A README or a licence beside tables is no document.
"""

import dataclasses
import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

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
# Files that are not read, although they are likely to hold documents.
_UNREAD_DATA = re.compile(
    r".*\.(tsv|gz|zst|xz|bz2|lz4|zip|7z|tar|tgz|arrow|feather|npz|xlsx?|orc|avro)", re.IGNORECASE
)
_ABOUT = re.compile(
    r"(.*/)?(readme|licen[cs]e|notice|changelog|contributing|citation|requirements)([^a-z/][^/]*)?",
    re.IGNORECASE,
)
_ROW = re.compile(r"-\d{6,}$")


def expand_pattern(source: str) -> list[str]:
    """Return the paths that match a pattern, sorted; the source itself if it is none.

    A folder that matches is read whole, so that what matches inside it is left out.
    """
    path = os.path.expanduser(source)
    if not glob.has_magic(path) or os.path.lexists(path):
        return [source]
    matches = sorted({match.rstrip("/") for match in glob.iglob(path, recursive=True)})
    folders = {Path(match) for match in matches if os.path.isdir(match)}
    return [match for match in matches if folders.isdisjoint(Path(match).parents)]


def list_files(source: str) -> Iterator[Path]:
    """Yield the local files that a source may read, sorted; none of other sources.

    Raises:
        OSError: a folder cannot be read.
    """
    for path in map(os.path.expanduser, expand_pattern(source)):
        # Unlike Path, os.path returns False for names that are too long to be a path, such as
        # 'docstrings:' with a hundred packages.
        if os.path.isfile(path):
            yield Path(path)
        elif os.path.isdir(path):
            inside = (Path(path, name) for name in sorted(_walk(Path(path))))
            yield from filter(os.path.isfile, inside)  # no FIFO, whose reading may never end


def find_files(source: str, *, setting: str) -> Iterator[NamedFile]:
    """Yield the files of a path that exists, in an order that depends on names only.

    ``setting`` names the source in errors.

    Raises:
        DataError: it cannot be examined, is of an unknown type, or holds what would be left out.
    """
    path, shown = Path(os.path.expanduser(source)), shorten(source, MAX_PATH)
    with explain_failures(setting, shown):
        if path.is_dir():
            origin = path.resolve().name
            check_name(origin, setting, DataError)
            folder = NamedFile(
                path=path, name=origin, origin=origin, shown=shown, setting=setting, kind="saved"
            )
            is_saved = any((path / mark).is_file() for mark in _SAVED_MARKS)
            yield from [folder] if is_saved else _look_into(folder)
        elif suffix := find_suffix(path.name):
            name = path.name[: -len(suffix)]
            yield NamedFile(path=path, name=name, origin=path.name, shown=shown, setting=setting)
        else:
            raise UnusableSource(f"has an unknown file type; supported are {KNOWN_SUFFIXES}")


def _look_into(folder: NamedFile) -> Iterator[NamedFile]:
    inside = sorted(_walk(folder.path))
    for name in inside:
        check_name(name, folder.setting, DataError)
        with explain_failures(folder.setting, f"{folder.shown}/{name}"):
            refuse_endless(folder.path / name)
    tables = [name for name in inside if name.lower().endswith(TABLE_SUFFIXES)]
    texts = [name for name in inside if name.lower().endswith(TEXT_SUFFIXES)]
    taken = tables or texts
    others = sorted({*inside} - {*taken} - {*filter(_ABOUT.fullmatch, inside)})
    lost = [name for name in others if find_suffix(name) or _UNREAD_DATA.fullmatch(name)]
    note = _count(others) if others else ""
    if not taken:
        held = note and f", but {note}"
        raise UnusableSource(f"has no file that ends in one of {KNOWN_SUFFIXES}{held}")
    if lost:
        example = f"{glob.escape(folder.shown)}/*{find_suffix(taken[0])}"
        raise UnusableSource(
            f"holds {_count(lost)} that would not be read beside its "
            f"{'tables' if tables else 'texts'}: convert or move what you need, or name the files "
            f"you mean, for example '{example}'"
        )
    words = {word for name in tables for word in re.split(r"[^a-z]+", name.lower())}
    splits = sorted({_SPLITS[word] for word in words if word in _SPLITS})
    if len(splits) > 1:
        raise UnusableSource(f"holds the splits {', '.join(splits)}; name the files you mean")
    for name in taken:
        yield dataclasses.replace(
            folder,
            path=folder.path / name,
            name=name[: -len(find_suffix(name))] if tables else name,
            shown=f"{folder.shown}/{name}",
            kind="file",
            note=note,
        )


def _walk(path: Path) -> Iterator[str]:
    """Yield relative paths of files, each folder once; hidden files and folders are left out."""

    def stop(error: OSError) -> None:
        raise error

    seen = set[str]()
    for folder, folders, files in os.walk(path, onerror=stop, followlinks=True):
        real = os.path.realpath(folder)
        is_new = real not in seen
        folders[:] = sorted(name for name in folders if is_new and not name.startswith("."))
        for name in files:
            if is_new and not name.startswith("."):
                yield Path(folder, name).relative_to(path).as_posix()
        seen.add(real)


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


def name_files(files: Iterable[NamedFile]) -> dict[str, str]:
    """Return a name for the place of each file, such that no two files make the same id.

    A file keeps its own name where it can; else it gets its suffix or more of its path.
    """
    own = {file.place: file.name for file in files}
    level = dict.fromkeys(own, 0)
    while True:
        names = {place: _name(place, name, level[place]) for place, name in own.items()}
        count = Counter(names.values())
        # The text of a file x-000001.txt has the id of row 1 of x.
        rows = {name for name in count if _ROW.search(name) and _ROW.sub("", name) in count}
        clashing = [
            place
            for place, name in names.items()
            if count[name] > 1 or (name in rows and place.lower().endswith(TEXT_SUFFIXES))
        ]
        if not clashing:
            return names
        for place in clashing:
            level[place] += 1


def _name(place: str, name: str, level: int) -> str:
    if level == 0:
        return name
    parts, num = place.split("/"), name.count("/") + 1 + level // 2
    end = "/".join(parts[-num:])
    has_suffix = level % 2 == 1 or num > len(parts)
    return end if has_suffix else end[: len(end) - len(find_suffix(end))]
