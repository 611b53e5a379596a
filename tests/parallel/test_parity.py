"""Every mesh gives the numbers of one process: loss, gradients, norm, weights after each step."""

import itertools
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from parity import SINGLE, TIED, UNTIED, Case, Degrees, check, compare, needs_compiler
from ranks import RankPool

from memguard.config.mitigations import (
    ConfidencePenaltyConfig,
    FloodingConfig,
    FocalConfig,
    GradientAscentConfig,
    LabelSmoothingConfig,
    LossClippingConfig,
    NeftuneConfig,
    NgramPenaltyConfig,
    NpoConfig,
)
from memguard.parallel.lora import LoraSpec

pytestmark = pytest.mark.slow

# For what happens in one layer, or before or after all of them.
_ONE_LAYER = (("num_hidden_layers", 1),)
_LOSS = Case(changes=UNTIED + _ONE_LAYER)

_ALL: list[Degrees] = list(itertools.product((1, 2), repeat=4))
_SAMPLE: list[Degrees] = [(1, 1, 2, 2)]
_FAMILIES = {"mistral": (("sliding_window", 4),), "qwen2": (), "qwen3": (("head_dim", 8),)}


def cases_of(degrees: Degrees) -> list[Case]:
    """Tied and untied, accumulation 1 and 2; a third step has moments of two."""
    rows = 8 // (degrees[0] * degrees[1])
    return [
        Case(changes=changes, micro_batch_size=micro, num_steps=3)
        for changes in (TIED, UNTIED)
        for micro in (None, rows // 2)
    ]


@pytest.mark.quick
@pytest.mark.parametrize("degrees", _SAMPLE, ids=str)
def test_a_sample_of_meshes_equals_one_process(ranks: RankPool, degrees: Degrees) -> None:
    tied, *_, untied_and_accumulated = cases_of(degrees)
    check(ranks, degrees, [tied, untied_and_accumulated])


@pytest.mark.mesh
@pytest.mark.parametrize("degrees", _ALL, ids=str)
def test_every_mesh_equals_one_process(ranks: RankPool, degrees: Degrees) -> None:
    check(ranks, degrees, cases_of(degrees))


@pytest.mark.parametrize("kv_heads", [2, pytest.param(1, marks=pytest.mark.mesh)])
def test_ranks_share_key_value_heads_where_x_has_more_ranks_than_heads(
    ranks: RankPool, kv_heads: int
) -> None:
    kv: tuple[tuple[str, Any], ...] = (("num_key_value_heads", kv_heads), *_ONE_LAYER)
    check(ranks, (1, 1, 1, 4), [Case(changes=TIED + kv), Case(changes=UNTIED + kv)])


def test_families_equal_one_process(ranks: RankPool) -> None:
    cases = [Case(family=each, changes=(*_FAMILIES[each], *UNTIED)) for each in _FAMILIES]
    check(ranks, (1, 1, 2, 2), cases)


@pytest.mark.mesh
@pytest.mark.parametrize(
    "degrees", [(2, 1, 1, 2), (1, 2, 2, 1), (1, 1, 1, 4), (1, 2, 2, 4)], ids=str
)
@pytest.mark.parametrize("family", _FAMILIES)
def test_families_equal_one_process_on_more_meshes(
    ranks: RankPool, family: str, degrees: Degrees
) -> None:
    cases = [Case(family=family, changes=(*_FAMILIES[family], *tied)) for tied in (TIED, UNTIED)]
    check(ranks, degrees, cases)


def test_settings_that_save_memory_change_no_number(ranks: RankPool) -> None:
    cases = [
        Case(changes=UNTIED, checkpointing="full"),
        Case(changes=TIED, checkpointing="selective"),
        Case(changes=UNTIED, reshard_after_forward=False, chunk_tokens=1000),
    ]
    check(ranks, (1, 2, 1, 2), cases)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt2"])
def test_compiled_blocks_with_selective_checkpointing_equal_one_process(
    fresh_ranks: RankPool, family: str
) -> None:
    changes = (*_FAMILIES.get(family, ()), *UNTIED)
    case = Case(family=family, changes=changes, checkpointing="selective", compile=True)
    check(fresh_ranks, (1, 1, 2, 2), [replace(case, micro_batch_size=4)])


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(
    ("degrees", "quantization"), [((1, 2, 1, 2), None), ((1, 2, 1, 1), "nf4")], ids=["LoRA", "NF4"]
)
def test_compiled_adapters_equal_one_process(
    fresh_ranks: RankPool, degrees: Degrees, quantization: Literal["nf4"] | None
) -> None:
    adapter = LoraSpec(r=4, alpha=8, dropout=0.25)
    case = Case(changes=UNTIED, checkpointing="full", compile=True, adapter=adapter)
    check(fresh_ranks, degrees, [replace(case, quantization=quantization)])


@pytest.mark.parametrize(
    "degrees", [(1, 2, 1, 2), pytest.param((1, 1, 2, 2), marks=pytest.mark.mesh)], ids=str
)
def test_losses_of_mitigations_equal_one_process(ranks: RankPool, degrees: Degrees) -> None:
    """Smoothed, focal, penalised, clipped and flooded, in accumulation too; some labels climb."""
    chosen: list[tuple[Any, ...]] = [
        (LabelSmoothingConfig(name="label_smoothing", epsilon=0.2),),
        (
            FocalConfig(name="focal", gamma=1.5),
            ConfidencePenaltyConfig(name="confidence_penalty", beta=0.3),
        ),
        # Losses are near log 131 = 4.9 nats.
        (LossClippingConfig(name="loss_clipping", floor=4.7, ceiling=5.2),),
        (FloodingConfig(name="flooding", level=4.9),),
    ]
    cases = [
        replace(_LOSS, mitigations=each, micro_batch_size=micro)
        for each, micro in zip(chosen, (None, 2, 1, 2), strict=True)
    ]
    check(ranks, degrees, cases)


@pytest.mark.parametrize(
    "degrees", [(1, 2, 1, 2), pytest.param((2, 1, 2, 1), marks=pytest.mark.mesh)], ids=str
)
def test_losses_that_compare_with_the_start_equal_one_process(
    ranks: RankPool, degrees: Degrees
) -> None:
    """Windows of 2 and 3 kept labels in pieces of 2 to 10 tokens, half of them forgotten."""
    chosen: list[tuple[Any, ...]] = [
        (NgramPenaltyConfig(name="ngram_penalty", n=2, weight=0.5, margin=0.0),),
        (
            FocalConfig(name="focal", gamma=1.5),
            NgramPenaltyConfig(name="ngram_penalty", n=3, weight=2.0, margin=0.1),
        ),
        (NpoConfig(name="npo", beta=0.3),),
        (
            LabelSmoothingConfig(name="label_smoothing", epsilon=0.2),
            GradientAscentConfig(name="gradient_ascent", ceiling=4.9),
        ),
    ]
    cases = [
        replace(_LOSS, mitigations=each, micro_batch_size=micro, num_steps=1)
        for each, micro in zip(chosen, (None, 1, 2, None), strict=True)
    ]
    check(ranks, degrees, cases)


_NOISE = (NeftuneConfig(name="neftune", alpha=5.0),)
_UNTIED_NOISE = Case(changes=UNTIED + _ONE_LAYER, mitigations=_NOISE, micro_batch_size=2)
_RECOMPUTED_NOISE = Case(changes=TIED + _ONE_LAYER, mitigations=_NOISE, checkpointing="full")


def test_noise_on_embeddings_is_that_of_one_process(ranks: RankPool) -> None:
    """Rows over z and data, features over y, a vocabulary over x, and in accumulation."""
    check(ranks, (1, 2, 2, 1), [_UNTIED_NOISE])
    check(ranks, (2, 1, 1, 2), [_RECOMPUTED_NOISE])


@pytest.mark.mesh
def test_noise_on_embeddings_on_more_meshes(ranks: RankPool) -> None:
    check(ranks, (1, 1, 2, 2), [replace(_UNTIED_NOISE, micro_batch_size=None)])
    check(ranks, (1, 2, 2, 1), [replace(_UNTIED_NOISE, changes=TIED)])


# 6 heads of 8 features, FFN 66; z = 3 cuts 48 rows evenly and 131 unevenly.
_ODD = (
    ("hidden_size", 48),
    ("num_attention_heads", 6),
    ("num_key_value_heads", 3),
    ("intermediate_size", 66),
)


def test_three_ranks_and_sizes_that_do_not_divide(ranks: RankPool) -> None:
    check(ranks, (1, 1, 1, 3), [Case(changes=UNTIED + _ODD)])
    check(ranks, (1, 1, 3, 1), [Case(changes=TIED + _ODD)])


@pytest.mark.mesh
def test_three_ranks_and_a_tied_head_that_does_not_divide(ranks: RankPool) -> None:
    check(ranks, (1, 1, 1, 3), [Case(changes=TIED + _ODD)])


def test_the_order_of_ranks_changes_no_number(ranks: RankPool) -> None:
    check(ranks, (1, 2, 1, 2), [Case(changes=UNTIED, order=("x", "z", "data", "y"))])


def test_single_precision_stays_within_its_rounding(ranks: RankPool) -> None:
    # Here the other side is transformers untouched. One step: AdamW magnifies what differs.
    llama = [Case(changes=each, dtype=torch.float32, num_steps=1) for each in (TIED, UNTIED)]
    check(ranks, (1, 2, 2, 1), llama, SINGLE)


@pytest.mark.mesh
def test_single_precision_of_another_family_stays_within_its_rounding(ranks: RankPool) -> None:
    qwen3 = Case(family="qwen3", changes=UNTIED, dtype=torch.float32, num_steps=1)
    check(ranks, (1, 1, 1, 2), [qwen3], SINGLE)


def test_bf16_arithmetic_stays_near(ranks: RankPool) -> None:
    # 8 bits of mantissa: 4e-3 an operation. Weights and optimizer are fp32, as the other side's.
    case = Case(changes=UNTIED, dtype=torch.float32, compute_dtype=torch.bfloat16, num_steps=1)
    for each in ranks(compare, 4, (1, 2, 1, 2), [case])[0]:
        assert each.loss < 5e-3
        assert each.norm < 3e-2
        assert each.gradient < 0.15, each
