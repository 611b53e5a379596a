"""Dropout as a setting: found in every family, in training alone, refused where there is none."""

from typing import Any

import pytest
import torch
import transformers
from tiny_llama import TINY_LLAMA
from transformers.models.falcon import modeling_falcon

from memguard.errors import ModelError
from memguard.model.trainable import list_dropout, set_dropout

FALCON = {
    "model_type": "falcon",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "alibi": False,
}
NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def build(values: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.for_model(**values, vocab_size=64)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("values", "rates"),
    [
        (TINY_LLAMA, {}),
        ({**TINY_LLAMA, "attention_dropout": 0.25}, {"attention_dropout": 0.25}),
        # Of its heads for other tasks: 'summary_first_dropout' is 0.1 too.
        (GPT2, {"drop": 0.1, "attn_dropout": 0.1, "resid_dropout": 0.1, "dropout": 0.1}),
        ({**GPT2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, {}),
        ({**NEOX, "classifier_dropout": 0.1}, {}),
    ],
    ids=str,
)
def test_only_dropout_that_acts_in_a_causal_lm_is_listed(
    values: dict[str, Any], rates: dict[str, float]
) -> None:
    assert list_dropout(build(values)) == rates


@pytest.mark.parametrize(
    ("values", "num_set"),
    [
        (TINY_LLAMA, 2),
        ({**TINY_LLAMA, "attention_dropout": 0}, 2),
        (GPT2, 1 + 2 * 3),
        # Modules hold more than they use.
        ({**FALCON, "parallel_attn": True}, 2 * 4),
    ],
)
def test_every_dropout_acts_in_training_alone(values: dict[str, Any], num_set: int) -> None:
    model = build(values)
    before = model.config.to_dict()
    assert set_dropout(model, 0.5) == num_set
    assert model.config.to_dict() == before
    ids = torch.arange(20).reshape(1, 20)
    with torch.no_grad():
        model.train()
        one, other = (model(ids).logits for _ in range(2))
        assert not torch.equal(one, other)
        model.eval()
        assert torch.equal(model(ids).logits, model(ids).logits)
        set_dropout(model, 0.0)
        model.train()
        assert torch.equal(model(ids).logits, model(ids).logits)


def test_dropouts_that_a_layer_reads_from_its_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Falcon's on the residual stream: after attention and after the MLP of each layer."""
    model = build({**FALCON, "parallel_attn": False})
    shares: list[float] = []
    original = modeling_falcon.dropout_add

    def note(x: Any, residual: Any, prob: float, training: bool) -> Any:
        shares.append(prob)
        return original(x, residual, prob, training)

    monkeypatch.setattr(modeling_falcon, "dropout_add", note)
    before = model.config.to_dict()
    set_dropout(model, 0.25)
    model.train()(torch.arange(20).reshape(1, 20))
    assert shares == [0.25] * 4
    assert model.config.to_dict() == before
    assert model.config.hidden_dropout == 0


def test_a_model_without_dropout_is_told() -> None:
    with pytest.raises(ModelError, match=r"'train.dropout' has no effect: Linear has no dropout"):
        set_dropout(torch.nn.Linear(2, 2), 0.1)
