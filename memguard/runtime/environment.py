"""Environment of a run: peak memory, folders, versions and hardware, silenced libraries."""

import importlib.metadata
import logging
import os
import platform
import resource
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_memory_bytes(device: "torch.device") -> int:
    """Return the peak memory: of the GPU, or the resident memory of this process on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def default_cache_dir() -> Path:
    """Return the folder of downloaded or derived inputs that are kept between runs."""
    named = os.environ.get("MEMGUARD_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memguard"


def quiet_kernel_advice() -> None:
    """Silence advice of torchao and bitsandbytes about kernels that this machine cannot use.

    They give it when transformers imports them; this may be called before, and imports nothing.
    """
    for name in ("torchao", "bitsandbytes", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def quiet_libraries() -> None:
    """Silence progress bars and advice of the libraries, to keep the console readable."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import datasets
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    quiet_kernel_advice()
    # torch's checkpoint writer warns that it runs without a process group, which is intended.
    warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load)")


def describe_environment(device: "torch.device", world_size: int = 1) -> dict[str, str]:
    """Return versions and hardware, for the records of a run."""
    import torch

    packages = ("memguard", "torch", "transformers", "datasets", "numpy", "scipy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        **versions,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "gpu": gpu,
        "world_size": str(world_size),
    }
