"""A model without storage has the buffers of one that was built with storage."""

from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from tiny_families import build
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from memguard.errors import ModelError
from memguard.hf.from_config import build_on_meta, describe_model

_LENGTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_SMALL = {
    **dict.fromkeys((*_LENGTHS, "encoder_layers"), 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 131),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("encoder_hash_byte_group_vocab", "moe_num_experts"), 4),
}


def shrink(config: Any) -> Any:
    """Reduce the sizes of a configuration, and of those in it."""
    for name, size in _SMALL.items():
        if type(value := getattr(config, name, None)) is int and value > size:
            setattr(config, name, size)
    num_layers = getattr(config, "num_hidden_layers", None)
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            shrink(value)
        elif "types" in name and isinstance(value, list) and type(num_layers) is int:
            setattr(config, name, value[:num_layers])
    return config


def compare(config: Any, built: Any) -> list[str]:
    """What differs between the buffers of a model without and one with storage."""
    model = build_on_meta(config)
    wanted = dict(built.named_buffers())
    buffers = dict(model.named_buffers())
    differing = sorted(wanted.keys() ^ buffers.keys())
    persistent = model.state_dict().keys()
    for name in wanted.keys() & buffers.keys() - persistent:
        buffer = buffers[name]
        if buffer.dtype != wanted[name].dtype or not torch.equal(buffer, wanted[name]):
            differing.append(name)
    differing += [f"{name} has storage" for name, p in model.named_parameters() if not p.is_meta]
    differing += [f"{name} has none" for name, buffer in buffers.items() if buffer.is_meta]
    for name, module in model.named_modules():
        # Tensors that are no buffers would stay without values.
        kept = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        differing += [f"{name} has a tensor that is no buffer" for value in kept if value.is_meta]
    return differing


# Rotary frequencies for several kinds of layers, a scaled embedding, a vector that the family
# changes in place, decays, and parameters that it always creates with storage.
@pytest.mark.parametrize("family", ["gemma3_text", "falcon_h1", "minimax", "xlnet"])
def test_buffers_have_the_values_of_a_model_with_storage(family: str) -> None:
    config = shrink(transformers.AutoConfig.for_model(family))
    assert compare(config, transformers.AutoModelForCausalLM.from_config(config)) == []


@pytest.mark.long
def test_buffers_of_all_causal_types() -> None:
    differing, compared, not_built = {}, [], []
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        for change in (shrink, lambda config: config):
            # Some families check sizes against each other: those keep their own.
            try:
                config = change(transformers.AutoConfig.for_model(family))
                with init_empty_weights(include_buffers=False):
                    built = transformers.AutoModelForCausalLM.from_config(config)
                break
            except Exception:
                continue
        else:
            # transformers has no default of it that can be built.
            not_built.append(family)
            continue
        compared.append(family)
        if found := compare(config, built):
            differing[family] = found
    assert differing == {}
    # Of 195 types in transformers 5.23.
    assert len(compared) > 170, not_built


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor with storage."""

    num_elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self.num_elements = max(self.num_elements, leaf.numel())
        return result


def test_no_parameter_is_ever_allocated() -> None:
    config = build("mixtral").config
    config.intermediate_size = 1 << 12
    with Largest() as largest:
        model = build_on_meta(config)
    assert model.model.layers[0].mlp.experts.down_proj.numel() == 4 * 32 << 12
    assert largest.num_elements < 1000


def test_tied_weights_stay_one_parameter() -> None:
    for is_tied in (False, True):
        model = build_on_meta(build("llama", tie_word_embeddings=is_tied).config)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied


def test_an_outline_leaves_its_configuration_alone() -> None:
    config = build("llama").config
    config.dtype = torch.float16
    assert isinstance(describe_model(config, name="m"), nn.Module)
    assert config.dtype == torch.float16


def test_a_model_of_another_kind_is_refused_in_one_line() -> None:
    with pytest.raises(
        ModelError, match=r"^model 'm' cannot be loaded as a causal language model: "
    ) as caught:
        describe_model(transformers.AutoConfig.for_model("clip"), name="model 'm'")
    assert "\n" not in str(caught.value)
