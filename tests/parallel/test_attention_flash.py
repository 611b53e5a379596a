"""`flash_attention_2` packs: its kernel gets the documents of all rows, without a wait for a GPU.

The package needs a GPU. Here its function for documents is replaced by the formula, below all of
transformers' own code; its function for whole rows fails.
"""

import functools
from typing import Any

import pytest
import torch
from test_attention_varlen import packing_of
from test_packed_rows import LONGEST, ROWS, packed_rows
from tiny_families import build
from torch import Tensor
from transformers import masking_utils, modeling_flash_attention_utils
from varlen_reference import Document, split

from memguard.model.causal_lm import CausalLM
from memguard.model.checks import keeps_documents_apart

_SUPPORTED = dict.fromkeys(["window_size", "max_seqlen_q", "max_seqlen_k"], True)
_OTHERS = ["dropout_p", "deterministic", "softcap", "s_aux", "learnable_sink", "block_table"]
_OTHERS += ["page_table", "cache_seqlens"]


def attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    assert causal
    assert cu_seqlens_q is cu_seqlens_k
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q == max_seqlen_k
    window = window_size[0], 0
    return torch.cat(
        [
            Document(*parts, window, softmax_scale).forward()
            for parts in split(cu_seqlens_q, query, key, value)
        ]
    )


@pytest.fixture
def _flash(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("transformers looks for documents, or attends to whole rows")

    process = functools.partial(
        modeling_flash_attention_utils._process_flash_attention_kwargs,
        supports_mapping={**dict.fromkeys(_OTHERS, False), **_SUPPORTED},
    )
    functions = (refuse, attend_documents, refuse, refuse, refuse), (process, refuse)
    monkeypatch.setattr(
        modeling_flash_attention_utils, "lazy_import_flash_attention", lambda name: functions
    )
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", refuse)
    monkeypatch.setattr(modeling_flash_attention_utils, "_is_packed_sequence", refuse)


def build_flash(family: str, dtype: torch.dtype) -> Any:
    model = build(family).to(dtype)
    model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma3_text"])
@torch.no_grad()
def test_packed_rows_have_the_numbers_of_the_path_with_masks(
    family: str, request: pytest.FixtureRequest
) -> None:
    ids, positions = packed_rows()
    expected = CausalLM(build(family).double()).hidden_states(ids, positions)
    request.getfixturevalue("_flash")
    lm = CausalLM(build_flash(family, torch.float64))
    assert lm.attention.kernel == "flash"
    found = lm.hidden_states(ids, positions, packing=packing_of(ROWS, LONGEST))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("_flash")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_training_packs(family: str) -> None:
    assert keeps_documents_apart(CausalLM(build_flash(family, torch.float64)))


def test_probes_of_fp32_weights_run_in_bf16(request: pytest.FixtureRequest) -> None:
    """Flash attention has no fp32; weights are fp32 where training runs under autocast."""
    model = build_flash("llama", torch.float32)
    request.getfixturevalue("_flash")
    dtypes = set()
    attend = modeling_flash_attention_utils.lazy_import_flash_attention(None)[0][1]

    def watch(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dtypes.add(query.dtype)
        return attend(query, *args, **kwargs)

    functions, processes = modeling_flash_attention_utils.lazy_import_flash_attention(None)
    replaced = (functions[0], watch, *functions[2:]), processes
    request.getfixturevalue("monkeypatch").setattr(
        modeling_flash_attention_utils, "lazy_import_flash_attention", lambda name: replaced
    )
    assert keeps_documents_apart(CausalLM(model))
    assert dtypes == {torch.bfloat16}
