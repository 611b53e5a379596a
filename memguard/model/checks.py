"""Checks, by running a model on random tokens, that it is a causal LM that memguard supports.

    has_known_head         CausalLM's logits equal those of the model's own forward
    check_causal           a prediction does not depend on later tokens
    keeps_documents_apart  two documents of one packed row do not attend to each other

On a mesh every rank runs the checks, and all get the same result.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memguard.errors import ModelError
from memguard.model.causal_lm import CausalLM
from memguard.model.evaluation import evaluating
from memguard.parallel.attention_pieces import Packing
from memguard.parallel.collectives import all_reduce
from memguard.runtime import Runtime
from memguard.seeds import derive_generator

_PROBE_ROWS, _PROBE_TOKENS = 2, 16


def build_causal_lm(
    model: Any,
    *,
    chunk_tokens: int = 1024,
    compute_dtype: torch.dtype | None = None,
    peers: Runtime | None = None,
) -> CausalLM:
    """Wrap a plain model after comparing logits with its own forward on 2 x 16 random tokens.

    A family with an operation between head and loss that `_AFTER_HEAD` does not list uses its own
    forward instead (all logits at once), with a warning.

    Raises:
        ModelError: the model is not a causal language model.
    """
    layer = CausalLM(model, chunk_tokens=chunk_tokens, compute_dtype=compute_dtype, peers=peers)
    check_causal_lm(layer)
    return layer


def check_causal_lm(layer: CausalLM, *, is_split: bool = False) -> None:
    """Check a model, plain or sharded, and let it use its own forward if its head is not known.

    ``is_split``: its layers are split over y and x, where its own forward cannot be used.

    Raises:
        ModelError: the model is not causal, or its head is not known and it is split.
    """
    layer.own_head = has_known_head(layer)
    if not layer.own_head and is_split:
        raise ModelError(explain_head(layer.model))
    check_causal(layer)
    if not layer.own_head:
        warnings.warn(
            f"{type(layer.model).__name__} has an operation after its head that memguard does not "
            "support: using its own forward, which needs memory for all logits at once.",
            stacklevel=3,
        )


def explain_head(model: Any) -> str:
    """Return why a model with this head cannot be split over y and x."""
    return (
        f"{type(model).__name__} transforms the output of its head in a way that memguard does "
        "not support over x and y: it can use the axes data and z"
    )


@torch.no_grad()
def has_known_head(layer: CausalLM) -> bool:
    """Whether the layer's logits of random tokens equal those of the model's own forward."""
    ids_BT = _probe_ids(layer)
    with _evaluating(layer):
        # The same attention kernel: in bf16, another kernel rounds differently in every layer.
        arguments = layer.attention.arguments(ids_BT, None, None, compute_dtype=layer.compute_dtype)
        call = {"input_ids": ids_BT, "use_cache": False, **arguments}
        own = layer(lambda: layer.model(**call).logits).float()
        try:
            logits = layer(lambda: layer.logits(layer.hidden_states(ids_BT))).float()
        except (AttributeError, TypeError):
            return False
    if logits.shape != own.shape:
        return False
    # The same operations on the same numbers: only a head that gets other shapes may round
    # differently, by the last bits of the dtype. NaN from damaged weights is ignored here and
    # reported when a loss is measured.
    difference = (logits - own).nan_to_num(0).abs().max()
    return float(layer.largest(difference)) <= 1e-4 + _tolerance(own, layer)


@torch.no_grad()
def check_causal(layer: CausalLM) -> None:
    """Reject a model that sees the tokens it predicts: it would seem to have memorized any text.

    Raises:
        ModelError: predictions depend on later tokens.
    """
    ids_BT = _probe_ids(layer)
    half = ids_BT.shape[1] // 2
    other_BT = ids_BT.clone()
    other_BT[:, half:] = (other_BT[:, half:] + 1) % layer.vocab_size
    with _evaluating(layer):
        before, after = (
            layer(partial(layer.hidden_states, ids))[:, :half].float() for ids in (ids_BT, other_BT)
        )
    # The median: a near-tied choice of an expert may change single tokens, a leak changes all.
    change_BT = (before - after).abs().amax(-1)
    if layer.mesh is not None:
        change_BT = all_reduce(change_BT, layer.mesh.axis("y"), "max")
    if float(change_BT.median()) >= _tolerance(before, layer):
        raise ModelError(
            f"{type(layer.model).__name__} is not a causal language model: its predictions depend "
            "on later tokens. Encoders (BERT) can be neither fine-tuned nor audited"
        )


@torch.no_grad()
def keeps_documents_apart(layer: CausalLM, *, bf16: bool = False) -> bool:
    """Return whether this model isolates the documents of a packed row from each other.

    Compares the hidden states of two documents packed into one row with those of each alone.
    ``bf16``: it trains under autocast to bf16, in which a GPU has other attention kernels.
    """
    ids_BT = _probe_ids(layer)
    positions = torch.arange(_PROBE_TOKENS, device=ids_BT.device).repeat(_PROBE_ROWS)[None]
    row, swapped = ids_BT.reshape(1, -1), ids_BT.flip(0).reshape(1, -1)
    rows = torch.cat([row, swapped])

    def hidden_states(ids: Tensor) -> Tensor:
        packing = Packing.of_equal_documents(
            ids.numel() // _PROBE_TOKENS, _PROBE_TOKENS, device=ids.device
        )
        return layer.hidden_states(ids, positions.expand(len(ids), -1), packing=packing)

    with _evaluating(layer, bf16=bf16):
        alone = layer(lambda: layer.hidden_states(ids_BT)).float()
        one = layer(lambda: hidden_states(row)).float()
        # Without cu_seqlens, flash attention isolates documents only if there is a single row.
        two = layer(lambda: hidden_states(rows)).float()
    packed = torch.cat([one, two]).reshape(3, *alone.shape)
    difference = (packed - torch.stack([alone, alone, alone.flip(0)])).abs().max()
    return float(layer.largest(difference)) < _tolerance(alone, layer, bf16=bf16)


def _tolerance(values: Tensor, layer: CausalLM, *, bf16: bool = False) -> float:
    """Return the largest difference between values that is accepted as rounding.

    A leak changes values by tenths; another order of summation changes the dtype's last bits.
    """
    scale = float(layer.largest(values.nan_to_num(0).abs().max())) or 1.0
    is_exact = layer.compute_dtype in (torch.float32, torch.float64) and not (
        bf16 or _needs_autocast(layer)
    )
    return scale * (1e-4 if is_exact else 3e-2)


def _needs_autocast(layer: CausalLM) -> bool:
    """Whether the probes need autocast: flash attention has no fp32."""
    return layer.attention.kernel == "flash" and layer.compute_dtype == torch.float32


@contextmanager
def _evaluating(layer: CausalLM, *, bf16: bool = False) -> Iterator[None]:
    enabled = bf16 or _needs_autocast(layer)
    with (
        evaluating(layer.model),
        torch.autocast(layer.device.type, dtype=torch.bfloat16, enabled=enabled),
    ):
        yield


def _probe_ids(layer: CausalLM) -> Tensor:
    draw = derive_generator(0, "probe tokens")
    ids = draw.integers(0, layer.vocab_size, (_PROBE_ROWS, _PROBE_TOKENS))
    return torch.from_numpy(ids).to(layer.device)
