"""Estimated steps: counted by hand and by torch, and never better for being on worse hardware."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from published_sizes import LLAMA_405B
from torch.utils.flop_counter import FlopCounterMode

from memguard.parallel.mesh_shape import MeshShape, ModelSizes, list_meshes
from memguard.parallel.shard import checkpoint_blocks
from memguard.planner.cost import (
    ATTAINABLE_FRACTION,
    CALL_S,
    ROUND_S,
    StepEstimate,
    compute_gb_per_s,
    count_flops,
    estimate_step,
)
from memguard.planner.machine import Machine, load_machine
from memguard.planner.traffic import StepSettings, TrafficAxis, list_collectives, sum_by_axis

NUM_PARAMETERS_405B = 405_853_388_800
SEQ_LEN = 2048
STEP = StepSettings(
    num_tokens=SEQ_LEN, num_labels=SEQ_LEN, chunk_tokens=SEQ_LEN, checkpointing="full"
)
NODES = Machine(
    name="nodes",
    gpu="any",
    memory_gib=80,
    gpus_per_node=8,
    link_gb_per_s=300,
    network_gb_per_s=100,
    peak_tflops=1000,
)
DIRECT = NODES.model_copy(update={"gpus_per_node": 4, "link_topology": "direct"})
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 44,
    "vocab_size": 97,
    "num_hidden_layers": 3,
}


def estimate(mesh: MeshShape, machine: Machine, **changes: Any) -> StepEstimate:
    return estimate_step(LLAMA_405B, mesh, replace(STEP, **changes), machine, seq_len=SEQ_LEN)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_flops_are_those_that_torch_counts(checkpointing: Any) -> None:
    config = transformers.LlamaConfig(**TINY, attn_implementation="eager", use_cache=False)
    model = transformers.LlamaForCausalLM(config).train()
    checkpoint_blocks(model, checkpointing)
    rows, seq_len = 2, 7
    tokens = torch.randint(0, TINY["vocab_size"], (rows, seq_len))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens).logits.sum().backward()
    settings = StepSettings(
        num_tokens=rows * seq_len, num_labels=rows * seq_len, checkpointing=checkpointing
    )
    sizes = ModelSizes.from_config(config)
    # Eager attention computes what the mask hides too: every token sees seq_len others, as on
    # average in causal rows of 2 seq_len - 1.
    ours = count_flops(sizes, MeshShape(), settings, seq_len=2 * seq_len - 1)
    assert ours == counter.get_total_flops()


def test_flops_of_405b_are_six_a_parameter_and_token() -> None:
    settings = replace(STEP, checkpointing="none")
    flops = count_flops(LLAMA_405B, MeshShape(), settings, seq_len=SEQ_LEN)
    # The embedding is looked up, norms are no matmuls.
    matmuls = NUM_PARAMETERS_405B - (128256 + 2 * 126 + 1) * 16384
    # 12 L H T a token over whole rows (arXiv 2204.02311, appendix B), half of it for causal rows.
    attention = 6 * 126 * 128 * 128 * (SEQ_LEN + 1)
    assert flops == SEQ_LEN * (6 * matmuls + attention)


def test_full_checkpointing_computes_all_but_down_again() -> None:
    none, full, selective = (
        count_flops(LLAMA_405B, MeshShape(), replace(STEP, checkpointing=mode), seq_len=SEQ_LEN)
        for mode in ("none", "full", "selective")
    )
    assert selective == none
    down, head = 126 * 53248 * 16384, 128256 * 16384
    forward = (none - 6 * SEQ_LEN * head) // 3
    assert full == none + forward - 2 * SEQ_LEN * down


def test_labels_alone_reach_the_head() -> None:
    def count(**changes: Any) -> int:
        return count_flops(LLAMA_405B, MeshShape(), replace(STEP, **changes), seq_len=SEQ_LEN)

    head = 2 * 128256 * 16384
    assert count() - count(num_labels=1000) == 3 * head * (SEQ_LEN - 1000)
    assert count(sums_nll=False) - count() == head * SEQ_LEN
    assert count(num_micro_batches=5) == 5 * count()


@pytest.mark.parametrize("mesh", [MeshShape(x=8), MeshShape(y=8), MeshShape(x=32, y=4, z=3)])
def test_ranks_share_all_but_attention(mesh: MeshShape) -> None:
    whole, share, without, share_without = (
        count_flops(LLAMA_405B, shape, STEP, seq_len=seq_len)
        for seq_len in (SEQ_LEN, -1)  # a row of -1 has no attention in the formula
        for shape in (MeshShape(), mesh)
    )
    assert share_without * mesh.x * mesh.y == without
    assert (share - share_without) * mesh.x == whole - without


def test_a_step_computed_by_hand() -> None:
    """Axis x within a node of 8, z of 4 across 4 nodes: 8 rings leave each of them."""
    mesh = MeshShape(z=4, x=8)
    found = estimate(mesh, NODES)
    assert found.num_tokens == 4 * SEQ_LEN
    assert found.compute_s == found.num_flops / (1000e12 * ATTAINABLE_FRACTION)
    times = {axis.axis: axis for axis in found.axes}
    assert list(times) == ["x", "z", "world"]
    # x, all-reduces in bf16: 4 a block and 1 computed again; of the head the gradient, the
    # embedding, and maxima and sums in fp32.
    activations, statistics = SEQ_LEN * 16384 * 2, SEQ_LEN * 4
    x_bytes = (5 * 126 + 2) * activations + 3 * statistics
    num_calls = 5 * 126 + 2 + 2
    assert times["x"].num_calls == num_calls
    assert times["x"].time_s == pytest.approx(
        2 * 7 / 8 * x_bytes / 300e9 + num_calls * (CALL_S + 2 * 3 * ROUND_S), rel=1e-12
    )
    # z: weights in bf16, a block's twice, gradients in fp32. A rank along x has an eighth, but for
    # the norms, which it has whole.
    norms = 126 * 2 * 16384
    blocks = (NUM_PARAMETERS_405B - 2 * 128256 * 16384 - 16384 - norms) / 8 + norms
    others = 2 * 128256 * 16384 / 8 + 16384
    z_bytes = (2 + 2 + 4) * blocks + (2 + 4) * others
    num_calls = 3 * 126 + 2 * 3
    assert times["z"].num_calls == num_calls
    assert times["z"].gb_per_s == 100 / 8
    assert times["z"].time_s == pytest.approx(
        3 / 4 * z_bytes / 12.5e9 + num_calls * (CALL_S + 3 * ROUND_S), rel=1e-12
    )
    assert found.exposed_s == times["x"].time_s + times["world"].time_s
    assert found.hidden_s == times["z"].time_s
    assert found.hidden_s > found.compute_s
    assert found.step_s == found.exposed_s + found.hidden_s
    assert found.tokens_per_s == found.num_tokens / found.step_s


def test_hidden_communication_costs_nothing_where_it_is_short() -> None:
    found = estimate(MeshShape(z=4, x=8), NODES, num_tokens=65536, num_labels=65536)
    assert found.hidden_s < found.compute_s
    assert found.step_s == found.exposed_s + found.compute_s


def test_bytes_are_those_of_the_formula_of_traffic() -> None:
    mesh = MeshShape(data=2, z=4, y=2, x=16)
    totals = sum_by_axis(list_collectives(LLAMA_405B, mesh, STEP))
    found = {axis.axis: (axis.num_calls, axis.ring_bytes) for axis in estimate(mesh, NODES).axes}
    assert found == {axis: (calls, ring) for axis, (calls, _, ring) in totals.items()}
    assert set(found) == {"data", "z", "y", "x", "kv_replicas", "world"}


@pytest.mark.parametrize(
    ("machine", "mesh", "axis", "expected"),
    [
        # Inside a node of 8 links count, whatever the axis.
        (NODES, MeshShape(x=8, data=4), "x", 300),
        (NODES, MeshShape(y=4, x=2, data=4), "y", 300),
        (NODES, MeshShape(z=2, y=2, x=2), "z", 300),
        # Across nodes as many rings leave a node as ranks of it lie in different ones.
        (NODES, MeshShape(z=4, x=8), "z", 100 / 8),
        (NODES, MeshShape(z=8, x=2), "z", 100 / 2),
        (NODES, MeshShape(z=16), "z", 100),
        (NODES, MeshShape(x=16), "x", 100),
        (NODES, MeshShape(data=2, z=2, x=8), "data", 100 / 8),
        (NODES, MeshShape(data=2, x=64), "data", 100 / 8),
        # Ranks 6 to 11 lie in two nodes.
        (NODES, MeshShape(data=4, x=6), "x", 100),
        # Fewer ranks than GPUs need no network.
        (NODES, MeshShape(x=6), "x", 300),
        # The order decides who are neighbours.
        (NODES, MeshShape(z=8, x=4, order=("data", "x", "y", "z")), "z", 300),
        (NODES, MeshShape(z=8, x=4, order=("data", "x", "y", "z")), "x", 100 / 8),
        # 4 ranks along x share each of 8 key/value heads.
        (NODES, MeshShape(x=32), "kv_replicas", 300),
        (NODES, MeshShape(x=32), "world", 100),
        # Three neighbours with 100 GB/s each.
        (DIRECT, MeshShape(x=2, data=4), "x", 100),
        (DIRECT, MeshShape(x=4, data=4), "x", 300),
        (DIRECT, MeshShape(z=2, x=2), "z", 100),
        (DIRECT, MeshShape(z=4, x=2), "z", 50),
        # A network faster than the links is as fast as they.
        (NODES.model_copy(update={"network_gb_per_s": 900}), MeshShape(x=16), "x", 300),
    ],
)
def test_bandwidths(machine: Machine, mesh: MeshShape, axis: TrafficAxis, expected: float) -> None:
    degrees = {"kv_replicas": max(1, mesh.x // 8), "world": mesh.num_ranks}
    degree = degrees.get(axis) or mesh.degree(axis)  # type: ignore[arg-type]
    assert compute_gb_per_s(machine, mesh, axis, degree=degree) == pytest.approx(expected)


@pytest.mark.parametrize("faster", ["link_gb_per_s", "network_gb_per_s", "peak_tflops"])
def test_faster_hardware_is_never_slower(faster: str) -> None:
    better = NODES.model_copy(update={faster: 2 * getattr(NODES, faster)})
    meshes = list_meshes(64, LLAMA_405B, batch_size=64)
    pairs = [(estimate(mesh, better).step_s, estimate(mesh, NODES).step_s) for mesh in meshes]
    assert all(new <= old for new, old in pairs)
    assert any(new < old for new, old in pairs)


@pytest.mark.parametrize("name", ["perlmutter", "frontier", "alps", "dgx-h100"])
def test_x_across_nodes_is_slower_than_inside(name: str) -> None:
    """The same degrees of 405B, x once of neighbouring ranks and once of ranks in other nodes."""
    machine = load_machine(name)
    x = machine.gpus_per_node
    inside = estimate(MeshShape(z=64, x=x), machine)
    across = estimate(MeshShape(z=64, x=x, order=("data", "x", "y", "z")), machine)
    assert across.compute_s == inside.compute_s
    assert across.exposed_s > 2 * inside.exposed_s


def test_on_16384_gpus_x_stays_in_its_node_or_pays_for_it() -> None:
    """405B at a batch of 16M tokens, 8 rows at a time on a tensor-parallel group of DGX H100."""
    machine = load_machine("dgx-h100")
    found = {
        (mesh.x, mesh.y): estimate(
            mesh, machine, num_tokens=4 * SEQ_LEN, num_labels=4 * SEQ_LEN
        ).exposed_s
        for mesh in list_meshes(16384, LLAMA_405B, batch_size=8192)
        if mesh.data == 1 and mesh.num_batch_ways * 4 <= 8192
    }
    one_axis = [found[x, 1] for x in (8, 16, 32)]
    assert one_axis == sorted(one_axis)
    # Of 16 ranks, two along y halve what x sends, and y's rings share the network between nodes.
    assert found[8, 2] > found[8, 1]


def test_no_step_is_faster_than_the_machine() -> None:
    machine = load_machine("h200")
    for mesh in list_meshes(512, LLAMA_405B, batch_size=512):
        found = estimate(mesh, machine)
        reached = found.num_flops / found.step_s
        assert reached <= machine.peak_tflops * 1e12 * ATTAINABLE_FRACTION


def test_fp32_takes_twice_as_long() -> None:
    mesh = MeshShape(x=8)
    bf16, fp32 = (estimate(mesh, NODES, compute_bytes=width) for width in (2, 4))
    assert fp32.compute_s == 2 * bf16.compute_s


def test_estimates_without_torch() -> None:
    code = (
        "import memguard.planner.cost, sys; "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
