"""What this installation and machine can do: libraries, devices, collectives.

    libraries    versions, compared with those that memguard requires; extras and what they enable
    devices      cores and memory; each GPU with its memory, capability and attention kernels, or
                 why torch cannot use the GPUs
    collectives  what gloo and NCCL really do, each compared with its exact result

All of it is tried, not assumed from a version.
"""

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from packaging.requirements import Requirement
from torch import distributed as dist
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from memguard import __version__
from memguard.errors import DISTRIBUTION, OPTIONAL, MemguardError
from memguard.records.record import Record
from memguard.runtime.processes import explain_unusable_gpus
from memguard.workflows.collective_checks import (
    LIMIT_S,
    Backend,
    check_backend,
    say_first_line,
    skip_backend,
)

EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "dp": (("opacus",), "the mitigation dp_sgd"),
    "dedup": (("rensa",), "the mitigation deduplicate with near-copies"),
    "quant": (
        ("torchao", "bitsandbytes"),
        "adapter.quantization, and audits of int8 and nf4 (--load-as)",
    ),
    "bench": (("lm_eval",), "benchmark tasks as utility (audit.utility)"),
    "plots": (("matplotlib",), "charts on pages"),
    "metrics": (("evaluate",), "evaluate.load of eval/metrics"),
    "track": (("tensorboard", "wandb", "trackio"), "curves of a run in trackers (track)"),
}
"""Libraries of each extra, by their names in Python, and what they enable."""

_MEMINFO = "/proc/meminfo"


class Library(Record):
    """An installed or missing library."""

    name: str
    version: str | None
    """null if it is not installed."""
    required: str
    """Versions that memguard requires; "" for any."""
    is_ok: bool


class Extra(Record):
    """Optional libraries."""

    name: str
    libraries: tuple[Library, ...]
    is_installed: bool
    enables: str


class Gpu(Record):
    """A GPU that torch can use."""

    index: int
    name: str
    capability: str
    memory_bytes: int
    free_bytes: int
    bf16: str
    """"ok", or why it does not work."""
    flash: str
    """Flash attention, as bf16."""
    varlen: str
    """Attention of packed rows, as bf16."""


class Diagnosis(Record):
    """Everything that `memguard doctor` prints."""

    kind: Literal["doctor"] = "doctor"
    version: Literal[1] = 1
    memguard: str
    python: str
    platform: str
    libraries: tuple[Library, ...]
    extras: tuple[Extra, ...]
    num_cores: int
    memory_bytes: int
    available_bytes: int | None
    cuda: str | None
    """CUDA version of torch; null for a build for CPUs."""
    gpus: tuple[Gpu, ...]
    backends: tuple[Backend, ...]
    problems: tuple[str, ...]
    """What memguard needs and does not work."""


def diagnose(
    *,
    num_ranks: int = 2,
    limit_s: float = LIMIT_S,
    on_step: Callable[[str], None] = lambda step: None,
) -> Diagnosis:
    """Try libraries, devices and collectives."""
    libraries = tuple(list_libraries())
    unusable = explain_unusable_gpus()
    # `device_count` may include GPUs that torch cannot use.
    can_use = unusable is None and torch.cuda.is_available()
    num_gpus = torch.cuda.device_count() if can_use else 0
    gpus = tuple(_try_gpu(index) for index in range(num_gpus))

    def test(name: Literal["gloo", "nccl"], count: int) -> Backend:
        on_step(f"{count} processes test the collectives of {name}")
        return check_backend(name, count, limit_s=limit_s)

    backends = tuple(_test_backends(test, num_ranks, len(gpus)))
    return Diagnosis(
        memguard=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        libraries=libraries,
        extras=tuple(_list_extras()),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_bytes=_read_meminfo(),
        cuda=torch.version.cuda,
        gpus=gpus,
        backends=backends,
        problems=tuple(_list_problems(libraries, unusable, gpus, backends)),
    )


def refuse_problems(diagnosis: Diagnosis) -> None:
    """Raise MemguardError if something that memguard needs does not work."""
    if diagnosis.problems:
        more = len(diagnosis.problems) - 1
        also = f", and {more} more; see the list above" if more else ""
        raise MemguardError(
            f"something that memguard needs does not work here: {diagnosis.problems[0]}{also}"
        )


def list_libraries() -> Iterator[Library]:
    """Yield the libraries that memguard requires; none where pip did not install it."""
    try:
        texts = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        texts = []
    for text in texts:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _find_library(requirement)


def _list_extras() -> Iterator[Extra]:
    for name, (libraries, enables) in EXTRAS.items():
        found = tuple(_find_library(Requirement(OPTIONAL[library])) for library in libraries)
        yield Extra(
            name=name,
            libraries=found,
            is_installed=all(library.is_ok for library in found),
            enables=enables,
        )


def _find_library(requirement: Requirement) -> Library:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    # A local build is of the version before its "+": 2.13.0+cpu.
    is_ok = version is not None and requirement.specifier.contains(version, prereleases=True)
    return Library(
        name=requirement.name, version=version, required=str(requirement.specifier), is_ok=is_ok
    )


def _read_meminfo() -> int | None:
    """Return the memory that programs can still allocate; None where the system does not say."""
    try:
        with open(_MEMINFO, encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


# -- GPUs ----------------------------------------------------------------------------------------


def _try_gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    device = torch.device("cuda", index)
    return Gpu(
        index=index,
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory_bytes=properties.total_memory,
        free_bytes=torch.cuda.mem_get_info(index)[0],
        bf16=_try(lambda: _multiply(device)),
        flash=_try(lambda: _attend_flash(device)),
        varlen=_try(lambda: _attend_varlen(device)),
    )


def _try(work: Callable[[], torch.Tensor]) -> str:
    """Return "ok", or why a computation does not work."""
    try:
        return "ok" if bool(work().isfinite().all()) else "the result is not finite"
    except Exception as error:
        return say_first_line(error)


def _multiply(device: torch.device) -> torch.Tensor:
    factor = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
    return factor @ factor


def _attend_flash(device: torch.device) -> torch.Tensor:
    query = torch.ones(1, 2, 64, 64, dtype=torch.bfloat16, device=device)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(query, query, query, is_causal=True)


def _attend_varlen(device: torch.device) -> torch.Tensor:
    query = torch.ones(64, 2, 64, dtype=torch.bfloat16, device=device)
    ends = torch.tensor([0, 16, 64], dtype=torch.int32, device=device)
    attended: Any = varlen_attn(query, query, query, ends, ends, 48, 48, window_size=(-1, 0))
    assert isinstance(attended, torch.Tensor), "no other output was requested"
    return attended


# -- collectives ---------------------------------------------------------------------------------


def _test_backends(
    test: Callable[[Literal["gloo", "nccl"], int], Backend], num_ranks: int, num_gpus: int
) -> Iterator[Backend]:
    """Yield the results of all backends, or why one cannot be tested."""
    if dist.is_gloo_available():
        yield test("gloo", num_ranks)
    else:
        yield skip_backend("gloo", "this build of torch has no gloo")
    if num_gpus > 1 and not dist.is_nccl_available():
        yield skip_backend("nccl", "this build of torch has no NCCL")
    elif num_gpus > 1:
        yield test("nccl", min(num_ranks, num_gpus))
    elif num_gpus == 1:
        yield skip_backend("nccl", "not tested: it connects GPUs, and there is one")


def _list_problems(
    libraries: tuple[Library, ...],
    unusable: str | None,
    gpus: tuple[Gpu, ...],
    backends: tuple[Backend, ...],
) -> Iterator[str]:
    owners = {*importlib.metadata.packages_distributions().get("memguard", ())}
    for other in sorted(owners - {DISTRIBUTION}):
        yield (
            f"the distribution '{other}' provides another package 'memguard': pip uninstall "
            f"{other}, then install {DISTRIBUTION} from its checkout"
        )
    for library in libraries:
        if not library.is_ok:
            version = library.version or "not installed"
            yield f"{library.name}{library.required} is required; got {version}"
    if unusable is not None:
        yield unusable
    for gpu in gpus:
        # Without the kernels of attention others are used, and bf16 can be switched off.
        if gpu.bf16 != "ok":
            yield f"GPU {gpu.index} ({gpu.name}) cannot multiply in bf16: {gpu.bf16}"
    for backend in backends:
        is_missing = backend.num_ranks == 0 and (backend.name == "gloo" or len(gpus) > 1)
        if backend.reason is not None and (backend.num_ranks or is_missing):
            yield f"{backend.name}: {backend.reason}"
            continue
        for check in backend.checks:
            if check.is_needed and check.state != "ok":
                yield (
                    f"{backend.name}: {check.operation} in {check.dtype} is {check.state} "
                    f"({check.reason})"
                )
