"""Losses and their gradients against torch's own on all logits."""

from typing import Any

import pytest
import torch
from plain_losses import reduce_plainly
from pydantic import ValidationError

from memguard.config import RunConfig
from memguard.config.mitigations import (
    ConfidencePenaltyConfig,
    FloodingConfig,
    FocalConfig,
    LabelSmoothingConfig,
    LossClippingConfig,
)
from memguard.mitigation import TokenTerms, build_mitigations
from memguard.model.lm_head import Head
from memguard.model.loss import token_terms

SETTINGS: list[tuple[Any, ...]] = [
    (LabelSmoothingConfig(name="label_smoothing"),),
    (FocalConfig(name="focal"),),
    (FocalConfig(name="focal", gamma=0.5),),
    (ConfidencePenaltyConfig(name="confidence_penalty", beta=0.5),),
    (LossClippingConfig(name="loss_clipping", floor=1.0, ceiling=4.0),),
    (LossClippingConfig(name="loss_clipping", floor=None, ceiling=3.0),),
    (FloodingConfig(name="flooding", level=2.0),),
    # Listed the other way round than they are applied.
    (
        FloodingConfig(name="flooding", level=2.0),
        LossClippingConfig(name="loss_clipping", floor=None, ceiling=4.0),
        ConfidencePenaltyConfig(name="confidence_penalty", beta=0.1),
        FocalConfig(name="focal", gamma=1.0),
    ),
]


@pytest.mark.parametrize("configs", SETTINGS, ids=lambda each: "+".join(c.name for c in each))
def test_losses_and_gradients_equal_torch(configs: tuple[Any, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 8, dtype=torch.float64, generator=generator)
    # Losses from nearly 0 to about 10 nats.
    weight = 1.5 * torch.randn(30, 8, dtype=torch.float64, generator=generator)
    labels_N = torch.randint(0, 30, (40,), generator=generator)
    labels_N[::2] = (hidden @ weight.T).argmax(1)[::2]
    mitigations = build_mitigations(configs, special_ids=[])
    assert not mitigations.sums_nll
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    head = Head(weight_VD=weight, vocab_size=30, chunk_tokens=7)
    terms = token_terms(head, ours, labels_N, mitigations.needs)
    loss = mitigations.reduce(terms)
    (loss / 40).backward()
    expected = reduce_plainly(theirs @ weight.T, labels_N, configs)
    expected.backward()
    assert float(loss.detach()) / 40 == pytest.approx(float(expected.detach()), rel=1e-12)
    assert ours.grad is not None
    assert theirs.grad is not None
    # float64: a few dozen terms.
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_labels_known_by_heart_have_a_finite_gradient() -> None:
    """A probability that rounds to 1: (1 - p)^.5 has no slope there."""
    nll_N = torch.zeros(3, requires_grad=True)
    focal = build_mitigations([FocalConfig(name="focal", gamma=0.5)], special_ids=[])
    focal.reduce(TokenTerms(nll_N=nll_N)).backward()
    assert nll_N.grad is not None
    assert nll_N.grad.isfinite().all()


# -- which go together -------------------------------------------------------------------------


def _run(*mitigations: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "model": {"path": "folder"},
            "data": {"train": "a.jsonl"},
            "mitigations": list(mitigations),
        }
    )


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ({"name": "focal"}, {"name": "focal"}, "contains an entry twice: focal, focal"),
        (
            {"name": "label_smoothing"},
            {"name": "focal"},
            "focal and label_smoothing cannot be combined",
        ),
        (
            {"name": "label_smoothing"},
            {"name": "confidence_penalty"},
            "confidence_penalty and label_smoothing cannot be combined",
        ),
        (
            {"name": "goldfish", "mode": "random"},
            {"name": "token_dropout"},
            "goldfish and token_dropout cannot be combined: mode 'random' is token dropout already",
        ),
        (
            {"name": "flooding"},
            {"name": "loss_clipping"},
            "flooding and loss_clipping cannot be combined: both keep a label's loss up",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    one: dict[str, Any], other: dict[str, Any], reason: str
) -> None:
    for pair in ((one, other), (other, one)):
        with pytest.raises(ValidationError) as told:
            _run(*pair)
        assert reason in str(told.value)


@pytest.mark.parametrize("mode", ["random", "static"])
def test_masks_that_do_not_grow_are_refused_beside_tightening(mode: str) -> None:
    run = _run({"name": "goldfish", "mode": mode}).model_dump()
    run["train"]["audit_every_steps"] = 5
    RunConfig.model_validate({**run, "budget": {"action": "stop"}})
    with pytest.raises(ValidationError, match=f"goldfish of mode '{mode}' cannot be combined with"):
        RunConfig.model_validate({**run, "budget": {"action": "tighten"}})


def test_what_goes_together() -> None:
    run = _run(
        {"name": "goldfish", "k": 3},
        {"name": "token_dropout"},
        {"name": "focal"},
        {"name": "loss_clipping", "floor": None, "ceiling": 8},
        {"name": "flooding"},
        {"name": "ngram_penalty"},
    )
    assert [each.name for each in run.mitigations][:2] == ["goldfish", "token_dropout"]


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "label_smoothing", "epsilon": 0},
        {"name": "focal", "gamma": 0},
        {"name": "confidence_penalty", "beta": 0},
        {"name": "token_dropout", "rate": 0},
        {"name": "flooding", "level": 0},
        {"name": "loss_clipping", "floor": None},
        {"name": "loss_clipping", "floor": 2, "ceiling": 1},
        {"name": "ngram_penalty", "weight": 0},
    ],
)
def test_what_would_do_nothing_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=settings["name"]):
        _run(settings)
