"""Child processes of the command line that have torch already, in place of `subprocess.Popen`.

A real child imports torch for seconds before it does what a test looks at. This one is a fork of
the ranks' server: the same command, the same signals, the same exit codes.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from step_count import count_steps


class PreloadedChild:
    """What memguard's workflows use of `subprocess.Popen`, for `python -m memguard ...`."""

    def __init__(
        self,
        command: Sequence[str],
        stdout: int | None = None,
        *,
        env: Mapping[str, str] | None = None,
        said: Path = Path(os.devnull),
        listener: socket.socket | None = None,
    ) -> None:
        """Start it; what it prints goes to ``said``, and ``listener`` is what rank 0 is given."""
        start = [sys.executable, "-m", "memguard"]
        assert command[:3] == start, "only memguard's own command line can be forked"
        assert stdout in (None, subprocess.DEVNULL)
        # The server's environment is that of when it started.
        work = (list(command[3:]), dict(env or os.environ), Path.cwd(), said, listener)
        self._process = multiprocessing.get_context("forkserver").Process(target=_run, args=work)
        self._process.start()
        if listener is not None:
            listener.close()  # The child has its own.
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


def _run(
    arguments: list[str],
    environment: dict[str, str],
    folder: Path,
    said: Path,
    listener: socket.socket | None,
) -> Any:
    os.environ.clear()
    os.environ.update(environment)
    if listener is not None:
        os.environ["MEMGUARD_STORE_FD"] = str(listener.fileno())
    count_steps()
    os.chdir(folder)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 1)
    if said != Path(os.devnull):
        os.dup2(1, 2)
    sys.argv = ["memguard", *arguments]
    from memguard.cli import main

    main()
