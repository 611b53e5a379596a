"""Ctrl-C and SIGTERM end a command as an exception: what it was writing is taken away, one line.

The trainer's own handler, which saves first, replaces this one while it trains. Ranks have none:
their launcher speaks for them.
"""

import math
import os
import signal
import threading
import time
from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM)
# A launcher passes on the Ctrl-C that the terminal has sent already.
_SAME_SIGNAL_S = 1.0


class SignalReceived(BaseException):
    """The command was asked to end. No `except Exception` on its way takes it for an error."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def raise_on_signals() -> None:
    """From now on the first signal raises `SignalReceived`, and a second one ends the process."""
    if "LOCAL_RANK" in os.environ or threading.current_thread() is not threading.main_thread():
        return
    received_s = -math.inf

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal received_s
        is_first, since_s = received_s == -math.inf, time.monotonic() - received_s
        if not is_first and since_s < _SAME_SIGNAL_S:
            return
        received_s = time.monotonic()
        if is_first:
            raise SignalReceived(number)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    for number in _STOPS:
        # One that is ignored stays so, as under nohup.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, handle)
