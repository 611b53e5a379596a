"""Mixture-of-experts blocks whose experts are split over y and x together.

Tokens M, hidden features H, experts E, of which each token uses k, intermediate features I of an
expert. Inside a block every rank has all features of its tokens, and a part of the intermediate
features of every expert; n = y x.

                                                  over y             over x
    X_MH    [M, H/y]        input and output      split              replicated
    inside the block:
    X_MH    [M, H]          hidden states         replicated         replicated
    router  [E, H]          k experts, weights    replicated         replicated
    gate_up [E, 2 I/n, H]   gate and up           split              split
    down    [E, H, I/n]                           split              split
    Y_MH    [M, H]          output                partial sum        partial sum

One equation and collective a pass:

    entry     X  = all-gather over y (X_y)                 dX_y = all-reduce over x (
                                                                  reduce-scatter over y (dX))
    inside    transformers' own forward on local tensors   no collective
    exit      Y_y = all-reduce over x (                    dY = all-gather over y (dY_y)
                    reduce-scatter over y (Y))

The output is a sum over ranks of what each computes from its own intermediate features, so every
gradient inside the block is the sum of what each rank's backward computes: dX at the entry, and the
gradients of the parameters that all ranks hold (router, gates), once a step
(`local_parameters.sum_partial_gradients`). Experts' weights have no other copy; their gradients are
whole. All ranks of one token choose the same experts, because they compute the router from the
same hidden states and weights.

Shared experts are linear layers inside the block, split in the same way and without collectives.

Gate and up are two halves of one parameter [E, 2 I, H], of which a rank needs the same rows of
both: a mesh stores the rows in another order than files (`fused`). Where they alternate (gpt_oss:
[E, H, 2 I], gate 0, up 0, gate 1, ...) a piece has both. The bias of down [E, H] is split over its
features: a rank adds its own features and zeros elsewhere, so that the sum has each once.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from memguard.parallel.collectives import (
    copy_to_axis,
    gather_from_axis,
    scatter_over_axis,
    sum_over_axis,
)
from memguard.parallel.fused import FeatureOrder
from memguard.parallel.layout import ShardSlice
from memguard.parallel.linear import to_local
from memguard.parallel.mesh import Axis

_SPLIT_BIAS = "down_proj_bias"


def is_experts(module: nn.Module) -> bool:
    """Whether this is a module of transformers with the weights of all experts of a block."""
    return hasattr(module, "is_concatenated") and hasattr(module, "is_transposed")


def has_halves(module: nn.Module) -> bool:
    """Whether gate and up are halves of one parameter of these experts, without a bias."""
    return is_experts(module) and _flags(module) == (True, False, False, True, False)


def alternates(module: nn.Module) -> bool:
    """Whether gate and up of these experts alternate, with a bias."""
    return is_experts(module) and _flags(module) == (False, True, True, True, False)


def _flags(module: Any) -> tuple[bool, ...]:
    return (
        module.is_concatenated,
        module.is_transposed,
        module.has_bias,
        module.has_gate,
        getattr(module, "has_post_expert_norm", False),  # Newer than transformers 5.16.
    )


class Local4D(nn.Module):
    """A module of a family whose forward reads its parameters as local tensors."""

    @classmethod
    def convert(cls, module: nn.Module) -> Any:
        """Change the class of a module in place; it keeps its own forward and parameters."""
        family = type(module)
        module.__class__ = type(family.__name__, (cls, family), {})
        return module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the family's forward, in which this rank's pieces have the parameters' names."""
        local = {
            leaf: self.expose(leaf, parameter)
            for leaf, parameter in self._parameters.items()
            if parameter is not None
        }
        # Attributes of the instance come before parameters.
        self.__dict__.update(local)
        try:
            return super().forward(*args, **kwargs)
        finally:
            for leaf in local:
                del self.__dict__[leaf]

    def expose(self, leaf: str, parameter: Tensor) -> Tensor:
        """Return a parameter as the forward reads it."""
        return to_local(parameter)


class Experts4D(Local4D):
    """The experts of a sharded model."""

    order: FeatureOrder | None = None
    """Order of gate and up if it is not that of files."""
    bias_slice: ShardSlice | None = None
    """Piece of the bias of down that this rank adds; None if it has none."""

    def find_order(self, leaf: str) -> FeatureOrder | None:
        """Return the order of a parameter's features if it is not that of files."""
        return self.order if leaf == "gate_up_proj" else None

    def expose(self, leaf: str, parameter: Tensor) -> Tensor:
        """Return a parameter as the forward reads it."""
        local = to_local(parameter)
        if leaf == _SPLIT_BIAS and self.bias_slice is not None:
            before = self.bias_slice.start[1]
            return functional.pad(local, (before, parameter.shape[1] - before - local.shape[1]))
        return local


class ExpertsBlock4D(nn.Module):
    """A block of router and experts; `convert` turns a family's block into one."""

    feature_axis: Axis
    width_axis: Axis

    @staticmethod
    def convert(block: nn.Module, *, feature_axis: Axis, width_axis: Axis) -> None:
        """Change the class of a block in place.

        Its forward maps hidden states ``[B, T, H]`` to the same, or to a tuple that begins with
        them. Outside of it ``feature_axis``, y, shards them; over ``width_axis``, x, they are
        replicated.
        """
        family = type(block)
        block.__class__ = type(family.__name__, (ExpertsBlock4D, family), {})
        assert isinstance(block, ExpertsBlock4D), "its class was just set"
        block.feature_axis, block.width_axis = feature_axis, width_axis

    def forward(self, hidden_states: Tensor) -> Any:
        """Return the local output ``[B, T, H/y]`` of local hidden states ``[B, T, H/y]``."""
        y, x = self.feature_axis, self.width_axis
        output = super().forward(gather_from_axis(copy_to_axis(hidden_states, x), y))
        partial, *others = output if isinstance(output, tuple) else (output,)
        whole = sum_over_axis(scatter_over_axis(partial, y), x)
        return (whole, *others) if isinstance(output, tuple) else whole
