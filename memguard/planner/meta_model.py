"""What a model's configuration says of it without its weights.

Parameters are counted on the meta device, which stores nothing. Whether documents of one row are
kept apart is a matter of the family's code, not of its weights: it is asked of a small model of
the same family, with random weights.
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
from memguard.model.checks import build_vocab_layer, keeps_documents_apart

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
    """A model known by its configuration only."""

    num_parameters: int
    """Tied ones once."""
    num_tensors: int
    vocab_size: int
    """Rows of the output embedding."""


def outline_model(config: Any, *, name: str) -> Outline:
    """Count the parameters of a configuration's model.

    Args:
        config: a transformers configuration.
        name: of the model, for messages.

    Raises:
        ModelError: it is no causal language model of a family transformers knows.
    """
    try:
        model = _build(config, "meta")
        head = model.get_output_embeddings().weight
    except Exception as error:  # Each family checks its fields in its own way.
        raise ModelError(
            f"model '{name}' cannot be loaded as a causal language model: {say_in_one_line(error)}"
        ) from error
    return Outline(
        num_parameters=count_parameters(model),
        num_tensors=len(list(model.parameters())),
        vocab_size=head.shape[0],
    )


def may_share_rows(config: Any, attn: str | None) -> bool | None:
    """Tell whether a model of this family keeps two documents of one row apart.

    Args:
        config: a transformers configuration.
        attn: attention implementation; None takes what transformers chooses.

    Returns:
        None where no small model of the family can be built, or its attention needs a GPU.

    Raises:
        ModelError: it is no causal language model.
    """
    for is_shrunk in (False, True):
        try:
            small = _shrink(config) if is_shrunk else config
            if count_parameters(_build(small, "meta")) > _SMALL_ENOUGH:
                continue
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                # What it has to say, training will say of the real one.
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                layer = build_vocab_layer(_build(small, "cpu", attn).eval())
                return keeps_documents_apart(layer)
        except ModelError:
            raise
        except Exception:  # Some families have sizes that hang together in other ways.
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
        for each in (small, text):
            if hasattr(each, name):
                setattr(each, name, None)
    return small
