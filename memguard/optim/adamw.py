"""AdamW of torch on fp32 tensors, with its parameter groups."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from memguard.config import OptimConfig
from memguard.optim.base import Optimizer
from memguard.parallel.local_parameters import LocalParameter


class AdamW(Optimizer):
    """torch's fused AdamW, with weight decay on matrices only."""

    def __init__(self, parameters: Sequence[LocalParameter], config: OptimConfig) -> None:
        """Build the optimizer of the local tensors."""
        super().__init__(parameters)
        matrices = [parameter.local for parameter in parameters if parameter.source.ndim >= 2]
        vectors = [parameter.local for parameter in parameters if parameter.source.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.inner = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            # One pass over weights, gradients and moments instead of ten by default.
            fused=True,
        )

    def update(self) -> None:
        """Update all parameters that have a gradient."""
        for group in self.inner.param_groups:
            group["lr"] = self._lr
        self.inner.step()

    def state_of(self, parameter: LocalParameter) -> Mapping[str, Tensor]:
        """Return the step count and both moments of a parameter."""
        state: Mapping[str, Tensor] = self.inner.state.get(parameter.local, {})
        return state

    def make_room(self, parameter: LocalParameter) -> None:
        """Allocate the step count and both moments of a parameter."""
        local = parameter.local
        self.inner.state[local] = {
            # The fused AdamW requires the step count on the parameter's device.
            "step": torch.zeros((), dtype=torch.float32, device=local.device),
            "exp_avg": torch.zeros_like(local),
            "exp_avg_sq": torch.zeros_like(local),
        }
