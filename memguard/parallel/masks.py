"""One attention mask for all decoder blocks, in the form in which attention keeps it.

    mask_B1TT   bool, True where a token is seen     from transformers, the same for all blocks
    bias_B1TT   0 there, -inf elsewhere              what scaled_dot_product_attention adds

torch turns a mask into a bias at every call and keeps each for backward: T^2 numbers a row and
block. A bias made once is shared by all blocks; the numbers are the same.
"""

from typing import Any

import torch
from torch import Tensor, nn

from memguard.parallel.hf_plan import find_blocks


class SharedBias:
    """A hook that gives every block the bias made of the mask it was passed."""

    def __init__(self) -> None:
        """Start without a mask."""
        self._mask: Tensor | None = None
        self._bias: Tensor | None = None

    def __call__(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Replace the mask among the arguments; leave them as they are where there is none."""
        mask = kwargs.get("attention_mask")
        hidden = args[0] if args else kwargs.get("hidden_states")
        # What a compiled block does, its compiler shares.
        if torch.compiler.is_compiling() or not isinstance(hidden, Tensor):
            return None
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 4:
            return None
        kind = hidden.device.type
        narrow = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
        dtype = torch.get_autocast_dtype(kind) if narrow else hidden.dtype
        if mask is not self._mask or self._bias is None or self._bias.dtype != dtype:
            # The old one goes first: there is room for one.
            self._mask, self._bias = mask, None
            self._bias = mask.new_zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
        return args, {**kwargs, "attention_mask": self._bias}


def share_masks(model: nn.Module) -> None:
    """Let the decoder blocks of a model share what they make of their mask.

    Blocks that are passed no mask of booleans, or several masks in turn, compute what they did.
    """
    bias = SharedBias()
    for name in find_blocks(model):
        model.get_submodule(name).register_forward_pre_hook(bias, with_kwargs=True)
