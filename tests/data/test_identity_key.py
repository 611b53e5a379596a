"""The identity key: made once, by one of several processes, and refused where it would leak."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memguard.data import identity_key
from memguard.data.identity_key import (
    IdentityKey,
    find_key_path,
    load_identity_key,
)
from memguard.errors import ConfigError, DataError

KEY = "00ff" * 16


def make(path: Path | None, **options: object) -> tuple[IdentityKey, list[str]]:
    said: list[str] = []
    return load_identity_key(path, say=said.append, **options), said  # type: ignore[arg-type]


def write_key(path: Path, text: str = KEY, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_it_is_made_once_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "new" / "my.key"
    first, said = make(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert len(said) == 1
    assert said[0].startswith(f"identity key: made {path}, keep it: ")
    assert os.listdir(path.parent) == ["my.key"]
    assert make(path) == (first, [])
    assert (len(first.key), first.path) == (32, path)
    other, _ = make(tmp_path / "other.key")
    assert other.key != first.key
    assert other.fingerprint != first.fingerprint
    # The key is printed by no log or traceback that shows the object.
    assert first.key.hex() not in repr(first)
    assert repr(first.key) not in repr(first)


def test_without_a_name_it_is_in_the_configuration_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session_key: Path
) -> None:
    assert find_key_path(None) == session_key
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_key_path(None) == tmp_path / ".config" / "memguard" / "memguard-identity.key"
    assert find_key_path("~/a.key") == tmp_path / "a.key"
    monkeypatch.chdir(tmp_path)
    assert find_key_path("a.key") == tmp_path / "a.key"


def test_of_processes_that_start_at_once_one_makes_it(tmp_path: Path) -> None:
    code = (
        "import sys; from memguard.data.identity_key import load_identity_key as load\n"
        "sys.stdin.readline()\n"
        "said = []\n"
        "print(load(sys.argv[1], say=said.append).key.hex(), len(said))"
    )
    path = tmp_path / "new" / "my.key"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    assert {key for key, _ in answers} == {path.read_text().strip()}
    assert sorted(count for _, count in answers) == ["0", "0", "1"]
    assert os.listdir(path.parent) == ["my.key"]


def test_it_is_not_made_where_none_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "my.key"
    with pytest.raises(DataError, match=rf"identity key is missing: '{path}'"):
        load_identity_key(path)
    # A key that was used before is not replaced by a new one.
    with pytest.raises(DataError, match=r"of 'runs/a' \(fingerprint 12ab\) is missing"):
        make(path, expected="12ab", of="'runs/a'")
    assert not path.exists()


def test_another_key_than_the_expected_one_names_both(tmp_path: Path) -> None:
    identity, _ = make(tmp_path / "my.key")
    assert make(tmp_path / "my.key", expected=identity.fingerprint)[0] == identity
    told = rf"fingerprint {identity.fingerprint}, and 'runs/a' the key of fingerprint 12ab: name"
    with pytest.raises(ConfigError, match=told):
        make(tmp_path / "my.key", expected="12ab", of="'runs/a'")


@pytest.mark.parametrize(
    "text", ["", "00ff", KEY + "0", "zz" * 32, KEY * 100, KEY[:32] + "\n" + KEY[32:]]
)
def test_what_is_no_key_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_key, "_PAUSE_S", 0.0)
    path = write_key(tmp_path / "my.key", text)
    with pytest.raises(DataError, match=r"is no identity key, which is 64 hexadecimal digits"):
        make(path)
    assert path.read_text() == text


def test_a_key_that_another_process_is_writing_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_key(tmp_path / "my.key", "")
    monkeypatch.setattr("time.sleep", lambda _: write_key(path))
    assert make(path)[0].key.hex() == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_that_others_can_read_is_refused(mode: int, tmp_path: Path) -> None:
    path = write_key(tmp_path / "my.key", mode=mode)
    with pytest.raises(ConfigError, match=rf"\(mode {mode:04o}\): chmod 600 '{path}'"):
        make(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe", mode=0o600)
    for path, told in (
        (tmp_path, "is not a file"),
        (tmp_path / "pipe", "is not a file"),
        (tmp_path / "loop", r"cannot be read \(Too many levels"),
    ):
        with pytest.raises(DataError, match=told):
            make(path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.EROFS])
def test_what_cannot_be_written_says_why_in_one_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my.key"

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        told = rf"'{path}' cannot be made \({os.strerror(number)}\): .* name another file"
        with pytest.raises(ConfigError, match=told):
            make(path)
    # Half a key would be refused by every later command.
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be made \((Not a directory|File exists)\)"):
        make(tmp_path / "file" / "my.key")


# -- places ----------------------------------------------------------------------------------------


def write_run(folder: Path) -> Path:
    (folder / "prepared").mkdir(parents=True)
    (folder / "config.yaml").touch()
    return folder


def write_audit(folder: Path) -> Path:
    folder.mkdir()
    (folder / "audit.json").touch()
    return folder


@pytest.mark.parametrize("write", [write_run, write_audit, Path.mkdir])
def test_it_is_refused_in_a_folder_that_is_handed_on(
    write: Callable[[Path], Path | None], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    write(folder)
    (tmp_path / "link").symlink_to(folder)
    outside = [folder] if write is Path.mkdir else []
    for path in (folder / "my.key", folder / "new" / "my.key", tmp_path / "link" / "my.key"):
        with pytest.raises(ConfigError, match=r"'data.identity_key': .* must not be in"):
            make(path, outside=outside)
    assert not list(folder.rglob("*.key"))
    make(tmp_path / "my.key", outside=outside)


def test_without_a_name_it_is_refused_below_a_folder_with_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME")
    with pytest.raises(ConfigError) as refused:
        make(None)
    (line,) = str(refused.value).splitlines()
    assert f"must not be in '{tmp_path}', a git work tree" in line
    assert line.endswith("Name another file in 'data.identity_key'")
    assert not list(tmp_path.rglob("*.key"))
    assert make(tmp_path / "mine.key")[0].path == tmp_path / "mine.key"


# -- secrets ---------------------------------------------------------------------------------------


def test_secrets_differ_by_purpose_run_and_key(tmp_path: Path) -> None:
    one, other = (make(tmp_path / name)[0] for name in ("one.key", "other.key"))
    secrets = {
        identity.derive_secret(purpose, run)
        for identity in (one, other)
        for purpose in ("noise", "coin")
        for run in ("run-a", "run-b")
    }
    assert len(secrets) == 8
    # Of a resumed run the same.
    assert load_identity_key(one.path).derive_secret("noise", "run-a") in secrets
    assert all(secret.bit_length() > 128 for secret in secrets)
