"""Models that start from nothing: a configuration and a seed instead of a checkpoint."""

import difflib
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from memguard.errors import ModelError
from memguard.parallel.assemble import (
    ShardedLayer,
    Sharding,
    build_meta_layer,
    check_layer,
    fill_layer,
)
from memguard.parallel.checkpoint_folder import say_in_one_line
from memguard.parallel.slices import ModuleWeights


def build_scratch_model(
    config: Mapping[str, Any], *, vocab_size: int, tokenizer: Any, seed: int, attn: str | None
) -> Any:
    """Draw a model's initial weights from a configuration (fp32, CPU).

    Args:
        config: Hugging Face configuration fields with ``model_type``.
        vocab_size: rows of the embedding (tokens).
        tokenizer: gives the ids of BOS, EOS and padding.
        seed: decides the weights.
        attn: attention implementation; None takes what transformers chooses.

    Raises:
        ModelError: an unknown ``model_type``, a misspelt field or values it does not take.
    """
    resolved = make_scratch_config(config, vocab_size=vocab_size, tokenizer=tokenizer)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(
                resolved, attn_implementation=attn, dtype=torch.float32
            )
    except Exception as error:  # Each family checks its fields in its own way.
        raise ModelError(
            f"'model.scratch.config' does not describe a model: {say_in_one_line(error)}"
        ) from error
    return model.eval()


def make_scratch_config(config: Mapping[str, Any], *, vocab_size: int, tokenizer: Any) -> Any:
    """Return the transformers configuration of a model that starts from nothing.

    Args:
        config: Hugging Face configuration fields with ``model_type``.
        vocab_size: rows of the embedding (tokens).
        tokenizer: gives the ids of BOS, EOS and padding; None where only sizes matter.

    Raises:
        ModelError: an unknown ``model_type``, a misspelt field or values it does not take.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {} if tokenizer is None else {name: getattr(tokenizer, name) for name in names}
    try:
        resolved = transformers.AutoConfig.for_model(**{**ids, **config, "vocab_size": vocab_size})
        _refuse_misspelt(config, resolved)
    except Exception as error:  # Each family checks its fields in its own way.
        raise ModelError(
            f"'model.scratch.config' does not describe a model: {say_in_one_line(error)}"
        ) from error
    return resolved


def shard_scratch_model(model: Any, sharding: Sharding, *, attn: str | None = None) -> ShardedLayer:
    """Put a model drawn by `build_scratch_model` onto a mesh; every rank has drawn the same."""
    layer = build_meta_layer(model.config, sharding, attn=attn)
    fill_layer(layer, ModuleWeights(model), name="model.scratch")
    check_layer(layer)
    return layer


def _refuse_misspelt(config: Mapping[str, Any], resolved: Any) -> None:
    """Raise ValueError for a field that transformers keeps, but only another spelling of is read.

    Not for every unknown field: published configurations hold leftovers, and some families read
    fields that their configuration class does not list.
    """
    default = type(resolved)()
    known = [*default.to_dict(), *type(default).attribute_map]
    for name in config:
        if hasattr(resolved, name) and not hasattr(default, name):
            near = difflib.get_close_matches(name, known, 1, cutoff=0.85)
            if near:
                raise ValueError(f"'{name}' is not a field of it; did you mean '{near[0]}'?")
