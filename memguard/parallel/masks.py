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

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class SharedBias:
    """A hook that gives every block the bias made of the mask it was passed."""

    def __init__(self, first: nn.Module) -> None:
        """Take the first block, at which a forward begins."""
        self._first = first
        # By identity; a few families have two masks, of which one slides.
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Replace the mask among the arguments; leave them as they are where there is none."""
        mask = kwargs.get("attention_mask")
        hidden = args[0] if args else kwargs.get("hidden_states")
        # A compiled block makes its own: a lookup by identity would be compiled anew each step.
        if torch.compiler.is_compiling() or not isinstance(hidden, Tensor):
            return None
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 4:
            return None
        return args, {**kwargs, "attention_mask": self._bias(block, mask, _dtype(hidden))}

    def _bias(self, block: nn.Module, mask: Tensor, dtype: torch.dtype) -> Tensor:
        _, bias = self._made.get(id(mask), (mask, None))
        if bias is None or bias.dtype != dtype:
            if block is self._first:
                # Those of the forward before; a recomputed first block finds its own.
                self._made.clear()
            # GPU kernels take rows that begin at multiples of 8, and copy any other mask.
            num_keys = mask.shape[-1]
            padded = (*mask.shape[:-1], -(-num_keys // 8) * 8)
            bias = mask.new_zeros(padded, dtype=dtype)[..., :num_keys]
            bias.masked_fill_(~mask, -torch.inf)
            self._made[id(mask)] = mask, bias
        return bias


def _dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype attention computes in, which its bias must have."""
    kind = hidden.device.type
    if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return hidden.dtype
    return torch.get_autocast_dtype(kind)


def share_masks(model: nn.Module) -> None:
    """Let the decoder blocks of a model share what attention makes of their mask.

    Blocks that are passed no mask of booleans compute as they did.
    """
    blocks = [model.get_submodule(name) for name in find_blocks(model)]
    if blocks:
        bias = SharedBias(blocks[0])
        for block in blocks:
            block.register_forward_pre_hook(bias, with_kwargs=True)
