"""What each rank stores: what chunk after chunk leaves, and together the whole."""

import itertools
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from meshes import all_rectangles
from tiny_families import FAMILIES
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from memguard.hf.assembly import Assembly, build_meta_layer
from memguard.parallel.hf_plan import PLACEMENTS
from memguard.parallel.layout import ShardSlice, cut, find_rectangle
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape

MATRIX = [(Shard(1), Shard(0)), (Shard(0), Shard(1))]
VECTOR = [(Replicate(), Shard(0)), (Shard(0), Replicate()), (Replicate(), Replicate())]


def piece(tensor: Tensor, dim: int, rank: int, degree: int) -> Tensor:
    """Piece of torch.chunk, which leaves out pieces that would be empty."""
    pieces = tensor.chunk(degree, dim)
    return pieces[rank] if rank < len(pieces) else tensor.narrow(dim, 0, 0)


def stored(full: Tensor, placements: Any, mesh: MeshShape, ranks: dict[str, int]) -> Tensor:
    for axis, placement in zip(("y", "x"), placements, strict=True):
        if isinstance(placement, Shard):
            full = piece(full, placement.dim, ranks[axis], getattr(mesh, axis))
    return piece(full, 0, ranks["z"], mesh.z)


degrees = st.integers(1, 5)
sizes = st.integers(1, 13)
meshes = st.builds(MeshShape, z=degrees, y=degrees, x=degrees)


@given(mesh=meshes, shape=st.tuples(sizes, sizes), placements=st.sampled_from(MATRIX))
def test_rectangles_of_a_matrix_are_its_chunks_and_tile_it(
    mesh: MeshShape, shape: tuple[int, int], placements: tuple[Placement, Placement]
) -> None:
    full = torch.arange(shape[0] * shape[1]).reshape(shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    listed = list(all_rectangles(shape, placements, mesh))
    for ranks, rectangle in listed:
        assert torch.equal(full[rectangle.slices], stored(full, placements, mesh, ranks))
        assert rectangle == find_rectangle(shape, placements, mesh, ranks)
        assert rectangle.num_elements == full[rectangle.slices].numel()
        seen[rectangle.slices] += 1
    assert torch.equal(seen, torch.ones_like(seen))
    order = itertools.product(range(mesh.z), range(mesh.y), range(mesh.x))
    assert [tuple(ranks.values()) for ranks, _ in listed] == list(order), "x is fastest"


@given(mesh=meshes, size=sizes, placements=st.sampled_from(VECTOR))
def test_a_vector_is_stored_once_for_each_rank_that_replicates_it(
    mesh: MeshShape, size: int, placements: tuple[Placement, Placement]
) -> None:
    full = torch.arange(size)
    seen = torch.zeros(size, dtype=torch.int64)
    for ranks, rectangle in all_rectangles((size,), placements, mesh):
        assert torch.equal(full[rectangle.slices], stored(full, placements, mesh, ranks))
        seen[rectangle.slices] += 1
    copies = [
        degree if isinstance(placement, Replicate) else 1
        for placement, degree in zip(placements, (mesh.y, mesh.x), strict=True)
    ]
    assert seen.tolist() == [copies[0] * copies[1]] * size


@given(size=st.integers(0, 40), degree=st.integers(1, 9), first=st.integers(0, 5))
def test_pieces_follow_each_other(size: int, degree: int, first: int) -> None:
    whole = ShardSlice(start=(first, 0), shape=(size, 3))
    pieces = [cut(whole, 0, rank, degree) for rank in range(degree)]
    indices = [i for each in pieces for i in range(each.start[0], each.start[0] + each.shape[0])]
    assert indices == list(range(first, first + size))
    assert {each.shape[1] for each in pieces} == {3}
    assert max(each.shape[0] for each in pieces) == -(-size // degree)


def test_what_a_forward_sees_is_not_cut_over_z() -> None:
    mesh = MeshShape(z=3, x=2)
    ranks = {"z": 1, "y": 0, "x": 1}
    seen = find_rectangle((9, 4), PLACEMENTS["plain", "weight"], mesh, ranks, over_z=False)
    assert seen == ShardSlice(start=(5, 0), shape=(4, 4))
    kept = find_rectangle((9, 4), PLACEMENTS["plain", "weight"], mesh, ranks)
    assert kept == ShardSlice(start=(7, 0), shape=(2, 4))


def shapes_of_fsdp(degrees: tuple[int, ...], fields: dict[str, Any]) -> list[tuple[Any, ...]]:
    """On a rank: name, local shape that FSDP2 gave each parameter, and the rectangle's."""
    shape = MeshShape(**dict(zip(("data", "z", "y", "x"), degrees, strict=True)))
    sharding = Assembly(mesh=build_mesh(shape, "cpu"), device=torch.device("cpu"))
    config = transformers.AutoConfig.for_model("llama", **{**FAMILIES["llama"], **fields})
    layer = build_meta_layer(config, sharding)
    mesh = sharding.mesh
    here = {axis: mesh.axis(axis).rank for axis in ("z", "y", "x")}
    rows = []
    for name, parameter in layer.lm.model.named_parameters():
        module, _, leaf = name.rpartition(".")
        placements = PLACEMENTS[layer.plan.roles[module], leaf]
        rectangle = find_rectangle(parameter.shape, placements, shape, here)
        rows.append((dist.get_rank(), name, tuple(parameter.to_local().shape), rectangle.shape))
    return rows


@pytest.mark.parametrize(
    "degrees", [pytest.param((1, 4, 1, 1), marks=pytest.mark.mesh), (1, 2, 1, 2)]
)
def test_fsdp_stores_rectangles_of_these_shapes(ranks: Any, degrees: tuple[int, ...]) -> None:
    # 97 tokens and 2 key/value heads of 8: neither is a multiple of what cuts it.
    num_ranks = torch.Size(degrees).numel()
    for rows in ranks(shapes_of_fsdp, num_ranks, degrees, {"intermediate_size": 20}):
        assert all(local == wanted for _, _, local, wanted in rows), rows
