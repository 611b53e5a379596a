"""Number of processes of a command if `--nproc` is left out, or under torchrun. No torch.

several visible GPUs   one for each that mesh, batch and model allow; one where a setting needs it
one GPU, or none       one
torchrun, Slurm        the processes that these started
"""

import os

from memguard.config import RunConfig
from memguard.errors import ConfigError
from memguard.parallel.mesh_shape import resolve_mesh
from memguard.runtime.environment import count_gpus, is_cpu_build
from memguard.workflows.common.checks import explain_one_process, read_local_sizes

_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


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
    """Return the number of processes, from `--nproc` (`nproc`) or from torchrun."""
    if nproc > 1 or not all(os.environ.get(name, "").isdigit() for name in _RANK_NAMES):
        return nproc
    return int(os.environ["WORLD_SIZE"])
