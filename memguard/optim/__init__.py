"""Optimizers: each updates the local tensors of any mesh as one process would update the whole.

    base.py         what every optimizer offers to the training step and to checkpoints
    adamw.py        AdamW of torch on fp32 tensors, with its parameter groups
    blockwise.py    AdamW in fp32 by parts: moments in 8 bits, weights in bf16
    in_backward.py  AdaLomo and LOMO, which update weights as soon as gradients are reduced
    mezo.py         MeZO, a step along a random direction from two forwards
    noise.py        random bits of every element of a parameter, the same on every mesh
    schedule.py     the learning rate of a step
    weights.py      weights read and written in fp32, stored in fp32 or bf16

An optimizer sees plain local tensors (`parallel.local_parameters`) and the step's learning rate.
Its state is stored by checkpoints with its position in the whole tensor, so that a run can resume
on any mesh. Whatever depends on a tensor's shape depends on that of the whole tensor.
"""

from collections.abc import Sequence

import torch

from memguard.config import OptimConfig
from memguard.optim.adamw import AdamW
from memguard.optim.base import Optimizer as Optimizer
from memguard.optim.blockwise import BlockwiseAdamW
from memguard.optim.in_backward import AdaLomo, Lomo
from memguard.optim.mezo import Mezo
from memguard.optim.weights import Weights
from memguard.parallel.local_parameters import LocalParameter
from memguard.parallel.mesh import Mesh4D


def build_optimizer(
    parameters: Sequence[LocalParameter],
    config: OptimConfig,
    *,
    seed: int = 0,
    mesh: Mesh4D | None = None,
) -> Optimizer:
    """Build the optimizer of the settings, with an empty state; ``seed``: of the run.

    Raises:
        ConfigError: the optimizer does not support the mesh.
    """
    is_clipped = config.max_grad_norm is not None
    assert not is_clipped or config.name.startswith("adamw"), "others never know the whole norm"
    if config.name in ("adalomo", "lomo"):
        kind = AdaLomo if config.name == "adalomo" else Lomo
        return kind(parameters, Weights(seed), mesh)
    if config.name == "mezo":
        return Mezo(parameters, seed, config.num_seeds)
    is_bf16 = any(each.local.dtype == torch.bfloat16 for each in parameters)
    if config.name == "adamw_8bit" or is_bf16:
        return BlockwiseAdamW(parameters, config, Weights(seed))
    return AdamW(parameters, config)
