"""Heads with random numbers, whole and cut into the pieces of a mesh, and what runs on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from meshes import mesh_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memguard.model.lm_head import Head, Step, apply_logit_transforms
from memguard.parallel.mesh import Axis
from memguard.parallel.mesh_shape import MeshShape


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    return torch.tanh(logits / cap) * cap


STEPS: tuple[Step, ...] = ((soft_cap, 3.0),)

# Degrees (y, x) of the meshes that these tests run on, 2 to 4 ranks: with a rank that has no row of
# the vocabulary, with both axes, and with `-m mesh` the others.
MESHES = [
    (1, 4),
    (2, 2),
    *(pytest.param(degrees, marks=pytest.mark.mesh) for degrees in ((1, 2), (2, 1), (1, 3))),
]

# The last ranks hold fewer rows of the vocabulary than the first, or, of 5 over 4, none.
VOCAB_SIZES = [131, 5]


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Hidden states, labels and a head, before they are cut."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    labels_N: Tensor
    steps: tuple[Step, ...] = ()

    @property
    def leaves(self) -> list[Tensor]:
        """What has gradients."""
        every = (self.hidden_ND, self.weight_VD, self.bias_V)
        return [tensor for tensor in every if tensor is not None]

    def logits(self) -> Tensor:
        """The logits of all tokens at once, as a model without any of our code has them."""
        logits = self.hidden_ND @ self.weight_VD.T
        return apply_logit_transforms(
            self.steps, logits if self.bias_V is None else logits + self.bias_V
        )


def draw_whole(
    num_tokens: int,
    vocab_size: int,
    *,
    seed: int = 0,
    dim: int = 8,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
    bias: bool = True,
    steps: tuple[Step, ...] = (),
    with_ties: bool = False,
) -> Whole:
    """Random numbers; ``with_ties`` small integers, whose logits are exact and often equal."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if with_ties:
            return torch.randint(-1, 2, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return Whole(
        hidden_ND=draw(num_tokens, dim) * scale,
        weight_VD=draw(vocab_size, dim),
        bias_V=draw(vocab_size) if bias else None,
        labels_N=torch.randint(0, vocab_size, (num_tokens,), generator=generator),
        steps=steps,
    )


@st.composite
def draw_wholes(draw: st.DrawFn) -> Whole:
    """Small heads of any size and scale, with and without a bias, steps and equal logits."""
    with_ties = draw(st.booleans())
    return draw_whole(
        draw(st.integers(0, 9)),
        draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 1000)),
        scale=1.0 if with_ties else draw(st.sampled_from([0.01, 1.0, 20.0])),
        bias=draw(st.booleans()),
        steps=draw(st.sampled_from([(), STEPS])),
        with_ties=with_ties,
    )


def cut_here(degrees: tuple[int, int]) -> tuple[Axis, Axis]:
    """This rank's place along y and x."""
    y, x = degrees
    mesh = mesh_of(MeshShape(y=y, x=x))
    return mesh.axis("y"), mesh.axis("x")


def take_piece(tensor: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's piece along a dimension, as torch.chunk cuts it; it may be empty."""
    size = -(-tensor.shape[dim] // axis.degree)
    first = min(axis.rank * size, tensor.shape[dim])
    return tensor.narrow(dim, first, min(size, tensor.shape[dim] - first))


def cut_whole(
    whole: Whole, axes: Sequence[Axis] = (), *, chunk_tokens: int = 1024
) -> tuple[Head, Tensor]:
    """This rank's head and hidden states, leaves of autograd; all of it without ``axes``."""
    y, x = axes or (Axis(name="y"), Axis(name="x"))
    rows_VD = take_piece(whole.weight_VD, 0, x)
    head = Head(
        weight_VD=take_piece(rows_VD, 1, y).detach().clone().requires_grad_(),
        bias_V=None
        if whole.bias_V is None
        else take_piece(whole.bias_V, 0, x).detach().clone().requires_grad_(),
        steps=whole.steps,
        first_token=min(x.rank * -(-len(whole.weight_VD) // x.degree), len(whole.weight_VD)),
        vocab_size=len(whole.weight_VD),
        vocab_axis=x,
        feature_axis=y,
        chunk_tokens=chunk_tokens,
    )
    return head, take_piece(whole.hidden_ND, 1, y).detach().clone().requires_grad_()


class Recorder(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, and the collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.collectives: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            self.collectives.append((func.__name__.split(".")[0], args[0].numel()))
        return made
