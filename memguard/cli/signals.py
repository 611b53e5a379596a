"""Ctrl-C and SIGTERM raise an exception: unfinished files are deleted and one line is printed.

During training the trainer's own handler, which saves first, replaces this one. Ranks have no
handler: their launcher reports the signal.
"""

import math
import os
import signal
import threading
import time
from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM)
# A launcher forwards a Ctrl-C that the terminal has already sent to all processes.
_SAME_SIGNAL_S = 1.0


class SignalReceived(BaseException):
    """A signal to end the command; not an `Exception`, so that handlers of those ignore it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def raise_on_signals() -> None:
    """Install handlers: the first signal raises `SignalReceived`, a second ends the process."""
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
        # An ignored signal stays ignored, for example under nohup.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, handle)
