"""Which modules are linear layers."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from memguard.parallel.linear import Linear4D


@torch.no_grad()
def is_linear(module: nn.Module) -> bool:
    """Whether a module computes ``input @ weight.T + bias``; of a subclass, by running it.

    Args:
        module: unsharded; may be on the meta device.
    """
    forward = type(module).forward
    if forward in (nn.Linear.forward, Linear4D.forward, Conv1D.forward):
        return True
    if not isinstance(module, nn.Linear):
        return False
    probe: Any = copy.copy(module)
    generator = torch.Generator().manual_seed(0)
    weight_NK, bias_N, input_MK = (
        torch.randn(*shape, generator=generator) for shape in ((3, 4), (3,), (2, 4))
    )
    probe._parameters = {"weight": nn.Parameter(weight_NK), "bias": nn.Parameter(bias_N)}
    expected_MN = functional.linear(input_MK, weight_NK, bias_N)
    return bool(torch.allclose(probe(input_MK), expected_MN, rtol=1e-4, atol=1e-5))


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is a `Conv1D`, sharded or not, whose weight is [in, out]."""
    return isinstance(module, Conv1D) or (isinstance(module, Linear4D) and module.stores_in_out)
