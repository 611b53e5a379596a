"""Processes, signals, console output and environment of a run.

processes.py     device and rank of this process, and collective operations over all ranks
ended.py         how an attempt at a run ended, and whether another follows
children.py      signals of this process, its child processes, and calls that a signal may end
console.py       output of rank 0
environment.py   peak memory, folders, versions, silenced libraries, limits of processes; allocator,
                 cuBLAS workspace and TF32 on GPUs
stalls.py        says which rank the others wait for
shared_sums.py   hashes files, each on one of the ranks

Modules that need torch are imported at first use: comparing finished runs works without it.
"""

import typing

from memguard.runtime.console import Advance, Console, format_duration
from memguard.runtime.environment import (
    default_cache_dir,
    describe_environment,
    deterministic_algorithms,
    fast_matmuls,
    measure_memory,
    quiet_libraries,
    quieted_advice,
    quieted_libraries,
    set_allocator_defaults,
    set_deterministic_defaults,
)

if typing.TYPE_CHECKING:
    from memguard.runtime.processes import Runtime, detect_runtime, start_runtime


def __getattr__(name: str) -> typing.Any:
    if name in ("Runtime", "detect_runtime", "start_runtime"):
        from memguard.runtime import processes

        return getattr(processes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
