"""A machine file of the GPUs at hand: bandwidths, and what large kernels reach of the peak.

    memory_gb_per_s    a copy reads and writes each byte
    matmul_share       2 n^3 operations of a bf16 product of n x n matrices / the peak
    attention_share    flash attention over causal rows of T tokens, forward and backward:
                       7 T^2 D for each head (2 and 5 matmuls, of which causal rows need half)
    link_gb_per_s      a copy from the first GPU to the second

Figures are medians of five rounds. Peak and network are not measured: the peak is that of the data
sheet, the network the reader's to fill in. `memguard plan --machine FILE` reads the file.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

NUM_ROUNDS, NUM_CALLS = 5, 10
NUM_HEADS, HEAD_DIM = 32, 128
LARGE = {"side": 8192, "row": 16384, "copied": 2**30}
TINY = {"side": 64, "row": 64, "copied": 2**16}
_UNKNOWN_LINK, _UNKNOWN_NETWORK = 25.0, 12.5
"""What `this-machine` assumes of GPUs on PCI Express and of a network (GB/s)."""
_RESERVED_GIB = 2.0
"""Of contexts and communicators, which torch's total memory includes."""


def measure_machine(device: torch.device) -> dict[str, float | None]:
    """Return bandwidths (GB/s) and rates (TFLOP/s) of a device; None for what it does not have.

    A CPU stands for a GPU in a dry run, with small sizes.
    """
    sizes = LARGE if device.type == "cuda" else TINY
    copied = sizes["copied"]
    matmul_s = _time_matmul(sizes["side"], device)
    attention_s = _time_attention(sizes["row"], device)
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    copy_s = _time(lambda: source.clone(), device)
    link_s = None
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        there = torch.zeros(copied, dtype=torch.uint8, device="cuda:1")
        link_s = _time(lambda: there.copy_(source), device)
    return {
        "memory_gb_per_s": 2 * copied / copy_s / 1e9,
        "matmul_tflops": 2 * sizes["side"] ** 3 / matmul_s / 1e12,
        "attention_tflops": 7 * sizes["row"] ** 2 * HEAD_DIM * NUM_HEADS / attention_s / 1e12,
        "link_gb_per_s": None if link_s is None else copied / link_s / 1e9,
    }


def _time_matmul(side: int, device: torch.device) -> float:
    first, second = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
    return _time(lambda: first @ second, device)


def _time_attention(row: int, device: torch.device) -> float:
    shape = (1, NUM_HEADS, row, HEAD_DIM)
    inputs = [
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    upstream = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def attend() -> None:
        output = functional.scaled_dot_product_attention(*inputs, is_causal=True)
        torch.autograd.grad(output, inputs, upstream)

    return _time(attend, device)


def _time(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call: median of five rounds of ten, after one."""

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    call()
    rounds = []
    for _ in range(NUM_ROUNDS):
        begin = wait()
        for _ in range(NUM_CALLS):
            call()
        rounds.append((wait() - begin) / NUM_CALLS)
    return statistics.median(rounds)


def describe_machine(
    measured: Mapping[str, Any],
    *,
    gpu: str,
    num_gpus: int,
    memory_bytes: int,
    peak_tflops: float | None,
) -> dict[str, Any]:
    """Return the fields of a machine file; what is assumed is in its list.

    Args:
        measured: see `measure_machine`.
        gpu: name, as torch gives it.
        num_gpus: of this node.
        memory_bytes: of each.
        peak_tflops: dense bf16 peak of the data sheet; None takes what the product reached.
    """
    assumed = ["network_gb_per_s"]
    matmul, attention = measured["matmul_tflops"], measured["attention_tflops"]
    if peak_tflops is None:
        peak_tflops = matmul
        assumed.append("peak_tflops")
    link = measured["link_gb_per_s"]
    if link is None:
        link = _UNKNOWN_LINK
        assumed.append("link_gb_per_s")
    return {
        "name": "measured",
        "gpu": gpu,
        "gpu_names": [gpu],
        "memory_gib": round(memory_bytes / 2**30, 2),
        "reserved_gib": _RESERVED_GIB,
        "gpus_per_node": num_gpus,
        "link_gb_per_s": _round(link),
        "network_gb_per_s": _UNKNOWN_NETWORK,
        "memory_gb_per_s": _round(measured["memory_gb_per_s"]),
        "peak_tflops": _round(peak_tflops),
        "matmul_share": min(1.0, _round(matmul / peak_tflops)),
        "attention_share": min(1.0, _round(attention / peak_tflops)),
        "assumed": assumed,
    }


def _round(value: float) -> float:
    return float(f"{value:.3g}")
