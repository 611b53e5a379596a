"""Inputs of checkpointed blocks are stored in parts over x, and gathered once in backward."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import parity
import pytest
import torch
from fake_mesh import Allocations, observe, simulated_mesh
from fake_step import _allocate
from parity import Case, Degrees, Worst, case_of, check, needs_compiler
from ranks import RankPool
from test_collectives import Operators
from test_shard import make_layer, sum_loss
from tiny_families import build
from torch import Tensor

from memguard.hf.assembly import Assembly, build_meta_layer
from memguard.parallel import shard, stored_inputs
from memguard.parallel.linear import to_local
from memguard.parallel.lora import LoraSpec
from memguard.parallel.mesh import Axis
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import COMPARED_FAMILIES
from memguard.parallel.stored_inputs import cut_rows

pytestmark = pytest.mark.slow

NUM_BLOCKS, FEATURES = 2, 32  # Of the tiny models.


# -- a part ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 4, 5), (3, 3, 5), (1, 1, 5)], ids=str)
def test_parts_are_copies_of_equal_size_that_make_up_the_input(shape: tuple[int, ...]) -> None:
    """8 tokens over three ranks are 3 + 3 + 2; one token leaves two ranks padding only."""
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parts = [cut_rows(hidden, Axis(name="x", degree=3, rank=rank)) for rank in range(3)]
    num_rows = hidden.flatten(0, 1).shape[0]
    for part in parts:
        assert part.shape == (-(-num_rows // 3), 5)
        assert part.untyped_storage().nbytes() == part.numel() * 4, "no view of the whole"
    rows = torch.cat(parts)
    assert torch.equal(rows[:num_rows].view(shape), hidden)
    assert not rows[num_rows:].any()


# -- a model -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One forward and backward of a model on one rank."""

    gradients: dict[str, Tensor]
    num_inputs_alive: int
    """Inputs of blocks that are in memory between forward and backward."""
    gathered: list[tuple[int, ...]]
    """Parts that were gathered in backward, in this order."""
    num_gathers: int | None
    """All-gathers of backward, those of FSDP2 not counted; None if not counted."""


def run_model(
    family: str, shape: MeshShape, mode: str, *, in_parts: bool, compile: bool = False
) -> Stored:
    """On a rank: train one step on seven tokens, with the inputs stored in parts or whole."""
    store = shard.store_inputs_in_parts if in_parts else lambda *_: None
    with mock.patch.object(shard, "store_inputs_in_parts", store):
        layer = make_layer(shape, build(family), checkpointing=mode, compile=compile)
    inputs: list[Any] = []
    for name in layer.plan.blocks:
        layer.lm.model.get_submodule(name).register_forward_pre_hook(
            lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage()))
        )
    gathered: list[tuple[int, ...]] = []
    gather = stored_inputs.gather_rows

    def note(rows: Tensor, axis: Axis) -> Tensor:
        gathered.append(tuple(rows.shape))
        return gather(rows, axis)

    ids_BT = torch.randint(0, 96, (1, 7), generator=torch.Generator().manual_seed(0))
    num_gathers = None
    loss = sum_loss(layer, ids_BT)
    gc.collect()
    num_alive = sum(storage() is not None for storage in inputs)
    with mock.patch.object(stored_inputs, "gather_rows", note):
        if compile:
            # Under a mode that sees operations nothing is compiled, so recomputation would differ.
            loss.backward()
        else:
            with Operators() as operators:
                loss.backward()
            num_gathers = operators.names.count("_c10d_functional.all_gather_into_tensor")
    return Stored(
        gradients={n: to_local(p.grad) for n, p in layer.lm.model.named_parameters()},
        num_inputs_alive=num_alive,
        gathered=gathered,
        num_gathers=num_gathers,
    )


def compare_storage(family: str, shape: MeshShape, mode: str, *, compile: bool = False) -> None:
    """On a rank: the same gradients in every bit, one all-gather a block, no input in memory."""
    torch.compiler.reset()
    whole = run_model(family, shape, mode, in_parts=False, compile=compile)
    torch.compiler.reset()
    parts = run_model(family, shape, mode, in_parts=True, compile=compile)
    assert whole.num_inputs_alive == NUM_BLOCKS
    assert whole.gathered == []
    assert parts.num_inputs_alive == 0
    rows = -(-7 // shape.x)
    assert parts.gathered == [(rows, FEATURES // shape.y)] * NUM_BLOCKS
    if whole.num_gathers is not None and parts.num_gathers is not None:
        assert parts.num_gathers == whole.num_gathers + NUM_BLOCKS
    for name, gradient in whole.gradients.items():
        assert torch.equal(parts.gradients[name], gradient), name


@pytest.mark.parametrize(
    ("family", "mode"), [("llama", "full"), ("llama", "selective"), ("olmo2", "selective")]
)
def test_gradients_are_those_of_whole_inputs_in_every_bit(
    ranks: RankPool, family: str, mode: str
) -> None:
    ranks(compare_storage, 2, family, MeshShape(x=2), mode)


@pytest.mark.mesh
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "olmo2", "gemma2", "qwen3_moe", "mixtral"])
def test_gradients_are_those_of_whole_inputs_on_more_meshes(
    ranks: RankPool, family: str, mode: str
) -> None:
    for shape in (MeshShape(x=4), MeshShape(y=2, x=2), MeshShape(z=2, x=2)):
        ranks(compare_storage, 4, family, shape, mode)


def compare_compiled(mode: str) -> None:
    compare_storage("llama", MeshShape(x=2), mode, compile=True)


@pytest.mark.long
@needs_compiler
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_of_compiled_blocks_are_those_of_whole_inputs(
    fresh_ranks: RankPool, mode: str
) -> None:
    fresh_ranks(compare_compiled, 2, mode, timeout_s=800)


# -- memory ------------------------------------------------------------------------------------


def measure_kept(shape: MeshShape, num_blocks: int, *, in_parts: bool) -> int:
    """Return the bytes in memory after a forward of 3 rows of 7 tokens, beside the weights."""
    config = build("llama", num_attention_heads=8, num_hidden_layers=num_blocks).config
    store = shard.store_inputs_in_parts if in_parts else lambda *_: None
    memory = Allocations()
    with simulated_mesh(shape) as mesh:
        assembly = Assembly(mesh=mesh, device=torch.device("cpu"), checkpointing="full")
        with mock.patch.object(shard, "store_inputs_in_parts", store):
            layer = build_meta_layer(config, assembly)
        with memory.following_resizes(), observe(memory):
            _allocate(layer.lm)
            layer.lm.model.train()
            before = memory.current_bytes
            loss = sum_loss(layer, torch.ones(3, 7, dtype=torch.int64))
            gc.collect()
            kept = memory.current_bytes - before
            del loss
    return kept


@pytest.mark.quick
@pytest.mark.parametrize(
    "shape", [MeshShape(x=8), pytest.param(MeshShape(y=2, x=4), marks=pytest.mark.mesh)], ids=str
)
def test_a_block_stores_its_share_of_the_tokens(shape: MeshShape) -> None:
    """In full checkpointing another block adds its input, and nothing else."""
    whole, parts = (
        measure_kept(shape, 2, in_parts=in_parts) - measure_kept(shape, 1, in_parts=in_parts)
        for in_parts in (False, True)
    )
    token = FEATURES // shape.y * 4
    assert whole == 21 * token
    assert parts == -(-21 // shape.x) * token
    assert parts <= whole / shape.x + token


# -- parity ------------------------------------------------------------------------------------

_LORA = LoraSpec(r=3, alpha=5)


def compare_odd(degrees: Degrees, cases: list[Case]) -> list[Worst]:
    """On a rank: `parity.compare` on rows of 11 tokens; 5 and 3 rows make 55 and 33 tokens."""
    with mock.patch.object(parity, "NUM_TOKENS", 11):
        return parity.compare(degrees, cases)


def check_odd(ranks: RankPool, degrees: Degrees, cases: list[Case]) -> None:
    """Assert that cases have the numbers of one process, where x does not divide the tokens."""

    def call(_: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return ranks(compare_odd, *args, **options)

    check(call, degrees, cases)  # type: ignore[arg-type]


def odd_cases(mode: str) -> list[Case]:
    """Pre-norm, post-norm, experts, and adapters: the first input then has no gradient."""
    settings: dict[str, Any] = {"checkpointing": mode, "micro_batch_size": 5}
    return [
        case_of("llama", **settings),
        case_of("olmo2", **settings),
        case_of("qwen3_moe", **settings),
        case_of("llama", adapter=_LORA, **settings),
    ]


def test_tokens_that_x_does_not_divide_equal_one_process(ranks: RankPool) -> None:
    llama, *_ = odd_cases("selective")
    _, olmo2, _, adapters = odd_cases("full")
    check_odd(ranks, (1, 1, 1, 2), [llama, olmo2, adapters])


@pytest.mark.mesh
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("degrees", [(1, 1, 1, 2), (1, 1, 1, 4), (1, 1, 2, 2)], ids=str)
def test_tokens_that_x_does_not_divide_equal_one_process_on_more_meshes(
    ranks: RankPool, degrees: Degrees, mode: str
) -> None:
    check_odd(ranks, degrees, odd_cases(mode))


@pytest.mark.mesh
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("family", sorted(COMPARED_FAMILIES))
def test_every_compared_family_equals_one_process(ranks: RankPool, family: str, mode: str) -> None:
    check(ranks, (1, 1, 1, 2), [case_of(family, checkpointing=mode)])


@pytest.mark.long
@needs_compiler
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_compiled_blocks_equal_one_process(fresh_ranks: RankPool, mode: str) -> None:
    case = Case(checkpointing=mode, compile=True, micro_batch_size=4)
    check(fresh_ranks, (1, 1, 1, 2), [case])
