"""A small disk of one's own, in a child process: a tmpfs that only it sees."""

import ctypes
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from cli_examples import run_cli

NOT_ALLOWED = 77
"""Exit code of a child that may not mount a file system."""
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_BALLAST = "ballast"


def mount_small_disk(folder: Path, size: str) -> None:
    """Mount an empty file system on a folder, for this process alone; exit where that is forbidden.

    The process must have one thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_USER | _NEW_MOUNTS) != 0:
        sys.exit(NOT_ALLOWED)
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError:
        sys.exit(NOT_ALLOWED)
    folder.mkdir(exist_ok=True)
    kind = b"tmpfs"
    if libc.mount(kind, os.fsencode(folder), kind, 0, f"size={size}".encode()) != 0:
        sys.exit(NOT_ALLOWED)


def fill(folder: Path, room: int) -> None:
    """Leave ``room`` bytes (whole pages) free on the disk that the folder is on."""
    handle = os.open(folder / _BALLAST, os.O_CREAT | os.O_WRONLY)
    for size in (1 << 20, 1 << 12, 1):
        try:
            while True:
                os.write(handle, b"\0" * size)
        except OSError:
            continue
    os.ftruncate(handle, os.fstat(handle).st_size - room)
    os.close(handle)


def run_twice(
    arguments: list[str], disk: Path, place: str, at_call: int, room: int, said: Path
) -> None:
    """In a child process: run a command whose disk is full, and again when it is not.

    Args:
        arguments: of the command line.
        disk: folder to be mounted.
        place: ``module:function``; the disk is full from one of its calls on.
        at_call: which one, from 1.
        room: bytes that are left then.
        said: file for exit code and standard error of both, and the files after the first.
    """
    mount_small_disk(disk, "64m")
    module_name, _, name = place.partition(":")
    module: Any = importlib.import_module(module_name)
    real, calls = getattr(module, name), 0

    def act(*given: Any, **how: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            fill(disk, room)
        return real(*given, **how)

    with mock.patch.object(module, name, act):
        first = run_cli(*arguments)
    left = sorted(str(path.relative_to(disk)) for path in disk.rglob("*"))
    (disk / _BALLAST).unlink(missing_ok=True)
    second = run_cli(*arguments)
    words = [first.code, first.err, left, second.code, second.err]
    said.write_text(json.dumps(words))
