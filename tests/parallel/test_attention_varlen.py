"""Packed rows through varlen attention have the numbers of the path with masks, in float64."""

from typing import Any

import pytest
import torch
from parity import Case, Worst, compare
from ranks import RankPool
from test_packed_rows import LONGEST, ROWS, packed_rows
from tiny_families import build
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from varlen_reference import reference_varlen

from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.parallel.attention import attend_varlen
from memguard.parallel.attention_pieces import Packing
from memguard.parallel.shard import Checkpointing, checkpoint_blocks, compile_blocks

pytestmark = pytest.mark.slow

# Sums in another order.
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def packing_of(rows: list[list[int]], longest: int) -> Packing:
    """Padding is a document of its own."""
    padded = [[*row, longest - sum(row)] if sum(row) < longest else row for row in rows]
    lengths = torch.tensor([0, *(length for row in padded for length in row)])
    return Packing(cu_seqlens=lengths.cumsum(0).int(), max_seqlen=int(lengths.max()))


def gradients(lm: CausalLM, packing: Packing) -> list[Tensor]:
    ids, positions = packed_rows()
    hidden = lm.hidden_states(ids, positions, packing=packing).flatten(0, 1)
    lm.sum_nll(hidden[:-1], ids.flatten()[1:]).backward()
    return [parameter.grad for parameter in lm.model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("family", "heads", "window"),
    [
        ("llama", (4, 2), (-1, 0)),
        ("mistral", (4, 2), (3, 0)),
        ("qwen3", (4, 2), (-1, 0)),
        ("gemma3_text", (4, 2), (3, 0)),
        ("gpt2", (4, 4), (-1, 0)),
        ("gpt_neox", (4, 4), (-1, 0)),
        ("phi3", (4, 2), (-1, 0)),
        ("starcoder2", (4, 2), (3, 0)),
    ],
)
def test_packed_rows_have_the_same_gradients(
    family: str, heads: tuple[int, int], window: tuple[int, int]
) -> None:
    packing = packing_of(ROWS, LONGEST)
    expected = gradients(CausalLM(build(family).double()), packing)
    with reference_varlen() as calls:
        found = gradients(CausalLM(build(family).double()), packing)
    # Keys and values are not repeated.
    assert calls.heads == [heads] * 2
    assert calls.windows == [window] * 2
    assert calls.num_backward == 2
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize(("mode", "num_forward"), [("none", 2), ("selective", 2), ("full", 4)])
def test_checkpointing_keeps_attention_if_it_is_selective(
    mode: Checkpointing, num_forward: int
) -> None:
    packing = packing_of(ROWS, LONGEST)
    expected = gradients(CausalLM(build("llama").double()), packing)
    with reference_varlen() as calls:
        lm = CausalLM(build("llama").double().train())
        checkpoint_blocks(lm.model, mode)
        found = gradients(lm, packing)
    assert len(calls.heads) == num_forward
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_the_head_is_compared_with_the_same_kernel() -> None:
    """In bf16, this kernel and that of a model's own forward differ by more than a head may."""
    with reference_varlen() as calls:
        lm = build_causal_lm(build("llama").bfloat16())
    assert lm.own_head
    # Of two layers: both forwards of the head, and two that look for a leak.
    assert len(calls.heads) == 8


@torch.no_grad()
def test_rows_of_one_document_need_no_positions() -> None:
    ids, _ = packed_rows()
    expected = CausalLM(build("mistral").double()).hidden_states(ids)
    with reference_varlen() as calls:
        found = CausalLM(build("mistral").double()).hidden_states(ids)
    assert len(calls.heads) == 2
    torch.testing.assert_close(found, expected, **CLOSE)


def test_generation_has_a_cache_and_a_mask() -> None:
    ids, _ = packed_rows()
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    expected = build("mistral").generate(ids, **arguments)
    with reference_varlen() as calls:
        found = CausalLM(build("mistral")).model.generate(ids, **arguments)
    assert torch.equal(found, expected)
    assert calls.heads == []


def test_dropout_of_attention_has_a_mask() -> None:
    """`varlen_attn` has no dropout; at 1e-9 nothing is dropped."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, LONGEST, 8, dtype=torch.float64, generator=draw)
    key, value = torch.randn(2, 3, 2, LONGEST, 8, dtype=torch.float64, generator=draw)
    packing = packing_of(ROWS, LONGEST)
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    arguments: dict[str, Any] = {
        "sliding_window": 3,
        "cu_seq_lens_q": packing.cu_seqlens,
        "max_length_q": packing.max_seqlen,
    }
    with reference_varlen() as calls:
        expected, _ = attend_varlen(module, query, key, value, None, **arguments)
        found, _ = attend_varlen(module, query, key, value, None, 1e-9, **arguments)
    assert len(calls.heads) == 1
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


# Dynamo looks at the gradient of the block's input, which has none.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    ("mode", "num_forward"),
    [
        ("selective", 1),
        pytest.param("none", 1, marks=pytest.mark.long),
        pytest.param("full", 2, marks=pytest.mark.long),
    ],
)
def test_blocks_are_not_compiled_for_every_packing(
    mode: Checkpointing, num_forward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a compiled block that keeps attention does not compute it again either."""
    rows = [[[5, 3], [8]], [[2, 2, 4], [3, 5]], [[1, 2, 3, 2], [6, 2]], [[4, 4], [7, 1]]]
    rows.append([[8], [8]])
    counter = CompileCounterWithBackend("aot_eager_decomp_partition")
    compile_plainly = torch.compile

    def compile_here(model: Any = None, **options: Any) -> Any:
        return compile_plainly(model, **{**options, "backend": counter})

    monkeypatch.setattr(torch, "compile", compile_here)
    torch._dynamo.reset()
    frames = []
    with reference_varlen() as calls:
        lm = CausalLM(build("llama", num_hidden_layers=1).train())
        checkpoint_blocks(lm.model, mode)
        compile_blocks(lm.model)
        for lengths in rows:
            ids = torch.arange(3, 19).reshape(2, 8)
            positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
            lm.hidden_states(ids, positions, packing=packing_of(lengths, 8)).sum().backward()
            frames.append(counter.frame_count)
    assert len(calls.heads) == num_forward * len(rows)
    assert calls.num_backward == len(rows)
    # The second, because the numbers of documents and of tokens of the longest are others.
    assert frames == [1, 2, 2, 2, 2]


def compare_varlen(
    degrees: tuple[int, int, int, int], cases: list[Case]
) -> tuple[list[Worst], list[tuple[int, int]], int]:
    """As `compare`, with varlen attention on the side of the mesh."""
    with reference_varlen() as calls:
        worst = compare(degrees, cases)
    return worst, calls.heads, calls.num_backward


def check(
    ranks: RankPool, degrees: tuple[int, int, int, int], cases: list[Case], heads: tuple[int, int]
) -> None:
    world_size = torch.Size(degrees).numel()
    for worst, seen, num_backward in ranks(compare_varlen, world_size, degrees, cases):
        assert set(seen) == {heads}
        assert num_backward > 0
        for case in worst:
            # The limits of test_parity.py: float64, sums in another order, magnified by AdamW.
            assert max(case.loss, case.gradient, case.norm) <= 1e-10, case
            assert case.weight <= 1e-9, case


def test_a_mesh_equals_one_process(ranks: RankPool) -> None:
    """Two ranks of x share the one key head."""
    kv: tuple[tuple[str, Any], ...] = (("num_key_value_heads", 1),)
    cases = [Case(changes=kv, checkpointing="selective", micro_batch_size=4, num_steps=2)]
    check(ranks, (1, 1, 1, 2), cases, (2, 1))


@pytest.mark.mesh
@pytest.mark.parametrize(
    "degrees",
    [(2, 2, 1, 1), (1, 2, 1, 2), (2, 1, 2, 1), (1, 1, 2, 2), (1, 1, 4, 1), (1, 1, 1, 4)],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_more_meshes_equal_one_process(
    ranks: RankPool, degrees: tuple[int, int, int, int], family: str
) -> None:
    cases = [Case(family=family), Case(family=family, checkpointing="full")]
    # Four ranks of x have one query head each, and share the two key heads.
    heads = 4 // degrees[3], max(1, 2 // degrees[3])
    check(ranks, degrees, cases, heads)


@pytest.mark.mesh
def test_bf16_arithmetic_stays_near(ranks: RankPool) -> None:
    case = Case(dtype=torch.float32, compute_dtype=torch.bfloat16, num_steps=1)
    for (worst,), *_ in ranks(compare_varlen, 4, (1, 2, 1, 2), [case]):
        # The limits of test_parity.py.
        assert worst.loss < 5e-3
        assert worst.norm < 3e-2
        assert worst.gradient < 0.15
