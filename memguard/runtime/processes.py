"""Device and rank of this process, and collective operations over all ranks.

    default group   "cpu:gloo,cuda:nccl" with a GPU, else "gloo": used for training. With a GPU its
                    NCCL communicator is connected at once, and groups of axes are split from it
    control group   gloo over all ranks, without a time limit: numbers and objects on the CPU

A rank may wait for hours while rank 0 reads documents, so the control group has no time limit. The
default group keeps its limits, which detect a hung collective. `stalls` says who is waited for.

It is an error if GPUs are visible and torch was built with CUDA, but cannot use them. The CPU is
used if none is visible, as with `CUDA_VISIBLE_DEVICES=`, or by a build of torch for CPUs.

In a program that goes on when a part of it fails, ranks are `contained`: before each operation all
ranks tell whether they have failed, so that an error on one rank ends the part on all of them.
"""

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar, cast
from uuid import uuid4

import torch
from torch import distributed as dist

from memguard.errors import ConfigError, MemguardError, OtherRankFailed, shorten
from memguard.runtime.environment import count_gpus, read_driver_version
from memguard.runtime.stalls import Progress, stalls_watched

ValueT = TypeVar("ValueT")

# Longer than any wait; gloo overflows on a much larger value.
_FOREVER = timedelta(days=30)
# Longest time between the first and the last rank that call the same function of memguard, or join.
_MEETING = timedelta(minutes=5)
# The launcher's listening socket, which reserves the port before any rank starts.
_STORE_FD = "MEMGUARD_STORE_FD"
_CPU = torch.device("cpu")
# Ranks of which each is connected with all others by gloo.
_MAX_CONNECTED = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """Rank and device of this process; by default a single process on the CPU.

    With one process every method returns at once. With several, all ranks must call the same
    methods in the same order.
    """

    device: torch.device = _CPU
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine; also the index of its GPU."""
    control: dist.ProcessGroup | None = None
    """Process group for these methods; the default group if None."""
    is_contained: bool = False
    """Whether an error on one rank is raised on all; see `contain`."""
    progress: Progress = field(default_factory=Progress, compare=False)
    """Of training, for the watch of stalls."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        self.agree_max(0)

    def check_peers(self) -> None:
        """Raise OtherRankFailed if ranks are contained and one failed; every other calls this."""
        if self.is_contained and self.world_size > 1:
            self._tell(None)

    def _tell(self, error: BaseException | None) -> None:
        """Tell all ranks whether this one failed; raise the failure of the lowest one that has."""
        code = 0 if error is None else _exit_code(error)
        # The largest of these is that of the lowest rank that has failed.
        place = 0 if error is None else self.world_size - self.rank
        failed = torch.tensor([place, code], dtype=torch.int64)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.control)
        if failed[0] > place:
            raise OtherRankFailed(self.world_size - int(failed[0]), int(failed[1])) from error

    @contextmanager
    def contain(self) -> Iterator["Runtime"]:
        """Yield this rank for a block that ends on all ranks if an error is raised on one of them.

        Raises:
            OtherRankFailed: another rank failed in its block, and this one did not.
        """
        contained = replace(self, is_contained=True)
        try:
            yield contained
        except OtherRankFailed:
            raise
        except BaseException as error:
            if self.world_size > 1:
                contained._tell(error)
            raise
        contained.check_peers()

    def agree_max(self, value: int) -> int:
        """Return the largest value of all ranks."""
        if self.world_size == 1:
            return value
        self.check_peers()
        values = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.control)
        return int(values)

    def agree_sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks, in float64: counts up to 2^53 are exact."""
        if self.world_size == 1:
            return list(values)
        self.check_peers()
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums, group=self.control)
        return sums.tolist()

    def agree_any(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank."""
        return bool(self.agree_max(int(flag)))

    def gather_objects(self, value: ValueT) -> list[ValueT]:
        """Return the values of all ranks, in order of rank. Values are pickled."""
        if self.world_size == 1:
            return [value]
        self.check_peers()
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast_object(self, value: ValueT | None) -> ValueT:
        """Return rank 0's value on every rank; values of other ranks are ignored. It is pickled."""
        if self.world_size == 1:
            return cast("ValueT", value)
        self.check_peers()
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return cast("ValueT", values[0])

    def only_on_main(self, function: Callable[[], ValueT]) -> ValueT | None:
        """Run a function on rank 0 while the other ranks wait; those return None.

        Raises:
            OtherRankFailed: on the other ranks, if the function failed on rank 0.
        """
        if not self.is_main:
            code = self.broadcast_object(0)
            if code:
                raise OtherRankFailed(0, code)
            return None
        try:
            result = function()
        except BaseException as error:
            if self.is_contained:
                raise  # The waiting ranks learn of it when the block ends.
            # The exit code is broadcast, so that waiting ranks end at once and do not report a lost
            # connection.
            self.broadcast_object(_exit_code(error))
            raise
        self.broadcast_object(0)
        return result

    def from_main(self, function: Callable[[], ValueT]) -> ValueT:
        """Return on every rank what a function returns on rank 0; see `only_on_main`."""
        return self.broadcast_object(self.only_on_main(function))


def _exit_code(error: BaseException) -> int:
    if isinstance(error, MemguardError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def detect_runtime() -> Runtime:
    """Return this process's device and rank, as set by torchrun or `--nproc`; starts no group.

    Raises:
        ConfigError: torch cannot use the visible GPUs, or this machine has more processes than
            GPUs.
    """
    problem = explain_unusable_gpus()
    if problem is not None:
        raise ConfigError(problem)
    return _find_place()


def explain_unusable_gpus() -> str | None:
    """Return in one line why torch cannot use the visible GPUs.

    None if it can, if no GPU is visible, or if torch was built without CUDA.
    """
    num_gpus = count_gpus()
    if num_gpus == 0 or torch.version.cuda is None:
        return None
    with warnings.catch_warnings():
        # The line says what torch warns of.
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return None
        reason = _find_cuda_error()
    gpus = "the visible GPU" if num_gpus == 1 else f"the {num_gpus} visible GPUs"
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = "" if listed is None else f" (CUDA_VISIBLE_DEVICES={shorten(listed)})"
    return (
        f"torch {torch.__version__} for CUDA {torch.version.cuda} cannot use {gpus}{listed} with "
        f"NVIDIA driver {read_driver_version() or 'of unknown version'}: {reason}. Update the "
        "driver or install a torch for it, or set CUDA_VISIBLE_DEVICES= to use the CPU"
    )


def _find_cuda_error() -> str:
    """Return torch's reason why CUDA is not available, without its advice."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        line = str(error).strip().partition("\n")[0]
        # An error of CUDA has a number, after guesses at its cause.
        number = re.search(r"Error \d+: .*", line)
        return re.split(r"\. (?=[A-Z])", number[0] if number else line)[0].rstrip(".")
    return "CUDA is not available"


def _find_place() -> Runtime:
    rank, local_rank, world_size = _read_ranks()
    if not torch.cuda.is_available():
        device = _CPU
    elif local_rank < torch.cuda.device_count():
        device = torch.device("cuda", local_rank)
    else:
        raise ConfigError(
            f"each process needs its own GPU: this machine has {torch.cuda.device_count()}, and "
            f"this is process {local_rank + 1}. Start fewer (--nproc, --nproc-per-node)"
        )
    return Runtime(device=device, rank=rank, world_size=world_size, local_rank=local_rank)


def _read_ranks() -> tuple[int, int, int]:
    """Return rank, rank on this machine and number of ranks."""
    if dist.is_initialized():
        # Called from a program that has already initialized a process group.
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        return dist.get_rank(), local_rank, dist.get_world_size()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    # Some clusters set one of them for other purposes; launchers of ranks set all three.
    if not all(os.environ.get(name) for name in names):
        return 0, 0, 1
    texts = [os.environ[name] for name in names]
    numbers = [int(text[:20]) if text.isascii() and text.isdigit() else -1 for text in texts]
    problems = [
        f"{name} must be a whole number of {least} or more; got '{shorten(ascii(text)[1:-1])}'"
        for name, text, number, least in zip(names, texts, numbers, (0, 0, 1), strict=True)
        if number < least
    ]
    rank, local_rank, world_size = numbers
    if not problems and rank >= world_size:
        problems = [
            f"RANK must be below WORLD_SIZE, the number of ranks; got {rank} and {world_size}"
        ]
    if problems:
        way_out = "Start the ranks with --nproc or torchrun, which set it"
        raise ConfigError(*(f"the environment variable {each}. {way_out}" for each in problems))
    return rank, local_rank, world_size


@contextmanager
def start_runtime(timeout: timedelta = timedelta(minutes=30)) -> Iterator[Runtime]:
    """Join the process group, and leave it at the end.

    After an error this rank does not wait for the others, and the connections stay open until the
    process ends, so that it can print its message first. ``timeout`` is the longest wait of a
    collective of the default group. Errors are those of `detect_runtime`.
    """
    runtime = detect_runtime()
    if runtime.world_size == 1:
        yield runtime
        return
    if runtime.device.type == "cuda":
        torch.cuda.set_device(runtime.device)
    if dist.is_initialized():
        runtime = _add_control(runtime)
        yield runtime
        runtime.barrier()
        return
    _join(runtime, timeout)
    store = dist.distributed_c10d._get_default_store()
    with stalls_watched(runtime.rank, runtime.world_size, store, runtime.progress):
        runtime = _add_control(runtime)
        yield runtime
        runtime.barrier()
    dist.destroy_process_group()


def _add_control(runtime: Runtime) -> Runtime:
    control = dist.new_group(backend="gloo", timeout=_FOREVER)
    return replace(runtime, control=cast("dist.ProcessGroup", control))


@contextmanager
def join_program() -> Iterator[Runtime]:
    """Yield this rank of a program that calls memguard on all its ranks, for the time of a block.

    An error on one rank ends the block on all ranks, and the program may go on. Its model stays
    where it is, so a GPU that cannot be used is no error here.

    Raises:
        ConfigError: not every rank of the program has called this within five minutes.
        OtherRankFailed: another rank failed in its block.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield replace(_find_place(), rank=0, world_size=1)
        return
    try:
        meeting = dist.new_group(backend="gloo", timeout=_MEETING)
        dist.barrier(group=meeting)
    except RuntimeError as error:
        raise ConfigError(
            "every process of this program must make this call with its part of the model; after "
            f"{_MEETING.total_seconds():.0f} s one had not. Call it on all ranks, or save the "
            "model and audit the folder"
        ) from error
    dist.destroy_process_group(meeting)
    control = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=_FOREVER))
    try:
        with replace(_find_place(), control=control).contain() as runtime:
            yield runtime
    finally:
        dist.destroy_process_group(control)


def _join(runtime: Runtime, timeout: timedelta) -> None:
    is_cuda = runtime.device.type == "cuda"
    if runtime.world_size > _MAX_CONNECTED:
        # A rank then connects with the few it talks to, not with all: two groups of 16,384 ranks
        # would hold 32,768 sockets each. Fewer ranks connect at once: one that waits for a rank
        # that died before they were connected would wait for hours. Read when a group is created.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=_find_store(runtime),
        rank=runtime.rank,
        world_size=runtime.world_size,
        timeout=timeout,
        device_id=runtime.device if is_cuda else None,
    )


def _find_store(runtime: Runtime) -> Any:
    """Return the store for the rendezvous; None lets torch use torchrun's environment."""
    inherited = os.environ.get(_STORE_FD)
    if inherited is None:
        return _meet_again(runtime)
    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        runtime.world_size,
        runtime.is_main,
        master_listen_fd=int(inherited) if runtime.is_main else None,
    )


def _meet_again(runtime: Runtime) -> Any:
    """Return the store of torchrun's agents with a prefix for this attempt; None if they lend none.

    The store has keys of the attempts before, and the agents of several machines need not have
    counted as many: rank 0 draws the prefix, and each rank waits until rank 0 has seen it.
    """
    lends = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not lends or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, runtime.world_size, False)  # type: ignore[attr-defined]
    own = uuid4().hex
    if runtime.is_main:
        store.set("memguard/attempt", own)
        names = [f"{own}/{rank}" for rank in range(1, runtime.world_size)]
        store.wait(names, _MEETING)
        store.set(f"{own}/seen", b"".join(store.multi_get(names)).decode())
        return dist.distributed_c10d.PrefixStore(own, store)
    while True:
        attempt = store.get("memguard/attempt").decode()
        store.set(f"{attempt}/{runtime.rank}", own)
        # That of an attempt before has not seen it.
        if store.check([f"{attempt}/seen"]) and own in store.get(f"{attempt}/seen").decode():
            return dist.distributed_c10d.PrefixStore(attempt, store)
        time.sleep(0.1)
