"""Only the chosen modules are trained; a choice that would also train others is refused."""

import pytest
import torch
import transformers
from corpus_examples import summarise
from tiny_families import build as build_family
from tiny_llama import TINY_LLAMA

from memguard.config import RunConfig, TrainConfig
from memguard.errors import ConfigError
from memguard.model.causal_lm import CausalLM
from memguard.model.trainable import freeze_others
from memguard.workflows.common.folder import compute_run_key


def build(*, tie: bool) -> transformers.PreTrainedModel:
    fields = {**TINY_LLAMA, "vocab_size": 50, "tie_word_embeddings": tie}
    config = transformers.AutoConfig.for_model(**fields)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    return model


def list_trained(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("lm_head",), {"lm_head.weight"}),
        (("embed_tokens", "model.norm"), {"model.embed_tokens.weight", "model.norm.weight"}),
        (("q_proj",), {f"model.layers.{n}.self_attn.q_proj.weight" for n in (0, 1)}),
    ],
)
def test_only_the_chosen_modules_are_trained(names: tuple[str, ...], expected: set[str]) -> None:
    model = build(tie=False)
    freeze_others(model, names)
    assert list_trained(model) == expected


def test_a_module_is_chosen_with_all_inside_it() -> None:
    model = build(tie=False)
    freeze_others(model, ["layers.1"])
    inside = {name for name, _ in model.named_parameters() if ".layers.1." in name}
    assert list_trained(model) == inside
    assert len(inside) == 9, "four attention layers, three of the MLP, two norms"


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_one_side_of_tied_weights_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"weights of '{name}' are also those of .*\(tied\)"):
        freeze_others(build(tie=True), [name])


def test_both_sides_of_tied_weights_are_trained() -> None:
    model = build(tie=True)
    freeze_others(model, ["lm_head", "embed_tokens"])
    assert list_trained(model) == {"model.embed_tokens.weight"}


def test_what_a_family_freezes_stays_frozen() -> None:
    """Nothing computes its gradient, and a checkpoint would have no moments for it."""
    model = build_family("ernie4_5_moe")
    offsets = "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"
    assert offsets not in list_trained(model)
    freeze_others(model, ["mlp"])
    trained = list_trained(model)
    assert "model.layers.1.mlp.gate.weight" in trained
    assert offsets not in trained
    with pytest.raises(ConfigError, match="no module 'moe_statics' with weights"):
        freeze_others(build_family("ernie4_5_moe"), ["moe_statics"])


# An activation has a name, but no weights.
@pytest.mark.parametrize("name", ["head", "act_fn"])
def test_a_module_that_does_not_exist_is_refused_with_those_that_do(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"no module '{name}' with weights; it has .*lm_head"):
        freeze_others(build(tie=False), [name])


def test_no_modules_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="'trainable_modules' must name a module"):
        TrainConfig(trainable_modules=())


def test_frozen_blocks_have_no_graph_and_the_head_has_its_gradient() -> None:
    model = build(tie=False).double()
    freeze_others(model, ["lm_head"])
    lm = CausalLM(model)
    ids_BT = torch.arange(12).reshape(2, 6)
    hidden_ND = lm.hidden_states(ids_BT)[:, :-1].flatten(0, 1)
    assert not hidden_ND.requires_grad, "activations of frozen blocks need not be kept"
    labels_N = ids_BT[:, 1:].flatten()
    head = model.get_output_embeddings().weight
    logits = torch.nn.functional.linear(hidden_ND, head)
    expected_nll = torch.nn.functional.cross_entropy(logits, labels_N, reduction="sum")
    (expected,) = torch.autograd.grad(expected_nll, head)
    for loss in (lm.sum_nll(hidden_ND, labels_N), lm.token_terms(hidden_ND, labels_N).nll_N.sum()):
        model.zero_grad()
        torch.autograd.backward(loss)
        # float64, another order of summation.
        torch.testing.assert_close(head.grad, expected, rtol=1e-12, atol=1e-12)
        assert {n for n, p in model.named_parameters() if p.grad is not None} == {"lm_head.weight"}


def test_trained_modules_are_in_the_run_key() -> None:
    run = {"name": "x", "model": {"path": "m"}, "data": {"train": "a.jsonl"}}
    keys = {
        compute_run_key(
            RunConfig.model_validate({**run, "train": {"trainable_modules": names}}), summarise(1)
        )
        for names in (None, ["lm_head"], ["embed_tokens"])
    }
    assert len(keys) == 3
