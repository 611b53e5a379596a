"""Blocks made from cu_seqlens show what the masks show; caps and sinks equal the families' own."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention_varlen import packing_of
from test_packed_rows import LONGEST, ROWS, packed_rows
from tiny_families import LARGE_HEADS, build
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, flex_attention
from varlen_reference import reference_varlen

from memguard.model.causal_lm import CausalLM
from memguard.parallel import attention_flex
from memguard.parallel.attention_flex import attend_flex, make_block_mask, make_block_masks
from memguard.parallel.attention_pieces import Packing, find_first_keys, make_dense_mask
from memguard.parallel.hf_plan import find_blocks

pytestmark = pytest.mark.slow

BLOCK = 128


@st.composite
def packings(draw: Any) -> tuple[list[list[int]], int]:
    """Lengths of documents in up to three rows of one length."""
    num_tokens = draw(st.integers(1, 600))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.sets(st.integers(1, num_tokens), max_size=5)) | {0, num_tokens}
        rows.append(np.diff(sorted(cuts)).tolist())
    return rows, num_tokens


def dense_mask(rows: list[list[int]], window: int | None) -> torch.Tensor:
    """[B, T, T] by the definition: the same document, not later, not behind the window."""
    masks = []
    for lengths in rows:
        document = np.repeat(np.arange(len(lengths)), lengths)
        before = np.subtract.outer(np.arange(len(document)), np.arange(len(document)))
        seen = (document[:, None] == document) & (before >= 0)
        masks.append(seen if window is None else seen & (before < window))
    return torch.from_numpy(np.stack(masks))


@settings(max_examples=60, deadline=None)
@given(packed=packings(), window=st.none() | st.integers(1, 400))
def test_blocks_show_what_the_mask_shows(
    packed: tuple[list[list[int]], int], window: int | None
) -> None:
    rows, num_tokens = packed
    expected = dense_mask(rows, window)
    first_BT = find_first_keys(packing_of(rows, num_tokens).cu_seqlens, *expected.shape[:2], window)
    assert torch.equal(make_dense_mask(first_BT)[:, 0], expected)

    mask = make_block_mask(first_BT)
    size = -(-num_tokens // BLOCK)
    padded = torch.zeros(len(rows), size * BLOCK, size * BLOCK, dtype=torch.bool)
    padded[:, :num_tokens, :num_tokens] = expected
    blocks = padded.unflatten(2, (size, BLOCK)).unflatten(1, (size, BLOCK))
    is_needed = blocks.any(dim=(2, 4))
    for row in range(len(rows)):
        for query in range(size):
            partial = read(mask.kv_num_blocks, mask.kv_indices, row, query)
            full = read(mask.full_kv_num_blocks, mask.full_kv_indices, row, query)
            # Neither is another block computed, nor one of them twice.
            assert sorted(partial + full) == is_needed[row, query].nonzero().flatten().tolist()
            last = min(BLOCK, num_tokens - query * BLOCK)
            assert all(blocks[row, query, :last, key].all() for key in full)
    place = torch.arange(num_tokens)
    seen = mask.mask_mod(
        torch.arange(len(rows))[:, None, None],
        place,
        place[:, None],
        place,  # type: ignore[arg-type]
    )
    assert torch.equal(seen, expected)


def read(counts: Any, indices: Any, row: int, query: int) -> list[int]:
    listed: list[int] = indices[row, 0, query, : counts[row, 0, query]].tolist()
    return listed


def test_rows_of_one_document() -> None:
    packing = Packing.of_equal_documents(2, 3, device=torch.device("cpu"))
    assert packing.cu_seqlens.tolist() == [0, 3, 6]
    assert packing.cu_seqlens.dtype == torch.int32
    assert packing.max_seqlen == 3


def test_documents_without_tokens_change_nothing() -> None:
    ends = torch.tensor([0, 0, 2, 2, 3, 5, 6, 6], dtype=torch.int32)
    assert find_first_keys(ends, 2, 3).tolist() == [[0, 0, 2], [0, 0, 2]]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention by its formula; it has no backward on the CPU either way."""
    monkeypatch.setattr(attention_flex, "_compiled", lambda: flex_attention)


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
@torch.no_grad()
def test_packed_documents_have_the_numbers_they_have_alone(family: str) -> None:
    """The window of gemma2 here is 4 tokens, the cap 50 and scores below 10."""
    changes: dict[str, Any] = {"sliding_window": 4, **LARGE_HEADS}
    if family == "gemma2":
        changes["attn_logit_softcapping"] = 2.0
    model = build(family, **changes)
    ids, positions = packed_rows()
    alone = [
        model.base_model(input_ids=document[None], use_cache=False).last_hidden_state[0]
        for row, lengths in zip(ids, ROWS, strict=True)
        for document in row[: sum(lengths)].split(lengths)
    ]
    with reference_varlen():
        lm = CausalLM(build(family, **changes))
        hidden = lm.hidden_states(ids, positions, packing=packing_of(ROWS, LONGEST))
    assert lm.attention.kernel == "flex"
    packed = [
        part
        for row, lengths in zip(hidden, ROWS, strict=True)
        for part in row[: sum(lengths)].split(lengths)
    ]
    for ours, theirs in zip(packed, alone, strict=True):
        # fp32, sums in another order; one key more or less changes tenths.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def attend_densely(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    score_mod: Any,
    block_mask: Any,
    scale: float,
    return_aux: AuxRequest,
    **_: Any,
) -> tuple[torch.Tensor, AuxOutput]:
    """Flex attention by its documentation, all pairs at once, with gradients."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = query @ key.mT * scale
    row, place = torch.arange(len(query)), torch.arange(query.shape[2])
    at = row[:, None, None, None], torch.zeros(1, dtype=torch.int64), place[:, None], place
    if score_mod is not None:
        scores = score_mod(scores, *at)
    scores = scores.masked_fill(~block_mask.mask_mod(*at), -torch.inf)
    lse = scores.logsumexp(-1) if return_aux.lse else None
    return scores.softmax(-1) @ value, AuxOutput(lse=lse)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_gradients_are_those_of_the_familys_own_attention(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_flex, "_compiled", lambda: attend_densely)
    layer = build(family).double().model.layers[0].self_attn
    packing = packing_of(ROWS, LONGEST)
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, heads, LONGEST, 8) for heads in (4, 2, 2)]
    tensors = [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]
    arguments: dict[str, Any] = {"scaling": 0.3, "sliding_window": 3}
    if family == "gpt_oss":
        arguments["s_aux"] = layer.sinks
    else:
        arguments["softcap"] = 2.0
    masks = make_block_masks(packing.cu_seqlens, 3, LONGEST, (3,))
    results = []
    for packed in ({"block_masks": masks}, {}):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        mask = None if packed else bias_of(ROWS, LONGEST, 3).double()
        attended, _ = attend_flex(layer, *inputs, mask, **packed, **arguments)
        sinks = [layer.sinks] if family == "gpt_oss" else []
        grads = torch.autograd.grad(attended.sin().sum(), [*inputs, *sinks])
        results.append([attended, *grads])
    for ours, theirs in zip(*results, strict=True):
        # gemma2 takes its softmax in fp32; with sinks, ours are added in fp32.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "attention alone"])
@torch.no_grad()
def test_it_is_not_compiled_for_every_packing(
    blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flex_attention, backend=counter)
    monkeypatch.setattr(attention_flex, "_compiled", lambda: compiled)
    frames = []
    with reference_varlen():
        lm = CausalLM(build("gemma2", **LARGE_HEADS))
        for name in find_blocks(lm.model) if blocks else ():
            lm.model.get_submodule(name).compile(backend=counter)
        for lengths in ([[5, 3], [8]], [[2, 2, 4], [3, 5]], [[8], [8]], [[1, 1, 6], [4, 4]]):
            ids = torch.arange(3, 19).reshape(2, 8)
            positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
            lm.hidden_states(ids, positions, packing=packing_of(lengths, 8))
            frames.append(counter.frame_count)
    # A block with a window and one without differ in more than the mask.
    assert frames == [2 if blocks else 1] * 4


def bias_of(rows: list[list[int]], longest: int, window: int) -> torch.Tensor:
    """[B, 1, T, T] for the families' own attention; padding is a document of its own."""
    padded = [[*row, longest - sum(row)] if sum(row) < longest else row for row in rows]
    seen = dense_mask(padded, window)[:, None]
    return torch.where(seen, 0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_fp32_and_dropout_have_the_familys_own_attention(family: str) -> None:
    """At 1e-9 nothing is dropped."""
    model = build(family)
    layer = model.model.layers[0].self_attn
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, LONGEST, 8, generator=draw)
    key, value = torch.randn(2, 3, 2, LONGEST, 8, generator=draw)
    arguments: dict[str, Any] = {"scaling": 0.3, "sliding_window": 3}
    if family == "gpt_oss":
        arguments["s_aux"] = layer.sinks
    else:
        arguments["softcap"] = 2.0
    packing = packing_of(ROWS, LONGEST)
    masks = make_block_masks(packing.cu_seqlens, *query.shape[::2][:2], (None, 3))
    expected, _ = attend_flex(layer, query, key, value, bias_of(ROWS, LONGEST, 3), **arguments)
    found, _ = attend_flex(
        layer,
        query,
        key,
        value,
        None,
        1e-9,
        block_masks=masks,
        cu_seq_lens_q=packing.cu_seqlens,
        **arguments,
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
