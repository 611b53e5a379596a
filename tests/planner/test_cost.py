"""Estimated steps: counted by hand and by torch, and never better for being on worse hardware."""

from dataclasses import replace
from typing import Any

import pytest
from fake_step import list_collectives
from planner_models import sum_by_axis
from published_sizes import LLAMA_405B
from step_flops import count_flops

from memguard.parallel.mesh_shape import MeshShape, list_meshes
from memguard.planner.compute import MATMUL_SHARE, ComputeTimes, estimate_compute
from memguard.planner.cost import (
    CALL_S,
    LINK_SHARE,
    OVERLAP_SHARE,
    ROUND_S,
    AxisTime,
    StepEstimate,
    compute_gb_per_s,
    estimate_step,
)
from memguard.planner.machine import Machine, load_machine
from memguard.planner.step_settings import StepSettings, stores_parts
from memguard.planner.traffic import TrafficAxis

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


def estimate(mesh: MeshShape, machine: Machine, **changes: Any) -> StepEstimate:
    return estimate_step(LLAMA_405B, mesh, replace(STEP, **changes), machine, seq_len=SEQ_LEN)


def times(found: StepEstimate) -> dict[str, AxisTime]:
    return {axis.axis: axis for axis in found.axes}


def block_s(compute: ComputeTimes) -> float:
    block = compute.block
    return block.forward_s + block.again_s + block.backward_s


def test_a_step_computed_by_hand() -> None:
    """Axis x within a node of 8, z of 4 across 4 nodes: 8 rings leave each of them."""
    mesh = MeshShape(z=4, x=8)
    found = estimate(mesh, NODES)
    compute = estimate_compute(LLAMA_405B, mesh, STEP, NODES, seq_len=SEQ_LEN)
    assert found.num_tokens == 4 * SEQ_LEN
    assert found.compute_s == 126 * block_s(compute) + compute.ends_s + compute.update_s
    axes = times(found)
    assert set(axes) == {"x", "z", "world"}
    # x, all-reduces in bf16: 4 a block and 1 computed again; of the head the gradient, the
    # embedding, and maxima and sums in fp32. Each block's stored input is gathered.
    activations, statistics = SEQ_LEN * 16384 * 2, SEQ_LEN * 4
    x_bytes = (5 * 126 + 2) * activations + 3 * statistics
    num_calls = 5 * 126 + 2 + 2
    once = CALL_S + 2 * 3 * ROUND_S
    num_gathers = 126 if stores_parts(mesh, STEP) else 0
    gather_s = 7 / 8 * activations / (300e9 * LINK_SHARE) + CALL_S + 7 * ROUND_S
    assert axes["x"].num_calls == num_calls + num_gathers
    assert axes["x"].time_s == pytest.approx(
        2 * 7 / 8 * x_bytes / (300e9 * LINK_SHARE) + num_calls * once + num_gathers * gather_s,
        rel=1e-12,
    )
    # In backward each block reduces twice, while weight gradients are computed.
    one_s = 2 * 7 / 8 * activations / (300e9 * LINK_SHARE) + once
    hidden_s = sum(
        min(one_s, compute.block.weight_gradients_s[group]) for group in ("q|k|v", "gate|up")
    )
    assert axes["x"].time_s - axes["x"].exposed_s == pytest.approx(126 * hidden_s, rel=1e-9)
    # z: weights in bf16, a block's twice, gradients in fp32. A rank along x has an eighth, but for
    # the norms, which it has whole.
    norms = 126 * 2 * 16384
    blocks = (NUM_PARAMETERS_405B - 2 * 128256 * 16384 - 16384 - norms) / 8 + norms
    others = 2 * 128256 * 16384 / 8 + 16384
    num_calls = 3 * 126 + 2 * 3

    def z_s(num_bytes: float, calls: int) -> float:
        return 3 / 4 * num_bytes / (12.5e9 * LINK_SHARE) + calls * (CALL_S + 3 * ROUND_S)

    assert axes["z"].num_calls == num_calls
    assert axes["z"].gb_per_s == 100 / 8
    z_bytes = (2 + 2 + 4) * blocks + (2 + 4) * others
    assert axes["z"].time_s == pytest.approx(z_s(z_bytes, num_calls), rel=1e-12)
    # One row a rank on this network: each block waits for its weights. x has other wires.
    x_forward_s, x_backward_s = 2 * one_s, 3 * one_s - hidden_s + num_gathers / 126 * gather_s
    free = 126 * (compute.block.forward_s + x_forward_s)
    free += 126 * (compute.block.again_s + compute.block.backward_s + x_backward_s)
    table = 128256 * 16384 / 8
    first_and_last = z_s((2 + 4) * blocks / 126, 2) + z_s((2 + 4) * table, 2)
    # The block in whose forward the head's weights are gathered takes longer than that.
    head_s = z_s(2 * table, 1) + z_s(2 * 16384, 1)
    unused = max(0.0, compute.block.forward_s + x_forward_s - head_s)
    waits = axes["z"].time_s - first_and_last - (free - unused)
    assert axes["z"].exposed_s == pytest.approx(first_and_last + waits, rel=1e-9)
    assert found.exposed_s == pytest.approx(sum(axis.exposed_s for axis in found.axes))
    assert found.slowed_s == found.compute_s + OVERLAP_SHARE * found.hidden_s
    assert found.step_s == found.slowed_s + found.exposed_s
    assert found.tokens_per_s == found.num_tokens / found.step_s


def test_of_short_gathers_only_the_first_and_the_last_reduction_are_exposed() -> None:
    found = estimate(MeshShape(z=4, x=8), NODES, num_tokens=65536, num_labels=65536)
    z = times(found)["z"]
    norms = 2 * 16384
    block = (NUM_PARAMETERS_405B - 2 * 128256 * 16384 - 16384 - 126 * norms) / 126 / 8 + norms
    num_bytes = (2 + 4) * (block + 128256 * 16384 / 8)
    first_and_last = 3 / 4 * num_bytes / (12.5e9 * LINK_SHARE) + 4 * (CALL_S + 3 * ROUND_S)
    assert z.exposed_s == pytest.approx(first_and_last, rel=1e-9)
    assert found.hidden_s > 20 * z.exposed_s


def test_z_has_no_compute_to_hide_behind_at_short_rows() -> None:
    """Exposed time grows from the first gather to nearly everything as rows get shorter."""
    mesh = MeshShape(z=16, x=8)
    shares = []
    for num_tokens in (65536, 4096, 256):
        z = times(estimate(mesh, NODES, num_tokens=num_tokens, num_labels=num_tokens))["z"]
        shares.append(z.exposed_s / z.time_s)
    assert shares == sorted(shares)
    assert shares[0] < 0.05
    assert shares[-1] > 0.8


def test_y_across_nodes_takes_the_network_from_z() -> None:
    """The same y, once within a node and once across: z's bandwidth is the same, its gaps not."""
    inside = MeshShape(z=8, y=2, x=4)
    across = MeshShape(z=8, y=2, x=8)
    gaps = {}
    for mesh in (inside, across):
        found = times(estimate(mesh, NODES))
        compute = estimate_compute(LLAMA_405B, mesh, STEP, NODES, seq_len=SEQ_LEN)
        assert found["z"].gb_per_s == 100 / 8
        hidden_s = found["z"].time_s - found["z"].exposed_s
        x_y_s = found["x"].exposed_s + found["y"].exposed_s
        gaps[mesh.x] = hidden_s / (126 * block_s(compute) + x_y_s)
    assert gaps[4] > 0.95, "the network is free while x and y use links"
    assert gaps[8] < 0.8


def test_gradients_over_data_are_reduced_in_the_last_micro_batch_only() -> None:
    mesh = MeshShape(data=2, z=4, x=8)
    one, four = (times(estimate(mesh, NODES, num_micro_batches=many)) for many in (1, 4))
    assert four["data"] == one["data"]
    assert four["z"].num_calls == 4 * one["z"].num_calls
    assert four["x"].time_s == pytest.approx(4 * one["x"].time_s, rel=1e-12)


def test_bytes_are_those_of_the_formula_of_traffic() -> None:
    mesh = MeshShape(data=2, z=4, y=2, x=16)
    step = replace(STEP, num_micro_batches=3)
    totals = sum_by_axis(list_collectives(LLAMA_405B, mesh, step))
    axes = estimate(mesh, NODES, num_micro_batches=3).axes
    found = {axis.axis: (axis.num_calls, pytest.approx(axis.ring_bytes)) for axis in axes}
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


@pytest.mark.parametrize(
    "faster", ["link_gb_per_s", "network_gb_per_s", "memory_gb_per_s", "peak_tflops"]
)
def test_faster_hardware_is_never_slower(faster: str) -> None:
    better = NODES.model_copy(update={faster: 2 * getattr(NODES, faster)})
    meshes = list_meshes(64, LLAMA_405B, batch_size=64)
    pairs = [(estimate(mesh, better).step_s, estimate(mesh, NODES).step_s) for mesh in meshes]
    # Exposed time of x that z no longer hides behind is rounded differently.
    assert all(new <= old * (1 + 1e-12) for new, old in pairs)
    assert any(new < 0.999 * old for new, old in pairs)


@pytest.mark.parametrize("name", ["perlmutter", "frontier", "alps", "dgx-h100"])
def test_x_across_nodes_is_slower_than_inside(name: str) -> None:
    """The same degrees of 405B, x once of neighbouring ranks and once of ranks in other nodes."""
    machine = load_machine(name)
    x = machine.gpus_per_node
    inside = estimate(MeshShape(z=64, x=x), machine)
    across = estimate(MeshShape(z=64, x=x, order=("data", "x", "y", "z")), machine)
    assert across.compute_s == inside.compute_s
    assert times(across)["x"].exposed_s > 2 * times(inside)["x"].exposed_s


def test_on_16384_gpus_x_stays_in_its_node_or_pays_for_it() -> None:
    """405B at a batch of 16M tokens, 8 rows at a time on a tensor-parallel group of DGX H100."""
    machine = load_machine("dgx-h100")
    found = {
        (mesh.x, mesh.y): sum(
            axis.exposed_s
            for axis in estimate(mesh, machine, num_tokens=4 * SEQ_LEN, num_labels=4 * SEQ_LEN).axes
            if axis.axis in ("x", "y")
        )
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
        reached = count_flops(LLAMA_405B, mesh, STEP, seq_len=SEQ_LEN) / found.step_s
        assert reached <= machine.peak_tflops * 1e12 * machine.matmul_share * MATMUL_SHARE
