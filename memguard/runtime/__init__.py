"""Where a run runs and how it speaks.

processes.py     this process among all ranks: device, rank, what all agree on
console.py       one voice for all ranks
environment.py   peak memory, folders, versions for the records, silenced libraries

What needs torch is imported at its first use: comparing finished runs speaks without it.
"""

import typing

from memguard.runtime.console import Advance, Console, format_duration
from memguard.runtime.environment import (
    default_cache_dir,
    describe_environment,
    peak_memory_bytes,
    quiet_libraries,
)

if typing.TYPE_CHECKING:
    from memguard.runtime.processes import Runtime, detect_runtime, start_runtime


def __getattr__(name: str) -> typing.Any:
    if name in ("Runtime", "detect_runtime", "start_runtime"):
        from memguard.runtime import processes

        return getattr(processes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
