"""Inputs of checkpointed blocks, stored in parts over x.

A checkpointed block keeps its input until backward, which computes the block again from it. All
ranks along x have the same input, so each keeps only its share of the tokens. Tokens M = B T,
features D, x ranks:

              of one block                 over x          over y       in memory
    H_MD      [M, D/y]                     replicated      features     in forward; in backward
    P_mD      [m, D/y],  m = ceil(M / x)   other tokens    features     from forward to backward

One equation and collective a pass. r is the rank along x:

    forward     P = H[r m : (r + 1) m]             none; rows beyond M are zero
    backward    H = all-gather over x (P)[:M]      once, before the block is computed again

What selective checkpointing keeps besides is stored whole.

Autograd's hooks for saved tensors put P in the place of H where H is saved. A checkpoint saves its
arguments before it sets hooks of its own, so hooks around it see the arguments only. Where the
compiler compiles the checkpoint too, hooks around the block see all that the compiler saves: input,
weights and kept outputs. In both cases the input is recognised by the memory that it occupies.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from memguard.parallel.collectives import gather_rows
from memguard.parallel.hf_plan import find_blocks
from memguard.parallel.mesh import Axis


def store_inputs_in_parts(model: nn.Module, axis: Axis) -> None:
    """Store the input of each checkpointed block in parts; call this after `compile_blocks`.

    The sharded model is changed in place; blocks without checkpointing stay as they are. Ranks
    along ``axis``, x, have the same inputs of blocks.
    """
    if axis.degree == 1:
        return
    for name in find_blocks(model):
        block: Any = model.get_submodule(name)
        checkpoint = getattr(block, "_gradient_checkpointing_func", None)
        if checkpoint is None:
            continue
        compiled = block._compiled_call_impl
        # Older releases of transformers checkpoint in `__call__`, outside of what is compiled.
        if compiled is not None and type(block).__call__ is nn.Module.__call__:
            block._compiled_call_impl = functools.partial(_call_block, axis, compiled)
        else:
            # With the keywords, by which `compile_blocks` recognises selective checkpointing.
            keywords = getattr(checkpoint, "keywords", {})
            block._gradient_checkpointing_func = functools.partial(
                _call_checkpoint, axis, checkpoint, **keywords
            )


def _call_block(axis: Axis, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _storing_in_parts(args, axis):
        return call(*args, **kwargs)


def _call_checkpoint(
    axis: Axis, checkpoint: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    with _storing_in_parts(args, axis):
        return checkpoint(function, *args, **kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """What is stored instead of an input."""

    rows_mD: Tensor
    shape: torch.Size
    """Of the input: ``[B, T, D/y]``."""


def _storing_in_parts(args: tuple[Any, ...], axis: Axis) -> Any:
    """Return a context in which autograd stores the hidden states among ``args`` in parts.

    They are the first argument of every block.
    """
    hidden = args[0] if args else None
    if not isinstance(hidden, Tensor) or hidden.ndim < 2 or hidden.numel() == 0:
        return contextlib.nullcontext()
    # Not the tensor, which the hooks would keep in memory.
    place = _find_place(hidden)

    def pack(saved: Tensor) -> Tensor | _Part:
        if _find_place(saved) != place:
            return saved
        return _Part(rows_mD=cut_rows(saved, axis), shape=saved.shape)

    def unpack(stored: Tensor | _Part) -> Tensor:
        if isinstance(stored, Tensor):
            return stored
        num_rows = stored.shape[:-1].numel()
        return gather_rows(stored.rows_mD, axis)[:num_rows].view(stored.shape)

    return saved_tensors_hooks(pack, unpack)


def _find_place(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two tensors have in common if they are the same elements in the same order."""
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def cut_rows(hidden: Tensor, axis: Axis) -> Tensor:
    """Return a copy of this rank's rows ``[m, D]`` of hidden states ``[..., D]``.

    Args:
        hidden: M rows, the same on all ranks.
        axis: the ranks that share them; each has m = ceil(M / ranks), the last ones with zeros.
    """
    rows_MD = hidden.detach().reshape(-1, hidden.shape[-1])
    num_rows = -(-len(rows_MD) // axis.degree)
    part = rows_MD[axis.rank * num_rows : (axis.rank + 1) * num_rows]
    missing = num_rows - len(part)
    # A view would keep all rows in memory.
    return functional.pad(part, (0, 0, 0, missing)) if missing else part.clone()
