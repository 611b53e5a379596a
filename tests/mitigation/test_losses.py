"""Losses and their gradients against torch's own on all logits, and by hand."""

from typing import Any

import pytest
import torch
from plain_losses import reduce_plainly
from pydantic import ValidationError
from torch.nn import functional

from memguard.config import RunConfig
from memguard.config.mitigations import (
    ConfidencePenaltyConfig,
    FloodingConfig,
    FocalConfig,
    GradientAscentConfig,
    LabelSmoothingConfig,
    LossClippingConfig,
    NgramPenaltyConfig,
    NpoConfig,
)
from memguard.mitigation import Mitigations, TokenTerms, build_mitigations
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
    assert nll_N.grad.isfinite().all()


def _run(
    *mitigations: dict[str, Any], model: dict[str, Any] | None = None, **data: Any
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "model": model or {"path": "folder"},
            "data": {"train": "a.jsonl", **data},
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


def terms(
    nll: list[float], reference: list[float], pieces: list[int], forget: list[int] | None = None
) -> TokenTerms:
    return TokenTerms(
        nll_N=torch.tensor(nll, dtype=torch.float64, requires_grad=True),
        reference_nll_N=torch.tensor(reference, dtype=torch.float64),
        piece_N=torch.tensor(pieces, dtype=torch.int64),
        forget_N=None if forget is None else torch.tensor(forget).bool(),
    )


def gradient(given: TokenTerms) -> torch.Tensor:
    assert given.nll_N.grad is not None
    return given.nll_N.grad


def test_npo_is_of_pieces_and_leaves_the_others_alone() -> None:
    npo = build_mitigations([NpoConfig(name="npo", beta=0.5)], special_ids=[])
    assert npo.needs == {"nll", "reference_nll"}
    given = terms([1, 2, 3, 4, 5, 6], [1, 1, 3, 9, 4, 4], [0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1])
    # Pieces 1 and 2 have gained 5 nats and lost 3.
    pieces = torch.tensor([5.0, -3.0], dtype=torch.float64)
    expected = 1 + 2 - (4 * functional.logsigmoid(-0.5 * pieces)).sum()
    assert float(npo.reduce(given).detach()) == pytest.approx(float(expected), rel=1e-12)


def test_npo_starts_as_ascent_and_comes_to_rest() -> None:
    npo = build_mitigations([NpoConfig(name="npo", beta=0.1)], special_ids=[])
    start = terms([2.0] * 4, [2.0] * 4, [0, 0, 1, 1], [1, 1, 0, 0])
    npo.reduce(start).backward()
    assert gradient(start).tolist() == [-1, -1, 1, 1]
    # 200 nats further on, and a piece that training has made far likelier.
    far = terms([102.0, 102.0, 0.0, 0.0], [2.0, 2.0, 999.0, 999.0], [0, 0, 1, 1], [1] * 4)
    npo.reduce(far).backward()
    assert gradient(far)[0].abs() < 1e-8
    assert gradient(far)[2:].tolist() == pytest.approx([-2, -2])
    assert gradient(far).isfinite().all()


def test_ascent_ends_at_its_ceiling() -> None:
    ascent = build_mitigations(
        [GradientAscentConfig(name="gradient_ascent", ceiling=3)], special_ids=[]
    )
    assert ascent.needs == {"nll"}
    given = terms([1, 2, 4, 5], [0] * 4, [0, 0, 0, 1], [1, 1, 1, 0])
    total = ascent.reduce(given)
    assert float(total.detach()) == -1 - 2 - 3 + 5
    total.backward()
    assert gradient(given).tolist() == [-1, -1, 0, 1]


def test_no_labels_are_no_error() -> None:
    for config in (NpoConfig(name="npo"), GradientAscentConfig(name="gradient_ascent")):
        given = terms([], [], [], [])
        total = build_mitigations([config], special_ids=[]).reduce(given)
        assert float(total.detach()) == 0
        total.backward()


def run(*names: str, **data: Any) -> RunConfig:
    forgetting = {"forget": "forget.jsonl", "control_fraction": 0}
    return _run(*({"name": name} for name in names), **{**forgetting, **data})


def test_a_forget_list_with_a_way_to_forget() -> None:
    config = run("goldfish", "flooding", "ngram_penalty", "npo", forget_repetitions=3)
    assert config.data.forget == ("forget.jsonl",)


@pytest.mark.parametrize(
    ("names", "settings", "reason"),
    [
        ((), {}, "'data.forget' without 'npo' or 'gradient_ascent' in 'mitigations' would be"),
        (("npo",), {"forget": ()}, "has npo, which is for the documents of 'data.forget'"),
        (("gradient_ascent",), {"forget": ()}, "has gradient_ascent, which is for the documents"),
        (("npo", "gradient_ascent"), {}, "gradient_ascent and npo cannot be combined: each def"),
        ((), {"forget": (), "forget_repetitions": 2}, "does nothing without 'data.forget'"),
        (("npo",), {"study": {}}, "'study' trains one: make the study a run of its own"),
        (("npo",), {"control_fraction": 0.02}, "name in 'control' documents that it never saw"),
        (("npo",), {"heldout_documents": 9}, "name documents that it never saw in 'heldout'"),
        (
            ("npo",),
            {"model": {"scratch": {"config": {"model_type": "llama"}}}},
            "needs a trained model in 'model.path'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    names: tuple[str, ...], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError) as told:
        run(*names, **settings)
    assert reason in str(told.value)


def penalty(**settings: float) -> Mitigations:
    config = NgramPenaltyConfig.model_validate({"name": "ngram_penalty", **settings})
    return build_mitigations([config], special_ids=[])


def test_windows_by_hand() -> None:
    mitigations = penalty(n=2, weight=3, margin=0.5)
    assert mitigations.needs == {"nll", "reference_nll"}
    assert not mitigations.sums_nll
    # Gains 2 2 0 | 2 2: windows of means 2, 1 | 2; the one across the pieces does not count.
    given = terms([1.0] * 5, [3.0, 3.0, 1.0, 3.0, 3.0], [0, 0, 0, 1, 1])
    assert float(mitigations.reduce(given).detach()) == 5 + 3 * (1.5 + 0.5 + 1.5)
    assert [int(count) for count in mitigations.count_windows(given)] == [3, 3]
    # Flooding turns labels below its level round; what is beyond the margin is due beside it.
    flooding = FloodingConfig(name="flooding", level=2.0)
    config = NgramPenaltyConfig(name="ngram_penalty", n=2, weight=3, margin=0.5)
    both = build_mitigations([config, flooding], special_ids=[])
    assert float(both.reduce(given).detach()) == 5 * 3 + 3 * (1.5 + 0.5 + 1.5)
    # The third is at the margin, which is left alone.
    at_margin = terms([1.0] * 5, [3.0, 2.0, 0.0, 3.0, 3.0], [0, 0, 0, 1, 1])
    assert float(mitigations.reduce(at_margin).detach()) == 5 + 3 * (1.0 + 1.5)
    assert [int(count) for count in mitigations.count_windows(at_margin)] == [2, 3]


@pytest.mark.parametrize("weight", [0.5, 1.0, 3.0])
def test_a_label_whose_windows_are_all_beyond_pulls_the_other_way(weight: float) -> None:
    given = terms([0.1] * 9, [9.0] * 9, [0] * 9)
    penalty(n=3, weight=weight, margin=1).reduce(given).backward()
    # At the ends of a piece a label is part of one window, then of two.
    parts = torch.tensor([1, 2, 3, 3, 3, 3, 3, 2, 1], dtype=torch.float64) / 3
    torch.testing.assert_close(gradient(given), 1 - weight * parts)


def test_a_piece_that_holds_no_window_keeps_its_loss() -> None:
    mitigations = penalty(n=4, weight=1, margin=0)
    for size in (0, 3, 6):
        given = terms([1.0] * size, [9.0] * size, [number // 3 for number in range(size)])
        assert float(mitigations.reduce(given).detach()) == size
        assert [int(count) for count in mitigations.count_windows(given)] == [0, 0]


def test_without_a_penalty_no_window_is_counted() -> None:
    plain = build_mitigations([], special_ids=[])
    given = terms([1.0] * 9, [9.0] * 9, [0] * 9)
    assert plain.count_windows(given) == ()
