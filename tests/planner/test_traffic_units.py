"""Units of storage as arithmetic, against the shards of the engine and transformers' own counts."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from fake_mesh import simulated_mesh
from ranks import RankPool
from tiny_families import FAMILIES

from memguard.hf.assembly import Assembly, build_meta_layer
from memguard.parallel.hf_plan import find_blocks
from memguard.parallel.linear import to_local
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.parameters import Unit, block_unit, other_units

_WHOLE = (2, 2, 2, 2)
# Neither z nor x divides the 97 entries of the vocabulary; three ranks along z divide nothing.
CASES: list[tuple[str, bool, tuple[int, int, int, int]]] = [
    ("llama", False, _WHOLE),
    ("llama", True, _WHOLE),
    ("mistral", False, (1, 3, 1, 2)),
    ("mistral", False, (1, 3, 2, 4)),
    ("qwen2", True, (1, 3, 2, 2)),
    ("qwen3", False, (1, 3, 2, 2)),
    ("qwen3", False, (1, 1, 4, 4)),
]


def load_config(family: str, is_tied: bool) -> Any:
    fields = {**FAMILIES[family], "tie_word_embeddings": is_tied}
    return transformers.AutoConfig.for_model(family, **fields)


def shape_of(mesh: tuple[int, int, int, int]) -> MeshShape:
    data, z, y, x = mesh
    return MeshShape(data=data, z=z, y=y, x=x)


def count_shards(
    family: str, is_tied: bool, mesh: tuple[int, int, int, int]
) -> tuple[list[int], list[int]]:
    """Return the elements of rank 0's shards: those of the first block, those of no block."""
    with simulated_mesh(shape_of(mesh)) as mesh_4d:
        sharding = Assembly(
            mesh=mesh_4d, device=torch.device("cpu"), compute_dtype=None, chunk_tokens=16
        )
        model = build_meta_layer(load_config(family, is_tied), sharding).lm.model
        blocks = [model.get_submodule(name) for name in find_blocks(model)]
        in_blocks = {id(p) for block in blocks for p in block.parameters()}
        first = [to_local(p.data).numel() for p in blocks[0].parameters()]
        others = [to_local(p.data).numel() for p in model.parameters() if id(p) not in in_blocks]
        return first, others


def count_all_shards() -> list[tuple[list[int], list[int]]]:
    return [count_shards(*case) for case in CASES]


@pytest.fixture(scope="module")
def shards(ranks: RankPool) -> dict[str, tuple[list[int], list[int]]]:
    return dict(zip(map(str, CASES), ranks(count_all_shards, 1)[0], strict=True))


def split_unit(unit: Unit) -> Counter[int]:
    """The stored elements of each parameter, in no order."""
    return Counter(Unit(name="one", shapes=(shape,), z=unit.z).stored for shape in unit.shapes)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_units_are_the_shards_of_rank_0(
    shards: dict[str, tuple[list[int], list[int]]], case: tuple[Any, ...]
) -> None:
    family, is_tied, mesh = case
    sizes, shape = ModelSizes.from_config(load_config(family, is_tied)), shape_of(mesh)
    block, others = shards[str(case)]
    unit = block_unit(sizes, shape)
    assert split_unit(unit) == Counter(block)
    assert unit.stored == sum(block)
    assert sum((split_unit(each) for each in other_units(sizes, shape)), Counter()) == Counter(
        others
    )


def test_a_unit_by_hand() -> None:
    unit = Unit(name="two", shapes=((7, 10), (4, 1)), z=3)
    # Pieces of 3, 3 and 1 rows of ten, and of 2, 2 and 0 elements.
    assert unit.stored == 3 * 10 + 2
    # All as long as the first: what FSDP2 gathers.
    assert unit.gathered == 9 * 10 + 6


def count_by_transformers(config: Any) -> int:
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def count_by_units(sizes: ModelSizes) -> int:
    whole = MeshShape()
    others = sum(unit.stored for unit in other_units(sizes, whole))
    return sizes.num_layers * block_unit(sizes, whole).stored + others


@pytest.mark.parametrize("is_tied", [False, True], ids=["head of its own", "tied"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_units_are_the_whole_model(family: str, is_tied: bool) -> None:
    config = load_config(family, is_tied)
    assert count_by_units(ModelSizes.from_config(config)) == count_by_transformers(config)


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama--Meta-Llama-3.1-8B",
        "mistralai--Mistral-7B-v0.1",
        "Qwen--Qwen2.5-1.5B",
        "Qwen--Qwen3-0.6B",
    ],
)
def test_published_models(shared_data: Path, name: str) -> None:
    path = shared_data / "hf_configs" / f"{name}_config.json"
    config = transformers.AutoConfig.from_pretrained(path)
    assert count_by_units(ModelSizes.from_config(config)) == count_by_transformers(config)
