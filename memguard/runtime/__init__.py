"""Where a run runs and how it speaks.

processes.py     this process among all ranks: device, rank, what all agree on
console.py       one voice for all ranks
environment.py   peak memory, folders, versions for the records, silenced libraries
"""

from memguard.runtime.console import Advance, Console, format_duration
from memguard.runtime.environment import (
    default_cache_dir,
    describe_environment,
    peak_memory_bytes,
    quiet_libraries,
)
from memguard.runtime.processes import Runtime, detect_runtime, start_runtime
