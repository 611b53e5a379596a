"""Long calls in a thread: their result, their error, and signals while they run."""

import signal
import threading

import pytest

from memguard.errors import DataError
from memguard.runtime.children import call_interruptibly


def test_the_result_and_the_thread() -> None:
    thread = call_interruptibly(threading.current_thread)
    assert thread is not threading.main_thread()
    assert thread.daemon, "the end of the process would wait for it"


def test_an_error_is_raised_on_the_caller() -> None:
    def fail() -> None:
        raise DataError("no documents")

    with pytest.raises(DataError, match="no documents"):
        call_interruptibly(fail)


def test_a_signal_ends_the_wait_at_once() -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait()
        has_ended.set()

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        call_interruptibly(work, interrupt, every_s=0.01)
    assert not has_ended.is_set(), "the call still runs"
    may_end.set()
    assert has_ended.wait(10)


def test_progress_is_shown_meanwhile() -> None:
    ticks, may_end = [], threading.Event()

    def tick() -> None:
        ticks.append(threading.current_thread())
        if len(ticks) == 3:
            may_end.set()

    assert call_interruptibly(may_end.wait, tick, every_s=0.01)
    assert set(ticks) == {threading.main_thread()}


def test_another_thread_calls_directly() -> None:
    threads = []

    def call() -> None:
        threads.append(call_interruptibly(threading.current_thread))

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    assert threads == [caller]
