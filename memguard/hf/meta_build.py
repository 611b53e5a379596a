"""Builds a model on the meta device: parameters without storage, buffers with their values.

    parameters              meta; no tensor of them is ever allocated, not even one at a time
    non-persistent buffers  on the CPU, computed from the configuration; no file has them
    persistent buffers      on the CPU, with initial values; files have those of the checkpoint

The values of buffers are those that the family's `_init_weights` sets, as when transformers loads a
checkpoint. A buffer that it leaves as it is, or changes in place, is computed by a second build
whose buffers have storage.
"""

import copy
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers.quantizers.auto import AutoHfQuantizer

from memguard.hf.checkpoint import explained


def build_on_meta(config: Any, *, attn: str | None = None, dtype: torch.dtype | None = None) -> Any:
    """Return a causal LM whose parameters are on the meta device.

    Args:
        config: a transformers configuration.
        attn: attention implementation; None uses transformers' default.
        dtype: of the parameters; None uses that of the configuration.
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


def outline_model(config: Any, *, name: str) -> Any:
    """Return a model without storage.

    Args:
        config: a transformers configuration.
        name: of the model, for messages; starts a sentence.

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

    Returns:
        Names of the non-persistent buffers whose value depends on what was there before.
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
