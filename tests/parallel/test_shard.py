"""Settings of a sharded model that must change cost and nothing else."""

import copy
import functools
from typing import Any

import pytest
import torch
from parity import needs_compiler, own_piece
from ranks import RankPool
from test_collectives import Operators
from tiny_families import build
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.nn import functional

from memguard.errors import ModelError
from memguard.hf.assembly import AssembledModel, Assembly, build_meta_layer, fill_layer
from memguard.hf.safetensors import ModuleWeights
from memguard.parallel.mesh import Mesh4D, build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.shard import checkpoint_blocks, compile_blocks

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
# fp32: some hundred operations deep, on gradients of about 1.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def make_layer(shape: MeshShape | Mesh4D, plain: Any, **settings: Any) -> AssembledModel:
    mesh = build_mesh(shape, "cpu") if isinstance(shape, MeshShape) else shape
    sharding = Assembly(mesh=mesh, device=CPU, **settings)
    layer = build_meta_layer(copy.deepcopy(plain.config), sharding)
    fill_layer(layer, ModuleWeights(plain), name="test")
    layer.lm.model.train()
    return layer


def draw_ids(seed: int) -> Tensor:
    return torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(seed))


def sum_loss(layer: AssembledModel, ids_BT: Tensor) -> Tensor:
    lm = layer.lm

    def work() -> Tensor:
        hidden_BTD = lm.hidden_states(ids_BT)
        return lm.sum_nll(hidden_BTD[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())

    return lm(work)


def plain_gradients(plain: Any, all_ids: list[Tensor]) -> dict[str, Tensor]:
    model = copy.deepcopy(plain).train()
    for ids_BT in all_ids:
        logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(
            logits.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="sum"
        )
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def check_gradients(
    layer: AssembledModel, expected: dict[str, Tensor], close: dict[str, float] = CLOSE
) -> None:
    for name, parameter in layer.lm.model.named_parameters():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor), name
        theirs = expected[name][own_piece(gradient)]
        torch.testing.assert_close(
            gradient.to_local(), theirs, **close, msg=lambda m, n=name: f"{n}: {m}"
        )


# -- what backward computes again --------------------------------------------------------------


class Costs(Operators):
    """Counts matrix multiplications as well as collectives."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.names.append("mm")
        return super().__torch_dispatch__(operation, types, args, kwargs)


def count_backward(shape: MeshShape) -> dict[str, tuple[int, int, int]]:
    """On a rank: activations computed, matmuls and all-reduces of backward, by mode."""
    plain = build("llama")
    ids_BT = draw_ids(0)
    expected = plain_gradients(plain, [ids_BT])
    found = {}
    for mode in ("none", "full", "selective"):
        layer = make_layer(shape, plain, checkpointing=mode)
        calls: list[Any] = []
        for block in layer.lm.model.model.layers:
            block.mlp.act_fn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        loss = sum_loss(layer, ids_BT)
        with Costs() as costs:
            loss.backward()
        check_gradients(layer, expected)
        reduces = costs.names.count("_c10d_functional.all_reduce")
        found[mode] = len(calls), costs.names.count("mm"), reduces
    return found


def test_checkpointing_repeats_what_it_says_and_changes_no_gradient(ranks: RankPool) -> None:
    for found in ranks(count_backward, 4, MeshShape(y=2, x=2)):
        (once, mm, reduces), (full, full_mm, full_reduces), (selective, *repeated) = (
            found[mode] for mode in ("none", "full", "selective")
        )
        assert once == 2, "one activation a block"
        assert full == selective == 4
        assert full_mm == mm + 2 * 7
        # q|k|v, o, gate|up and two norms; after down there is nothing that backward needs.
        assert full_reduces == reduces + 2 * 5
        assert repeated == [mm, reduces]


def test_checkpointing_of_a_plain_model() -> None:
    plain = build("llama")
    expected = plain_gradients(plain, [draw_ids(0)])
    for mode in ("full", "selective"):
        again = copy.deepcopy(plain)
        checkpoint_blocks(again, mode)  # type: ignore[arg-type]
        for name, gradient in plain_gradients(again, [draw_ids(0)]).items():
            assert torch.equal(gradient, expected[name]), (mode, name)


def test_a_family_without_checkpointing_is_refused() -> None:
    model = build("jetmoe")
    checkpoint_blocks(model, "none")
    with pytest.raises(ModelError, match="JetMoeForCausalLM has no activation checkpointing"):
        checkpoint_blocks(model, "full")


# -- more than one forward ---------------------------------------------------------------------


def accumulate(shape: MeshShape) -> list[int]:
    """On a rank: all-reduces over data of each micro-batch; gradients are those of both."""
    plain = build("llama")
    layer = make_layer(shape, plain)
    lm = layer.lm
    counts = []
    for number in range(2):
        ids_BT = draw_ids(10 * lm.batch_rank + number)
        lm.set_last_micro_batch(number == 1)
        with Operators() as operators:
            (sum_loss(layer, ids_BT) * lm.num_batch_ways).backward()
        counts.append(operators.names.count("c10d.allreduce_"))
    ways = range(lm.num_batch_ways)
    all_ids = [draw_ids(10 * rank + number) for rank in ways for number in range(2)]
    check_gradients(layer, plain_gradients(plain, all_ids))
    return counts


def test_gradients_travel_over_data_once_a_step(ranks: RankPool) -> None:
    # Two blocks, embedding, head and the root's last norm are units.
    assert ranks(accumulate, 2, MeshShape(data=2)) == [[0, 5]] * 2
    assert ranks(accumulate, 4, MeshShape(data=2, z=2)) == [[0, 5]] * 4


def run_twice(shape: MeshShape) -> None:
    """On a rank: two forwards, then their backward; and a forward without one in between."""
    plain = build("llama")
    layer = make_layer(shape, plain)
    first, second, third = (draw_ids(seed) for seed in range(3))
    (sum_loss(layer, first) + sum_loss(layer, second)).backward()
    with torch.no_grad():
        sum_loss(layer, third)
    sum_loss(layer, third).backward()
    # z ranks work on the same rows here: their average is the sum on one process.
    check_gradients(layer, plain_gradients(plain, [first, second, third]))


def test_two_forwards_before_a_backward(ranks: RankPool) -> None:
    ranks(run_twice, 4, MeshShape(z=2, x=2))


# -- compiled ----------------------------------------------------------------------------------


# Compiled kernels fuse operations, and so round in other places.
CLOSE_COMPILED = {"rtol": 1e-3, "atol": 5e-5}


def run_compiled() -> list[tuple[int, int]]:
    """On a rank: graphs and graph breaks of all modes; the numbers are those of one process."""
    plain = build("llama")
    ids_BT = draw_ids(0)
    expected = plain_gradients(plain, [ids_BT, ids_BT])
    found = []
    for mode in ("none", "full", "selective"):
        counters.clear()
        torch.compiler.reset()
        layer = make_layer(MeshShape(x=2), plain, compile=True, checkpointing=mode)
        # Held-out loss of other shapes before training leaves its shape static.
        with torch.no_grad():
            sum_loss(layer, ids_BT[:, :-1])
            sum_loss(layer, ids_BT[:, :-2])
        # The second step must find what the first has compiled.
        for _ in range(2):
            sum_loss(layer, ids_BT).backward()
        check_gradients(layer, expected, CLOSE_COMPILED)
        found.append((counters["stats"]["unique_graphs"], len(counters["graph_break"])))
    return found


@pytest.mark.long
@needs_compiler
def test_compiled_blocks_are_one_graph_and_give_the_same(fresh_ranks: RankPool) -> None:
    for found in fresh_ranks(run_compiled, 2, timeout_s=280):
        assert found == [(1, 0)] * 3


def run_compiled_family(family: str) -> tuple[int, int]:
    """On a rank: graphs and graph breaks; loss and gradients are those of the layers uncompiled."""
    plain = build(family)
    ids_BT = draw_ids(0)
    results = []
    for compile in (False, True):
        counters.clear()
        torch.compiler.reset()
        layer = make_layer(MeshShape(x=2), plain, compile=compile)
        for _ in range(2):
            loss = sum_loss(layer, ids_BT)
            loss.backward()
        parts = {n: p.grad.to_local() for n, p in layer.lm.model.named_parameters()}
        results.append({"loss": loss.detach(), **parts})
    torch.testing.assert_close(results[1], results[0], **CLOSE_COMPILED)
    return counters["stats"]["unique_graphs"], len(counters["graph_break"])


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("family", ["phi3", "gpt2"])
def test_compiled_blocks_of_fused_layers_give_the_same(fresh_ranks: RankPool, family: str) -> None:
    for found in fresh_ranks(run_compiled_family, 2, family, timeout_s=560):
        assert found == (1, 0)


def count_compiled(shape: MeshShape) -> dict[str, tuple[int, int]]:
    """On a rank: matmuls and all-reduces of a compiled backward, by mode."""
    plain = build("llama")
    ids_BT = draw_ids(0)
    expected = plain_gradients(plain, [ids_BT])
    compile_module = nn.Module.compile
    # Partitions the graph like the default compiler, and then calls the operators one by one.
    nn.Module.compile = functools.partialmethod(  # type: ignore[assignment]
        compile_module, backend="aot_eager_decomp_partition"
    )
    found = {}
    for mode in ("none", "selective"):
        torch.compiler.reset()
        layer = make_layer(shape, plain, compile=True, checkpointing=mode)
        loss = sum_loss(layer, ids_BT)
        with Costs() as costs:
            loss.backward()
        check_gradients(layer, expected, CLOSE_COMPILED)
        reduces = costs.names.count("_c10d_functional.all_reduce")
        found[mode] = costs.names.count("mm"), reduces
    return found


@pytest.mark.long
def test_compiled_selective_checkpointing_repeats_no_matmul_and_no_collective(
    fresh_ranks: RankPool,
) -> None:
    for found in fresh_ranks(count_compiled, 4, MeshShape(y=2, x=2), timeout_s=280):
        assert found["selective"] == found["none"]


class CallsItself(nn.Module):
    """A block that checkpoints in its own ``__call__``, as those of transformers 5.17 do."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def test_compiled_selective_checkpointing_in_a_call_of_its_own_is_refused() -> None:
    model = build("llama")
    for block in model.model.layers:
        block.__class__ = type("OldLayer", (CallsItself, type(block)), {})
    checkpoint_blocks(model, "selective")
    with pytest.raises(ModelError, match=r"'train.compile' with .* gives wrong gradients"):
        compile_blocks(model)
