"""What a step costs: its speed on a GPU, and memory by kind.

    MFU = seconds of the step's matmuls at a GPU's peak / (seconds of the step x ranks)

A matmul counts once, also if backward computes it again: for tokens without padding, pairs of
tokens inside a piece, and the labels that receive loss.
"""

from collections import Counter
from typing import Any

import numpy as np

from memguard.config.optimizers import OPTIMIZERS
from memguard.data.loader import Loader
from memguard.parallel.linear import to_local
from memguard.runtime import measure_memory
from memguard.train.run_state import RunState
from memguard.train.step import TrainStep


def measure_cost(
    step: TrainStep, loader: Loader, run: RunState, samples: range, num_kept: int, took_s: float
) -> dict[str, Any]:
    """Return the fields of a step's line; ``num_kept`` labels received loss."""
    starts, numbers = loader.rows.row_start, loader.schedule[samples.start : samples.stop]
    pieces = np.concatenate([np.arange(*starts[number : number + 2]) for number in numbers])
    length_P = loader.rows.stop[pieces] - loader.rows.start[pieces]
    counts = int(length_P.sum()), int((length_P * (length_P + 1) // 2).sum()), num_kept
    gpu_s, mfu = took_s * run.runtime.world_size, None
    if run.peak_s is not None:
        peak_s = sum(count * each for count, each in zip(counts, run.peak_s, strict=True))
        mfu = float(f"{peak_s / gpu_s:.4g}")
    peak, model = measure_memory(run.runtime.device), step.lm.model
    frozen = [to_local(weight) for weight in model.parameters() if not weight.requires_grad]
    trained = sum(parameter.local.nbytes for parameter in step.parameters)
    states = [step.optimizer.state_of(parameter).values() for parameter in step.parameters]
    gradients: Counter[str] = Counter()
    for each in step.parameters:
        dtype = each.local.grad_dtype or each.local.dtype
        gradients[each.unit] += each.local.numel() * dtype.itemsize
    share = OPTIMIZERS[step.optim.name].gradients
    largest = max(gradients.values(), default=0) if share == "unit" else 0
    kinds = {
        "weights": trained + sum(tensor.nbytes for tensor in (*frozen, *model.buffers())),
        "gradients": gradients.total() if share == "all" else largest,
        "optimizer": sum(tensor.nbytes for state in states for tensor in state),
    }
    return {
        "tokens_per_s": round(num_kept / took_s, 1),
        "tokens_per_s_per_gpu": round(counts[0] / gpu_s, 1),
        "mfu": mfu,
        "memory_bytes": kinds | {"other": max(0, peak.allocated_bytes - sum(kinds.values()))},
        "peak_memory_bytes": peak.allocated_bytes,
        "peak_reserved_bytes": peak.reserved_bytes,
        "num_alloc_retries": peak.num_alloc_retries,
    }
