"""Folders that appear under their name only when they are complete."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from memguard.errors import ConfigError
from memguard.records.record import (
    TEMPORARY,
    atomic_folder,
    commit,
    make_private_folder,
    make_temporary_folder,
    open_private,
    write_atomically,
    write_new,
)


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "model"
    with atomic_folder(folder) as aside:
        (aside / "weights").write_text("new")
        assert not folder.exists()
        # Where a process that is killed leaves it, no reader looks.
        assert aside.parent == folder.parent
        assert aside.name.startswith(f"{TEMPORARY}model.")
    assert (folder / "weights").read_text() == "new"
    assert list(folder.parent.iterdir()) == [folder]


def test_a_link_stays_and_its_folder_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "disk" / "result", tmp_path / "result"
    target.mkdir(parents=True)
    (target / "old").touch()
    link.symlink_to(target)
    for _ in range(2):
        with atomic_folder(link) as aside:
            (aside / "new").touch()
        assert link.is_symlink()
        assert [path.name for path in link.iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "result"]


def test_a_failed_write_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_text("old")

    def write() -> None:
        with atomic_folder(folder) as aside:
            (aside / "weights").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write()
    assert (folder / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [folder]


def test_an_older_folder_is_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "of the old one alone").touch()
    # What an earlier process left when it was killed while it replaced a folder.
    (tmp_path / f"{TEMPORARY}model.old").mkdir()
    aside = make_temporary_folder(folder)
    (aside / "weights").write_text("new")
    commit(aside, folder)
    assert [path.name for path in folder.iterdir()] == ["weights"]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.fixture
def umask() -> Iterator[None]:
    """Take write access from the group and every access from others."""
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("umask")
def test_modes_are_those_that_the_umask_leaves(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "model", private=["below/tokens"]) as aside:
        (aside / "weights").touch(mode=0o600)
        (aside / "below").mkdir()
        (aside / "below" / "tokens").touch(mode=0o644)
        (aside / "tokens").touch(mode=0o600)
    write_atomically(tmp_path / "metrics.jsonl", b"")
    write_atomically(tmp_path / "my.key", b"", mode=0o600)
    found = {path.relative_to(tmp_path).as_posix(): mode(path) for path in tmp_path.rglob("*")}
    assert found == {
        "model": 0o750,
        "model/weights": 0o640,
        "model/below": 0o750,
        "model/below/tokens": 0o600,
        "model/tokens": 0o640,
        "metrics.jsonl": 0o640,
        "my.key": 0o600,
    }


def test_a_private_file_is_private_from_its_first_byte(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with open_private(tmp_path / "tokens") as file:
            assert mode(tmp_path / "tokens") == 0o600
            file.write(b"1 2 3")
        with pytest.raises(FileExistsError):  # It might be open to others, or be their link.
            open_private(tmp_path / "tokens")
        # An earlier file that all could read is replaced, not filled.
        (tmp_path / "scores").touch(mode=0o644)
        write_atomically(tmp_path / "scores", b"", mode=0o600)
        assert mode(tmp_path / "scores") == 0o600
        make_private_folder(tmp_path / "config" / "memguard")
        assert mode(tmp_path / "config") == mode(tmp_path / "config" / "memguard") == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize("target", ["nothing", "link"])
def test_a_link_to_nothing_or_itself_is_not_replaced(tmp_path: Path, target: str) -> None:
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(ConfigError, match="exists already"):
        write_new(tmp_path / "link", "text")
    assert os.listdir(tmp_path) == ["link"]
