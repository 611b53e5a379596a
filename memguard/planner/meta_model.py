"""Properties of a model that are known from its configuration, without its weights.

Parameters are counted on the meta device, which stores nothing. Whether attention separates the
documents of one row depends on the family's code, not on its weights, so it is tested on a small
model of the same family with random weights.
"""

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from memguard.errors import ModelError
from memguard.hf.checkpoint import say_in_one_line
from memguard.hf.load import count_parameters
from memguard.model.checks import build_causal_lm, keeps_documents_apart
from memguard.parallel.lora import LoraSpec, attach_lora

_SMALL: dict[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
_SMALL_ENOUGH = 20_000_000
"""Parameters of a model that may be built with storage (80 MB)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """Sizes of a model, from its configuration only."""

    num_parameters: int
    """Tied parameters are counted once."""
    num_trained: int
    """Those of adapters if there are any, else all of them."""
    num_tensors: int
    """Trained parameters that are separate tensors."""
    vocab_size: int
    """Rows of the output embedding."""


def outline_model(config: Any, *, name: str, adapter: LoraSpec | None = None) -> Outline:
    """Count the parameters of a configuration's model.

    Args:
        config: a transformers configuration.
        name: name of the model, for messages.
        adapter: adapters to train instead of the weights; None trains the weights.

    Raises:
        ConfigError: the adapters name a layer that the model does not have.
        ModelError: it is not a causal language model of a family known to transformers.
    """
    try:
        model = _build(config, "meta")
        head = model.get_output_embeddings().weight
    except Exception as error:  # Each family checks its fields in its own way.
        raise ModelError(
            f"model '{name}' cannot be loaded as a causal language model: {say_in_one_line(error)}"
        ) from error
    num_parameters = count_parameters(model)
    if adapter is not None:
        attach_lora(model, adapter)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Outline(
        num_parameters=num_parameters,
        num_trained=sum(parameter.numel() for parameter in trained),
        num_tensors=len(trained),
        vocab_size=head.shape[0],
    )


def may_share_rows(config: Any, attn: str | None) -> bool | None:
    """Return whether attention in this model family separates two documents of one row.

    Args:
        config: a transformers configuration.
        attn: attention implementation; None takes the default of transformers.

    Returns:
        None if no small model of the family can be built, or its attention needs a GPU.

    Raises:
        ModelError: it is not a causal language model.
    """
    for is_shrunk in (False, True):
        try:
            small = _shrink(config) if is_shrunk else config
            if count_parameters(_build(small, "meta")) > _SMALL_ENOUGH:
                continue
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                # Training will repeat the warnings for the real model.
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                layer = build_causal_lm(_build(small, "cpu", attn).eval())
                return keeps_documents_apart(layer)
        except ModelError:
            raise
        except Exception:  # Some families have other constraints between sizes.
            continue
    return None


def _build(config: Any, device: str, attn: str | None = None) -> Any:
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attn, dtype=torch.float32
        )


def _shrink(config: Any) -> Any:
    """Return a copy with few and narrow layers and without special tokens."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    for name, value in _SMALL.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(value, getattr(text, name)))
    if isinstance(getattr(text, "layer_types", None), list):
        text.layer_types = text.layer_types[: _SMALL["num_hidden_layers"]]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for part in (small, text):
            if hasattr(part, name):
                setattr(part, name, None)
    return small
