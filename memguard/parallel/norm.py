"""Norms over sharded features, with statistics over all features; and norms of each head.

    x_MD   [M, D/axis]   activations      weight_D, bias_D  [D/axis]      D = all features

    mean   m = all-reduce over axis (sum x) / D                  (layer norm only)
    scale  s = 1 / sqrt(all-reduce over axis (sum (x-m)^2) / D + eps)
    y      = (x - m) * s * (offset + weight) + bias              offset 0, or 1 (Gemma)

Each rank uses the statistics for its own features, so their gradients are all-reduced as well.
The residual stream is sharded over y. A norm of each head (Qwen3) sees whole heads and has no
feature axis. Each rank along x has different heads, so gradients of its weight are summed over x.
A norm of all heads together (OLMo 2) has the feature axis x; ranks that share a key head gather its
parts after the norm.

A rank that has all features runs torch's own kernel: one launch on a GPU, eight for the equations.

The formula of a family's norm is found by running the norm, not from its class name.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memguard.errors import ModelError
from memguard.parallel.collectives import copy_to_axis, gather_from_axis, sum_for_each
from memguard.parallel.linear import to_local
from memguard.parallel.mesh import Axis

# Mean squares in units of eps: as small as eps, where eps matters, up to the size of activations.
_PROBE_SQUARES = (1.0, 10.0, 1e6)
# fp32 arithmetic on outputs of a few units; another formula differs by tenths.
_PROBE_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class NormFormula:
    """The formula of a norm."""

    centred: bool
    """Whether the mean is subtracted (layer norm)."""
    offset: float
    """Added to the weight: 0, or 1 for families that store weights around zero."""
    eps: float
    num_features: int
    """D, before sharding."""


class Norm4D(nn.Module):
    """A norm of a sharded model; `convert` turns a family's norm into one."""

    formula: NormFormula
    feature_axis: Axis
    gradient_axis: Axis
    kv_replicas: Axis
    weight: nn.Parameter

    @staticmethod
    def convert(
        norm: nn.Module,
        formula: NormFormula,
        *,
        feature_axis: Axis | None = None,
        gradient_axis: Axis | None = None,
        kv_replicas: Axis | None = None,
    ) -> None:
        """Change the class of a norm in place; its parameters are sharded elsewhere.

        Args:
            norm: keeps its parameters, their names and its hooks.
            formula: the result of `measure_norm`.
            feature_axis: shards its features; None if each rank has all of them.
            gradient_axis: ranks over which gradients of the weight are summed.
            kv_replicas: ranks that each have a part of one key head and gather all of it.
        """
        norm.__class__ = Norm4D
        assert isinstance(norm, Norm4D), "its class was just set"
        norm.formula = formula
        norm.feature_axis = feature_axis or Axis(name="none")
        norm.gradient_axis = gradient_axis or Axis(name="none")
        norm.kv_replicas = kv_replicas or Axis(name="none")

    def forward(self, input_MD: Tensor) -> Tensor:
        """Normalise the local features ``[..., D/axis]``; statistics in fp32 or wider."""
        return gather_from_axis(self._normalise(input_MD), self.kv_replicas)

    def _normalise(self, input_MD: Tensor) -> Tensor:
        weight_D = copy_to_axis(to_local(self.weight), self.gradient_axis)
        bias = getattr(self, "bias", None)
        bias_D = None if bias is None else copy_to_axis(to_local(bias), self.gradient_axis)
        if self.feature_axis.degree > 1:
            return self._normalise_shard(input_MD, weight_D, bias_D)
        if self.formula.centred:
            scale_D = weight_D + self.formula.offset if self.formula.offset else weight_D
            shape, eps = weight_D.shape, self.formula.eps
            return functional.layer_norm(input_MD, shape, scale_D, bias_D, eps)
        output = self._rms_norm(input_MD, weight_D)
        return output if bias_D is None else output + bias_D

    def _rms_norm(self, input_MD: Tensor, weight_D: Tensor) -> Tensor:
        """Normalise by torch's kernel, one for forward; rounds where transformers' norms do."""
        formula, shape = self.formula, weight_D.shape
        if formula.offset:
            # The kernel is fused only if input and weight have one dtype, and the offset needs a
            # wide one.
            x_MD = _widen(input_MD)
            scale_D = formula.offset + weight_D.to(x_MD.dtype)
            return functional.rms_norm(x_MD, shape, scale_D, formula.eps).to(input_MD.dtype)
        if input_MD.dtype == weight_D.dtype == _widen(input_MD).dtype:
            return functional.rms_norm(input_MD, shape, weight_D, formula.eps)
        # Families round to bf16 before the weight; with the weight the kernel rounds after it.
        return weight_D * functional.rms_norm(input_MD, shape, None, formula.eps)

    def _normalise_shard(self, input_MD: Tensor, weight_D: Tensor, bias_D: Tensor | None) -> Tensor:
        formula, axis = self.formula, self.feature_axis
        x_MD = _widen(input_MD)
        if formula.centred:
            x_MD = x_MD - sum_for_each(x_MD.sum(-1, True), axis) / formula.num_features
        squares_M1 = sum_for_each(x_MD.pow(2).sum(-1, True), axis)
        x_MD = x_MD * torch.rsqrt(squares_M1 / formula.num_features + formula.eps)
        if formula.offset:
            # Gemma's weights are near zero: the offset is added in fp32, before the cast.
            output = (x_MD * (formula.offset + weight_D.to(x_MD.dtype))).to(input_MD.dtype)
        else:
            output = weight_D * x_MD.to(input_MD.dtype)
        return output if bias_D is None else output + bias_D

    def extra_repr(self) -> str:
        """Describe the formula and how the norm is sharded."""
        return f"{self.formula}, features/{self.feature_axis.name}"


def _widen(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype of statistics: fp32, or float64 if it has that."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@torch.no_grad()
def measure_norm(norm: nn.Module) -> NormFormula:
    """Find the formula of an unsharded norm by running it on random features on the CPU.

    Raises:
        ModelError: the norm is neither an RMS norm nor a layer norm.
    """
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    reason, formula = "has no 'eps' or no vector 'weight'", None
    if isinstance(eps, float) and weight is not None and weight.ndim == 1:
        reason, formula = "is neither an RMS norm nor a layer norm", _probe(norm, weight, eps)
    if formula is None:
        raise ModelError(f"norm {type(norm).__name__} {reason}: it cannot be sharded")
    return formula


def _probe(norm: nn.Module, weight: Tensor, eps: float) -> NormFormula | None:
    probe: Any = copy.deepcopy(norm).to_empty(device="cpu").to(torch.float32)
    num_features = weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    x_MD = torch.randn(len(_PROBE_SQUARES), num_features, generator=generator) + 0.5
    x_MD *= (eps * torch.tensor(_PROBE_SQUARES)).sqrt()[:, None]
    for parameter in probe.parameters():
        parameter.copy_(torch.randn(num_features, generator=generator))
    output_MD = probe(x_MD)
    bias_D = getattr(probe, "bias", None)
    bias_D = torch.zeros(num_features) if bias_D is None else bias_D
    for centred, normalise in ((False, functional.rms_norm), (True, functional.layer_norm)):
        for offset in (0.0, 1.0):
            scaled_MD = normalise(x_MD, (num_features,), eps=eps) * (offset + probe.weight)
            if float((output_MD - scaled_MD - bias_D).abs().max()) < _PROBE_TOLERANCE:
                return NormFormula(
                    centred=centred, offset=offset, eps=eps, num_features=num_features
                )
    return None
