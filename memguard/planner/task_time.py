"""How long benchmark tasks run on a mesh of GPUs.

    a pass      weights / (x y) / bandwidth of the GPU's memory; where they do not fit at once also
                the time to gather them, as in `generation`
    forwards    the larger of 2 parameters x tokens / (ranks x speed of matmuls), batches x a pass
    generation  batches x `num_new` x a pass

Attention is left out: the rows of most tasks are short. Answers that are cached take no time.
"""

import math

from memguard.audit.benchmarks.work import TaskWork
from memguard.parallel.mesh_shape import MeshShape
from memguard.planner.compute import MATMUL_SHARE
from memguard.planner.generation import BATCH_TOKENS, GenerationPlan
from memguard.planner.machine import Machine


def knows_speed(machine: Machine) -> bool:
    """Return whether the time of a forward on a machine can be estimated."""
    return machine.has_gpus and "peak_tflops" not in machine.assumed


def estimate_task(
    work: TaskWork,
    *,
    num_models: int,
    num_parameters: int,
    element_bytes: float,
    mesh: MeshShape,
    machine: Machine,
    generation: GenerationPlan,
) -> float:
    """Return the time of a task on all models of an audit (minutes).

    Args:
        work: of the task on one model.
        num_models: that it runs on.
        num_parameters: of the model.
        element_bytes: bytes of a weight as it is stored: 4 in fp32, 2 in bf16, 0.5625 in NF4.
        mesh: of the audit.
        machine: see `knows_speed`.
        generation: of the audit on this mesh; says whether the weights fit at once.
    """
    weights = num_parameters * element_bytes / (mesh.x * mesh.y)
    read_s = weights / (1e9 * machine.memory_gb_per_s)
    pass_s = read_s if generation.fits else generation.token_s
    flops_per_s = machine.peak_flops(4 if element_bytes == 4 else 2)
    flops_per_s *= machine.matmul_share * MATMUL_SHARE * mesh.num_ranks
    seconds = max(
        2 * num_parameters * work.num_tokens / flops_per_s,
        _count_batches(work.num_tokens, mesh) * pass_s,
    )
    if work.num_new:
        rows_tokens = work.num_tokens + work.num_decoded_tokens
        seconds += max(
            2 * num_parameters * work.num_decoded_tokens / flops_per_s,
            _count_batches(rows_tokens, mesh) * work.num_new * pass_s,
        )
    return num_models * seconds / 60


def _count_batches(num_tokens: int, mesh: MeshShape) -> int:
    """Return the batches that a rank runs one after the other."""
    return math.ceil(num_tokens / (mesh.num_batch_ways * BATCH_TOKENS))
