"""Which attention kernel a model runs, chosen once when the model is built.

    kernel    runs on                                   computes in   documents are separated by
    varlen    GPUs; families with SDPA attention        bf16, fp16    cu_seqlens
    flex      GPUs; families with a soft cap or sinks   bf16, fp16    blocks made from cu_seqlens
    flash     `model.attn_implementation` flash_attention_2           cu_seqlens
    pieces    everything else with SDPA attention       any dtype     a mask of T x T pairs
    own       all other models                          any dtype     the family's own mask

varlen calls torch's `varlen_attn` (flash attention 2, in training also 3: flash_attention_3.py) on
the flattened rows; key heads are not repeated. In fp32, for which there is no flash attention, and
with a cache of keys, whose slots are masked, attention is computed as by pieces (varlen) or own
(flex).

transformers makes the mask of packed rows from their positions, and waits for the GPU to read them.
It passes a mask of four dimensions on unchanged. Therefore packed rows are passed with a mask that
holds no pairs, cu_seqlens [1, 1, 1, documents + 1], which a hook removes before each block. Heads
are local: no collective.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.hooks import RemovableHandle
from transformers.masking_utils import eager_mask, sdpa_mask

from memguard.parallel.attention_flex import attend_flex, make_block_masks
from memguard.parallel.attention_pieces import (
    UNSUPPORTED,
    Arguments,
    Packing,
    SharedBias,
    attend_in_pieces,
    attend_whole,
    attention_dtype,
    cast_for_attention,
    find_first_keys,
    make_dense_mask,
    repeat_heads,
)
from memguard.parallel.hf_plan import find_blocks

Kernel = Literal["varlen", "flex", "flash", "pieces", "own"]

HALF_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of flash attention's kernels."""
_LARGEST_HEAD = 256
_SMALLEST_FLEX_HEAD = 16
_WINDOW_IN_MASK = frozenset({"phimoe", "qwen2_moe"})
"""Families with a sliding window in their mask only, which they do not pass on to attention."""
# torch 2.11 has no such argument, and its documentation asks for equal numbers of heads.
_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend_varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention output ``[B, T, H, d]``; implements transformers' attention interface.

    Without ``cu_seq_lens_q`` (a cache, fp32), and with dropout or another argument that
    `varlen_attn` does not have, `attend_in_pieces` runs.

    Its other arguments are those of `attend_in_pieces`; ``sliding_window`` is the number of tokens
    that a query sees, itself included (None: all of its document).
    """
    num_rows, _, num_tokens, _ = query.shape
    has_more = dropout > 0 or any(kwargs.get(name) is not None for name in UNSUPPORTED)
    if cu_seq_lens_q is None or has_more:
        if cu_seq_lens_q is not None:
            attention_mask = make_dense_mask(
                find_first_keys(cu_seq_lens_q, num_rows, num_tokens, sliding_window)
            )
        return attend_in_pieces(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    assert max_length_q is not None, "they are passed together"
    query, key, value = cast_for_attention(query, key, value)
    if not _HAS_GQA:
        key, value = repeat_heads(query, key, value)
    options: dict[str, Any] = {"enable_gqa": True} if _HAS_GQA else {}
    attended = varlen_attn(
        query.transpose(1, 2).flatten(0, 1),
        key.transpose(1, 2).flatten(0, 1),
        value.transpose(1, 2).flatten(0, 1),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        # Its window is the number of tokens before the query; -1 is no limit.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **options,
    )
    assert isinstance(attended, Tensor), "no other output was requested"
    return attended.view(num_rows, num_tokens, *attended.shape[1:]), None


# By kernel: the attention function, the function that makes its masks, and what it replaces.
_REPLACING: dict[Kernel, tuple[Any, Any, str]] = {
    "varlen": (attend_varlen, sdpa_mask, "sdpa"),
    "flex": (attend_flex, eager_mask, "eager"),
    "pieces": (attend_in_pieces, sdpa_mask, "sdpa"),
}
_PREFIX = "memguard_"


def _read_implementation(model: Any) -> str:
    """Return transformers' name of a model's attention, before this module replaced it.

    Empty for models without a choice of attention.
    """
    name: str = model.config._attn_implementation or ""
    names = {_PREFIX + kernel: replaced for kernel, (*_, replaced) in _REPLACING.items()}
    return names.get(name, name)


def choose_attention(model: Any, device_type: str) -> Kernel:
    """Return the attention kernel of a model that runs on this type of device."""
    implementation = _read_implementation(model)
    if "flash" in implementation:
        return "flash"
    if implementation not in ("sdpa", "eager") or not model._supports_attention_backend:
        return "own"
    if _selects_keys(model):
        return "own"
    on_gpu = _has_flash(device_type) and _is_plain_causal(model)
    is_capped = _caps_scores(model)
    if implementation == "sdpa" and not is_capped:
        return "varlen" if on_gpu and _fits_flash(model.config.get_text_config()) else "pieces"
    # Eager is the default of families that SDPA attention cannot compute.
    is_eager = is_capped or not model._supports_sdpa
    return "flex" if on_gpu and is_eager and _is_flexible(model) else "own"


def _selects_keys(model: Any) -> bool:
    """Whether an indexer selects the keys of each query (DeepSeek sparse attention).

    Families put the selection into the mask for transformers' own implementations only; others
    would have to read it from an argument, and attend to all keys if they do not.
    """
    return any(name.endswith(".indexer") for name, _ in model.named_modules())


def _caps_scores(model: Any) -> bool:
    """Whether scores have a soft cap, which SDPA attention drops; transformers 5.17 takes it."""
    return getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None


def _has_flash(device_type: str) -> bool:
    if device_type != "cuda" or torch.version.hip is not None:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


def _is_plain_causal(model: Any) -> bool:
    """Whether each token sees its document up to itself, or a window of it, in all layers.

    Families that support flash attention pass the window on to the attention function, with the
    exceptions listed.
    """
    config = model.config.get_text_config()
    fields = config.to_dict()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    is_spread = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
    return (
        model._supports_flash_attn
        and not getattr(model, "_is_stateful", False)
        and getattr(config, "is_causal", True)
        and not (config.model_type in _WINDOW_IN_MASK and fields.get("sliding_window"))
        and kinds <= {"full_attention", "sliding_attention"}
        and not fields.get("attention_chunk_size")
        and not fields.get("use_bidirectional_attention")
        and not any(
            isinstance(value, float | int) and value > 0
            for name, value in fields.items()
            if "att" in name and "drop" in name
        )
        # accelerate moves arguments to the device of a block, but not what is inside a mask.
        and not is_spread
        and len(find_blocks(model)) > 0
    )


def list_head_sizes(config: Any) -> list[int]:
    """Return the sizes of the attention heads of a language model (features), perhaps repeated."""
    fields = config.to_dict()
    sizes = [value for name, value in fields.items() if name.endswith("head_dim") and value]
    return sizes or [config.hidden_size // config.num_attention_heads]


def _fits_flash(config: Any) -> bool:
    """Whether flash attention's kernels take the heads: one size for queries, keys and values."""
    fields = config.to_dict()
    is_one = fields.get("kv_lora_rank") is None and "v_head_dim" not in fields
    sizes = list_head_sizes(config)
    return is_one and all(size % 8 == 0 and size <= _LARGEST_HEAD for size in sizes)


def _is_flexible(model: Any) -> bool:
    """Whether a soft cap or sinks are all that a family adds to SDPA attention."""
    config = model.config.get_text_config()
    return (
        model._supports_flex_attn
        and min(list_head_sizes(config)) >= _SMALLEST_FLEX_HEAD
        and (
            _caps_scores(model)
            or any(name.endswith(".sinks") for name, _ in model.named_parameters())
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """The attention kernel of a model."""

    kernel: Kernel
    windows: tuple[int | None, ...]
    """Sliding windows of its layers (tokens); None: no window."""
    hooks: tuple[RemovableHandle, ...] = ()
    """Of its blocks."""
    replaced: str | None = None
    """transformers' name of the attention before; None if it was not replaced."""

    def restore(self, model: Any) -> None:
        """Give a model the attention that it had before `prepare_attention`."""
        for hook in self.hooks:
            hook.remove()
        if self.replaced is not None:
            model.config._attn_implementation = self.replaced

    def arguments(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor | None,
        packing: Packing | None,
        *,
        compute_dtype: torch.dtype,
    ) -> dict[str, Any]:
        """Return arguments of the model's forward pass, without a cache, about attention.

        Without positions rows are one document each; without ``packing`` transformers finds
        documents by their positions. ``compute_dtype`` is that of the model's matmuls outside
        autocast.
        """
        plain = {"attention_mask": None, "position_ids": position_ids_BT}
        device = input_ids_BT.device
        dtype = attention_dtype(compute_dtype, device.type)
        if self.kernel in ("pieces", "own") or (
            self.kernel != "flash" and dtype not in HALF_DTYPES
        ):
            return plain
        num_rows, num_tokens = input_ids_BT.shape
        if position_ids_BT is None:
            position_ids_BT = torch.arange(num_tokens, device=device)[None]
            packing = Packing.of_equal_documents(num_rows, num_tokens, device=device)
        if packing is None:
            return plain
        ends = packing.cu_seqlens
        arguments = {
            "attention_mask": ends[None, None, None],
            "position_ids": position_ids_BT,
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": packing.max_seqlen,
            "max_length_k": packing.max_seqlen,
        }
        if self.kernel == "flex":
            arguments["block_masks"] = make_block_masks(ends, num_rows, num_tokens, self.windows)
        return arguments


def prepare_attention(model: Any, device_type: str) -> Attention:
    """Choose a model's attention kernel on a type of device; its blocks share what they attend by.

    The exported configuration does not change: transformers does not write the attention name.
    """
    kernel = choose_attention(model, device_type)
    # Boolean masks of eager attention have a meaning of their own: MPT's are True where a token is
    # hidden.
    has_shared_bias = _read_implementation(model) == "sdpa" and not _caps_scores(model)
    replaced: str | None = None
    if kernel == "own" and _caps_scores(model) and model.config._attn_implementation == "sdpa":
        replaced, model.config._attn_implementation = "sdpa", "eager"
    if kernel in _REPLACING:
        replaced = model.config._attn_implementation
        name = _PREFIX + kernel
        attend, make_mask, _ = _REPLACING[kernel]
        transformers.AttentionInterface.register(name, attend)
        transformers.AttentionMaskInterface.register(name, make_mask)
        model.config._attn_implementation = name
    elif device_type == "cuda" and _read_implementation(model) == "sdpa":
        # Such a family may compare the name with "sdpa", which it therefore keeps.
        transformers.AttentionInterface.register("sdpa", attend_whole)
    blocks = [model.get_submodule(name) for name in find_blocks(model)]
    hooks = []
    if blocks:
        bias = SharedBias(blocks[0])
        for block in blocks:
            hooks.append(block.register_forward_pre_hook(_drop_packing_mask, with_kwargs=True))
            if has_shared_bias:
                hooks.append(block.register_forward_pre_hook(bias, with_kwargs=True))
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    return Attention(
        kernel=kernel,
        windows=(None,) if window is None else (None, window),
        hooks=tuple(hooks),
        replaced=replaced,
    )


def _drop_packing_mask(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """Remove the mask that only kept transformers from making one, see `Attention.arguments`."""

    def keep(value: Any) -> Any:
        is_packing = isinstance(value, Tensor) and value.dtype == torch.int32 and value.ndim == 4
        return None if is_packing else value

    return tuple(keep(value) for value in args), {name: keep(v) for name, v in kwargs.items()}
