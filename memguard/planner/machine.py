"""Machines that a run may use: published figures of their GPUs, links and network.

    memory_gib          80 "GB" of GPU memory are 80 x 2^30 bytes: vendors count memory chips, whose
                        sizes are powers of two. An A100 "40 GB" reports 42,405,855,232 bytes, which
                        is 39.5 x 2^30 (https://upb-pc2.atlassian.net/wiki/spaces/PC2DOK/pages/1900609).
    ..._gb_per_s        10^9 bytes, one direction. Vendors add both directions of GPU links up
                        (NVLink "900 GB/s" is 450) and give networks in bits, one direction
                        ("400 Gb/s" is 50).
    peak_tflops         dense bf16; figures "with sparsity" are twice that.
    fp32_tflops         with 'train.precision' fp32, which uses TF32 on NVIDIA's GPUs: half of bf16.
    ..._share           what kernels reach of the peak, measured by others (compute.py): matmuls of
                        A100, H100, GH200 and B200 in the table of maximum achievable FLOPS of
                        https://github.com/stas00/ml-engineering, attention by FlashAttention-2's
                        authors.

All other figures are nominal: published by vendors and computing centres, not reached by a program.

`this-machine` is looked up: the name of its GPU is in one of these files, or its speeds are
assumptions. What its runs have measured replaces the assumed fragmentation.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from memguard.assets import find_asset, list_assets
from memguard.config import load_yaml, validate
from memguard.config.settings import Name, NonNegative, Positive, PositiveInt, Settings
from memguard.errors import ConfigError
from memguard.records.record import write_atomically
from memguard.runtime.environment import default_cache_dir

THIS_MACHINE = "this-machine"
"""The name of the machine that this process runs on."""

_FOLDER = "configs/machines"
_GIB = 2**30

# A process that has imported torch and transformers uses 0.4 GB (measured).
_RESERVED_GIB_CPU = 0.5
# glibc keeps freed memory as holes that tensors of the same size do not fit into: 0.5 to 0.7 of the
# transient memory was measured (glibc 2.36, scripts/bench/plan.py). The share is higher with
# recomputation, where the holes are as large but there are fewer tensors.
FRAGMENTATION_CPU = 0.55
# One process has no buffers of gathered weights and gradients between its activations: 0.28 in fp32
# and 0.33 in bf16 were measured (scripts/bench/adapters.py).
FRAGMENTATION_ONE_CPU = 0.3
# nvidia-smi reports the actual memory, so only context and communicators are subtracted.
_RESERVED_GIB_DETECTED = 2.0

# Speeds of a GPU that no machine file names, and of CPUs. These values only allow the machine's
# meshes to be compared: GPUs on PCI Express 4.0 and a network of 100 Gb/s; processes that share
# memory and a network of 10 Gb/s.
_GPU_LINK_GB_PER_S, _GPU_NETWORK_GB_PER_S, _GPU_TFLOPS = 25.0, 12.5, 100.0
_CPU_LINK_GB_PER_S, _CPU_NETWORK_GB_PER_S, _CORE_TFLOPS = 5.0, 1.25, 0.05
_GPU_MEMORY_GB_PER_S, _CORE_MEMORY_GB_PER_S = 2000.0, 5.0

_MARGIN = 0.15
_MEASURED = "gpus.json"
"""In the cache's folder: what steps on GPUs of each name lost to fragmentation."""

_Speed = Literal["link_gb_per_s", "network_gb_per_s", "memory_gb_per_s", "peak_tflops"]
_SPEEDS: tuple[_Speed, ...] = get_args(_Speed)
_Share = Literal["matmul_share", "attention_share"]
Figure = Literal["memory_gib", "gpus_per_node", _Speed, "fp32_tflops", _Share]


class Machine(Settings):
    """Identical nodes of identical GPUs on a network.

    ``reserved_gib`` is our allowance, not a published figure. It covers the difference between
    nominal and reported memory (0.5 GiB of an A100's 40, about 2 of a GH200's 96), the driver's
    context, and the buffers of the communication library, one set for each axis.
    """

    name: Name = Field(description="Name for '--machine'.")
    gpu: str = Field(description="Common name of the GPU, e.g. H100 SXM 80 GB.")
    gpu_names: tuple[str, ...] = Field(
        (), description="Names of the GPU in nvidia-smi and torch, for 'this-machine'."
    )
    memory_gib: Positive = Field(description="Nominal memory of a GPU (GiB).")
    reserved_gib: NonNegative = Field(
        3.0, description="Memory used before the first tensor: an assumption (GiB)."
    )
    gpus_per_node: PositiveInt = Field(description="GPUs of a node, joined by the links below.")
    link_gb_per_s: Positive = Field(
        description="Bandwidth of one GPU's links inside its node, one direction (GB/s)."
    )
    link_topology: Literal["switched", "direct"] = Field(
        "switched",
        description="switched: any two GPUs of a node have the full 'link_gb_per_s'; direct: it is "
        "divided evenly between a GPU's neighbours.",
    )
    network_gb_per_s: Positive = Field(
        description="Bandwidth of a node's network cards together, one direction (GB/s)."
    )
    memory_gb_per_s: Positive = Field(
        _GPU_MEMORY_GB_PER_S,
        description="Bandwidth of a GPU's memory (GB/s); the default is an assumption.",
    )
    peak_tflops: Positive = Field(description="Dense bf16 peak of a GPU (TFLOP/s).")
    matmul_share: Positive = Field(
        0.803,
        le=1,
        description="Share of 'peak_tflops' that the largest bf16 matmuls reach; the default is "
        "published for the H100.",
    )
    attention_share: Positive = Field(
        0.332,
        le=1,
        description="Share of 'peak_tflops' that FlashAttention-2 reaches over causal rows of "
        "16,384 tokens, forward and backward together; the default is published for the H100.",
    )
    fp32_tflops: Positive | None = Field(
        None,
        description="Peak of a GPU in fp32 training (TFLOP/s). None: half of 'peak_tflops', as "
        "TF32 has on NVIDIA's GPUs.",
    )
    has_gpus: bool = Field(
        True, description="Whether each rank has a GPU. false: each is a process on CPU cores."
    )
    has_flash: bool = Field(
        True,
        description="Whether its GPUs run torch's flash attention for packed rows in bf16: CUDA of "
        "compute capability 8.0 or higher. false: attention reads a mask of all pairs.",
    )
    fragmentation: NonNegative = Field(
        0.1,
        description="Share of activations, logits and buffers that the allocator loses to "
        "fragmentation: an assumption. 0: an allocator that loses nothing, not even to streams.",
    )
    is_measured: bool = Field(
        False,
        description="Whether the memory of a step was measured on such a GPU. false: 'auto' leaves "
        "15 % of it, where settings do.",
    )
    assumed: tuple[Figure, ...] = Field(
        (), description="Figures above that are assumptions, not published or measured."
    )
    sources: tuple[str, ...] = Field((), description="Where the figures come from (URLs).")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reserved_gib >= self.memory_gib:
            raise ValueError(
                f"'reserved_gib' must leave some of 'memory_gib'; got {self.reserved_gib:g} of "
                f"{self.memory_gib:g}"
            )
        return self

    def peak_flops(self, compute_bytes: int) -> float:
        """Return the nominal peak of a GPU (FLOP/s); ``compute_bytes``: 2 for bf16, 4 for fp32."""
        fp32_tflops = self.fp32_tflops or self.peak_tflops / 2
        return 1e12 * (self.peak_tflops if compute_bytes == 2 else fp32_tflops)

    @property
    def has_streams(self) -> bool:
        """Whether memory is reused only for the stream on which it was allocated, as by CUDA's.

        An allocator without fragmentation stands for the least that a step needs: CUDA's frees all
        cached memory before it gives up, so that such a step runs, though slowly.
        """
        return self.has_gpus and self.fragmentation > 0

    @property
    def margin(self) -> float:
        """Share of the usable memory that `auto` leaves."""
        return 0.0 if self.is_measured or not self.has_streams else _MARGIN

    @property
    def memory_bytes(self) -> int:
        """Memory of one GPU (bytes)."""
        return round(self.memory_gib * _GIB)

    @property
    def usable_bytes(self) -> int:
        """Memory of one GPU that is available for tensors (bytes)."""
        return self.memory_bytes - round(self.reserved_gib * _GIB)


def load_machine(name_or_path: str | Path, *, num_processes: int = 1) -> Machine:
    """Read a machine by shipped name or by path, or detect this one.

    Processes of the run share the memory of a machine without GPUs.

    Raises:
        ConfigError: not found or invalid; lists every problem, one line each.
    """
    if str(name_or_path) == THIS_MACHINE:
        return detect_machine(num_processes)
    try:
        path = find_asset(_FOLDER, name_or_path, setting="--machine")
    except ConfigError as error:
        way_out = f"'--machine {THIS_MACHINE}' plans for the present machine"
        raise ConfigError(*error.problems, way_out) from error
    document = load_yaml(path)
    return validate(Machine, document.values, document)


def detect_machine(
    num_processes: int = 1, *, gpus: Sequence[tuple[str, float]] | None = None
) -> Machine:
    """Describe the present machine, without torch.

    By default NVIDIA GPUs are read from ``nvidia-smi`` (which ignores CUDA_VISIBLE_DEVICES); if
    they differ, the smallest one is used. ``gpus`` are name and memory (GiB) of those that are
    used, none for the CPU. Without GPUs, physical memory and cores are divided evenly between the
    processes; a container may have less. GPUs of other vendors are not detected. Speeds are those
    of a machine file that has the GPU's name; otherwise, and for the network, they are assumptions.

    Raises:
        ConfigError: a GPU's memory cannot be read, or a CPU's memory is too small.
    """
    if gpus is None:
        gpus = _list_gpus()
    figures: dict[str, Any]
    assumed: tuple[Figure, ...] = _SPEEDS
    if gpus:
        figures = {
            "gpu": ", ".join(sorted({name for name, _ in gpus})),
            "memory_gib": min(memory for _, memory in gpus),
            "reserved_gib": _RESERVED_GIB_DETECTED,
            "gpus_per_node": len(gpus),
            "link_gb_per_s": _GPU_LINK_GB_PER_S,
            "network_gb_per_s": _GPU_NETWORK_GB_PER_S,
            "memory_gb_per_s": _GPU_MEMORY_GB_PER_S,
            "peak_tflops": _GPU_TFLOPS,
        }
        known = find_gpu(figures["gpu"], len(gpus))
        if known is not None:
            figures |= _take_speeds(known, len(gpus))
            own = (name for name in known.assumed if name != "gpus_per_node")
            assumed = tuple(dict.fromkeys((*own, "network_gb_per_s")))
        if (measured := _read_measured().get(figures["gpu"])) is not None:
            figures |= {"fragmentation": measured, "is_measured": True}
    else:
        total_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
        num_cores = os.cpu_count() or 1
        peak_tflops = num_cores * _CORE_TFLOPS / num_processes
        figures = {
            "gpu": f"CPU process, of {num_cores} cores",
            "fragmentation": FRAGMENTATION_CPU if num_processes > 1 else FRAGMENTATION_ONE_CPU,
            "memory_gib": total_gib / num_processes,
            "reserved_gib": _RESERVED_GIB_CPU,
            "gpus_per_node": num_processes,
            "link_gb_per_s": _CPU_LINK_GB_PER_S,
            "network_gb_per_s": _CPU_NETWORK_GB_PER_S,
            "memory_gb_per_s": num_cores * _CORE_MEMORY_GB_PER_S / num_processes,
            "peak_tflops": peak_tflops,
            # A CPU computes bf16 no faster than fp32.
            "fp32_tflops": peak_tflops,
            "has_gpus": False,
            "has_flash": False,
        }
    if figures["memory_gib"] <= figures["reserved_gib"]:
        raise ConfigError(
            f"'--machine {THIS_MACHINE}' has {figures['memory_gib']:.2g} GiB a process (GPU: "
            f"{figures['gpu']}), which is no more than the {figures['reserved_gib']:g} GiB used "
            "before the first tensor; name another machine or use fewer processes"
        )
    return Machine(name=THIS_MACHINE, assumed=assumed, **figures)


def keep_measured(gpu: str, fragmentation: float) -> None:
    """Store the fragmentation that a step had on a GPU of this name; the largest is kept."""
    path = default_cache_dir() / _MEASURED
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = _read_measured()
    stored[gpu] = max(fragmentation, stored.get(gpu, 0.0))
    write_atomically(path, json.dumps(stored, indent=2).encode())


def _read_measured() -> dict[str, float]:
    """Return the measured fragmentation by the name of the GPU; nothing from a damaged file."""
    try:
        stored = json.loads((default_cache_dir() / _MEASURED).read_bytes())
        return {gpu: share for gpu, share in stored.items() if 0 < share <= 1}
    except (ConfigError, OSError, ValueError, TypeError, AttributeError):
        return {}


def find_gpu(name: str, num_gpus: int) -> Machine | None:
    """Return the shipped machine that has GPUs of this name; None if there is none.

    Of several the one with as many GPUs in a node is preferred, then the one with most. Names are
    those that nvidia-smi and torch give.
    """
    found = [
        machine
        for machine in map(load_machine, list_assets(_FOLDER).values())
        if name in machine.gpu_names
    ]
    found.sort(key=lambda machine: (machine.gpus_per_node != num_gpus, -machine.gpus_per_node))
    return found[0] if found else None


def _take_speeds(known: Machine, num_gpus: int) -> dict[str, Any]:
    """Return the speeds of a node with this number of GPUs of a known machine."""
    share = num_gpus / known.gpus_per_node
    link = known.link_gb_per_s
    if known.link_topology == "direct" and known.gpus_per_node > 1:
        # Its links to GPUs that are not used are not used either.
        link *= min(1.0, max(1, num_gpus - 1) / (known.gpus_per_node - 1))
    same = ["link_topology", "memory_gb_per_s", "peak_tflops", "fp32_tflops"]
    same += ["matmul_share", "attention_share", "has_flash"]
    return {name: getattr(known, name) for name in same} | {
        "link_gb_per_s": link,
        # What leaves this node cannot be seen: that of the known machine, for as many GPUs.
        "network_gb_per_s": known.network_gb_per_s * min(1.0, share),
    }


def _list_gpus() -> list[tuple[str, float]]:
    """Return name and memory (GiB) of each GPU; empty without nvidia-smi or GPUs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = ["--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            [program, *query], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"'--machine {THIS_MACHINE}' reads the GPUs from nvidia-smi, which did not respond; "
            "name a machine or write its YAML"
        ) from error
    if answer.returncode:
        return []
    gpus = []
    for line in answer.stdout.splitlines():
        name, _, mebibytes = line.rpartition(",")
        try:
            gpus.append((name.strip(), float(mebibytes) / 1024))
        except ValueError as error:
            raise ConfigError(
                f"'--machine {THIS_MACHINE}' needs the memory of each GPU; nvidia-smi reports "
                f"{line.strip()!r}. Write the machine's YAML"
            ) from error
    return gpus
