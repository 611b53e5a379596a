"""Low-rank adapters (LoRA) of linear layers, the same on one process and on every mesh.

A layer with an adapter is a `Linear4D`, also on one process, where its axes have one rank. The base
model is frozen; its equations are in `linear_function`. An adapter has two factors, of rank R:

                plain layer                transposed layer           gradient is partial over
    A [R, K]    Shard(1) over y            Shard(1) over x            the axis that shards N
    B [N, R]    Shard(0) over x            Shard(0) over y            the axis that shards K
    m [N]       Shard(0) over x            Shard(0) over y            none (DoRA's magnitude)

All are DTensors over (y, x), fp32 or wider, and not part of FSDP2's units: z may exceed R. The axis
over which a factor's gradient is partial is the one over which the factor is replicated. Once a
step, after the last micro-batch (`local_parameters.sum_partial_gradients`):

    dA, dB = all-reduce over that axis, then all-reduce over z and data / (z data)

Initial values are drawn whole on the CPU from the seed and the parameter's name, then cut, so that
they are the same on every mesh: A as in `peft`, B zero; m is the norm of each row of the weight.

A dropout mask is drawn on each rank from the seed, the layer's name, the first sample of the
micro-batch and the rank along the axis that shards K. It is therefore the same on all ranks along
the other axis, which share the input, and in a recomputed forward.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from memguard.config.adapters import matches_target, refuse_target
from memguard.errors import ConfigError, ModelError
from memguard.parallel.collectives import all_reduce
from memguard.parallel.experts import ExpertsBlock4D, is_experts
from memguard.parallel.layout import ShardSlice, cut
from memguard.parallel.linear import Linear4D, is_conv1d, is_linear, to_local
from memguard.parallel.mesh import Axis, Mesh4D
from memguard.parallel.nf4 import dequantise_nf4
from memguard.seeds import derive_seed

FACTORS = ("lora_A", "lora_B")
MAGNITUDE = "lora_magnitude_vector"
# Families, and the layer whose adapter would have no effect with their fused kernels; as in peft.
_FUSED_KERNELS = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
_READ_BY_KERNELS = "out_proj"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSpec:
    """Adapters of a model, in `peft`'s terms."""

    r: int
    alpha: float
    target_modules: tuple[str, ...] | None = None
    """Last parts of layer names; None: every linear layer but the head."""
    dropout: float = 0.0
    """Share of the adapters' input features that are dropped in training."""
    use_rslora: bool = False
    use_dora: bool = False
    init: Literal["kaiming", "gaussian"] = "kaiming"
    seed: int = 0

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class LoraPart(nn.Module):
    """A factor or magnitude; a module of its own, so that parameters have `peft`'s names."""

    def __init__(self, weight: Tensor) -> None:
        """Wrap a tensor."""
        super().__init__()
        self.weight = nn.Parameter(weight)


def is_adapter_parameter(name: str) -> bool:
    """Return whether a parameter of this name is part of an adapter."""
    return name.split(".")[-2:-1] in ([part] for part in (*FACTORS, MAGNITUDE))


def is_factor(name: str) -> bool:
    """Return whether a parameter of this name is a factor, whose gradient is partial on a rank."""
    return is_adapter_parameter(name) and not name.endswith(f"{MAGNITUDE}.weight")


class DropoutMasks:
    """The dropout masks of one layer on this rank."""

    def __init__(self, spec: LoraSpec, name: str, rank: int) -> None:
        """Draw masks for a layer; ``rank`` is along the axis that shards its input."""
        self._rate, self._seed = spec.dropout, spec.seed
        self._purpose = f"lora dropout {name} {rank}"
        self.start(0)

    def start(self, first_sample: int) -> None:
        """Draw from now on for the micro-batch of this rank that begins with this row of all."""
        seed = derive_seed(self._seed, self._purpose, first_sample)
        self._drawn_from = torch.tensor(seed, device="cpu")

    def __call__(self, input_MK: Tensor) -> Tensor:
        """Return which features of the input are kept; the same for the same sample."""
        kept_MK: Tensor = _draw_kept(input_MK.detach(), self._drawn_from, self._rate)
        return kept_MK


# One operation for the compiler, of a seed that it does not read: layers and micro-batches with
# other seeds have the same kernels.
@torch.library.custom_op("memguard::draw_kept", mutates_args=())
def _draw_kept(input_MK: Tensor, seed: Tensor, rate: float) -> Tensor:
    generator = torch.Generator(device=input_MK.device)
    generator.manual_seed(int(seed))
    drawn_MK = torch.rand(input_MK.shape, generator=generator, device=input_MK.device)
    return drawn_MK >= rate


@_draw_kept.register_fake
def _(input_MK: Tensor, seed: Tensor, rate: float) -> Tensor:
    return torch.empty(input_MK.shape, dtype=torch.bool, device=input_MK.device)


def list_masks(model: nn.Module) -> list[DropoutMasks]:
    """Return the masks of all layers with dropout in their adapters."""
    drawn = [module.draw_mask for module in model.modules() if isinstance(module, Linear4D)]
    return [masks for masks in drawn if isinstance(masks, DropoutMasks)]


def find_targets(model: Any, target_modules: Sequence[str] | None) -> tuple[str, ...]:
    """Return the full names of the layers that get an adapter, in the model's order.

    The model is plain, sharded or on the meta device; names are matched as in `peft`.

    Raises:
        ConfigError: a name matches no layer.
        ModelError: a matching module is not a plain linear layer, or `peft` reads its name as that
            of experts.
    """
    names = _list_linear(model)
    if target_modules is not None:
        linear = names
        names = [name for name, _ in model.named_modules() if matches_target(name, target_modules)]
        for target in target_modules:
            if not any(matches_target(name, (target,)) for name in names):
                raise refuse_target(target, type(model).__name__, linear)
    head = model.get_output_embeddings()
    heads = [name for name in names if model.get_submodule(name) is head]
    if heads:
        raise ConfigError(
            f"'adapter.target_modules': '{heads[0]}' is the head, whose logits are computed in "
            "pieces without an adapter: leave it out"
        )
    problem = _find_problem(model, names, target_modules)
    if problem is not None:
        raise ModelError(problem)
    return tuple(names)


def _find_problem(
    model: Any, names: Sequence[str], target_modules: Sequence[str] | None
) -> str | None:
    """Return why layers cannot have adapters; None if they can."""
    family = type(model).__name__
    if target_modules is None and any(is_conv1d(module) for module in model.modules()):
        return (
            f"'adapter': {family} computes with Conv1D instead of linear layers, which memguard "
            "has no adapter for"
        )
    if not names:
        return f"'adapter': {family} has no linear layers"
    for name in names:
        module = model.get_submodule(name)
        if not is_linear(module) or is_conv1d(module):
            kind = "Conv1D" if is_conv1d(module) else type(module).__name__
            return (
                f"'adapter': '{name}' of {family} is a {kind}, not a plain linear layer: choose "
                "others in 'adapter.target_modules'"
            )
    is_read = any(matches_target(name, (_READ_BY_KERNELS,)) for name in names)
    problem = _find_name_of_experts(model, target_modules)
    if problem is None and is_read and model.config.model_type in _FUSED_KERNELS:
        others = {name.rpartition(".")[2] for name in _list_linear(model)} - {_READ_BY_KERNELS}
        return (
            f"'adapter.target_modules': kernels of {family} read the weights of "
            f"'{_READ_BY_KERNELS}' without its adapter: name others, {', '.join(sorted(others))}"
        )
    return problem


def _list_linear(model: Any) -> list[str]:
    """Return the names of all linear layers but the head."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


def _find_name_of_experts(model: Any, target_modules: Sequence[str] | None) -> str | None:
    """Return why a name is refused that `peft` reads as that of experts; None without one.

    The experts of some families are linear layers in their checkpoints and one parameter in
    transformers. For `peft` their names, also within all-linear, mean adapters of this parameter,
    even where dense layers have the same names; it would not load adapters of those.
    """
    if not any(is_experts(module) for module in model.modules()):
        return None
    # It takes seconds to import, and other models do not need it.
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def means_experts(target: str | list[str]) -> bool:
        config = LoraConfig(target_modules=target)
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # One name of several that it merges.
            return True
        return bool(config.target_parameters)

    if target_modules is None:
        refused = "all-linear" if means_experts("all-linear") else None
    else:
        refused = next((target for target in target_modules if means_experts([target])), None)
    if refused is None:
        return None
    leaves = {name.rpartition(".")[2] for name in _list_linear(model)}
    others = sorted(leaf for leaf in leaves if not means_experts([leaf]))
    return (
        f"'adapter.target_modules': in peft '{refused}' of {type(model).__name__} means its "
        f"experts too, for which memguard has no adapters: name others, {', '.join(others)}"
    )


def shorten_targets(model: Any, targets: Sequence[str]) -> list[str]:
    """Return `peft`'s ``target_modules`` for these layers: last parts of names if they suffice."""
    leaves = sorted({name.rpartition(".")[2] for name in targets})
    matching = {name for name, _ in model.named_modules() if matches_target(name, leaves)}
    return leaves if matching == set(targets) else list(targets)


def attach_lora(model: Any, spec: LoraSpec, mesh: Mesh4D | None = None) -> tuple[str, ...]:
    """Freeze a model and give layers adapters, which `fill_lora` fills; return their full names.

    The model is on the meta device and sharded by `shard_model`, before FSDP2; or plain, without a
    mesh.

    Raises:
        ConfigError: a target is not a layer of the model.
        ModelError: see `find_targets`; or a layer is in a block of experts that y or x split.
    """
    targets = find_targets(model, spec.target_modules)
    if mesh is not None and mesh.shape.y * mesh.shape.x > 1:
        blocks = [
            name for name, block in model.named_modules() if isinstance(block, ExpertsBlock4D)
        ]
        inside = [
            name for name in targets if name.startswith(tuple(f"{block}." for block in blocks))
        ]
        if inside:
            raise ModelError(
                f"'adapter': '{inside[0]}' of {type(model).__name__} is in a block of experts, "
                "which has no adapters over x and y: name others, or use the axes data and z"
            )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in targets:
        layer = model.get_submodule(name)
        if not isinstance(layer, Linear4D):
            # On one process, or in a family whose layers are not split.
            Linear4D.convert(layer, in_axis=Axis(name="y"), out_axis=Axis(name="x"))
        layer.lora_scale, layer.lora_dropout_rate = spec.scale, spec.dropout
        if spec.dropout:
            layer.draw_mask = DropoutMasks(spec, name, layer.in_axis.rank)
        for part, shape in _shapes(layer, spec).items():
            setattr(layer, part, LoraPart(_make_part(layer, part, shape, mesh)))
    return targets


def _shapes(layer: Linear4D, spec: LoraSpec) -> dict[str, tuple[int, ...]]:
    # The features of the whole layer, also where it is sharded.
    magnitude = {MAGNITUDE: (layer.out_features,)} if spec.use_dora else {}
    factors = {"lora_A": (spec.r, layer.in_features), "lora_B": (layer.out_features, spec.r)}
    return {**factors, **magnitude}


def _find_placements(layer: Linear4D, part: str) -> tuple[Placement, Placement]:
    """Return the placements over (y, x) of a factor or magnitude."""
    axis, dim = (layer.in_axis, 1) if part == "lora_A" else (layer.out_axis, 0)
    y, x = (Shard(dim) if axis.name == name else Replicate() for name in ("y", "x"))
    return y, x


def _make_part(layer: Linear4D, part: str, shape: tuple[int, ...], mesh: Mesh4D | None) -> Tensor:
    dtype = torch.promote_types(layer.weight.dtype, torch.float32)
    if mesh is None:
        return torch.empty(shape, dtype=dtype, device=layer.device)
    placements = _find_placements(layer, part)
    local_shape = mesh.cut_gathered(shape, placements).shape
    return DTensor.from_local(
        torch.empty(local_shape, dtype=dtype, device=layer.device),
        mesh.tensor_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


@torch.no_grad()
def fill_lora(model: nn.Module, spec: LoraSpec, mesh: Mesh4D | None = None) -> None:
    """Set the initial values of all adapters of a model whose storage is allocated."""
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear4D) or layer.lora_scale is None:
            continue
        for factor in FACTORS:
            parameter = layer.get_submodule(factor).weight
            assert isinstance(parameter, Tensor), "a factor has one parameter"
            full = _draw(f"{name}.{factor}.weight", tuple(parameter.shape), spec)
            if mesh is not None:
                here = mesh.cut_gathered(full.shape, _find_placements(layer, factor))
                full = full[here.slices]
            to_local(parameter).copy_(full)
    if spec.use_dora:
        _fill_magnitudes(model, mesh)


def _fill_magnitudes(model: nn.Module, mesh: Mesh4D | None) -> None:
    """Set each magnitude to the norms of the rows of its weight, which is sharded over z too."""
    if mesh is not None:
        # On the CPU, whose groups have a long timeout: ranks may finish reading minutes apart.
        dist.all_reduce(torch.zeros(()))
    for layer in model.modules():
        if not hasattr(layer, MAGNITUDE):
            continue
        assert isinstance(layer, Linear4D), "only linear layers have adapters"
        magnitude_N = to_local(layer.get_submodule(MAGNITUDE).weight)  # type: ignore[arg-type]
        # In float64 sums over ranks are those of one process but for the last bit in fp32.
        weight = _gather_nf4(layer) if layer.is_quantised else layer.stored_weight()
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64) ** 2
        if mesh is not None and not layer.is_quantised:
            z, own = mesh.axis("z"), squares
            rows = cut(ShardSlice.whole(magnitude_N.shape), 0, z.rank, z.degree)
            squares = torch.zeros(magnitude_N.shape, dtype=own.dtype, device=own.device)
            squares[rows.slices] = own
            squares = all_reduce(all_reduce(squares, z), layer.in_axis)
        magnitude_N.copy_(squares.sqrt())


def _gather_nf4(layer: Linear4D) -> Tensor:
    """Return the whole weight: blocks, and so the pieces over z, do not end with rows."""
    packed, scales = (
        part.full_tensor() if isinstance(part, DTensor) else part
        for part in (layer.packed, layer.scales)
    )
    shape = (layer.out_features, layer.in_features)
    return dequantise_nf4(packed, scales.view(torch.float32), shape)


def _draw(name: str, shape: tuple[int, ...], spec: LoraSpec) -> Tensor:
    """Return the initial value of a whole factor."""
    if name.endswith("lora_B.weight"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(derive_seed(spec.seed, f"lora {name}"))
    if spec.init == "gaussian":
        return torch.randn(shape, generator=generator) / spec.r
    # kaiming_uniform_ with a = sqrt(5), as in peft, is uniform within 1 / sqrt(fan).
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
