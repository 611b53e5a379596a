"""The study of an audit's arithmetic: what it compares, and logits that are rounded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from script_calls import load_script

from memguard.compare import load_sweep
from memguard.model.lm_head import Head
from memguard.model.next_token import find_best
from memguard.model.token_scores import score_tokens

pytestmark = pytest.mark.slow

STUDY = Path(__file__).resolve().parents[2] / "eval" / "studies" / "audit_dtype.yaml"


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("study_audit_dtype")


def test_the_sweep_has_adapters_and_all_weights() -> None:
    settings = load_sweep(STUDY).config.settings
    assert [setting.name for setting in settings] == ["full", "lora-r4", "lora-r64"]


def test_a_change_is_of_a_document_that_both_measured(script: Any) -> None:
    nan = np.nan
    columns = {
        "fp32": {"verbatim": [1, 0, 0, nan, nan, 1], "tiny_margin": [0] * 6},
        "mixed": {"verbatim": [1, 1, 0, nan, 0, 0], "tiny_margin": [1, 1, 1, 0, 0, 0]},
    }
    one = {
        name: SimpleNamespace(
            columns={
                f"extraction.{column}": np.array(values, float) for column, values in of.items()
            }
        )
        for name, of in columns.items()
    }
    # What only one of them measured counts as a change too.
    assert script.list_changed(one, "mixed", ["verbatim"]) == ([1, 4, 5], [4, 5])
    assert script.list_changed(one, "fp32", ["verbatim"]) == ([], [])


def test_rounded_logits_are_those_of_bf16(script: Any) -> None:
    head = Head(weight_VD=torch.randn(64, 16).bfloat16(), vocab_size=64)
    assert head.weight_VD is not None
    hidden_ND, labels_N = torch.randn(8, 16).bfloat16(), torch.arange(8)
    exact_N = score_tokens(head, hidden_ND, labels_N).logprob_N
    with script.rounded_logits():
        scores, best = score_tokens(head, hidden_ND, labels_N), find_best(head, hidden_ND, 64)
    logits_NV = (hidden_ND.float() @ head.weight_VD.float().T).bfloat16().float()
    expected_NV = logits_NV.log_softmax(1)
    torch.testing.assert_close(scores.logprob_N, expected_NV.gather(1, labels_N[:, None])[:, 0])
    torch.testing.assert_close(best.logprob_NK, expected_NV.sort(1, descending=True).values)
    torch.testing.assert_close(score_tokens(head, hidden_ND, labels_N).logprob_N, exact_N)
    assert not exact_N.equal(scores.logprob_N)
