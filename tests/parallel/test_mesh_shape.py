"""Every mesh is checked before a rank starts, and those that are offered work."""

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_sizes import LLAMA_8B, LLAMA_405B

from memguard.config import ParallelConfig
from memguard.errors import ConfigError
from memguard.parallel.mesh_shape import (
    AXES,
    MeshShape,
    check_mesh,
    list_meshes,
    nearest_meshes,
    nearest_world_sizes,
    resolve_mesh,
)
from memguard.parallel.model_sizes import ModelSizes


def make_sizes(hidden: int, heads: int, kv_heads: int, width: int, **others: int) -> ModelSizes:
    return ModelSizes(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=others.get("head_dim", hidden // heads),
        intermediate_size=width,
        vocab_size=others.get("vocab_size", 128256),
        num_layers=2,
    )


# As published in their config.json.
QWEN25_7B = make_sizes(3584, 28, 4, 18944, vocab_size=152064)
QWEN3_06B = make_sizes(1024, 16, 8, 3072, head_dim=128, vocab_size=151936)
GEMMA_2B = make_sizes(2048, 8, 1, 16384, head_dim=256, vocab_size=256000)
TINYLLAMAS_260K = make_sizes(64, 8, 4, 172, vocab_size=512)


def problems_of(config: dict[str, Any], *args: Any, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve_mesh(ParallelConfig(**config), *args, **options)
    assert all("\n" not in problem for problem in caught.value.problems)
    return list(caught.value.problems)


def test_a_shape_knows_its_ranks() -> None:
    shape = MeshShape(data=2, z=3, y=4, x=5)
    assert (shape.num_ranks, shape.num_batch_ways) == (120, 6)
    assert [shape.degree(axis) for axis in AXES] == [2, 3, 4, 5]
    assert str(MeshShape(z=2, x=4)) == "(data=1, z=2, y=1, x=4)"


@pytest.mark.parametrize("wrong", [{"x": 0}, {"order": ("x", "y", "z", "z")}])
def test_a_shape_that_is_none_is_our_mistake(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        MeshShape(**wrong)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (1, 16, 1, 1)),
        ({"x": 4}, (1, 4, 1, 4)),
        ({"data": -1}, (16, 1, 1, 1)),
        ({"data": -1, "x": 4}, (4, 1, 1, 4)),
        ({"data": 1, "z": -1, "y": 2, "x": 2}, (1, 4, 2, 2)),
        ({"data": 2, "z": 2, "y": 2, "x": 2}, (2, 2, 2, 2)),
        ({"data": 16, "z": -1}, (16, 1, 1, 1)),
    ],
)
def test_the_open_degree_takes_the_rest(
    config: dict[str, Any], expected: tuple[int, int, int, int]
) -> None:
    order = ("x", "data", "y", "z")
    shape = resolve_mesh(ParallelConfig(**config, order=order), 16, LLAMA_8B, batch_size=16)
    assert tuple(shape.degree(axis) for axis in AXES) == expected
    assert shape.order == order


def test_a_wrong_product_is_told_with_the_ranks_it_fits() -> None:
    mesh = {"data": 1, "z": 2, "y": 2, "x": 4}
    assert problems_of(mesh, 8, LLAMA_8B) == [
        "'parallel.data' × 'parallel.z' × 'parallel.y' × 'parallel.x' must be the number of ranks "
        "started, 8; got 1 × 2 × 2 × 4 = 16",
        "meshes that work on 8 ranks, nearest first: (data=1, z=1, y=2, x=4), "
        "(data=1, z=2, y=2, x=2), (data=1, z=2, y=1, x=4); the requested degrees fit 16 ranks "
        "(--nproc 16)",
    ]
    assert problems_of({"x": 2}, 1) == [
        "'parallel.data' × 'parallel.y' × 'parallel.x' must divide the number of ranks started, 1, "
        "because 'parallel.z' is -1, the rest of them; got 1 × 1 × 2 = 2",
        "meshes that work on 1 rank, nearest first: (data=1, z=1, y=1, x=1); the requested degrees "
        "fit 2 ranks (--nproc 2)",
    ]


def test_all_broken_rules_come_together_and_the_way_out_once() -> None:
    problems = problems_of({"data": -1, "x": 3, "y": 5, "z": 3}, 16, LLAMA_8B, batch_size=16)
    assert [problem.partition("; got ")[0] for problem in problems] == [
        "'parallel.z' × 'parallel.y' × 'parallel.x' must divide the number of ranks started, 16, "
        "because 'parallel.data' is -1, the rest of them",
        "'parallel.y' must divide the model's hidden size of 4096",
        "'parallel.x' must divide the model's 32 attention heads",
        "'parallel.x' must divide the model's 8 key/value heads or be a multiple of them",
        "'parallel.x' must divide the model's FFN width of 14336",
        "meshes that work on 16 ranks, nearest first: (data=1, z=2, y=4, x=2), "
        "(data=1, z=1, y=4, x=4), (data=1, z=4, y=4, x=1)",
    ]


def test_where_no_mesh_works_other_numbers_of_ranks_are_told() -> None:
    assert problems_of({}, 12, LLAMA_8B, batch_size=16) == [
        "'parallel.data' × 'parallel.z' must divide 'train.batch_size', 16 rows; "
        "got 1 × 12 = 12 ('parallel.z' is -1, the rest of the ranks)",
        "no mesh works on 12 ranks: choose another 'train.batch_size', or start a number of ranks "
        "that has one, nearest first: 8, 16, 4",
    ]


@pytest.mark.parametrize(
    ("sizes", "allowed"),
    [
        # 405B: 8 key/value heads, each a rank's own up to x=8 and shared by two ranks at 16.
        (LLAMA_405B, [1, 2, 4, 8, 16, 32, 64, 128]),
        (LLAMA_8B, [1, 2, 4, 8, 16, 32]),
        # 28 heads, 18944 = 2^9 * 37: 7 divides the heads but not the FFN width.
        (QWEN25_7B, [1, 2, 4]),
        (QWEN3_06B, [1, 2, 4, 8, 16]),
        (GEMMA_2B, [1, 2, 4, 8]),
        # An FFN width of 172 = 4 * 43.
        (TINYLLAMAS_260K, [1, 2, 4]),
    ],
    ids=["llama-405b", "llama-8b", "qwen2.5-7b", "qwen3-0.6b", "gemma-2b", "stories260k"],
)
def test_widths_of_known_models(sizes: ModelSizes, allowed: list[int]) -> None:
    found = []
    for x in range(1, 200):
        try:
            check_mesh(MeshShape(x=x), sizes)
        except ConfigError:
            continue
        found.append(x)
    assert found == allowed


def test_published_meshes_of_405b_pass() -> None:
    for degrees in [(1, 64, 1, 8), (2, 64, 4, 8), (8, 128, 2, 8), (8, 64, 2, 16)]:
        shape = MeshShape(**dict(zip(AXES, degrees, strict=True)))
        check_mesh(shape, LLAMA_405B, batch_size=1024)
        assert shape in list_meshes(shape.num_ranks, LLAMA_405B, batch_size=1024)


def test_near_means_few_changes_then_small_ones() -> None:
    def nearest(num_ranks: int, **config: Any) -> list[str]:
        meshes = nearest_meshes(ParallelConfig(**{"data": -1} | config), num_ranks, LLAMA_8B)[:3]
        return ["".join(str(mesh.degree(axis)) for axis in AXES) for mesh in meshes]

    # x alone changes: to 4 by a third, to 2 by a half, to 8.
    assert nearest(16, x=3) == ["4114", "8112", "2118"]
    # What was asked works and so comes first.
    assert nearest(8, x=4)[0] == "2114"
    # z is halved before x, and x before y: they set the memory and the traffic of a layer.
    assert nearest(8, data=1, z=2, y=2, x=4) == ["1124", "1222", "1214"]
    order = ("x", "y", "z", "data")
    meshes = nearest_meshes(MeshShape(x=3, order=order), 16, LLAMA_8B)
    assert {mesh.order for mesh in meshes} == {order}


SIZES = st.builds(
    make_sizes,
    hidden=st.sampled_from([8, 24, 36, 64, 96]),
    heads=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
    kv_heads=st.sampled_from([1, 2, 3, 4, 8]),
    width=st.integers(1, 200),
    head_dim=st.sampled_from([1, 2, 3, 4, 6, 8]),
    vocab_size=st.integers(1, 40),
)
BATCH = st.none() | st.integers(1, 100)


def follows_the_rules(shape: MeshShape, sizes: ModelSizes, batch_size: int | None) -> bool:
    """Decide by cutting each size into ``degree`` pieces, as the engine will."""

    def even(size: int, degree: int) -> bool:
        return size // degree * degree == size

    kv_heads, x = sizes.num_kv_heads, shape.x
    if x <= kv_heads:
        kv = even(kv_heads, x)
    else:
        kv = even(x, kv_heads) and even(kv_heads * sizes.head_dim, x)
    return (
        kv
        and even(sizes.num_heads, x)
        and even(sizes.intermediate_size, x)
        and even(sizes.hidden_size, shape.y)
        and len(range(0, sizes.vocab_size, -(-sizes.vocab_size // x))) == x
        and (batch_size is None or even(batch_size, shape.data * shape.z))
    )


@given(world_size=st.integers(1, 96), sizes=SIZES, batch_size=BATCH)
def test_the_list_holds_all_meshes_that_work_and_no_other(
    world_size: int, sizes: ModelSizes, batch_size: int | None
) -> None:
    listed = list_meshes(world_size, sizes, batch_size=batch_size)
    assert len(set(listed)) == len(listed)
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    for data, z, y in itertools.product(divisors, repeat=3):
        if world_size % (data * z * y):
            continue
        shape = MeshShape(data=data, z=z, y=y, x=world_size // (data * z * y))
        works = follows_the_rules(shape, sizes, batch_size)
        assert works == (shape in listed)
        if works:
            check_mesh(shape, sizes, batch_size=batch_size)
        else:
            with pytest.raises(ConfigError):
                check_mesh(shape, sizes, batch_size=batch_size)


DEGREE = st.integers(1, 9)


@given(
    world_size=st.integers(1, 96),
    sizes=SIZES,
    batch_size=BATCH,
    degrees=st.tuples(DEGREE, DEGREE, DEGREE, DEGREE),
    rest=st.none() | st.sampled_from(AXES),
)
def test_any_request_is_granted_or_told_what_works(
    world_size: int,
    sizes: ModelSizes,
    batch_size: int | None,
    degrees: tuple[int, ...],
    rest: str | None,
) -> None:
    requested = dict(zip(AXES, degrees, strict=True)) | ({rest: -1} if rest else {})
    config = ParallelConfig(**requested)
    nearest = nearest_meshes(config, world_size, sizes, batch_size=batch_size)
    assert set(nearest) == set(list_meshes(world_size, sizes, batch_size=batch_size))
    try:
        shape = resolve_mesh(config, world_size, sizes, batch_size=batch_size)
    except ConfigError as error:
        *problems, way_out = error.problems
        assert problems
        assert all(str(mesh) in way_out for mesh in nearest[:3])
        assert bool(nearest) != way_out.startswith("no mesh works")
        return
    assert shape.num_ranks == world_size
    assert all(shape.degree(axis) == requested[axis] for axis in AXES if requested[axis] != -1)
    assert follows_the_rules(shape, sizes, batch_size)
    assert nearest[0] == shape


@given(world_size=st.integers(1, 60), sizes=SIZES, batch_size=st.integers(1, 30))
def test_other_numbers_of_ranks_are_the_nearest(
    world_size: int, sizes: ModelSizes, batch_size: int
) -> None:
    offered = nearest_world_sizes(world_size, sizes, batch_size=batch_size)
    within = [n for n in range(1, 121) if list_meshes(n, sizes, batch_size=batch_size)]
    within.sort(key=lambda n: (abs(n - world_size), n))
    assert [n for n in offered if n <= 120] == within


def test_the_largest_machines_are_answered_at_once() -> None:
    for world_size in (16_384, 15_120):
        began = time.perf_counter()
        problems_of({"x": 48, "y": 3}, world_size, LLAMA_405B, batch_size=1000)
        # 5 ms where nothing else runs; one second tells enumeration of divisors from ranges.
        assert time.perf_counter() - began < 1
