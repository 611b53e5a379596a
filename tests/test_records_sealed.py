"""What is read again is held against the hash that was written with it."""

import errno
import hashlib
import json
import os
import re
from pathlib import Path

import pytest

from memguard.errors import RecordError
from memguard.records.sealed import (
    FileSum,
    SealedRecord,
    find_damage,
    is_closed,
    load_sealed,
    save_sealed,
    sum_file,
)


class Note(SealedRecord):
    text: str
    share: float
    files: dict[str, FileSum]


NOTE = Note(text="größer\u2028", share=0.1, files={"a": FileSum(num_bytes=1, sha256="ff")})


def test_a_sealed_record_comes_back(tmp_path: Path) -> None:
    save_sealed(NOTE, tmp_path / "note.json")
    assert load_sealed(Note, tmp_path / "note.json") == NOTE


def test_every_flipped_bit_is_noticed_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    save_sealed(NOTE, path)
    content = path.read_bytes()
    unnoticed = []
    for index in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[index // 8] ^= 1 << index % 8
        path.write_bytes(flipped)
        try:
            assert load_sealed(Note, path) == NOTE
        except RecordError:
            continue
        unnoticed.append(flipped)
    # White space between the fields is all that may differ.
    assert all(json.loads(text) == json.loads(content) for text in unnoticed)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"text": "a"}', b"3"])
def test_other_content_is_damage(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "note.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"note\.json' is damaged"):
        load_sealed(Note, path)


def test_a_missing_record_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read: No such file"):
        load_sealed(Note, tmp_path / "note.json")


def test_sums_are_those_of_hashlib(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "a").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    assert sum_file(tmp_path / "a") == FileSum(num_bytes=len(content), sha256=digest)


def test_a_file_that_the_disk_does_not_give_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"a")
    files = {"a": sum_file(tmp_path / "a")}

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(hashlib, "file_digest", fail)
    (damage,) = find_damage(tmp_path, files)
    assert (str(damage), damage.is_unreadable) == ("a cannot be read: Input/output error", False)
    with pytest.raises(OSError, match=re.escape(f"Input/output error: '{tmp_path / 'a'}'")):
        sum_file(tmp_path / "a")


def test_a_folder_behind_a_closed_one_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    assert not is_closed(tmp_path)
    # As Path.is_dir does on some versions of Python; tests may run as root, who may enter.
    monkeypatch.setattr(Path, "is_dir", refuse)
    assert is_closed(tmp_path)


def test_damage_of_each_kind_is_named(tmp_path: Path) -> None:
    for name in ("whole", "short", "flipped"):
        (tmp_path / name).write_bytes(b"abcd")
    files = {name: sum_file(tmp_path / name) for name in ("whole", "short", "flipped")}
    files |= dict.fromkeys(("gone", "../outside", ".."), files["whole"])
    (tmp_path / "short").write_bytes(b"abc")
    (tmp_path / "flipped").write_bytes(b"abce")
    assert [str(damage) for damage in find_damage(tmp_path, files)] == [
        "short has 3 bytes instead of 4",
        "flipped is not what was written (its SHA-256 differs)",
        "gone is missing",
        "../outside is not the name of a file in its folder",
        ".. is not the name of a file in its folder",
    ]
