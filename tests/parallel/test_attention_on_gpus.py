"""Which kernels a GPU gets, traced without one: no mask of all pairs, no wait for a number."""

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from fake_gpu import fake_gpu, move
from tiny_families import FAMILIES, LARGE_HEADS, build
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxOutput, BlockMask
from transformers import masking_utils

from memguard.model.causal_lm import CausalLM
from memguard.model.kv_cache import build_row_cache
from memguard.parallel import attention_flex
from memguard.parallel.attention import _WINDOW_IN_MASK, choose_attention
from memguard.parallel.attention_pieces import Packing

pytestmark = pytest.mark.slow

NUM_ROWS, NUM_TOKENS = 2, 4096


def forward(lm: CausalLM, *, packed: bool = True, positions: bool = True) -> None:
    """Two rows of four documents each."""
    ids = torch.ones(NUM_ROWS, NUM_TOKENS, dtype=torch.int64, device="cuda")
    device = torch.device("cuda")
    packing = Packing.of_equal_documents(4 * NUM_ROWS, NUM_TOKENS // 4, device=device)
    place = torch.arange(NUM_TOKENS, device="cuda").remainder(NUM_TOKENS // 4)
    lm.hidden_states(
        ids, place.expand(NUM_ROWS, -1) if positions else None, packing=packing if packed else None
    )


def build_on_gpu(family: str, dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    heads = LARGE_HEADS if family in ("gemma2", "gpt_oss") else {}
    model = build(family, max_position_embeddings=NUM_TOKENS, **heads)
    return CausalLM(move(model, dtype))


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Collect the positions in which transformers looks for documents, which waits for a GPU."""
    searched: list[Tensor] = []
    search = masking_utils.find_packed_sequence_indices

    def count(position_ids: Tensor) -> Any:
        searched.append(position_ids)
        return search(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", count)
    return searched


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3"])
def test_packed_rows_reach_the_varlen_kernel(
    family: str, positions: bool, searches: list[Tensor]
) -> None:
    with fake_gpu() as operations:
        forward(build_on_gpu(family), positions=positions)
    assert operations.counts["torch_attn::_varlen_attn"] == 2
    assert operations.largest < NUM_TOKENS**2
    assert searches == []


@pytest.mark.quick
@pytest.mark.parametrize(("size", "kernel"), [(256, "varlen"), (264, "pieces")])
def test_heads_up_to_256_reach_the_varlen_kernel(size: int, kernel: str) -> None:
    assert choose_attention(build("llama", head_dim=size), "cuda") == kernel


def test_without_packing_there_is_a_mask(searches: list[Tensor]) -> None:
    """So that the tests here can fail."""
    with fake_gpu() as operations:
        forward(build_on_gpu("llama"), packed=False)
    assert "torch_attn::_varlen_attn" not in operations.counts
    assert operations.largest >= NUM_TOKENS**2
    assert len(searches) == 1


@pytest.mark.parametrize("autocast", [False, True])
def test_fp32_keeps_the_masks_and_autocast_counts_as_half_precision(autocast: bool) -> None:
    with (
        fake_gpu(),
        mock.patch("torch.is_autocast_enabled", return_value=autocast),
        mock.patch("torch.get_autocast_dtype", return_value=torch.bfloat16),
    ):
        lm = build_on_gpu("llama", torch.float32)
        ids = torch.ones(1, 8, dtype=torch.int64, device="cuda")
        packing = Packing.of_equal_documents(2, 4, device=torch.device("cuda"))
        arguments = lm.attention.arguments(ids, ids, packing, compute_dtype=torch.float32)
    assert lm.attention.kernel == "varlen"
    if autocast:
        assert arguments["cu_seq_lens_q"] is packing.cu_seqlens
    else:
        assert arguments == {"attention_mask": None, "position_ids": ids}


@pytest.mark.parametrize(
    ("family", "is_cached"),
    [
        pytest.param("llama", True, marks=pytest.mark.quick),
        *itertools.product(["llama", "phi3"], [False]),
        *itertools.product(["qwen3", "stablelm"], [True]),
    ],
)
def test_fp32_reaches_sdpa_with_equal_heads(
    family: str, is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an audit calls it: CUDA's fused kernels refuse others, and scores are T x T a head."""
    calls: list[tuple[int, int, int]] = []

    def record(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        assert kwargs["is_causal"] == (query.shape[2] > 1)
        assert kwargs["attn_mask"] is None
        calls.append((query.shape[1], key.shape[1], value.shape[1]))
        return torch.empty_like(query)

    mapping = dict(transformers.AttentionInterface._global_mapping)
    monkeypatch.setattr(transformers.AttentionInterface, "_global_mapping", mapping)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", record)
    # What it says of rows that hold one document each; without numbers it cannot know.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda _: None)
    with fake_gpu() as operations:
        lm = build_on_gpu(family, torch.float32)
        ids = torch.ones(NUM_ROWS, NUM_TOKENS - 1, dtype=torch.int64, device="cuda")
        if is_cached:
            cache = build_row_cache(1)
            lm.hidden_states(ids, cache=cache)
            lm.hidden_states(ids[:, :1], ids[:, :1], cache=cache)
        else:
            lm.hidden_states(ids)
    assert calls == [(4, 4, 4)] * (4 if is_cached else 2)
    assert operations.largest < NUM_TOKENS**2


class Flex:
    """Takes flex attention's place: it has no fake tensors of a GPU, and no backward on a CPU."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> tuple[Tensor, AuxOutput]:
        heads = query.shape[1], key.shape[1]
        self.calls.append({"heads": heads, "dtype": query.dtype, **kwargs})
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        return torch.empty_like(query), AuxOutput(lse=lse)


@pytest.mark.parametrize(
    ("family", "has_cap", "has_sinks", "positions"),
    [("gemma2", True, False, True), ("gemma2", True, False, False), ("gpt_oss", False, True, True)],
)
def test_caps_and_sinks_reach_flex_attention(
    family: str,
    has_cap: bool,
    has_sinks: bool,
    positions: bool,
    searches: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flex = Flex()
    monkeypatch.setattr(attention_flex, "_compiled", lambda: flex)
    with fake_gpu() as operations:
        forward(build_on_gpu(family), positions=positions)
    assert operations.largest < NUM_TOKENS**2
    assert searches == []
    assert [call["heads"] for call in flex.calls] == [(4, 2)] * 2
    for call in flex.calls:
        assert call["dtype"] == torch.bfloat16
        assert isinstance(call["block_mask"], BlockMask)
        assert (call["score_mod"] is not None) == has_cap
        assert call["return_aux"].lse == has_sinks
    # A layer with a window and one without.
    assert flex.calls[0]["block_mask"] is not flex.calls[1]["block_mask"]


KERNELS = {
    **dict.fromkeys(FAMILIES, "varlen"),
    "gemma2": "flex",
    "stablelm": "own",  # Its layers do not pass arguments on.
    "opt": "varlen",
    "bloom": "own",
    "gpt_oss": "flex",
    "mamba": "own",
    "deepseek_v32": "own",  # It would attend to keys that its indexer leaves out.
}


@pytest.mark.parametrize("family", KERNELS)
def test_families_have_the_kernels_of_the_table(family: str) -> None:
    model = build(family, **(LARGE_HEADS if KERNELS[family] == "flex" else {}))
    assert choose_attention(model, "cuda") == KERNELS[family]
    on_cpu = "pieces" if KERNELS[family] == "varlen" else "own"
    assert choose_attention(model, "cpu") == on_cpu


@pytest.mark.parametrize(
    ("family", "changes", "kernel"),
    [
        ("llama", {"attention_dropout": 0.1}, "pieces"),
        ("gpt2", {"attn_pdrop": 0.1}, "pieces"),
        ("llama", {"head_dim": 12}, "pieces"),
        ("llama", {"head_dim": 512}, "pieces"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "pieces"),
        # Flex attention has no smaller heads.
        ("gemma2", {"head_dim": 8}, "own"),
        # Eager attention stays where it was chosen.
        ("llama", {"attn": "eager"}, "own"),
    ],
    ids=str,
)
def test_what_flash_attention_cannot_compute_has_a_mask(
    family: str, changes: dict[str, Any], kernel: str
) -> None:
    assert choose_attention(build(family, **changes), "cuda") == kernel


def test_families_pass_their_window_on_to_attention() -> None:
    """Or are listed, since without a mask they would have no window."""
    found = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = path.read_text()
        has_window = "create_sliding_window_causal_mask" in text and "ForCausalLM(" in text
        supports = ("_supports_attention_backend = True", "_supports_flash_attn = True")
        if has_window and all(flag in text for flag in supports) and "sliding_window=" not in text:
            found.add(path.stem.removeprefix("modeling_"))
    assert found <= _WINDOW_IN_MASK
    assert "phimoe" in found
    config = {"num_local_experts": 2, "num_experts_per_tok": 1}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.PhimoeConfig(**{**FAMILIES["llama"], **config, "sliding_window": 4})
    )
    assert choose_attention(model, "cuda") == "pieces"


def test_a_model_on_several_devices_keeps_its_masks() -> None:
    model = build("llama")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert choose_attention(model, "cuda") == "pieces"


def test_a_model_can_be_wrapped_twice() -> None:
    model = build("llama")
    assert CausalLM(model, device_type="cuda").attention.kernel == "varlen"
    assert CausalLM(model, device_type="cpu").attention.kernel == "pieces"
    assert model.config._attn_implementation == "memguard_pieces"
