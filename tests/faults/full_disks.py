"""A disk of a fixed size, seen by one process alone, that is full from a chosen file on.

Mount namespaces of a user of its own need no rights, but not every machine allows them.
"""

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from fault_runs import environment, exit_as_main

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_REMOUNT = 32
_DISK_BYTES = 64 * 2**20


def find_obstacle() -> str | None:
    """Return why this machine lets nobody mount a disk of their own; None where it does."""
    pid = os.fork()
    if pid == 0:
        try:
            _enter_namespace()
            _mount(Path("/mnt"), _DISK_BYTES)
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if code == 0 else os.strerror(code)


def _enter_namespace() -> None:
    user, group = os.getuid(), os.getgid()
    _call(ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER | _NEW_MOUNTS))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _mount(folder: Path, num_bytes: int, flags: int = 0) -> None:
    size = f"size={num_bytes}".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    _call(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, size))


def _call(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def work_on_full_disk(
    folder: Path, stage: str, num_bytes_left: int, deleted: str | None = None
) -> None:
    """Train in a copy of `folder` on a disk that is full from a stage on, then with room again.

    Leaves beside the disk: `first` and `second`, what each of the two commands said, with its exit
    code as the last line; and `copy`, the folder in the end.

    Args:
        folder: with the settings; becomes the place of the disk.
        stage: full once a file whose path holds this is opened.
        num_bytes_left: still free at that moment.
        deleted: the first command has room again as it deletes a folder whose path holds this.
    """
    _enter_namespace()
    disk = folder.parent / "disk"
    disk.mkdir()
    _mount(disk, _DISK_BYTES)
    shutil.copytree(folder, disk, dirs_exist_ok=True)
    os.chdir(disk)
    os.environ.update(environment(disk))
    _run(folder.parent / "first", stage, num_bytes_left, deleted)
    (disk / "ballast").unlink(missing_ok=True)
    _run(folder.parent / "second", None)
    shutil.copytree(disk, folder.parent / "copy")


def _run(log: Path, stage: str | None, num_bytes_left: int = 0, deleted: str | None = None) -> None:
    pid = os.fork()
    if pid == 0:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        if stage is not None:
            _fill_at(stage, num_bytes_left, deleted)
        exit_as_main(["train", "run.yaml"])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with log.open("a") as file:
        file.write(f"\n{code}")


def _fill_at(stage: str, num_bytes_left: int, deleted: str | None) -> None:
    is_full, ballast = False, Path("ballast")

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal is_full
        if event not in ("open", "os.mkdir", "os.rename", "shutil.rmtree"):
            return
        if not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.fsdecode(arguments[0])
        if is_full and event == "shutil.rmtree" and deleted is not None and deleted in path:
            os.truncate(ballast, 0)
        if is_full or stage not in path:
            return
        is_full = True
        num_bytes = max(0, shutil.disk_usage(".").free - num_bytes_left)
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, num_bytes))

    sys.addaudithook(look)
