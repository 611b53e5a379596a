"""Number of processes on this machine, and the most there may be. Does not import torch.

                       if --nproc is left out                      at most
several visible GPUs   one for each that mesh, batch and model     one for each GPU
                       allow; one where a setting needs it
no GPU                 one                                         four for each core; more than
                                                                   one with a warning
torchrun, Slurm        the processes that these started
"""

import importlib.metadata
import os
import sys
from pathlib import Path

from memguard.config import RunConfig
from memguard.errors import ConfigError
from memguard.parallel.mesh_shape import resolve_mesh
from memguard.workflows.run_checks import explain_one_process, read_local_sizes

_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MOST_A_CORE = 4
_DEVICES = Path("/dev")
MORE_MACHINES = "use several machines with torchrun"


def choose_num_processes(config: RunConfig, nproc: int | None) -> tuple[int, str]:
    """Return the number of processes, and why some GPUs are not used ("" if all are).

    Args:
        config: the run's settings.
        nproc: value of `--nproc`; None if left out.
    """
    num_gpus = count_usable_gpus()
    if nproc is not None or num_gpus <= 1:
        return nproc or 1, ""
    why = explain_one_process(config)
    if why is not None:
        return 1, f"1 of {num_gpus} visible GPUs is used: {why}"
    sizes = read_local_sizes(config)
    for count in range(num_gpus, 0, -1):
        try:
            resolve_mesh(config.parallel, count, sizes, batch_size=config.train.batch_size)
        except ConfigError as error:
            why = why or error.problems[0]
            continue
        is_all = count == num_gpus
        return count, "" if is_all else f"{count} of {num_gpus} visible GPUs are used: {why}"
    # No number works: the mesh is refused with the ones that would.
    return num_gpus, ""


def count_usable_gpus() -> int:
    """Return the number of GPUs that processes started here would have; 0 under torchrun."""
    return 0 if "LOCAL_RANK" in os.environ or is_cpu_build() else count_gpus()


def count_processes(nproc: int) -> int:
    """Return the number of processes, from `--nproc` or from torchrun.

    Args:
        nproc: value of the option.
    """
    if nproc > 1 or not all(os.environ.get(name, "").isdigit() for name in _RANK_NAMES):
        return nproc
    return int(os.environ["WORLD_SIZE"])


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


def is_cpu_build() -> bool:
    """Return whether the installed torch cannot use GPUs; does not import it."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
