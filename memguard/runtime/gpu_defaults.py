"""Process-wide settings of torch for GPUs: the allocator, determinism, TF32.

The user's own environment variables win. NVIDIA_TF32_OVERRIDE=0 turns TF32 off.
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
    """Make torch use only deterministic algorithms inside the block.

    Operations that have none raise an error. Where each operation has one, as on the CPU, results
    do not change.

    Args:
        enabled: False changes nothing.
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

    TF32 rounds factors to 10 bits of mantissa, more than bf16's 7; sums stay fp32. Only training
    steps use it: an audit in fp32 is exact.
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
