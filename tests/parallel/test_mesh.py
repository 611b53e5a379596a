"""Which ranks share an axis, for any order of the axes."""

import itertools
import types
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import RankPool
from torch import distributed as dist

from memguard.parallel.mesh import CONNECT_BYTES, Axis, build_mesh
from memguard.parallel.mesh_shape import AXES, MeshShape

DEFAULT = MeshShape(z=2, y=2, x=2)
PERMUTED = MeshShape(data=2, z=2, x=2, order=("x", "z", "data", "y"))
X_FASTER_THAN_Z = MeshShape(data=2, y=1, z=1, x=4, order=("z", "y", "data", "x"))


def look(shape: MeshShape) -> dict[str, tuple[int, list[int]]]:
    """This rank's place along each axis and the ranks it shares the axis with."""
    mesh = build_mesh(shape, "cpu")
    axes = [mesh.axis(name) for name in AXES]
    assert all(axis.degree == shape.degree(axis.name) for axis in axes)  # type: ignore[arg-type]
    places = {axis.name: (axis.rank, ranks_of(axis)) for axis in axes}
    places["batch"] = (mesh.batch_rank, list(mesh.batch_mesh.mesh.flatten().tolist()))
    assert mesh.batch_mesh.mesh_dim_names == (("data", "z") if shape.data > 1 else ("z",))
    assert mesh.tensor_mesh.mesh_dim_names == ("y", "x")
    return places


def ranks_of(axis: Axis) -> list[int]:
    assert axis.group is not None
    return dist.get_process_group_ranks(axis.group)


def look_at_all(shapes: list[MeshShape]) -> list[dict[str, tuple[int, list[int]]]]:
    return [look(shape) for shape in shapes]


def expect(shape: MeshShape, rank: int) -> dict[str, tuple[int, list[int]]]:
    """Count through the ranks as one counts through digits, the last axis of the order fastest."""
    digits = list(itertools.product(*(range(shape.degree(axis)) for axis in shape.order)))
    places = [dict(zip(shape.order, each, strict=True)) for each in digits]
    mine = places[rank]

    def sharing(*axes: str) -> list[int]:
        others = [axis for axis in AXES if axis not in axes]
        return [
            other
            for other, place in enumerate(places)
            if all(place[axis] == mine[axis] for axis in others)
        ]

    found: dict[str, tuple[int, list[int]]] = {axis: (mine[axis], sharing(axis)) for axis in AXES}
    batch = sorted(sharing("data", "z"), key=lambda r: (places[r]["data"], places[r]["z"]))
    found["batch"] = (mine["data"] * shape.z + mine["z"], batch)
    return found


def test_ranks_along_each_axis(ranks: RankPool) -> None:
    shapes = [DEFAULT, PERMUTED, X_FASTER_THAN_Z]
    results = ranks(look_at_all, 8, shapes)
    for rank, found in enumerate(results):
        for shape, places in zip(shapes, found, strict=True):
            assert places == expect(shape, rank), (shape, rank)
    # As the table in mesh.py draws it.
    assert [found[0]["z"][0] for found in results] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [found[0]["y"][0] for found in results] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [found[0]["x"][0] for found in results] == [0, 1, 0, 1, 0, 1, 0, 1]


def share_heads(shape: MeshShape, num_kv_heads: list[int]) -> list[tuple[int, int, list[int]]]:
    mesh = build_mesh(shape, "cpu")
    found = []
    for number in num_kv_heads:
        axis = mesh.kv_replicas(number)
        assert mesh.kv_replicas(number) is axis or axis.degree == 1, "each group is made once"
        members = ranks_of(axis) if axis.degree > 1 else [dist.get_rank()]
        found.append((axis.degree, axis.rank, members))
    return found


def test_ranks_that_share_a_key_value_head(ranks: RankPool) -> None:
    # Heads are dealt along x in order: with 2 of them over 4 ranks, ranks 0 and 1 share the first.
    results = ranks(share_heads, 8, MeshShape(y=2, x=4), [8, 4, 2, 1, 3])
    for rank, found in enumerate(results):
        y, x = divmod(rank, 4)
        pair, row = 4 * y + x // 2 * 2, list(range(4 * y, 4 * y + 4))
        alone = (1, 0, [rank])
        two, four = (2, x % 2, [pair, pair + 1]), (4, x, row)
        assert found == [alone, alone, two, four, alone]


def test_ranks_that_share_a_head_are_neighbours_along_x_in_any_order(ranks: RankPool) -> None:
    shape = MeshShape(z=2, x=4, order=("x", "y", "z", "data"))
    # Rank = 2 * place along x + place along z.
    for rank, ((degree, place, members),) in enumerate(ranks(share_heads, 8, shape, [2])):
        x, z = divmod(rank, 2)
        first = x // 2 * 2
        assert (degree, place) == (2, x % 2)
        assert members == [2 * first + z, 2 * (first + 1) + z]


def test_one_rank_along_an_axis_has_no_group_to_name() -> None:
    with pytest.raises(AssertionError, match="left out"):
        _ = Axis(name="x").group_name


class NcclOptions:
    """Stands for `ProcessGroupNCCL.Options`, which builds of torch for CPUs lack."""

    def __init__(self, *, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream = is_high_priority_stream


def create(device_type: str, shape: MeshShape, num_kv_heads: int) -> list[tuple[Any, ...]]:
    """On a rank: ranks, backend, name, priority and limits of the groups it creates."""
    inner, calls = dist.new_group, []

    def spy(ranks: Any, *, backend: Any, pg_options: Any, **settings: Any) -> Any:
        is_urgent = pg_options is not None and pg_options.is_high_priority_stream
        limits = {settings["timeout"], *([pg_options._timeout] if is_urgent else [])}
        assert settings["use_local_synchronization"]
        calls.append((list(ranks), backend, settings["group_desc"], is_urgent, limits))
        return inner(ranks, **settings)

    options = types.SimpleNamespace(Options=NcclOptions)
    with (
        mock.patch.object(dist, "new_group", spy),
        mock.patch.object(dist, "ProcessGroupNCCL", options, create=True),
    ):
        mesh = build_mesh(shape, device_type, timeout=timedelta(minutes=7))
        mesh.kv_replicas(num_kv_heads)
    return calls


def test_a_rank_creates_its_own_groups_only(ranks: RankPool) -> None:
    limits = {timedelta(minutes=7)}
    found = ranks(create, 4, "cpu", MeshShape(z=2, x=2), 2)
    for rank, calls in enumerate(found):
        z, x = divmod(rank, 2)
        # data and y are axes of one rank and share a group.
        assert calls == [
            ([rank], None, "mesh_alone", False, limits),
            ([x, x + 2], None, "mesh_z", False, limits),
            ([2 * z, 2 * z + 1], None, "mesh_x", False, limits),
        ]
    (calls, *_) = ranks(create, 4, "cpu", MeshShape(z=4), 2)
    assert calls == [([0], None, "mesh_alone", False, limits)], "z has the group of all ranks"


def test_collectives_that_computation_waits_for_have_priority_on_gpus(ranks: RankPool) -> None:
    limits = {timedelta(minutes=7)}
    (calls, *_) = ranks(create, 4, "cuda", MeshShape(x=4), 2)
    assert calls == [
        ([0], "nccl", "mesh_alone", False, limits),
        # Not the group of all ranks, whose stream is as urgent as that of computation.
        ([0, 1, 2, 3], "nccl", "mesh_x", True, limits),
        ([0, 1], "nccl", "mesh_kv_replicas", True, limits),
    ]
    (calls, *_) = ranks(create, 4, "cuda", MeshShape(z=2, y=2), 2)
    assert [(call[2], call[3]) for call in calls] == [
        ("mesh_alone", False),
        ("mesh_z", False),
        ("mesh_y", True),
    ]


def connect(shape: MeshShape) -> list[tuple[str, str, int]]:
    """Collectives of a rank that connects its groups: name, group, bytes of the whole tensor."""
    mesh, sent = build_mesh(shape, "cpu"), []

    def spy(name: str) -> Any:
        inner = getattr(dist, name)

        def send(*tensors: torch.Tensor, group: Any = None) -> None:
            named = "world" if group is None else group.group_desc
            sent.append((name, named, max(tensor.nbytes for tensor in tensors)))
            inner(*tensors, group=group)

        return send

    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
    with mock.patch.multiple(dist, **{name: spy(name) for name in names}):
        mesh.connect(torch.device("cpu"))
    return sent


def test_each_axis_is_connected_for_each_collective_of_large_messages(ranks: RankPool) -> None:
    (sent, *others) = ranks(connect, 4, MeshShape(z=2, x=2))
    assert sent == [
        ("all_reduce", "world", 4),
        *(
            (name, group, CONNECT_BYTES)
            for group in ("mesh_z", "mesh_x")
            for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
        ),
    ]
    assert all(other == sent for other in others)
