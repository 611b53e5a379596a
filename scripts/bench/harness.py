"""Shared code of the benchmarks: ranks as processes, alternating sides, tables and a verdict.

    with Ranks(work, case, num_ranks=4) as ranks:         work(case, rank) in four processes
        ranks.hear()                                      all have called rank.report()
        answers, peaks = ranks.watch("go on")             rank.report() returned "go on"; RssAnon

    rounds = take_turns({"ours": ours, "theirs": theirs}, rounds=5)
    verdict = Verdict()
    words = verdict.check("speed", rounds.ratio("ours", "theirs"), at_least=1.0)
    return verdict.end()

A figure is the median over rounds, and a ratio the median of the ratios of each round, because the
speed of a shared machine varies from minute to minute. BENCH_TRACEBACK=1 prints a failed rank's
traceback.
"""

import argparse
import contextlib
import multiprocessing
import operator
import os
import re
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Imported once, by the fork server, so that memory of code is not part of the measurement.
PRELOADED = [
    "quieted",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.testing._internal.distributed.fake_pg",
    "accelerate.utils.fsdp_utils",
    "transformers.distributed",
    "transformers.trainer",
    "transformers.integrations.tensor_parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "fake_step",
    "memguard.train.step",
    "memguard.hf.load",
]
TIMEOUT_S = 300
SAMPLE_EVERY_S = 0.002


def build_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints a script's docstring as help."""
    summary, _, usage = (doc or "").partition("\n")
    return argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )


# -- processes ---------------------------------------------------------------------------------


class Failed(Exception):
    """A side does not run; the message is the reason."""


class Rank:
    """The connection of one rank's work to the process that started it."""

    def __init__(self, pipe: connection.Connection, sync: Callable[[], None]) -> None:
        self._pipe, self._sync = pipe, sync

    def report(self, answer: Any = None) -> Any:
        """Synchronise all ranks, send an answer, and return the next message."""
        self._sync()
        self._pipe.send(("", answer))
        message = self._pipe.recv()
        self._sync()
        return message


class Ranks:
    """Processes with gloo between them, killed at the end of the `with` block."""

    def __init__(
        self, work: Callable[..., Any], *arguments: Any, num_ranks: int = 1, num_threads: int = 1
    ) -> None:
        """Start ``work(*arguments, rank)`` on every rank; its return value is its last answer."""
        os.environ.update(
            OMP_NUM_THREADS=str(num_threads),
            GLOO_SOCKET_IFNAME="lo",
            CUDA_VISIBLE_DEVICES="",
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
            # Before Python 3.13 the fork server does not take over sys.path and skips what it
            # cannot import without a word; `quieted` is in this folder.
            PYTHONPATH=os.pathsep.join(sys.path),
        )
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes, self._processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_be_rank,
                args=(work, arguments, rank, num_ranks, num_threads, port, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def hear(self, poll: Callable[[], None] | None = None) -> list[Any]:
        """Wait for one answer of every rank; call `poll` every few milliseconds until then.

        Raises:
            Failed: a rank failed, died or did not answer in time.
        """
        answers: dict[Any, Any] = {}
        deadline_s = time.monotonic() + TIMEOUT_S
        while waiting := [pipe for pipe in self._pipes if pipe not in answers]:
            if time.monotonic() > deadline_s:
                raise Failed(f"no answer within {TIMEOUT_S} s")
            # All pipes are read, because if one rank fails the others wait for it.
            for pipe in connection.wait(waiting, SAMPLE_EVERY_S if poll else 1.0):
                try:
                    failure, answers[pipe] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    failure = "a process died without a message"
                if failure:
                    raise Failed(failure)
            if poll:
                poll()
        return [answers[pipe] for pipe in self._pipes]

    def go(self, message: Any = None, poll: Callable[[], None] | None = None) -> list[Any]:
        """Send a message to every rank and return their answers."""
        for pipe in self._pipes:
            pipe.send(message)
        return self.hear(poll)

    def monitor(self, message: Any = None) -> tuple[list[Any], list[int]]:
        """Like `go`; return the answers and the peak anonymous memory of each rank (bytes)."""
        peaks = self.anonymous_bytes()

        def look() -> None:
            peaks[:] = map(max, peaks, self.anonymous_bytes())

        return self.go(message, look), peaks

    def anonymous_bytes(self) -> list[int]:
        """Return RssAnon of each rank, which excludes mapped files; 0 if the rank has ended."""
        return [_read_anonymous_bytes(process.pid or 0) for process in self._processes]

    @property
    def process_ids(self) -> list[int]:
        """Id of each rank's process."""
        return [process.pid or 0 for process in self._processes]

    def end(self) -> None:
        """Kill all ranks that still run."""
        for process in self._processes:
            process.kill()
            process.join()


def _be_rank(
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    num_threads: int,
    port: int,
    pipe: connection.Connection,
) -> None:
    import torch
    import transformers
    from torch import distributed as dist

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(num_threads)

    def sync() -> None:
        if num_ranks > 1:
            dist.barrier()

    try:
        if num_ranks > 1:
            # Set only for several ranks, because a Trainer that finds these wraps its model.
            os.environ.update(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                WORLD_SIZE=str(num_ranks),
                LOCAL_WORLD_SIZE=str(num_ranks),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
            )
            dist.init_process_group("gloo")
        answer = work(*arguments, Rank(pipe, sync))
        sync()
        pipe.send(("", answer))
    except BaseException as error:
        pipe.send((describe_error(error), None))
        if os.environ.get("BENCH_TRACEBACK"):
            traceback.print_exc()
    # Its memory is still sampled, and its peers may still send, so it waits until it is killed.
    with contextlib.suppress(EOFError):
        pipe.recv()


def describe_error(error: BaseException) -> str:
    """Return an exception in one line."""
    return " ".join(traceback.format_exception_only(error)[-1].split())[:200]


def _read_anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    match = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0


# -- turns -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """Seconds of each side, one value per round."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)
    """CPU seconds of this process in each side's rounds; not for a unit."""
    failures: dict[str, str] = field(default_factory=dict)
    """Reason why a side does not run; it then has no ratio."""

    def median_s(self, side: str) -> float:
        """Return the median of a side's rounds."""
        return statistics.median(self.seconds[side])

    def ratio(self, side: str, other: str) -> float:
        """Return the median speed-up of a side over another."""
        return _compare(self.seconds[side], self.seconds[other])

    def cpu_ratio(self, side: str, other: str) -> float:
        """Return `ratio` in CPU seconds, which depend less on what else runs on the machine."""
        return _compare(self.cpu_seconds[side], self.cpu_seconds[other])


def _compare(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def take_turns(sides: Mapping[str, Callable[[], float]], *, rounds: int) -> Rounds:
    """Run each side once per round; each returns its seconds for a unit of its choice."""
    results = Rounds(seconds={name: [] for name in sides}, cpu_seconds={name: [] for name in sides})
    # One extra round that is not counted, to allocate buffers and fill caches.
    for number in range(rounds + 1):
        # The order alternates, so that a machine that becomes slower favours no side.
        for name in list(sides)[:: -1 if number % 2 else 1]:
            if name in results.failures:
                continue
            begin_s = time.process_time()
            try:
                seconds = sides[name]()
            except Failed as failure:
                results.failures[name] = str(failure)
            else:
                results.seconds[name] += [seconds] if number else []
                results.cpu_seconds[name] += [time.process_time() - begin_s] if number else []
    return results


def timed(
    work: Callable[[], object], units: int = 1, wait: Callable[[], None] = lambda: None
) -> Callable[[], float]:
    """Return a side that runs ``work`` and returns the seconds per unit.

    Args:
        work: the function to time.
        units: number of units in one call.
        wait: waits until the device has finished.
    """

    def side() -> float:
        wait()
        begin_s = time.perf_counter()
        work()
        wait()
        return (time.perf_counter() - begin_s) / units

    return side


# -- output ------------------------------------------------------------------------------------


class Table:
    """Rows under headings; a heading has the width of its column."""

    def __init__(self, name_width: int, *headings: str, corner: str = "", end: str = "") -> None:
        self._widths = (name_width, *map(len, headings))
        print(f"{corner:<{name_width}}{''.join(headings)}  {end}".rstrip(), flush=True)

    def row(self, name: str, *cells: str, end: str = "") -> None:
        """Print a row; `end` may have any width."""
        first, *widths = self._widths
        padded = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False))
        print(f"{name:<{first}}{padded:<{sum(widths)}}  {end}".rstrip(), flush=True)

    def failure(self, name: str, reason: str) -> None:
        """Print a row without figures."""
        print(f"{name:<{self._widths[0]}} does not run: {reason}", flush=True)


class Verdict:
    """Limits that were checked, and those that failed."""

    def __init__(self) -> None:
        self.num_limits = 0
        self.failed: list[str] = []

    def check(
        self,
        name: str,
        value: float,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        below: float | None = None,
        unit: str = "x",
    ) -> str:
        """Return a limit and whether it is met; an empty string without a limit."""
        limits = {
            ">=": (at_least, operator.ge),
            "<=": (at_most, operator.le),
            "<": (below, operator.lt),
        }
        given = {
            sign: (limit, holds) for sign, (limit, holds) in limits.items() if limit is not None
        }
        if not given:
            return ""
        self.num_limits += 1
        words = " and ".join(f"{sign} {limit:,.4g}{unit}" for sign, (limit, _) in given.items())
        is_met = all(holds(value, limit) for limit, holds in given.values())
        if not is_met:
            self.fail(f"{name}: {value:,.4g}{unit}, not {words}")
        return f"{words} {'ok' if is_met else 'MISSED'}"

    def fail(self, reason: str) -> None:
        """Record a failure that is independent of limits."""
        self.failed.append(reason)

    def end(self, also: str = "") -> int:
        """Print the last line; return the exit code."""
        if self.failed:
            print(f"\nFAIL: {'; '.join(self.failed)}")
            return 1
        plural = "s" * (self.num_limits != 1)
        limits = f": {self.num_limits} limit{plural} met" if self.num_limits else ""
        print(f"\nPASS{limits}{also}")
        return 0
