"""The order of features on a mesh, spelled out; and every rectangle found again in the file."""

from typing import Any

import pytest
import torch
from meshes import to_mesh
from tiny_families import build

from memguard.parallel.fused import FeatureOrder, Parts
from memguard.parallel.hf_plan import plan_sharding
from memguard.parallel.layout import ShardSlice

# 4 query heads and 2 key/value heads of 2 features each.
HEADS = Parts(sizes=(8, 4, 4), key_value=(1, 2))
# The same heads as Falcon stores them: the queries of a key head, the key head, the value head.
GROUPS = Parts(sizes=(4, 2, 2), num_groups=2, key_value=(1, 2))
HALVES = Parts(sizes=(8, 8))


def order_of(parts: Parts, degree: int) -> list[int]:
    order = parts.order(degree, 0)
    features = torch.arange(parts.num_groups * sum(parts.sizes))
    mixed: list[int] = (features if order is None else to_mesh(order, features)).tolist()
    return mixed


@pytest.mark.parametrize(
    ("parts", "degree", "expected"),
    [
        (HEADS, 1, [*range(16)]),
        (HEADS, 2, [*(0, 1, 2, 3, 8, 9, 12, 13), *(4, 5, 6, 7, 10, 11, 14, 15)]),
        # Halves of key heads: ranks 0 and 1 share the first.
        (HEADS, 4, [0, 1, 8, 12, 2, 3, 9, 13, 4, 5, 10, 14, 6, 7, 11, 15]),
        (GROUPS, 2, [*range(16)]),
        (GROUPS, 4, [0, 1, 4, 6, 2, 3, 5, 7, 8, 9, 12, 14, 10, 11, 13, 15]),
        (HALVES, 2, [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]),
    ],
)
def test_each_rank_has_an_equal_share_of_each_part(
    parts: Parts, degree: int, expected: list[int]
) -> None:
    assert order_of(parts, degree) == expected
    if degree > parts.num_groups:
        shares = torch.tensor(expected).chunk(degree)
        assert all(sum(parts.local_sizes(degree)) == len(share) for share in shares)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("parts", [HEADS, HALVES])
def test_pieces_of_a_rectangle_are_found_in_the_file(parts: Parts, dim: int) -> None:
    order = parts.order(4, dim)
    stored = torch.arange(16 * 16).view(16, 16)
    mixed = to_mesh(order, stored)
    for start, shape in (((0, 0), (16, 16)), ((3, 2), (7, 9)), ((5, 5), (1, 1)), ((4, 16), (2, 0))):
        rectangle = ShardSlice(start=start, shape=shape)
        local = torch.full(shape, -1)
        for piece in order.split(rectangle):
            assert piece.mesh.shape == piece.file.shape
            local[piece.mesh.slices] = stored[piece.file.slices]
        assert torch.equal(local, mixed[rectangle.slices])


def test_a_vector_has_the_order_of_its_features() -> None:
    order = HALVES.order(2, 0)
    assert isinstance(order, FeatureOrder)
    assert to_mesh(order, torch.arange(16)).tolist() == order_of(HALVES, 2)


@pytest.mark.parametrize(
    ("family", "fields", "layer", "parts"),
    [
        ("phi3", {}, "qkv_proj", Parts(sizes=(32, 16, 16), key_value=(1, 2))),
        ("phi3", {}, "gate_up_proj", Parts(sizes=(48, 48))),
        ("gpt2", {}, "c_attn", Parts(sizes=(32, 32, 32), key_value=(1, 2))),
        ("gpt_bigcode", {}, "c_attn", Parts(sizes=(32, 8, 8), key_value=(1, 2))),
        ("gpt_bigcode", {"multi_query": False}, "c_attn", None),
        ("falcon", {}, "query_key_value", Parts(sizes=(32, 8, 8), key_value=(1, 2))),
        ("falcon", {"multi_query": False}, "query_key_value", None),
        (
            "falcon",
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            "query_key_value",
            Parts(sizes=(16, 8, 8), num_groups=2, key_value=(1, 2)),
        ),
    ],
)
def test_families_have_these_parts(
    family: str, fields: dict[str, Any], layer: str, parts: Parts | None
) -> None:
    plan = plan_sharding(build(family, **fields))
    matching = {name: found for name, found in plan.parts.items() if name.endswith(f".{layer}")}
    assert list(matching.values()) == ([] if parts is None else [parts, parts])
    assert all(plan.roles[name] == "plain" for name in plan.parts)
