"""A base in NF4 whose blocks are cut over z: numbers, bytes and reads of each rank."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from parity import Case
from ranks import RankPool
from test_parity import Degrees, check
from tiny_families import build
from torch.distributed.tensor import DTensor

from memguard.hf.assembly import Assembly, build_meta_layer, fill_layer
from memguard.hf.nf4_base import Nf4Base, list_nf4
from memguard.hf.safetensors import ModuleWeights, Origin, WeightSource
from memguard.parallel.layout import ShardSlice
from memguard.parallel.linear import to_local
from memguard.parallel.lora import LoraSpec, is_adapter_parameter
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.nf4 import dequantise_nf4, quantise_nf4

pytestmark = pytest.mark.slow

_LORA = LoraSpec(r=3, alpha=5)
_DORA = LoraSpec(r=3, alpha=5, use_dora=True)
# Rows of 45 weights end within blocks; 45 x 32 weights are 23 blocks, the last of them half full.
_ODD: tuple[tuple[str, Any], ...] = (("intermediate_size", 45), ("vocab_size", 131))
_TIED = Case(
    family="qwen2",
    changes=(*_ODD, ("tie_word_embeddings", True)),
    adapter=_LORA,
    quantization="nf4",
)
_UNTIED = Case(
    changes=(*_ODD, ("attention_bias", True), ("tie_word_embeddings", False)),
    adapter=_DORA,
    quantization="nf4",
    micro_batch_size=1,
    checkpointing="full",
)


def test_a_mesh_equals_one_process_on_the_same_base(ranks: RankPool) -> None:
    check(ranks, (1, 2, 1, 1), [replace(case, num_steps=1) for case in (_TIED, _UNTIED)])


@pytest.mark.mesh
@pytest.mark.parametrize(
    "degrees", [(1, 2, 1, 1), (2, 1, 1, 1), (2, 2, 1, 1), (1, 4, 1, 1)], ids=str
)
def test_more_meshes_equal_one_process(ranks: RankPool, degrees: Degrees) -> None:
    check(ranks, degrees, [_TIED, _UNTIED])


class Recorded:
    """A source that records what is read of it."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.rectangles: dict[str, ShardSlice] = {}

    @property
    def origin(self) -> Origin | None:
        return self.source.origin

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.source.shapes

    def read(self, name: str, rectangle: ShardSlice) -> torch.Tensor:
        assert name not in self.rectangles, "each tensor is read once"
        self.rectangles[name] = rectangle
        return self.source.read(name, rectangle)


@dataclass(frozen=True)
class Stored:
    """A layer in NF4 on one rank."""

    num_bytes: int
    num_read: int
    """Weights that were read from the checkpoint."""
    packed: torch.Tensor
    scales: torch.Tensor
    """Of all ranks."""


def load(z: int, spec: LoraSpec) -> tuple[dict[str, Stored], dict[str, torch.Tensor]]:
    """On a rank: load a model and return its layers, and its adapters."""
    model = build("llama", **dict(_ODD))
    sharding = Assembly(
        mesh=build_mesh(MeshShape(z=z), "cpu"),
        device=torch.device("cpu"),
        adapter=spec,
        quantization="nf4",
    )
    layer = build_meta_layer(model.config, sharding)
    source = Recorded(ModuleWeights(model))
    fill_layer(layer, source, name="tiny")
    stored = {}
    for name, linear in list_nf4(layer.lm.model).items():
        parts = (linear.packed, linear.scales)
        whole = [part.full_tensor() for part in parts if isinstance(part, DTensor)]
        num_bytes = sum(to_local(part).untyped_storage().nbytes() for part in parts)
        stored[name] = Stored(num_bytes, source.rectangles[name].num_elements, *whole)
    adapters = {
        name: to_local(parameter).detach()
        for name, parameter in layer.lm.model.named_parameters()
        if is_adapter_parameter(name)
    }
    return stored, adapters


def test_each_rank_stores_and_reads_its_part(ranks: RankPool) -> None:
    results = ranks(load, 3, 3, _DORA)
    model = build("llama", **dict(_ODD))
    weights = dict(model.named_parameters())
    expected, _ = load_plain(model)
    for stored, adapters in results:
        assert stored.keys() == expected.keys()
        assert len(stored) == 2 * 7, "the head is not quantised"
        for name, part in stored.items():
            packed, scales = expected[name]
            assert torch.equal(part.packed, packed)
            assert torch.equal(part.scales.view(torch.float32), scales)
            # 32 bytes and a scale a block; the last rank's storage is padded as the first's is.
            assert part.num_bytes == 36 * -(-len(scales) // 3)
            # Whole rows are read: at most a part of two of them belongs to other ranks.
            num_columns = weights[name].shape[1]
            assert part.num_read <= 64 * -(-len(scales) // 3) + 2 * (num_columns - 1)
        for name, value in adapters.items():
            if "magnitude" in name:
                name = name.replace("lora_magnitude_vector.", "")
                dense = dequantise_nf4(*expected[name], tuple(weights[name].shape))
                torch.testing.assert_close(value, dense.double().norm(dim=1).float())
    total = sum(part.num_read for stored, _ in results for part in stored.values())
    num_weights = sum(weights[name].numel() for name in expected)
    assert total < 1.2 * num_weights


def gather_in_bf16() -> dict[str, torch.Tensor]:
    """On a rank: the dense weights of a block that is gathered for arithmetic in bf16."""
    model = build("llama", **dict(_ODD))
    sharding = Assembly(
        mesh=build_mesh(MeshShape(z=2), "cpu"),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        compute_dtype=torch.bfloat16,
        adapter=_LORA,
        quantization="nf4",
    )
    layer = build_meta_layer(model.config, sharding)
    fill_layer(layer, ModuleWeights(model), name="tiny")
    block, dense = layer.lm.model.model.layers[1], {}

    def keep(*_: Any) -> None:
        assert block.input_layernorm.weight.dtype == torch.bfloat16
        for name, linear in list_nf4(block).items():
            dense[name] = linear.stored_weight().dequantise(torch.float32)

    block.mlp.register_forward_hook(keep)
    layer.lm(lambda: layer.lm.hidden_states(torch.arange(12)[None]))
    return dense


def test_a_gather_in_bf16_does_not_round_the_scales(ranks: RankPool) -> None:
    model = build("llama", **dict(_ODD))
    whole, base = load_plain(model)
    for dense in ranks(gather_in_bf16, 2):
        assert len(dense) == 7
        for name, weight in dense.items():
            full = f"model.layers.1.{name}"
            assert torch.equal(weight, dequantise_nf4(*whole[full], base.shapes[full]))


def load_plain(model: Any) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], Nf4Base]:
    """Return packed weights and scales of each layer, quantised whole, and the base."""
    base = Nf4Base(ModuleWeights(model), model)
    weights = dict(model.named_parameters())
    return {name: quantise_nf4(weights[name]) for name in base.layers}, base


def test_any_rectangle_of_the_dequantised_base_is_cut_from_the_whole() -> None:
    model = build("llama", **dict(_ODD))
    whole, base = load_plain(model)
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        shape = base.shapes[name]
        dense = dequantise_nf4(*whole[name], shape)
        for start, size in (((0, 0), shape), ((3, 7), (5, 9)), ((31, 0), (1, shape[1]))):
            rectangle = ShardSlice(start=start, shape=size)
            assert torch.equal(base.read(name, rectangle), dense[rectangle.slices])
    name = "model.norm.weight"
    everything = ShardSlice(start=(0,), shape=base.shapes[name])
    assert torch.equal(base.read(name, everything), dict(model.named_parameters())[name])
