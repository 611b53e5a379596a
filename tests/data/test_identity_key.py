"""The identity key: made once, by one of several processes, and refused where it would leak."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memguard.data import identity_key
from memguard.data.identity_key import (
    IdentityKey,
    check_key_place,
    find_identity_key,
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


def git(*words: str, folder: Path) -> None:
    # Neither the settings of the user nor a repository around the tests have a say.
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", *words], cwd=folder, env=environment, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A git work tree that ignores what is in private/."""
    folder = tmp_path / "tree"
    folder.mkdir()
    git("init", "-q", folder=folder)
    (folder / ".gitignore").write_text("private/\n")
    return folder


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


@pytest.mark.parametrize("links", [True, False])
def test_the_slower_process_takes_the_key_of_the_faster(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking and writing, another process has written its own."""
    path, link = tmp_path / "my.key", os.link

    def lose(source: str, target: str) -> None:
        write_key(path)
        if not links:
            raise OSError(errno.EPERM, "no hard links")
        link(source, target)

    monkeypatch.setattr(os, "link", lose)
    identity, said = make(path)
    assert (identity.key.hex(), said) == (KEY, [])
    assert os.listdir(tmp_path) == ["my.key"]


def test_a_file_system_without_hard_links_has_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no hard links")

    monkeypatch.setattr(os, "link", refuse)
    identity, said = make(tmp_path / "my.key")
    assert identity.key.hex() == (tmp_path / "my.key").read_text().strip()
    assert (tmp_path / "my.key").stat().st_mode & 0o777 == 0o600
    assert len(said) == 1
    assert os.listdir(tmp_path) == ["my.key"]


def test_it_is_not_made_where_none_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "my.key"
    assert find_identity_key(path) is None
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
    monkeypatch.setattr(identity_key, "_PATIENCE_S", 0.0)
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


def test_it_is_refused_in_a_git_work_tree_that_does_not_ignore_it(tree: Path) -> None:
    (tree / "inside").mkdir()
    told = rf"git work tree '{tree}', which does not ignore it. Add '/inside/my.key' to its"
    for path in (tree / "inside" / "my.key", tree / "inside" / ".." / "inside" / "my.key"):
        with pytest.raises(ConfigError, match=told):
            make(path)
    assert not list(tree.rglob("*.key"))
    make(tree / "private" / "my.key")
    (tree / ".gitignore").write_text("*.key\n")
    make(tree / "inside" / "my.key")
    # What is committed already is not ignored, whatever .gitignore says.
    git("add", "-f", "inside/my.key", folder=tree)
    with pytest.raises(ConfigError, match="which does not ignore it"):
        make(tree / "inside" / "my.key")


def test_a_home_folder_under_git_is_a_work_tree_too(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tree))
    monkeypatch.delenv("XDG_CONFIG_HOME")
    with pytest.raises(ConfigError) as refused:
        make(None)
    (line,) = str(refused.value).splitlines()
    assert "Add '/.config/memguard/memguard-identity.key' to its .gitignore" in line
    assert "name a file outside of it in 'data.identity_key'" in line
    (tree / ".gitignore").write_text("/.config/memguard/\n")
    assert make(None)[0].path == tree / ".config" / "memguard" / "memguard-identity.key"


def test_variables_of_a_git_hook_name_no_other_work_tree(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git("init", "-q", folder=other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    check_key_place(tree / "private" / "my.key")
    with pytest.raises(ConfigError, match=re.escape(str(tree))):
        check_key_place(tree / "my.key")


def test_without_git_to_ask_only_work_trees_are_refused(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ConfigError, match="git is not installed here"):
        make(tree / "private" / "my.key")
    make(tmp_path / "my.key")
    broken = tmp_path / "bin" / "git"
    broken.write_text("#!/bin/sh\necho 'fatal: detected dubious ownership' >&2\nexit 128\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    with pytest.raises(ConfigError, match=r"does not tell .* \(fatal: detected dubious ownership"):
        make(tree / "private" / "my.key")


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
