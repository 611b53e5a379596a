"""Properties of a model that are known from its configuration, without its weights.

Parameters are counted on the meta device, which stores nothing. Whether attention separates the
documents of one row depends on the family's code, not on its weights, so it is tested on a small
model of the same family with random weights.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.distributed.tensor.placement_types import Shard

from memguard.config.optimizers import is_quantised
from memguard.errors import ModelError
from memguard.hf import from_config
from memguard.hf.assembly import choose_trained
from memguard.hf.from_config import RUNNABLE, reduce_config
from memguard.hf.load import count_parameters
from memguard.model.checks import build_causal_lm, keeps_documents_apart
from memguard.parallel.hf_plan import plan_sharding, plan_storage
from memguard.parallel.lora import LoraSpec
from memguard.parallel.model_sizes import ModelSizes, Sizes, StorageOnly
from memguard.planner.plan import ModelStorage

_SMALL_ENOUGH = 20_000_000
"""Parameters of a model that may be built with storage (80 MB)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """Sizes of a model, from its configuration only."""

    num_parameters: int
    """Tied parameters are counted once."""
    num_trained: int
    """Those of adapters if there are any, of the chosen modules, or else all of them."""
    num_quantised: int
    """Those of them whose moments `adamw_8bit` keeps in 8 bits."""
    vocab_size: int
    """Rows of the output embedding."""


def describe_model(
    config: Any,
    *,
    name: str,
    adapter: LoraSpec | None = None,
    trainable_modules: Sequence[str] | None = None,
) -> Outline:
    """Count the parameters of a configuration's model, and those that would be trained.

    Raises:
        ConfigError: the adapters or the modules name what the model does not have.
        ModelError: it is not a causal language model of a family known to transformers.
    """
    model = from_config.describe_model(config, name=f"model '{name}'")
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"model '{name}' must have an output embedding; it has none")
    num_parameters = count_parameters(model)
    choose_trained(model, adapter, trainable_modules)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    table = model.get_input_embeddings().weight
    quantised = [each for each in trained if is_quantised(each.shape, is_embedding=each is table)]
    return Outline(
        num_parameters=num_parameters,
        num_trained=sum(each.numel() for each in trained),
        num_quantised=sum(each.numel() for each in quantised),
        vocab_size=head.weight.shape[0],
    )


def measure_storage(config: Any, *, name: str, unknown: str) -> ModelStorage:
    """Count the parameters of a configuration's model, by the axes that split them.

    ``unknown`` says why its memory and time cannot be estimated.

    Raises:
        ModelError: it is not a causal language model of a family known to transformers.
    """
    family = config.get_text_config().model_type
    model = from_config.describe_model(config, name=f"model '{name}'")
    sizes: Sizes
    try:
        plan = plan_sharding(model)
        sizes = ModelSizes.from_config(config)
    except ModelError:
        plan, sizes = plan_storage(model), StorageOnly(family=family)
    elements: Counter[tuple[bool, bool]] = Counter()
    for key, parameter in model.named_parameters():
        over_y, over_x = (isinstance(each, Shard) for each in plan.placements(key))
        elements[over_y, over_x] += parameter.numel()
    return ModelStorage(
        family=family,
        sizes=sizes,
        num_parameters=count_parameters(model),
        elements=tuple((*axes, count) for axes, count in sorted(elements.items())),
        unknown=unknown,
    )


def may_share_rows(config: Any, attn: str | None) -> bool | None:
    """Return whether attention in this model family separates two documents of one row.

    None if no small model of the family can be built, or its attention needs a GPU. ``attn`` None
    takes the default attention of transformers.

    Raises:
        ModelError: it is not a causal language model.
    """
    for is_shrunk in (False, True):
        try:
            small = reduce_config(config, RUNNABLE[0]) if is_shrunk else copy.deepcopy(config)
            if count_parameters(from_config.build_on_meta(small)) > _SMALL_ENOUGH:
                continue
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                # Training will repeat the warnings for the real model.
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                model = transformers.AutoModelForCausalLM.from_config(
                    small, attn_implementation=attn, dtype=torch.float32
                )
                return keeps_documents_apart(build_causal_lm(model.eval()))
        except ModelError:
            raise
        except Exception:  # Some families have other constraints between sizes.
            continue
    return None
