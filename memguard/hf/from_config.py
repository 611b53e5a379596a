"""Models of a configuration alone: without storage, reduced in size, or with random weights.

    build_on_meta        on the meta device
      parameters                meta; no tensor of them is ever allocated, not even one at a time
      non-persistent buffers    on the CPU, computed from the configuration; no file has them
      persistent buffers        on the CPU, with initial values; files have the checkpoint's
    reduce_config        for trials: the family's widths with 2 layers, or widths of tens of
                         features as well; composite configurations are reduced in all their parts
    build_scratch_model  drawn from a seed

The values of buffers are those that the family's `_init_weights` sets, as when transformers loads a
checkpoint. A buffer that it leaves as it is, or changes in place, is computed by a second build
whose buffers have storage.
"""

import copy
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers.quantizers.auto import AutoHfQuantizer

from memguard.hf.checkpoint import explained
from memguard.hf.config_fields import check_fields


def build_on_meta(config: Any, *, attn: str | None = None, dtype: torch.dtype | None = None) -> Any:
    """Return a causal LM whose parameters are on the meta device.

    None leaves the attention implementation to transformers, and the dtype to the configuration.
    """
    arguments = {"attn_implementation": attn, "dtype": dtype}
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, **arguments)
    _quantise_online(model)
    _drop_storage(model)
    model.tie_weights()
    if unset := _compute_buffers(model):
        with init_empty_weights(include_buffers=False):
            built = transformers.AutoModelForCausalLM.from_config(config, **arguments)
        for name in unset:
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module)._buffers[leaf] = built.get_buffer(name)
    return model


def describe_model(config: Any, *, name: str) -> Any:
    """Return a model without storage; ``name`` starts a sentence.

    Raises:
        ModelError: it is not a causal language model.
    """
    with explained(f"{name} cannot be loaded as a causal language model"):
        # transformers writes the dtype of the model into its configuration.
        return build_on_meta(copy.deepcopy(config))


def _quantise_online(model: Any) -> None:
    """Give a model the layers of its configuration's quantisation, as `from_pretrained` does.

    `check_fields` accepts only one: ternary weights that are rounded in each forward pass, from
    plain weights that are stored and trained (BitNet).
    """
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is None:
        return
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
    model.config.quantization_config = quantizer.quantization_config
    quantizer.preprocess_model(model=model, device_map=None)


def _drop_storage(model: nn.Module) -> None:
    """Move parameters to the meta device that a family creates in a way that ignores it."""
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                meta = torch.empty_like(parameter, device="meta")
                module._parameters[leaf] = nn.Parameter(meta, parameter.requires_grad)


def _compute_buffers(model: Any) -> list[str]:
    """Compute the buffers of a model on the meta device, on the CPU.

    The names of non-persistent ones whose value depends on what was there before are returned.
    """
    owners: dict[str, Any] = {}
    unset = []
    for name, module in model.named_modules():
        is_owner = isinstance(module, transformers.PreTrainedModel)
        owners[name] = module if is_owner else owners[name.rpartition(".")[0]]
        leaves = [leaf for leaf, buffer in module._buffers.items() if buffer is not None]
        if not leaves:
            continue
        first, second = (_initialise(owners[name], module, leaves, fill) for fill in (0, 1))
        unset += [
            f"{name}.{leaf}".removeprefix(".")
            for leaf in leaves
            if leaf in module._non_persistent_buffers_set
            and not torch.equal(first[leaf], second[leaf])
        ]
    return unset


def _initialise(owner: Any, module: nn.Module, leaves: list[str], fill: int) -> dict[str, Tensor]:
    """Fill a module's buffers with a number, let the family set them, and return them."""
    for leaf in leaves:
        module._buffers[leaf] = torch.full_like(module.get_buffer(leaf), fill, device="cpu")
    # Parameters on the meta device are not affected.
    owner._init_weights(module)
    return {leaf: module.get_buffer(leaf) for leaf in leaves}


LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"),
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_HEADS: dict[str, int] = {
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
}
_WIDTHS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim"), 64),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "dim_feedforward"), 64),
    **dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"), 64),
    "expert_ffn_hidden_size": 64,
    "ffn_hidden_size": 64,
    # Recurrent layers pad a row to whole chunks.
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
}
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TWO_LAYERS: dict[str, int] = {**dict.fromkeys(LAYERS, 2), "vocab_size": 512}
RUNNABLE: tuple[Mapping[str, int], ...] = (
    # Routers choose up to 16 experts.
    {**_TWO_LAYERS, **dict.fromkeys(EXPERTS, 32), **_WIDTHS, **_HEADS},
    # Sizes of some families, such as latent attention, are tied to the default heads.
    {**_TWO_LAYERS, **dict.fromkeys(EXPERTS, 32), **_WIDTHS},
    _TWO_LAYERS,
)
"""Limits of models to run, the smallest first."""


def reduce_config(config: Any, limits: Mapping[str, int]) -> Any:
    """Return a copy whose sizes are at most these, by name of the field.

    With a limit for the vocabulary, special tokens are moved into it.
    """
    small = copy.deepcopy(config)
    for part in list_parts(small):
        num_before = getattr(part, "num_hidden_layers", None)
        for name, limit in limits.items():
            value = vars(part).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > limit:
                setattr(part, name, limit)
        num_layers = getattr(part, "num_hidden_layers", None)
        for name, value in list(vars(part).items()):
            # One entry for each layer, such as `layer_types`.
            if isinstance(value, list) and num_before and len(value) == num_before:
                setattr(part, name, value[:num_layers])
        for number, name in enumerate(_SPECIAL_TOKENS):
            token = getattr(part, name, None)
            if isinstance(token, int) and token >= limits.get("vocab_size", token + 1):
                setattr(part, name, number)
    return small


def list_parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and all its parts."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PretrainedConfig):
            yield from list_parts(value)


_NO_SCRATCH = "'model.scratch.config' does not describe a model"


def build_scratch_model(
    config: Mapping[str, Any], *, vocab_size: int, tokenizer: Any, seed: int, attn: str | None
) -> Any:
    """Draw a model's initial weights from a configuration (fp32, CPU).

    See `make_scratch_config` for configuration, tokenizer and errors.
    """
    resolved = make_scratch_config(config, vocab_size=vocab_size, tokenizer=tokenizer)
    with explained(_NO_SCRATCH), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            resolved, attn_implementation=attn, dtype=torch.float32
        )
    return model.eval()


def make_scratch_config(config: Mapping[str, Any], *, vocab_size: int, tokenizer: Any) -> Any:
    """Return the transformers configuration of a model with random weights.

    ``config`` has Hugging Face's fields with ``model_type``, the embedding ``vocab_size`` rows. The
    tokenizer provides the ids of BOS, EOS and padding; None if only sizes are needed.

    Raises:
        ModelError: the ``model_type`` is unknown, a field is misspelt or a value is invalid.
    """
    check_fields(config, place="'model.scratch.config'")
    names = () if tokenizer is None else _SPECIAL_TOKENS
    ids = {name: getattr(tokenizer, name) for name in names}
    with explained(_NO_SCRATCH):
        resolved = transformers.AutoConfig.for_model(**{**ids, **config, "vocab_size": vocab_size})
        _refuse_misspelt(config, resolved)
    return resolved


def _refuse_misspelt(config: Mapping[str, Any], resolved: Any) -> None:
    """Raise ValueError for an unknown field whose name is close to a known one.

    Other unknown fields are accepted: published configurations contain unused fields, and some
    families read fields that their configuration class does not list.
    """
    default = type(resolved)()
    known = [*default.to_dict(), *type(default).attribute_map]
    for name in config:
        if hasattr(resolved, name) and not hasattr(default, name):
            near = difflib.get_close_matches(name, known, 1, cutoff=0.85)
            if near:
                raise ValueError(f"'{name}' is not a field of it; did you mean '{near[0]}'?")
