"""A script's main called on a rank, which has torch already; each call has a process of its own.

What a script leaves in its process (a process group, filters of warnings) ends with that.
"""

import contextlib
import importlib.util
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks import RankPool

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a call ended."""

    code: int
    out: str
    err: str


def load_script(name: str) -> Any:
    """Import scripts/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_script(
    ranks: RankPool, name: str, *arguments: str, change: Callable[[Any], None] | None = None
) -> Ended:
    """Call main of scripts/NAME.py with these arguments, after `change` of the module."""
    ended: Ended = ranks(_call, 1, name, arguments, change)[0]
    return ended


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
