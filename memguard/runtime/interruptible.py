"""Runs a long call of a library in a thread, so that Ctrl-C takes effect at once. No torch.

    main thread   waits, and handles signals; Python delivers them to this thread only
    thread        is inside the library, which releases the interpreter's lock

A call of a library in Rust or C++ on the main thread delays a signal until it returns, which for a
document of ten million characters is minutes. After a signal the thread ends with the process.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

ResultT = TypeVar("ResultT")

_TICK_EVERY_S = 1.0


@dataclass(slots=True)
class _Outcome(Generic[ResultT]):
    result: ResultT | None = None
    error: BaseException | None = None


def call_interruptibly(
    function: Callable[[], ResultT],
    tick: Callable[[], None] | None = None,
    *,
    every_s: float = _TICK_EVERY_S,
) -> ResultT:
    """Return what the function returns; a signal ends the wait for it.

    Outside of the main thread, which receives no signals, the function is called directly.

    Args:
        function: it must not depend on the thread that calls it.
        tick: called on the main thread while the function runs, e.g. to show progress.
        every_s: time between two of these calls (seconds).

    Raises:
        BaseException: that of the function, or of the handler of a signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    outcome: _Outcome[ResultT] = _Outcome()
    has_ended = threading.Event()

    def run() -> None:
        try:
            outcome.result = function()
        except BaseException as error:  # Raised again on the main thread.
            outcome.error = error
        finally:
            has_ended.set()

    # A daemon: the end of the process does not wait for it.
    threading.Thread(target=run, name="memguard-call", daemon=True).start()
    while not has_ended.wait(every_s):
        if tick is not None:
            tick()
    if outcome.error is not None:
        raise outcome.error
    return cast("ResultT", outcome.result)
