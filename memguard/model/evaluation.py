"""Modes of modules and random numbers of a program: at the end of a block they are as before."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model, whose submodules may be in different modes, into evaluation mode.

    Linear layers of bitsandbytes in 4 bits keep training mode, which does not change their numbers:
    in evaluation mode on a CPU they repack their weights in place, and training that continues
    computes something else.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for module, _ in modes:
        if is_4bit(module):
            module.training = True
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def keep_random_states() -> Iterator[None]:
    """Give Python, NumPy and torch, on all devices, the random state they had before a block."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002 - the program's, not ours
    has_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = range(torch.cuda.device_count()) if has_gpus else []
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def is_4bit(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of bitsandbytes in 4 bits."""
    # Not the attribute: layers of peft show the weight of the layer that they wrap as their own.
    return hasattr(module._parameters.get("weight"), "quant_state")
