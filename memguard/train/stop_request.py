"""Ctrl-C and SIGTERM: the run ends after the step in hand, on all ranks alike."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from memguard.runtime import Console, Runtime

# A launcher passes on the Ctrl-C that the terminal has sent already.
_SAME_SIGNAL_S = 1.0


class StopRequest:
    """Remembers that this process was asked to stop."""

    def __init__(self, console: Console) -> None:
        """Nobody has asked yet; ``console`` tells whoever does what happens."""
        self.signal_number: int | None = None
        self._console = console

    def agree(self, runtime: Runtime) -> int:
        """Return the signal that any rank was sent, 0 for none: it may reach some ranks only."""
        return runtime.agree_max(self.signal_number or 0)

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM end the run after the step in hand; a second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        asked_s = -math.inf

        def stop(number: int, _frame: FrameType | None) -> None:
            nonlocal asked_s
            if time.monotonic() - asked_s < _SAME_SIGNAL_S:
                return
            if self.signal_number is not None:
                for each, handler in before.items():
                    signal.signal(each, handler)
                signal.raise_signal(number)
            self.signal_number, asked_s = number, time.monotonic()
            self._console.info("stopping after this step; once more to stop at once")

        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
