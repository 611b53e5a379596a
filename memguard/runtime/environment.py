"""Environment of a run: memory, folders, versions, silenced libraries, number of processes.

Process-wide settings of torch for GPUs are here too (the allocator, determinism, TF32). The user's
own environment variables win; NVIDIA_TF32_OVERRIDE=0 turns TF32 off.

Processes on one machine, without torch:

    visible NVIDIA GPUs   one process per GPU
    no GPU                one process per core; up to four per core are allowed with a warning
"""

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import resource
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memguard import __version__
from memguard.errors import ConfigError

if TYPE_CHECKING:
    import torch

MORE_MACHINES = "use several machines with torchrun"
_MOST_A_CORE = 4
_PACKAGE = Path(__file__).parents[1]
_CODE_SUFFIXES = (".py", ".j2")
_DEVICES = Path("/dev")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPeak:
    """Memory of this process since its start."""

    allocated_bytes: int
    """Peak of the tensors on the GPU; on a CPU the peak resident memory of the process."""
    reserved_bytes: int | None = None
    """Peak of what CUDA's allocator held for them; None on a CPU."""
    num_alloc_retries: int | None = None
    """Times that the allocator freed its cached memory because memory was short; None on a CPU."""


def measure_memory(device: "torch.device") -> MemoryPeak:
    """Return the peak memory of this process on a device."""
    if device.type == "cuda":
        import torch

        statistics = torch.cuda.memory_stats(device)
        return MemoryPeak(
            allocated_bytes=statistics["allocated_bytes.all.peak"],
            reserved_bytes=statistics["reserved_bytes.all.peak"],
            num_alloc_retries=statistics["num_alloc_retries"],
        )
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return MemoryPeak(allocated_bytes=resident)


def default_cache_dir() -> Path:
    """Return the folder of downloaded or derived inputs that are kept between runs.

    Raises:
        ConfigError: no variable names one, and the user has no home folder.
    """
    named = os.environ.get("MEMGUARD_CACHE")
    if named:
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memguard"
    except RuntimeError as error:
        raise ConfigError(
            "this user has no home folder for what memguard keeps between runs: set the "
            "environment variable MEMGUARD_CACHE to a folder"
        ) from error


# From high to low priority; torch 2.11 and later read all of them.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def set_allocator_defaults() -> None:
    """Let segments of GPU memory grow, because the sizes of tensors change from step to step.

    Has an effect only before CUDA is initialised.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def set_deterministic_defaults() -> None:
    """Give cuBLAS the fixed workspace that its deterministic algorithms need.

    Has an effect only before the first matmul on a GPU. The size is that of torch's documentation.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Make torch use only deterministic algorithms inside the block, if enabled.

    Operations that have none raise an error. Where each operation has one, as on the CPU, results
    do not change.
    """
    if not enabled:
        yield
        return
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def fast_matmuls(device: "torch.device") -> Iterator[None]:
    """Compute fp32 matmuls on a GPU in TF32 inside this block; on a CPU nothing changes.

    TF32 rounds factors to 10 bits of mantissa, more than bf16's 7; sums stay fp32. Training
    steps use it, and heads of audits in bf16, whose factors are not rounded by it.
    """
    if device.type != "cuda":
        yield
        return
    import torch

    before = None
    # Fails if the calling program has set it by torch's other interface; then its choice stays.
    with contextlib.suppress(RuntimeError):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)


_PARALLELISM = "TOKENIZERS_PARALLELISM"
_ADVISERS = ("torchao", "bitsandbytes", "torch.utils._pytree")


def quiet_kernel_advice() -> None:
    """Silence advice of torchao and bitsandbytes about kernels that this machine cannot use.

    They give it when transformers imports them; this may be called before, and imports nothing. If
    GPUs are visible, torch's warning that it cannot use them is silenced too, as `detect_runtime`
    raises an error.
    """
    for name in _ADVISERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if count_gpus():
        warnings.filterwarnings("ignore", message="CUDA initialization")


@contextmanager
def quieted_advice() -> Iterator[None]:
    """Silence for a block what libraries advise when they are imported; imports nothing."""
    levels = {name: logging.getLogger(name).level for name in _ADVISERS}
    with warnings.catch_warnings():
        # tqdm, in a notebook without ipywidgets.
        warnings.filterwarnings("ignore", message="IProgress not found")
        quiet_kernel_advice()
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def quiet_libraries() -> None:
    """Silence progress bars and advice of the libraries, to keep the console readable."""
    os.environ.setdefault(_PARALLELISM, "false")
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


@contextmanager
def quieted_libraries() -> Iterator[None]:
    """Silence the libraries for the time of a block; a program that called memguard goes on."""
    import datasets
    import transformers

    of_transformers, of_datasets = transformers.utils.logging, datasets.utils.logging
    levels = of_transformers.get_verbosity(), of_datasets.get_verbosity()
    has_bars = of_transformers.is_progress_bar_enabled(), datasets.is_progress_bar_enabled()
    ranks = logging.getLogger("torch.distributed")
    level_of_ranks = ranks.level
    parallelism = os.environ.get(_PARALLELISM)
    with warnings.catch_warnings():
        quiet_libraries()
        try:
            yield
        finally:
            of_transformers.set_verbosity(levels[0])
            of_datasets.set_verbosity(levels[1])
            if has_bars[0]:
                of_transformers.enable_progress_bar()
            if has_bars[1]:
                datasets.enable_progress_bars()
            ranks.setLevel(level_of_ranks)
            if parallelism is None:
                os.environ.pop(_PARALLELISM, None)


def describe_environment(device: "torch.device", world_size: int = 1) -> dict[str, str]:
    """Return versions and hardware, for the records of a run."""
    import torch

    packages = ("torch", "transformers", "datasets", "numpy", "scipy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        "memguard": __version__,
        **versions,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "gpu": gpu,
        "world_size": str(world_size),
    }


def check_num_processes(count: int, *, option: str, way_out: str) -> None:
    """Reject more processes than GPUs, or than four per core; warn about more than one per core.

    ``option`` set the number; ``way_out`` is advice for a machine that is too small, e.g. ``"use
    several machines"``.

    Raises:
        ConfigError: names the maximum.
    """
    if count == 1:
        return
    num_gpus, num_cores = count_gpus(), len(os.sched_getaffinity(0))
    cores = f"{num_cores} core{'' if num_cores == 1 else 's'}"
    most, why = num_gpus, "the number of visible GPUs"
    instead = "To train on the CPU set CUDA_VISIBLE_DEVICES="
    if not num_gpus:
        most, instead = _MOST_A_CORE * num_cores, f"Use {num_cores}"
        why = f"{_MOST_A_CORE} for each core, on this machine with {cores}"
    if count > most:
        raise ConfigError(
            f"'{option}' must be at most {most}, {why}; got {count}. {instead}, or {way_out}"
        )
    if not num_gpus and count > num_cores:
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


def read_driver_version() -> str | None:
    """Return the version of the loaded NVIDIA driver; None where the system does not say."""
    try:
        text = _DRIVER.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
    found = re.search(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)", text, re.MULTILINE)
    return None if found is None else found[1]


def is_cpu_build() -> bool:
    """Return whether the installed torch cannot use GPUs; does not import it."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def hash_code() -> str:
    """Return one hash of memguard's source files and templates.

    It equals the output of this shell command in the folder of the package:

        find * -name '*.py' -o -name '*.j2' | LC_ALL=C sort | xargs sha256sum | sha256sum
    """
    names = {
        path.relative_to(_PACKAGE).as_posix(): path
        for path in _PACKAGE.rglob("*")
        if path.suffix in _CODE_SUFFIXES and path.is_file()
    }
    lines = (f"{hashlib.sha256(names[n].read_bytes()).hexdigest()}  {n}\n" for n in sorted(names))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
