"""Estimated computing time: operations as torch counts them, shapes, precisions and passes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from planner_models import TINY
from published_sizes import LLAMA_405B
from step_flops import count_flops
from torch.utils.flop_counter import FlopCounterMode

from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.parallel.shard import checkpoint_blocks
from memguard.planner.compute import (
    ATTENTION_SHARE,
    ELEMENT_SHARE,
    KERNEL_S,
    MATMUL_SHARE,
    MEMORY_SHARE,
    ComputeTimes,
    attention_curve,
    estimate_compute,
    time_matmul,
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
        operations_s = 2 * SEQ_LEN * outs * ins / (989e12 * 0.803)
        num_bytes = 2 * (SEQ_LEN * outs + outs * ins + ins * SEQ_LEN)
        return (max(operations_s, num_bytes / (3350e9 * MEMORY_SHARE)) + KERNEL_S) / MATMUL_SHARE

    def attention_s(*, is_backward: bool) -> float:
        operations = 4 * SEQ_LEN * queries * (SEQ_LEN + 1) / 2 * (2.5 if is_backward else 1)
        # FlashAttention-2 on an H100, rows of 2,048: forward 298 TFLOP/s as published; backward is
        # what remains of 265 for both: 5 / (7 / 265 - 2 / 298).
        speed = 5 / (7 / 265 - 2 / 298) if is_backward else 298
        return operations / (989e12 * 0.332 * speed / 328 * ATTENTION_SHARE)

    down_s = matmul_s(hidden, width)
    assert block.weight_gradients_s["down"] == pytest.approx(down_s, rel=1e-12)
    matmuls_s = matmul_s(queries, hidden) + 2 * matmul_s(keys, hidden) + matmul_s(hidden, queries)
    matmuls_s += 2 * matmul_s(width, hidden) + down_s
    elements = 8 * hidden + 2 * (queries + keys) + 3 * width
    other_s = 2 * SEQ_LEN * elements / (3350e9 * ELEMENT_SHARE)
    forward_s = attention_s(is_backward=False)
    assert block.forward_s == pytest.approx(matmuls_s + forward_s + other_s, rel=1e-12)
    assert block.again_s == pytest.approx(block.forward_s - down_s, rel=1e-12)
    assert block.backward_s == pytest.approx(
        2 * matmuls_s + attention_s(is_backward=True) + 2 * other_s, rel=1e-12
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
    for mesh, num_tokens in ((MeshShape(), 16384), (MeshShape(x=32), 2048), (MeshShape(), 64)):
        block = estimate(mesh, num_tokens=num_tokens).block
        operations = 2 * num_tokens * 16384 * 2 * 53248 / mesh.x
        shares.append(operations / block.weight_gradients_s["gate|up"] / 989e12)
    largest = MATMUL_SHARE * H100.matmul_share
    assert 0.99 * largest < shares[0] < largest
    assert shares[0] > 1.03 * shares[1] > 2 * shares[2]


@pytest.mark.parametrize(
    ("rows", "outs", "ins", "measured"),
    [
        # TFLOP/s of some of the products in XLA's table for an H100.
        (4096, 4096, 4096, 783),
        (4096, 4096, 1024, 677),
        (4096, 4096, 256, 392),
        (4096, 1024, 4096, 738),
        (2048, 2048, 2048, 632),
        (4096, 512, 1024, 371),
        (1024, 1024, 1024, 236),
        (512, 512, 512, 40.7),
        (256, 256, 256, 6.5),
    ],
)
def test_matmuls_take_what_was_measured(rows: int, outs: int, ins: int, measured: float) -> None:
    seconds = time_matmul(
        rows, outs, ins, element_bytes=2, flops_per_s=989e12 * H100.matmul_share, bytes_per_s=3350e9
    )
    # Nine of ten products of the table are within 14 %; those in between of a full and an empty
    # GPU, with sides of about 1,024, are the worst.
    assert 2 * rows * outs * ins / seconds / 1e12 == pytest.approx(measured, rel=0.25)


def test_attention_is_slower_over_short_rows_and_in_backward() -> None:
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    forward, backward = (
        [attention_curve(length, is_backward=is_backward) for length in lengths]
        for is_backward in (False, True)
    )
    assert forward == sorted(forward)
    assert backward == sorted(backward)
    assert all(back < ahead for back, ahead in zip(backward, forward, strict=True))
    # Both together are what is published: 2 and 5 matmuls in the time of 7.
    for length, together in zip(lengths, (163, 221, 265, 294, 308, 328), strict=True):
        times = [
            number / attention_curve(length, is_backward=is_backward)
            for number, is_backward in ((2, False), (5, True))
        ]
        assert 7 / sum(times) == pytest.approx(together / 328, rel=1e-12)
    # Between and beyond the measured lengths.
    assert forward[1] < attention_curve(1500, is_backward=False) < forward[2]
    assert attention_curve(100, is_backward=False) == forward[0]
    assert attention_curve(10**6, is_backward=True) == backward[-1]


def other_s(mesh: MeshShape, *, is_compiled: bool = False) -> float:
    """Element-wise work of a block: what selective checkpointing computes again."""
    step = estimate(mesh, checkpointing="selective", is_compiled=is_compiled)
    return step.block.again_s


def test_separate_kernels_move_more() -> None:
    bytes_per_s = 3350e9 * ELEMENT_SHARE
    attention, width = (128 + 8) * 128, 53248
    for mesh, is_compiled, norms, rotary, swiglu in (
        (MeshShape(z=8), True, 8, 2, 3),
        (MeshShape(z=8), False, 14, 10, 5),
        # A part of the features, and transformers' own modules.
        (MeshShape(y=8), False, 42, 10, 5),
        (MeshShape(), False, 42, 10, 5),
    ):
        elements = norms * 16384 / mesh.y + rotary * attention + swiglu * width
        found = other_s(mesh, is_compiled=is_compiled)
        assert found == pytest.approx(2 * SEQ_LEN * elements / bytes_per_s, rel=1e-12)
    eager, compiled = (
        estimate(MeshShape(z=8), is_compiled=is_compiled).block for is_compiled in (False, True)
    )
    added_s = other_s(MeshShape(z=8)) - other_s(MeshShape(z=8), is_compiled=True)
    assert eager.forward_s - compiled.forward_s == pytest.approx(added_s, rel=1e-9)
    assert eager.backward_s - compiled.backward_s == pytest.approx(2 * added_s, rel=1e-9)


def test_norms_and_residuals_are_split_over_y_and_repeated_over_x() -> None:
    over_x, over_y = (other_s(mesh, is_compiled=True) for mesh in (MeshShape(x=8), MeshShape(y=8)))
    bytes_per_s = 3350e9 * ELEMENT_SHARE
    attention_and_mlp = 2 * (128 + 8) * 128 + 3 * 53248
    residuals = 8 * 16384
    x_bytes = 2 * SEQ_LEN * (attention_and_mlp / 8 + residuals)
    y_bytes = 2 * SEQ_LEN * (attention_and_mlp + residuals / 8)
    assert over_x == pytest.approx(x_bytes / bytes_per_s, rel=1e-12)
    assert over_y == pytest.approx(y_bytes / bytes_per_s, rel=1e-12)


def test_sharded_weights_are_copied_in_and_out_of_their_buffers() -> None:
    alone, sharded, kept = (
        # Compiled: one process has other norms than eight.
        estimate(MeshShape(z=z), reshard_after_forward=reshard, is_compiled=True).block
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
    # All but the begin and end of seven matmuls, which takes as long.
    fixed_s = 7 * KERNEL_S / MATMUL_SHARE
    assert fp32.forward_s - fixed_s == pytest.approx(2 * (bf16.forward_s - fixed_s), rel=1e-12)


def test_the_update_reads_and_writes_what_a_rank_stores() -> None:
    whole, share = (estimate(MeshShape(z=z)).update_s for z in (1, 128))
    assert whole == pytest.approx(36 * NUM_PARAMETERS_405B / 3350e9, rel=1e-12)
    assert share == pytest.approx(whole / 128, rel=1e-3)
