"""Estimated computing time: operations as torch counts them, shapes, precisions and passes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from planner_models import TINY
from published_sizes import LLAMA_405B
from torch.utils.flop_counter import FlopCounterMode

from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.parallel.shard import checkpoint_blocks
from memguard.planner.compute import (
    ATTENTION_SHARE,
    EAGER_PASSES,
    MATMUL_SHARE,
    ComputeTimes,
    count_flops,
    estimate_compute,
)
from memguard.planner.machine import Machine, load_machine
from memguard.planner.step_settings import StepSettings

NUM_PARAMETERS_405B = 405_853_388_800
SEQ_LEN = 2048
STEP = StepSettings(
    num_tokens=SEQ_LEN,
    num_labels=SEQ_LEN,
    chunk_tokens=SEQ_LEN,
    checkpointing="full",
    has_mask=False,
)
H100 = load_machine("dgx-h100")


def estimate(mesh: MeshShape, machine: Machine = H100, **changes: Any) -> ComputeTimes:
    return estimate_compute(LLAMA_405B, mesh, replace(STEP, **changes), machine, seq_len=SEQ_LEN)


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


def test_a_block_computed_by_hand() -> None:
    """405B over x = 8: its matmuls, attention and element-wise work."""
    block = estimate(MeshShape(x=8), is_compiled=True).block
    hidden, queries, keys, width = 16384, 128 * 128 // 8, 8 * 128 // 8, 53248 // 8

    def matmul_s(outs: int, ins: int) -> float:
        operations = 2 * SEQ_LEN * outs * ins / (989e12 * MATMUL_SHARE)
        return operations + 2 * (SEQ_LEN * outs + outs * ins + ins * SEQ_LEN) / 3350e9

    down_s = matmul_s(hidden, width)
    assert block.weight_gradients_s["down"] == pytest.approx(down_s, rel=1e-12)
    matmuls_s = matmul_s(queries, hidden) + 2 * matmul_s(keys, hidden) + matmul_s(hidden, queries)
    matmuls_s += 2 * matmul_s(width, hidden) + down_s
    attention_s = 4 * SEQ_LEN * queries * (SEQ_LEN + 1) / 2 / (989e12 * ATTENTION_SHARE)
    other_s = 2 * SEQ_LEN * (8 * hidden + 2 * (queries + keys) + 3 * width) / 3350e9
    assert block.forward_s == pytest.approx(matmuls_s + attention_s + other_s, rel=1e-12)
    assert block.again_s == pytest.approx(block.forward_s - down_s, rel=1e-12)
    assert block.backward_s == pytest.approx(
        2 * matmuls_s + 2.5 * attention_s + 2 * other_s, rel=1e-12
    )


def test_a_mask_is_read_by_each_head() -> None:
    with_mask, without = (
        estimate(MeshShape(x=8), checkpointing="none", has_mask=has_mask).block
        for has_mask in (True, False)
    )
    mask_s = 128 // 8 * SEQ_LEN * (SEQ_LEN + 1) / 2 * 2 / 3350e9
    assert with_mask.forward_s - without.forward_s == pytest.approx(mask_s, rel=1e-6)
    assert with_mask.backward_s - without.backward_s == pytest.approx(2.5 * mask_s, rel=1e-6)


def test_matmuls_with_short_sides_reach_less_of_the_peak() -> None:
    shares = []
    for mesh, num_tokens in ((MeshShape(), 16384), (MeshShape(x=32), 16384), (MeshShape(), 64)):
        block = estimate(mesh, num_tokens=num_tokens).block
        operations = 2 * num_tokens * 16384 * 2 * 53248 / mesh.x
        shares.append(operations / block.weight_gradients_s["gate|up"] / 989e12)
    assert 0.95 * MATMUL_SHARE < shares[0] < MATMUL_SHARE
    assert shares[0] > 1.05 * shares[1] > 2 * shares[2]


def test_separate_kernels_cost_element_wise_work_several_times() -> None:
    eager, compiled = (
        estimate(MeshShape(), checkpointing="selective", is_compiled=is_compiled).block
        for is_compiled in (False, True)
    )
    # Selective checkpointing computes element-wise work again, and nothing else.
    assert eager.again_s == pytest.approx(EAGER_PASSES * compiled.again_s, rel=1e-12)
    added_s = eager.again_s - compiled.again_s
    assert eager.forward_s - compiled.forward_s == pytest.approx(added_s, rel=1e-9)
    assert eager.backward_s - compiled.backward_s == pytest.approx(2 * added_s, rel=1e-9)


def test_norms_and_residuals_are_split_over_y_and_repeated_over_x() -> None:
    def other_s(mesh: MeshShape) -> float:
        return estimate(mesh, checkpointing="selective").block.again_s

    over_x, over_y = other_s(MeshShape(x=8)), other_s(MeshShape(y=8))
    bytes_per_s = 3350e9 / EAGER_PASSES
    attention_and_mlp = 2 * (128 + 8) * 128 + 3 * 53248
    residuals = 8 * 16384
    x_bytes = 2 * SEQ_LEN * (attention_and_mlp / 8 + residuals)
    y_bytes = 2 * SEQ_LEN * (attention_and_mlp + residuals / 8)
    assert over_x == pytest.approx(x_bytes / bytes_per_s, rel=1e-12)
    assert over_y == pytest.approx(y_bytes / bytes_per_s, rel=1e-12)


def test_sharded_weights_are_copied_in_and_out_of_their_buffers() -> None:
    alone, sharded, kept = (
        estimate(MeshShape(z=z), reshard_after_forward=reshard).block
        for z, reshard in ((1, True), (8, True), (8, False))
    )
    num_elements = (NUM_PARAMETERS_405B - 2 * 128256 * 16384 - 16384) / 126
    gather_s, reduce_s = 4 * num_elements / 3350e9, 6 * num_elements / 3350e9
    assert sharded.forward_s - alone.forward_s == pytest.approx(gather_s, rel=1e-6)
    assert sharded.backward_s - alone.backward_s == pytest.approx(gather_s + reduce_s, rel=1e-6)
    assert kept.backward_s - alone.backward_s == pytest.approx(reduce_s, rel=1e-6)


def test_fp32_has_the_peak_of_tf32_on_nvidia_and_its_own_elsewhere() -> None:
    assert H100.peak_flops(4) == H100.peak_flops(2) / 2
    frontier = load_machine("frontier")
    assert frontier.peak_flops(4) == 47.9e12
    bf16, fp32 = (estimate(MeshShape(x=8), compute_bytes=width).block for width in (2, 4))
    assert fp32.forward_s == pytest.approx(2 * bf16.forward_s, rel=1e-12)


def test_the_update_reads_and_writes_what_a_rank_stores() -> None:
    whole, share = (estimate(MeshShape(z=z)).update_s for z in (1, 128))
    assert whole == pytest.approx(36 * NUM_PARAMETERS_405B / 3350e9, rel=1e-12)
    assert share == pytest.approx(whole / 128, rel=1e-3)
