"""Child processes of the command line that have torch already, in place of `subprocess.Popen`.

A real child imports torch for seconds before it does what a test looks at. This one is a fork of
the ranks' server: the same command, the same signals, the same exit codes.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from step_count import count_steps


class PreloadedChild:
    """What a sweep uses of `subprocess.Popen`, for `python -m memguard ...`."""

    def __init__(self, command: Sequence[str], stdout: int | None = None, env: None = None) -> None:
        start = [sys.executable, "-m", "memguard"]
        assert command[:3] == start, "only memguard's own command line can be forked"
        assert stdout == subprocess.DEVNULL
        # The server's environment is that of when it started.
        work = (list(command[3:]), dict(os.environ), Path.cwd())
        self._process = multiprocessing.get_context("forkserver").Process(target=_run, args=work)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("memguard", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            assert self.pid is not None
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], environment: dict[str, str], folder: Path) -> Any:
    os.environ.clear()
    os.environ.update(environment)
    count_steps()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["memguard", *arguments]
    from memguard.cli import main

    main()
