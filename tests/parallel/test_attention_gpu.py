"""Attention kernels of GPUs, forward and backward, against float64 on the CPU.

Their numbers are bf16, which has 8 bits: 4e-3 a rounding, of which gradients gather several.
"""

from typing import Any

import pytest
import torch
from test_attention_varlen import gradients, packing_of
from test_packed_rows import LONGEST, ROWS, packed_rows
from tiny_families import COMPILES_SELECTIVE, LARGE_HEADS, build
from torch import Tensor
from varlen_reference import Document, split

from memguard.model.causal_lm import CausalLM
from memguard.model.checks import keeps_documents_apart
from memguard.parallel.attention import attend_varlen
from memguard.parallel.attention_flex import attend_flex, make_block_masks
from memguard.parallel.attention_pieces import Packing, find_first_keys, make_dense_mask
from memguard.parallel.shard import Checkpointing, checkpoint_blocks, compile_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    # The compiler warns of what it does itself, and so does torch where it counts waits.
    pytest.mark.filterwarnings("default"),
]

# Three rows of 300 tokens: documents longer and shorter than a block of 128, and of one token.
LONG_ROWS = [[140, 1, 159], [300], [7, 129, 64, 100]]
LONG = 300
HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 64
FORWARD, BACKWARD = 1e-2, 3e-2


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that bf16 has, so that both sides begin with the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16().double()


def inputs() -> tuple[list[Tensor], Tensor]:
    """Query, key, value [B, H, T, d] and a gradient [B, T, H, d]."""
    heads = HEADS, KEY_HEADS, KEY_HEADS
    tensors = [draw(3, num, LONG, HEAD_DIM, seed=seed) for seed, num in enumerate(heads)]
    return tensors, draw(3, LONG, HEADS, HEAD_DIM, seed=3)


def on_gpu(packing: Packing, device: torch.device) -> Packing:
    return Packing(cu_seqlens=packing.cu_seqlens.to(device), max_seqlen=packing.max_seqlen)


def distance(ours: Tensor, theirs: Tensor) -> float:
    difference = ours.detach().double().cpu() - theirs.detach()
    return float(difference.norm() / theirs.detach().norm())


@pytest.mark.parametrize("window", [None, 50])
def test_varlen_equals_the_formula(device: torch.device, window: int | None) -> None:
    tensors, grad = inputs()
    packing = on_gpu(packing_of(LONG_ROWS, LONG), device)
    ours = [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in tensors]
    attended, _ = attend_varlen(
        torch.nn.Module(),
        *ours,
        None,
        sliding_window=window,
        cu_seq_lens_q=packing.cu_seqlens,
        max_length_q=packing.max_seqlen,
    )
    attended.backward(grad.to(device, torch.bfloat16))

    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]
    ends = packing.cu_seqlens.cpu()
    before = (-1 if window is None else window - 1, 0)
    documents = [Document(*parts, before, None) for parts in split(ends, *flat)]
    output = torch.cat([document.forward() for document in documents])
    assert distance(attended.flatten(0, 1), output) < FORWARD
    grads = [
        document.backward(part)
        for document, (part,) in zip(documents, split(ends, grad.flatten(0, 1)), strict=True)
    ]
    for tensor, *parts in zip(ours, *grads, strict=True):
        assert distance(tensor.grad.transpose(1, 2).flatten(0, 1), torch.cat(parts)) < BACKWARD


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("kind", ["cap", "sinks"])
def test_flex_equals_the_familys_own_attention(
    device: torch.device, kind: str, window: int | None
) -> None:
    model = build("gemma2" if kind == "cap" else "gpt_oss").double()
    layer = model.model.layers[0].self_attn
    tensors, grad = inputs()
    packing = on_gpu(packing_of(LONG_ROWS, LONG), device)
    extra: dict[str, Any] = {"scaling": 0.1, "sliding_window": window}
    if kind == "cap":
        extra["softcap"] = 1.5
    ours = [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in tensors]
    sinks = draw(HEADS, seed=4).to(device, torch.bfloat16).requires_grad_()
    attended, _ = attend_flex(
        layer,
        *ours,
        None,
        block_masks=make_block_masks(packing.cu_seqlens, 3, LONG, (window,)),
        s_aux=None if kind == "cap" else sinks,
        **extra,
    )
    attended.backward(grad.to(device, torch.bfloat16))

    exact = [tensor.clone().requires_grad_() for tensor in tensors]
    if kind == "sinks":
        # The family's own attention reads them from its layer.
        layer.sinks = torch.nn.Parameter(draw(HEADS, seed=4))
    seen = make_dense_mask(find_first_keys(packing.cu_seqlens.cpu(), 3, LONG, window))
    bias = torch.zeros_like(seen, dtype=torch.float64).masked_fill(~seen, -1e300)
    expected, _ = attend_flex(layer, *exact, bias, **extra)
    expected.backward(grad)
    assert distance(attended, expected) < FORWARD
    pairs = list(zip(ours, exact, strict=True))
    if kind == "sinks":
        pairs.append((sinks, layer.sinks))
    for mine, theirs in pairs:
        assert mine.grad is not None
        assert theirs.grad is not None
        assert distance(mine.grad, theirs.grad) < BACKWARD


def build_large(family: str, **changes: Any) -> Any:
    return build(family, **changes, **(LARGE_HEADS if family in ("gemma2", "gpt_oss") else {}))


FAMILIES = ["llama", "mistral", "qwen3", "gemma3_text", "gpt2", "gemma2"]


def gradients_on_gpu(lm: CausalLM, device: torch.device) -> list[Tensor]:
    ids, positions = (tensor.to(device) for tensor in packed_rows())
    packing = on_gpu(packing_of(ROWS, LONGEST), device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        hidden = lm.hidden_states(ids, positions, packing=packing).flatten(0, 1)
        lm.sum_nll(hidden[:-1], ids.flatten()[1:]).backward()
    return [parameter.grad for parameter in lm.model.parameters() if parameter.grad is not None]


def total_distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return distance(
        torch.cat([gradient.flatten().double().cpu() for gradient in ours]),
        torch.cat([gradient.flatten().double() for gradient in theirs]),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_packed_rows(device: torch.device, family: str) -> None:
    packing = packing_of(ROWS, LONGEST)
    expected = gradients(CausalLM(build_large(family).double()), packing)
    lm = CausalLM(build_large(family).to(device))
    assert lm.attention.kernel == ("flex" if family == "gemma2" else "varlen")
    # The whole model in bf16, which documents that see each other would change by far more.
    assert total_distance(gradients_on_gpu(lm, device), expected) < 0.1


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_checkpointed_and_compiled_blocks_have_the_same_gradients(
    device: torch.device, family: str, mode: Checkpointing, compiled: bool
) -> None:
    if compiled and mode == "selective" and not COMPILES_SELECTIVE:
        pytest.skip("refused with this transformers")
    expected = gradients_on_gpu(CausalLM(build_large(family).to(device).train()), device)
    lm = CausalLM(build_large(family).to(device).train())
    checkpoint_blocks(lm.model, mode)
    if compiled:
        compile_blocks(lm.model)
    found = gradients_on_gpu(lm, device)
    # Fused operations round less often.
    limit = 5e-2 if compiled else 1e-2
    assert total_distance(found, [gradient.cpu() for gradient in expected]) < limit


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_documents_are_kept_apart(device: torch.device, family: str) -> None:
    assert keeps_documents_apart(CausalLM(build_large(family).to(device)), bf16=True)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_step_neither_waits_for_the_gpu_nor_makes_a_mask(
    device: torch.device, family: str
) -> None:
    num_tokens = 16_384
    model = build_large(family, max_position_embeddings=num_tokens)
    lm = CausalLM(model.to(device, torch.bfloat16))
    ids = torch.ones(1, num_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(num_tokens, device=device).remainder(1024)[None]
    packing = Packing.of_equal_documents(num_tokens // 1024, 1024, device=device)
    # The first step compiles and starts libraries, which may wait.
    lm.hidden_states(ids, positions, packing=packing).float().sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        lm.hidden_states(ids, positions, packing=packing).float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # A mask of all pairs takes 268 MB as booleans.
    assert torch.cuda.max_memory_allocated() - before < num_tokens**2
