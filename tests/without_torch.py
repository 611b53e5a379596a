"""The command line where importing torch fails: forks of one process that has the rest of it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_SERVER = """
import json, os, sys, traceback
import memguard.cli, memguard.cli.app, memguard.config, memguard.workflows.training.checks
for line in sys.stdin:
    arguments, folder, variables, *files = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(folder)
            os.environ.update(variables)
            for number, file in enumerate(files, 1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.argv = ["memguard", *arguments]
            memguard.cli.main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def serve(folder: Path) -> Iterator[Any]:
    """Yield a function of a folder to stand in, arguments, and environment variables to add.

    It returns the same as `subprocess.run` of `python -m memguard ARGUMENTS`.
    """
    for name in ("torch", "transformers", "datasets"):
        (folder / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:  # It ends with its input, and is waited for.
        yield partial(_ask, server, folder)


def _ask(
    server: "subprocess.Popen[str]", home: Path, here: Path, *arguments: object, **variables: str
) -> "subprocess.CompletedProcess[str]":
    assert server.stdin is not None
    assert server.stdout is not None
    out, err = home / "out", home / "err"
    question = ([*map(str, arguments)], str(here), variables, str(out), str(err))
    server.stdin.write(f"{json.dumps(question)}\n")
    server.stdin.flush()
    code = int(server.stdout.readline())
    return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())
