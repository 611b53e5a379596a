"""A pool of preloaded processes for distributed tests.

    def mean_rank() -> float: ...                 at the top level of a module
    assert ranks(mean_rank, 4) == [1.5] * 4       in a test that takes the fixture `ranks`

One server process imports torch once; each rank is a fork of it, with one thread and gloo. With
`RankPool("cuda")` each rank is a new process with a GPU of its own and NCCL.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
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
    "memguard.workflows.train",
    "memguard.workflows.audit",
    "datasets",
    "matplotlib.figure",
    "peft",
]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}


class RankFailure(AssertionError):
    """A rank ended without a result, or with an exception that cannot be sent."""


class RankPool:
    """Runs functions on many ranks; each call has fresh processes and a fresh process group."""

    def __init__(self, device_type: str = "cpu") -> None:
        self._device_type = device_type
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
        receivers, processes = [], []
        with tempfile.TemporaryDirectory() as folder:
            try:
                for rank in range(world_size):
                    receiver, sender = self._context.Pipe(duplex=False)
                    group = (rank, world_size, Path(folder) / "store", self._device_type)
                    work = (function, args, *group, sender)
                    process = self._context.Process(target=_run_rank, args=work, daemon=True)
                    process.start()
                    sender.close()
                    receivers.append(receiver)
                    processes.append(process)
                return _collect(receivers, deadline)
            finally:
                for process in processes:
                    process.kill()
                    process.join()

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
            except EOFError:
                when, error = 0.0, RankFailure(f"rank {rank} died without a word")
            if error is not None:
                failures.append((when, rank, error))
        if failures:
            # The others fail only because the first one left them.
            raise min(failures, key=lambda failure: failure[:2])[2]
    return [results[rank] for rank in range(len(receivers))]


def _run_rank(
    function: Any, args: Any, rank: int, size: int, store: Path, device_type: str, sender: Any
) -> None:
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
        message = pickle.dumps((0.0, None, function(*args)))
        if dist.is_initialized():  # A simulation ends the group of its only real rank.
            # Nobody leaves while another rank may still wait for it.
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:
        error.add_note(f"On rank {rank} of {size}:\n{traceback.format_exc()}")
        try:
            message = pickle.dumps((time.monotonic(), error, None))
            pickle.loads(message)
        except Exception:
            failure = RankFailure("\n".join([repr(error), *error.__notes__]))
            message = pickle.dumps((time.monotonic(), failure, None))
    sender.send_bytes(message)
