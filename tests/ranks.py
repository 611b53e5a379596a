"""A pool of preloaded processes for distributed tests.

    def mean_rank() -> float: ...                 at the top level of a module
    assert ranks(mean_rank, 4) == [1.5] * 4       in a test that takes the fixture `ranks`

One server process imports torch once; each rank is a fork of it, with one thread and gloo. With
`RankPool("cuda")` each rank is a new process with a GPU of its own and NCCL.
"""

import copy
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from step_count import count_steps

_PRELOADED = [
    "hypothesis",
    "pytest",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    # What a whole run imports, and the largest of what it imports when needed: a second a rank.
    "memguard.workflows.training.train",
    "memguard.workflows.auditing.audit",
    "datasets",
    "matplotlib.figure",
    "peft",
    "rank_server",
]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    # Where the server finds `rank_server`.
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    ),
}


class RankFailure(AssertionError):
    """A rank ended without a result, or with an exception that cannot be sent."""


class RankPool:
    """Runs functions on many ranks; each call has fresh processes and a fresh process group.

    A pool that `keep` yields has the same ones for all calls with as many ranks.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self._device_type = device_type
        self._kept: dict[int, _Group] | None = None
        self._context: Any = multiprocessing.get_context("spawn")
        if device_type == "cuda":
            # A fork cannot use CUDA once its parent has looked for a GPU.
            return
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        before = dict(os.environ)
        try:
            # Ranks inherit what the server has when it starts.
            os.environ.update(_ENVIRONMENT)
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)

    def __call__(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank of a gloo group and return the results in order.

        Args:
            function: importable by name; it asks `torch.distributed` for its rank.
            world_size: number of ranks.
            args: picklable, as what the function returns.
            timeout_s: for all of it; then the ranks are killed.

        Raises:
            Exception: what the first failing rank raised, with its traceback as a note.
            TimeoutError: naming the ranks without a result.
        """
        deadline = time.monotonic() + timeout_s
        group = (self._kept or {}).pop(world_size, None)
        group = group or _Group(self._context, self._device_type)
        try:
            if not group.processes:
                group.start(world_size)
            results = group.call(function, args, deadline)
        except BaseException:
            group.end()
            raise
        if self._kept is None:
            group.end()
        else:
            self._kept[world_size] = group
        return results

    @contextmanager
    def keep(self) -> Iterator["RankPool"]:
        """Yield a pool that has one group a size for all calls; after a failure, another one."""
        pool = copy.copy(self)
        pool._kept = {}
        try:
            yield pool
        finally:
            for group in pool._kept.values():
                group.end()

    def start(self, function: Callable[..., Any], *args: Any) -> BaseProcess:
        """Call ``function(*args)`` in a process of its own, without a group; the caller waits.

        Its exit code is what `sys.exit` was given, 1 after an exception, or a negative signal.
        """
        process = self._context.Process(target=_run_alone, args=(function, args), daemon=True)
        process.start()
        return process


def _run_alone(function: Callable[..., Any], args: Sequence[Any]) -> None:
    count_steps()
    function(*args)


@dataclass(eq=False)
class _Group:
    """Processes that have one process group, and take calls until one fails."""

    context: Any
    device_type: str
    connections: list[connection.Connection] = field(default_factory=list)
    processes: list[BaseProcess] = field(default_factory=list)
    folder: Any = field(default_factory=tempfile.TemporaryDirectory)
    """Of the file by which the ranks find each other."""

    def start(self, world_size: int) -> None:
        for rank in range(world_size):
            ours, theirs = self.context.Pipe()
            work = (rank, world_size, Path(self.folder.name) / "store", self.device_type, theirs)
            process = self.context.Process(target=_serve, args=work, daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def call(self, function: Callable[..., Any], args: Any, deadline: float) -> list[Any]:
        message = pickle.dumps((function, args))
        for each in self.connections:
            with suppress(OSError):  # A rank that died is found when its result is missing.
                each.send_bytes(message)
        return _collect(self.connections, deadline)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for each in self.connections:
            each.close()
        self.folder.cleanup()


def _collect(receivers: Sequence[connection.Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while missing := [rank for rank in range(len(receivers)) if rank not in results]:
        wanted = {receivers[rank]: rank for rank in missing}
        ready = connection.wait(list(wanted), max(0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"no result from ranks {missing} of {len(receivers)}")
        failures = []
        for receiver in ready:
            rank = wanted[receiver]
            try:
                when, error, results[rank] = pickle.loads(receiver.recv_bytes())
            except (EOFError, ConnectionError):
                when, error = 0.0, RankFailure(f"rank {rank} died without a word")
            if error is not None:
                failures.append((when, rank, error))
        if failures:
            # The others fail only because the first one left them.
            raise min(failures, key=lambda failure: failure[:2])[2]
    return [results[rank] for rank in range(len(receivers))]


def _serve(rank: int, size: int, store: Path, device_type: str, caller: Any) -> None:
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    count_steps()
    try:
        group = {"store": dist.FileStore(str(store), size), "rank": rank, "world_size": size}
        backend = "gloo"
        if device_type == "cuda":
            torch.cuda.set_device(rank)
            backend = "cpu:gloo,cuda:nccl"
        # Who is too slow is decided by the caller's timeout alone.
        dist.init_process_group(backend, timeout=timedelta(hours=1), **group)
        while True:
            function, args = pickle.loads(caller.recv_bytes())
            message = pickle.dumps((0.0, None, function(*args)))
            if dist.is_initialized():  # A simulation ends the group of its only real rank.
                # The caller may end this rank once it has the result; no other waits for it then.
                dist.barrier()
            caller.send_bytes(message)
    except BaseException as error:
        error.add_note(f"On rank {rank} of {size}:\n{traceback.format_exc()}")
        try:
            message = pickle.dumps((time.monotonic(), error, None))
            pickle.loads(message)
        except Exception:
            failure = RankFailure("\n".join([repr(error), *error.__notes__]))
            message = pickle.dumps((time.monotonic(), failure, None))
        with suppress(OSError):  # The caller is gone.
            caller.send_bytes(message)
