"""A stop after the current step, on SIGINT or SIGTERM.

After Ctrl-C or SIGTERM all ranks save and stop after the same step. On a mesh they learn of a
signal with the sums of losses; one that comes later than these takes effect a step later.
"""

import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from memguard.runtime import Console, Runtime

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# Signals within this time count as one: a launcher forwards the Ctrl-C that the terminal already
# sent to the process.
_SAME_SIGNAL_S = 1.0


class StopRequest:
    """Records whether this process received a signal to stop."""

    def __init__(self, console: Console) -> None:
        """Start without a request; ``console`` shows a message when a signal arrives."""
        self.signal_number: int | None = None
        self._console = console

    def agree(self, runtime: Runtime) -> int:
        """Return the signal that any rank received, 0 for none; not all ranks may receive it."""
        return runtime.agree_max(self.signal_number or 0)

    def count(self) -> list[float]:
        """Return for each signal whether this rank received it: 0 or 1, to be summed over ranks."""
        return [float(self.signal_number == number) for number in _SIGNALS]

    @staticmethod
    def find(counts: Sequence[float]) -> int:
        """Return the signal that any rank received from sums of `count`; 0 for none."""
        pairs = zip(_SIGNALS, counts, strict=True)
        return max((number for number, count in pairs if count), default=0)

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Stop the run after the current step on SIGINT or SIGTERM, immediately on a second one."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        received_s = -math.inf

        def stop(number: int, _frame: FrameType | None) -> None:
            nonlocal received_s
            if time.monotonic() - received_s < _SAME_SIGNAL_S:
                return
            if self.signal_number is not None:
                for handled, handler in before.items():
                    signal.signal(handled, handler)
                signal.raise_signal(number)
            self.signal_number, received_s = number, time.monotonic()
            self._console.info("stopping after this step; send the signal again to stop now")

        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
