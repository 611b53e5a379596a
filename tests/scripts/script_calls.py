"""A script's main called on a rank, which has torch already; each call has a process of its own.

What a script leaves in its process (a process group, filters of warnings) ends with that.
"""

import contextlib
import importlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from cli_examples import run_cli
from preloaded import PreloadedChild
from ranks import RankPool

from memguard.runtime import children

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a call ended."""

    code: int
    out: str
    err: str


def load_script(name: str) -> Any:
    """Import scripts/NAME.py as a module, which finds the modules beside it."""
    path = SCRIPTS / f"{name}.py"
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def run_script(
    ranks: RankPool, name: str, *arguments: str, change: Callable[[Any], None] | None = None
) -> Ended:
    """Call main of scripts/NAME.py with these arguments, after `change` of the module."""
    ended: Ended = ranks(_call, 1, name, arguments, change)[0]
    return ended


def start_script(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Start scripts/NAME.py as a user does, which ranks of its own need; 300 s at most."""
    return subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_study(*arguments: str) -> None:
    """Call main of scripts/study.py; the commands that it starts run in this process."""

    def run_inside(command: Sequence[str], **_: Any) -> Any:
        outcome = run_cli(*command[3:])  # without `python -m memguard`
        return subprocess.CompletedProcess(command, outcome.code, outcome.out, outcome.err)

    with (
        mock.patch.object(sys, "argv", ["study.py", *arguments]),
        mock.patch.object(load_script("study_common").subprocess, "run", run_inside),
        mock.patch.object(children.subprocess, "Popen", PreloadedChild),
    ):
        load_script("study").main()


def list_cells(table: str) -> list[list[str]]:
    """Return the cells of a table's rows, without its heading."""
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")]
    return rows[1:]


def _call(name: str, arguments: tuple[str, ...], change: Callable[[Any], None] | None) -> Ended:
    script = load_script(name)
    if change is not None:
        change(script)
    sys.argv = [str(SCRIPTS / f"{name}.py"), *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = script.main()
        except SystemExit as stop:
            code = stop.code
    return Ended(code=code, out=out.getvalue(), err=err.getvalue())
