"""The role of each module of a Hugging Face model on the mesh.

Roles are derived from Hugging Face's own plan for tensor parallelism. Its styles change with every
release, so only those in `_ROLE_OF_STYLE` are accepted. `family_styles` has the roles of families
whose plan is missing or has other styles. Modules that neither names (embedding, norms of the
residual stream) get their roles here.

    role         weight [out, in]        placements over (y, x)   gradient of the weight
    plain        q k v gate up lm_head   Shard(1), Shard(0)       whole
      its bias                           Replicate, Shard(0)      whole
    transposed   o down                  Shard(0), Shard(1)       whole
      its bias                           Shard(0), Replicate      whole
    embedding    [vocabulary, features]  Shard(1), Shard(0)       whole
    positions    [positions, features]   Shard(1), Replicate      whole
    norm         features                Shard(0), Replicate      whole
    head_norm    one head's features     Replicate, Replicate     summed over x
    heads_norm   features of all heads   Replicate, Shard(0)      whole
    sinks        one number a head       Replicate, Shard(0)      whole
    unsplit      any                     Replicate, Replicate     whole

    in blocks of experts (`experts`); d is the dimension of intermediate features
    experts      gate and up are halves  Shard(d), Shard(d)       whole
    alternating_experts                  Shard(d), Shard(d)       whole
    expert_plain shared gate up          Shard(0), Shard(0)       whole
    expert_transposed  shared down       Shard(1), Shard(1)       whole
    router       [experts, features]     Replicate, Replicate     summed over y and x

"Whole" means that every rank that holds a copy computes the same gradient. The output of a plain
layer or of experts may be several projections (`fused`). The weights of GPT-2's Conv1D are
[in, out], and their two placements are exchanged. The parent of experts has the role experts_block.

A family without such a plan can use the axes data and z: all its modules are `unsplit`, stay as
they are, and only their storage is sharded (`plan_storage`).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from transformers.pytorch_utils import Conv1D

from memguard.errors import ModelError, list_first
from memguard.parallel.embedding import is_scaled_lookup
from memguard.parallel.experts import alternates, has_halves
from memguard.parallel.family_styles import PARTS_OF_FAMILY, ROLES_OF_FAMILY, Role
from memguard.parallel.fused import Parts
from memguard.parallel.linear import is_linear

_ROLE_OF_STYLE: dict[str, Role] = {
    "colwise": "plain",
    "rowwise": "transposed",
    "replicated_with_grad_allreduce": "head_norm",
}

# What the sharded layers reproduce. A module that computes something else gives another result.
_REPRODUCED: dict[str, Callable[[nn.Module], bool]] = {
    "plain": is_linear,
    "transposed": is_linear,
    "expert_plain": is_linear,
    "expert_transposed": is_linear,
    "embedding": is_scaled_lookup,
}

_LAYOUT_OF_ROLE = {"experts": has_halves, "alternating_experts": alternates}

PLACEMENTS: dict[tuple[Role, str], tuple[Placement, Placement]] = {
    ("plain", "weight"): (Shard(1), Shard(0)),
    ("plain", "bias"): (Replicate(), Shard(0)),
    ("transposed", "weight"): (Shard(0), Shard(1)),
    ("transposed", "bias"): (Shard(0), Replicate()),
    ("embedding", "weight"): (Shard(1), Shard(0)),
    ("positions", "weight"): (Shard(1), Replicate()),
    ("norm", "weight"): (Shard(0), Replicate()),
    ("norm", "bias"): (Shard(0), Replicate()),
    ("head_norm", "weight"): (Replicate(), Replicate()),
    ("head_norm", "bias"): (Replicate(), Replicate()),
    ("heads_norm", "weight"): (Replicate(), Shard(0)),
    ("heads_norm", "bias"): (Replicate(), Shard(0)),
    ("sinks", "sinks"): (Replicate(), Shard(0)),
    # Of [E, 2 I, H] and [E, H, I].
    ("experts", "gate_up_proj"): (Shard(1), Shard(1)),
    ("experts", "down_proj"): (Shard(2), Shard(2)),
    # Of [E, H, 2 I], [E, 2 I], [E, I, H] and [E, H].
    ("alternating_experts", "gate_up_proj"): (Shard(2), Shard(2)),
    ("alternating_experts", "gate_up_proj_bias"): (Shard(1), Shard(1)),
    ("alternating_experts", "down_proj"): (Shard(1), Shard(1)),
    ("alternating_experts", "down_proj_bias"): (Shard(1), Shard(1)),
    ("expert_plain", "weight"): (Shard(0), Shard(0)),
    ("expert_transposed", "weight"): (Shard(1), Shard(1)),
    ("router", "weight"): (Replicate(), Replicate()),
    ("router", "bias"): (Replicate(), Replicate()),
    ("router", "e_score_correction_bias"): (Replicate(), Replicate()),
}

# Layers of one parent that read the same input.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_KEY_VALUE = ("k_proj", "v_proj")
# Attributes of attention modules: numbers of query heads, of key/value heads, their ratio.
QUERY_COUNTS = ("num_heads", "num_attention_heads")
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
RATIO = "num_key_value_groups"
HEAD_COUNTS = (*QUERY_COUNTS, *KEY_VALUE_COUNTS, RATIO)
# Features of all query heads, and of all key heads.
QUERY_FEATURES = ("split_size", "embed_dim")
KEY_VALUE_FEATURES = "kv_dim"

_NUM_LISTED = 6
_WAY_OUT = "It can use the axes data and z."
_NO_PLAN = "has no plan for tensor parallelism in this version of transformers"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingPlan:
    """The role of each module by name, and the groups of modules."""

    roles: dict[str, Role]
    groups: tuple[tuple[str, ...], ...]
    """Linear layers that read the same input."""
    key_value: frozenset[str]
    """Modules whose outputs are key or value heads, as attention reads them."""
    attentions: tuple[str, ...]
    """Modules that store numbers of heads."""
    blocks: tuple[str, ...]
    """Decoder blocks, in order."""
    is_tied: bool
    """Whether head and embedding are one parameter."""
    parts: Mapping[str, Parts] = field(default_factory=dict)
    """Of layers and experts whose output is several projections, by name."""
    in_out: frozenset[str] = frozenset()
    """Layers whose weights are [in, out]."""

    @property
    def is_split(self) -> bool:
        """Whether layers are split over y and x; if not, only storage is sharded."""
        return "unsplit" not in self.roles.values()

    def placements(self, parameter: str) -> tuple[Placement, Placement]:
        """Return the placements over (y, x) of a parameter, by its name in the model."""
        module, _, leaf = parameter.rpartition(".")
        role = self.roles[module]
        if role == "unsplit":
            return Replicate(), Replicate()
        y, x = PLACEMENTS[role, leaf]
        return (x, y) if module in self.in_out and leaf == "weight" else (y, x)


def plan_sharding(model: Any) -> ShardingPlan:
    """Assign a role to every module with parameters of an unsharded model, also on the meta device.

    Raises:
        ModelError: the family has no plan, its plan has unsupported styles, a module's forward
            differs from that of its sharded layer, or parameters have no role; each is listed.
    """
    embedding, head = _find_ends(model)
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
        elif isinstance(style, _UnknownStyle):
            unknown[name] = style.name
        elif style is not None:
            roles[name] = style
        elif _is_residual_norm(module, hidden_size):
            roles[name] = "norm"
    roles |= {
        name.rpartition(".")[0]: "experts_block"
        for name, role in roles.items()
        if role in _LAYOUT_OF_ROLE
    }
    names = dict(model.named_modules())
    obstacle = _find_obstacle(model, names, roles, unknown) if styles else _NO_PLAN
    if obstacle:
        raise ModelError(f"{type(model).__name__} {obstacle}. {_WAY_OUT}")
    config = model.config.get_text_config()
    return ShardingPlan(
        roles=roles,
        groups=tuple(_find_groups(names)),
        key_value=frozenset(_find_key_value(roles)),
        attentions=tuple(
            name
            for name, module in names.items()
            if any(hasattr(module, field) for field in HEAD_COUNTS)
        ),
        blocks=find_blocks(model),
        is_tied=head.weight is embedding.weight,
        parts=dict(_find_parts(names, roles, config)),
        in_out=frozenset(name for name in roles if isinstance(names[name], Conv1D)),
    )


def plan_storage(model: Any) -> ShardingPlan:
    """Return the plan of an unsharded model of any family, for data and z: layers are not split.

    Raises:
        ModelError: the model has no LM head, or a parameter without dimensions.
    """
    embedding, head = _find_ends(model)
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise ModelError(
            f"{type(model).__name__} has parameters without dimensions, whose storage cannot be "
            f"shared: {list_first(scalars, _NUM_LISTED)}. It can run on one process."
        )
    blocks = find_blocks(model)
    owners = [{id(p) for p in model.get_submodule(name).parameters()} for name in blocks]
    # A parameter cannot be in two units of storage: blocks that share one are all in the root's.
    is_shared = sum(map(len, owners)) > len(set().union(*owners))
    return ShardingPlan(
        roles={
            name: "unsplit"
            for name, module in model.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        },
        groups=(),
        key_value=frozenset(),
        attentions=(),
        blocks=() if is_shared else blocks,
        is_tied=getattr(head, "weight", None) is embedding.weight,
    )


def _find_ends(model: Any) -> tuple[Any, Any]:
    """Return the embedding and the head."""
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(
            f"{type(model).__name__} has no LM head: it is not a causal language model"
        )
    return model.get_input_embeddings(), head


@dataclass(frozen=True, slots=True)
class _UnknownStyle:
    """A style of Hugging Face's plan that has no role."""

    name: str


def _read_styles(model: Any) -> dict[str, Role | _UnknownStyle]:
    """Return the roles of modules by pattern, with names from the root; empty without a plan."""
    config = model.config.get_text_config()
    prefix = f"{model.base_model_prefix}."
    own = ROLES_OF_FAMILY.get(config.model_type)
    if own is not None:
        return {prefix + name: role for name, role in own.items()}
    base = config.base_model_tp_plan
    if not base:
        return {}
    styles = {**{prefix + name: style for name, style in base.items()}, **(model._tp_plan or {})}
    return {name: _ROLE_OF_STYLE.get(style, _UnknownStyle(style)) for name, style in styles.items()}


def _match(styles: dict[str, Role | _UnknownStyle], name: str) -> Role | _UnknownStyle | None:
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


def _find_obstacle(
    model: Any, names: dict[str, nn.Module], roles: dict[str, Role], unknown: dict[str, str]
) -> str:
    """Return why layers cannot be split, the predicate of a sentence; empty if they can.

    Modules are refused too whose sharded form would silently compute slightly different results.
    """
    cannot = "cannot be split over x and y:"
    if unknown:
        listed = list_first([f"{name} ({style})" for name, style in unknown.items()], _NUM_LISTED)
        plan = "its plan for tensor parallelism has styles that memguard does not support"
        return f"{cannot} {plan}: {listed}"
    leaves = [(name, *name.rpartition(".")[::2]) for name, _ in model.named_parameters()]
    uncovered = [
        name
        for name, module, leaf in leaves
        if module not in roles or (roles[module], leaf) not in PLACEMENTS
    ]
    if uncovered:
        return f"{cannot} no role is defined for {list_first(uncovered, _NUM_LISTED)}"
    unsupported = [
        f"{name} ({type(module).__name__})"
        for name, module in names.items()
        if not _is_reproduced(roles.get(name), module)
    ]
    if unsupported:
        return f"{cannot} memguard has no sharded form of {list_first(unsupported, _NUM_LISTED)}"
    if getattr(model.config.get_text_config(), "alibi", False):
        return f"{cannot} its biases of attention (ALiBi) are those of all heads"
    return ""


def _is_reproduced(role: Role | None, module: nn.Module) -> bool:
    if role is None:
        # A norm without weights needs no role, but would compute statistics of its shard only.
        return "Norm" not in type(module).__name__
    checks = (_REPRODUCED.get(role), _LAYOUT_OF_ROLE.get(role))
    return all(check is None or check(module) for check in checks)


def _find_key_value(roles: dict[str, Role]) -> Iterator[str]:
    """Return the last modules before attention that have key or value heads as output."""
    for name, role in roles.items():
        parent, _, leaf = name.rpartition(".")
        # Statistics of a norm over all heads are those of heads that are not copied yet.
        is_normed = leaf == "k_proj" and roles.get(f"{parent}.k_norm") == "heads_norm"
        is_norm = leaf == "k_norm" and role == "heads_norm"
        if is_norm or (leaf in _KEY_VALUE and not is_normed):
            yield name


def _find_parts(
    names: dict[str, nn.Module], roles: dict[str, Role], config: Any
) -> Iterator[tuple[str, Parts]]:
    splits = PARTS_OF_FAMILY.get(config.model_type, {})
    for name, module in names.items():
        if roles.get(name) == "experts":
            _, num_features, _ = module.get_parameter("gate_up_proj").shape
            yield name, Parts(sizes=(num_features // 2,) * 2)
            continue
        split = splits.get(name.rpartition(".")[2])
        if split is None:
            continue
        num_features = module.get_parameter("weight").shape[1 if isinstance(module, Conv1D) else 0]
        parts = split(config, num_features)
        if parts is not None:
            assert parts.num_groups * sum(parts.sizes) == num_features, f"{name} has these parts"
            yield name, parts


def _find_groups(names: dict[str, nn.Module]) -> Iterator[tuple[str, ...]]:
    for name in names:
        for group in _GROUPS:
            members = tuple(f"{name}.{layer}" for layer in group)
            if all(member in names for member in members):
                yield members


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the decoder blocks: the list of modules with the most parameters.

    Of lists with as many, it is the outer one: a block may be all experts, also a list.
    """

    def rank(name: str, modules: nn.ModuleList) -> tuple[int, int, int]:
        num_parameters = sum(parameter.numel() for parameter in modules.parameters())
        return num_parameters, -name.count("."), len(modules)

    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    if not lists:
        return ()
    name = max(lists, key=lambda name: rank(name, lists[name]))
    return tuple(f"{name}.{number}" for number in range(len(lists[name])))
