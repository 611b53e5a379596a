"""A stop after the current step, on SIGINT or SIGTERM.

After Ctrl-C or SIGTERM all ranks save and stop after the same step. On a mesh they learn of a
signal with the sums of losses; one that comes later than these takes effect a step later.
"""

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from memguard.runtime import Console, Runtime
from memguard.runtime.children import SAME_SIGNAL_S, STOP_SIGNALS, restore_handlers, signals_handled


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
        return [float(self.signal_number == number) for number in STOP_SIGNALS]

    @staticmethod
    def find(counts: Sequence[float]) -> int:
        """Return the signal that any rank received from sums of `count`; 0 for none."""
        pairs = zip(STOP_SIGNALS, counts, strict=True)
        return max((number for number, count in pairs if count), default=0)

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Stop the run after the current step on SIGINT or SIGTERM, immediately on a second one."""
        received_s = -math.inf

        def stop(number: int, _frame: FrameType | None) -> None:
            nonlocal received_s
            if time.monotonic() - received_s < SAME_SIGNAL_S:
                return
            if self.signal_number is not None:
                restore_handlers(before)
                signal.raise_signal(number)
            self.signal_number, received_s = number, time.monotonic()
            self._console.info("stopping after this step; send the signal again to stop now")

        with signals_handled(stop) as before:
            yield
