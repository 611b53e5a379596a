"""The role of each module of a Hugging Face model on the mesh.

Roles are derived from Hugging Face's own plan for tensor parallelism. Its styles change with every
release, so only those in `_ROLE_OF_STYLE` are accepted. Modules that the plan omits (embedding,
norms of the residual stream) get their roles here.

    role         weight [out, in]        placements over (y, x)   gradient of the weight
    plain        q k v gate up lm_head   Shard(1), Shard(0)       whole
      its bias                           Replicate, Shard(0)      whole
    transposed   o down                  Shard(0), Shard(1)       whole
      its bias                           Shard(0), Replicate      whole
    embedding    [vocabulary, features]  Shard(1), Shard(0)       whole
    norm         features                Shard(0), Replicate      whole
    head_norm    one head's features     Replicate, Replicate     summed over x

"Whole" means that every rank that holds a copy computes the same gradient.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from memguard.errors import ModelError

Role = Literal["plain", "transposed", "embedding", "norm", "head_norm"]

_ROLE_OF_STYLE: dict[str, Role] = {
    "colwise": "plain",
    "rowwise": "transposed",
    "replicated_with_grad_allreduce": "head_norm",
}

# Forwards that the sharded layers reproduce. A class with another forward computes another result.
_FORWARD_OF_ROLE = {
    "plain": nn.Linear.forward,
    "transposed": nn.Linear.forward,
    "embedding": nn.Embedding.forward,
}

PLACEMENTS: dict[tuple[Role, str], tuple[Placement, Placement]] = {
    ("plain", "weight"): (Shard(1), Shard(0)),
    ("plain", "bias"): (Replicate(), Shard(0)),
    ("transposed", "weight"): (Shard(0), Shard(1)),
    ("transposed", "bias"): (Shard(0), Replicate()),
    ("embedding", "weight"): (Shard(1), Shard(0)),
    ("norm", "weight"): (Shard(0), Replicate()),
    ("norm", "bias"): (Shard(0), Replicate()),
    ("head_norm", "weight"): (Replicate(), Replicate()),
    ("head_norm", "bias"): (Replicate(), Replicate()),
}

# Layers of one parent that read the same input.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_KEY_VALUE = ("k_proj", "v_proj")

_NUM_LISTED = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingPlan:
    """The role of each module by name, and the groups of modules."""

    roles: dict[str, Role]
    groups: tuple[tuple[str, ...], ...]
    """Linear layers that read the same input."""
    key_value: frozenset[str]
    """Linear layers whose outputs are key or value heads."""
    attentions: tuple[str, ...]
    """Modules that store their number of heads."""
    blocks: tuple[str, ...]
    """Decoder blocks, in order."""
    is_tied: bool
    """Whether head and embedding are one parameter."""


def plan_sharding(model: Any) -> ShardingPlan:
    """Assign a role to every module that has parameters.

    Args:
        model: an unsharded Hugging Face causal LM; may be on the meta device.

    Raises:
        ModelError: the family has no plan, its plan has unsupported styles, a module's forward
            differs from that of its sharded layer, or parameters have no role; each is listed.
    """
    family = type(model).__name__
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{family} has no LM head: it is not a causal language model")
    styles = _read_styles(model)
    roles: dict[str, Role] = {}
    unknown: dict[str, str] = {}
    hidden_size = model.config.get_text_config().hidden_size
    for name, module in model.named_modules():
        style = _match(styles, name)
        if module is embedding:
            roles[name] = "embedding"
        elif module is head:
            roles[name] = "plain"
        elif style is not None and style not in _ROLE_OF_STYLE:
            unknown[name] = style
        elif style is not None:
            roles[name] = _ROLE_OF_STYLE[style]
        elif _is_residual_norm(module, hidden_size):
            roles[name] = "norm"
    if unknown:
        listed = _join([f"{name} ({style})" for name, style in unknown.items()])
        raise ModelError(
            f"{family} cannot be sharded: its plan for tensor parallelism has styles that memguard "
            f"does not support: {listed}. It can run on one process."
        )
    _check_covered(model, roles, family)
    names = dict(model.named_modules())
    _check_computed(names, roles, family)
    return ShardingPlan(
        roles=roles,
        groups=tuple(_find_groups(names)),
        key_value=frozenset(name for name in roles if name.rpartition(".")[2] in _KEY_VALUE),
        attentions=tuple(
            name for name, module in names.items() if hasattr(module, "num_key_value_groups")
        ),
        blocks=find_blocks(model),
        is_tied=head.weight is embedding.weight,
    )


def _read_styles(model: Any) -> dict[str, str]:
    """Return Hugging Face's plan with names that start at the root of the model."""
    base = model.config.get_text_config().base_model_tp_plan or {}
    prefix = f"{model.base_model_prefix}."
    if not base:
        raise ModelError(
            f"{type(model).__name__} has no plan for tensor parallelism in this version of "
            "transformers: it can run on one process only"
        )
    return {**{prefix + name: style for name, style in base.items()}, **(model._tp_plan or {})}


def _match(styles: dict[str, str], name: str) -> str | None:
    for pattern, style in styles.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            return style
    return None


def _is_residual_norm(module: nn.Module, hidden_size: int) -> bool:
    """Whether this is a norm over all features; `measure_norm` later finds its formula."""
    own = dict(module.named_parameters(recurse=False))
    return (
        "Norm" in type(module).__name__
        and "weight" in own
        and all(parameter.shape == (hidden_size,) for parameter in own.values())
    )


def _check_covered(model: nn.Module, roles: dict[str, Role], family: str) -> None:
    uncovered = []
    for name, _ in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        if module not in roles or (roles[module], leaf) not in PLACEMENTS:
            uncovered.append(name)
    if uncovered:
        raise ModelError(
            f"{family} cannot be sharded: no role is defined for {_join(uncovered)}. It can run on "
            "one process."
        )


def _check_computed(names: dict[str, nn.Module], roles: dict[str, Role], family: str) -> None:
    """Reject modules whose sharded form would silently compute slightly different results."""
    unsupported = []
    for name, module in names.items():
        role = roles.get(name)
        forward = type(module).forward
        if role in _FORWARD_OF_ROLE and forward is not _FORWARD_OF_ROLE[role]:
            unsupported.append(f"{name} ({type(module).__name__})")
        if role is None and "Norm" in type(module).__name__:
            # A norm without weights needs no role, but would compute statistics of its shard only.
            unsupported.append(f"{name} ({type(module).__name__})")
    if unsupported:
        raise ModelError(
            f"{family} cannot be sharded: memguard has no sharded form of {_join(unsupported)}. It "
            "can run on one process."
        )


def _join(items: list[str]) -> str:
    more = len(items) - _NUM_LISTED
    return ", ".join(items[:_NUM_LISTED]) + (f" and {more} more" if more > 0 else "")


def _find_groups(names: dict[str, nn.Module]) -> Iterator[tuple[str, ...]]:
    for name in names:
        for group in _GROUPS:
            members = tuple(f"{name}.{layer}" for layer in group)
            if all(member in names for member in members):
                yield members


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the decoder blocks: the entries of the longest list of modules."""
    lists = [(len(m), name) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    length, name = max(lists, default=(0, ""))
    return tuple(f"{name}.{number}" for number in range(length))
