"""Dropout as a setting: found in every family, in training alone, refused where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from run_examples import make_run
from tiny_llama import TINY_LLAMA
from transformers.models.falcon import modeling_falcon

from memguard.errors import ConfigError, ModelError
from memguard.train.dropout import set_dropout
from memguard.train.metrics import HeldoutMetrics, StepMetrics, read_metrics
from memguard.workflows.run_checks import check_dropout
from memguard.workflows.train import train_run

FALCON = {
    "model_type": "falcon",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "alibi": False,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def build(values: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.for_model(**values, vocab_size=64)
    return transformers.AutoModelForCausalLM.from_config(config)


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


def test_a_run_with_dropout_has_other_losses_from_the_first_step(tmp_path: Path) -> None:
    curves, heldout = [], []
    for number, dropout in enumerate((None, 0.0, 0.3)):
        config = make_run(
            tmp_path,
            name=f"run{number}",
            audit={"enabled": False},
            train={"max_steps": 4, "dropout": dropout},
        )
        train_run(config)
        lines = list(read_metrics(tmp_path / "runs" / config.name / "metrics.jsonl"))
        curves.append([line.loss for line in lines if isinstance(line, StepMetrics)])
        heldout.append([line.nll for line in lines if isinstance(line, HeldoutMetrics)])
    plain, none, some = curves
    assert plain == none
    assert plain[0] != some[0]
    # Utility is measured without it.
    assert heldout[0][0] == heldout[2][0]


def test_dropout_on_a_mesh_is_refused(tmp_path: Path) -> None:
    config = make_run(tmp_path, train={"dropout": 0.1})
    check_dropout(config.train, world_size=1)
    with pytest.raises(ConfigError, match=r"'train.dropout' needs one process; got 0.1 on 4"):
        check_dropout(config.train, world_size=4)
