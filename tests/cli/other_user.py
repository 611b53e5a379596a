"""Commands of a user who may read what all may read, and nothing else of a run."""

import ctypes
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_examples import Outcome, run_cli
from ranks import RankPool

NOBODY = 65534

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")


@contextmanager
def open_copy(folder: Path) -> Iterator[Path]:
    """Copy a folder to where every user may enter; pytest's own folders are closed to others.

    Everyone may write to `out/` in it.
    """
    with tempfile.TemporaryDirectory(prefix="memguard-other-") as name:
        place = shutil.copytree(folder, Path(name), dirs_exist_ok=True)
        place.chmod(0o755)
        (place / "out").mkdir()
        (place / "out").chmod(0o777)
        yield place


def run_as_nobody(ranks: RankPool, place: Path, *commands: Sequence[object]) -> list[Outcome]:
    """Run commands one after the other on the files of another user, in an `open_copy`.

    The files are given to that user, and the commands run as root without root's privileges: a
    process of that user could not import a checkout in a folder that is closed to others.
    """
    for path in (place, *place.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    said = place / "out" / "said.json"
    child = ranks.start(_run_all, [[str(word) for word in words] for words in commands], place)
    child.join()
    assert child.exitcode == 0
    outcomes = [Outcome(**values) for values in json.loads(said.read_text())]
    said.unlink()
    return outcomes


def _run_all(commands: list[list[str]], place: Path) -> None:
    os.environ["MEMGUARD_CACHE"] = str(place / "out" / "cache")
    os.chdir(place)
    os.setgroups([])
    # capset(2), version 3: no effective, permitted or inheritable capability, as 6 words.
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0, "root's capabilities were not dropped"
    said = []
    for words in commands:
        ended = run_cli(*words)
        said.append({"code": ended.code, "out": ended.out, "err": ended.err})
    (place / "out" / "said.json").write_text(json.dumps(said))
