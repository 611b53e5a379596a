"""Maximum number of processes on this machine, determined without torch.

visible NVIDIA GPUs   one process per GPU
no GPU                one process per core; up to four per core are allowed with a warning
"""

import os
import sys
from pathlib import Path

from memguard.errors import ConfigError

_MOST_A_CORE = 4
_DEVICES = Path("/dev")
MORE_MACHINES = "use several machines with torchrun"


def check_num_processes(count: int, *, option: str, way_out: str) -> None:
    """Reject more processes than GPUs, or than four per core; warn about more than one per core.

    Args:
        count: number of simultaneous processes.
        option: the option that set the number.
        way_out: advice for a machine that is too small, e.g. ``"use several machines"``.

    Raises:
        ConfigError: names the maximum.
    """
    if count == 1:
        return
    num_gpus, num_cores = count_gpus(), len(os.sched_getaffinity(0))
    if num_gpus and count > num_gpus:
        raise ConfigError(
            f"'{option}' must be at most {num_gpus}, the number of visible GPUs: each process "
            f"needs its own GPU; got {count}. To train on the CPU set CUDA_VISIBLE_DEVICES=, or "
            f"{way_out}"
        )
    if num_gpus:
        return
    cores = f"{num_cores} core{'' if num_cores == 1 else 's'}"
    if count > _MOST_A_CORE * num_cores:
        raise ConfigError(
            f"'{option}' must be at most {_MOST_A_CORE * num_cores}, {_MOST_A_CORE} for each core, "
            f"on this machine with {cores}; got {count}. Use {num_cores}, or {way_out}"
        )
    if count > num_cores:
        print(
            f"warning: '{option}' {count} on {cores}: the processes take turns; {num_cores} would "
            "be as fast",
            file=sys.stderr,
        )


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process may use."""
    present = sum(path.name[len("nvidia") :].isdigit() for path in _DEVICES.glob("nvidia*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # CUDA uses the entries before the first one that is not a device.
    names = [name.strip() for name in visible.split(",")]
    is_none = [name in ("", "-1", "none", "NoDevFiles") for name in names]
    listed = is_none.index(True) if True in is_none else len(names)
    return min(present, listed)
