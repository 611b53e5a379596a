"""NPO and gradient ascent: by hand, where they start and where they end."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional

from memguard.config import RunConfig
from memguard.config.mitigations import GradientAscentConfig, NpoConfig
from memguard.mitigation import TokenTerms, build_mitigations


def terms(
    nll: list[float], reference: list[float], pieces: list[int], forget: list[int]
) -> TokenTerms:
    return TokenTerms(
        nll_N=torch.tensor(nll, dtype=torch.float64, requires_grad=True),
        reference_nll_N=torch.tensor(reference, dtype=torch.float64),
        piece_N=torch.tensor(pieces, dtype=torch.int64),
        forget_N=torch.tensor(forget).bool(),
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


# -- which settings make sense -------------------------------------------------------------------


def run(
    *names: str, model: dict[str, Any] | None = None, forget: Any = "forget.jsonl", **data: Any
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "model": model or {"path": "folder"},
            "data": {"train": "a.jsonl", "forget": forget, "control_fraction": 0, **data},
            "mitigations": [{"name": name} for name in names],
        }
    )


def test_a_forget_list_with_a_way_to_forget() -> None:
    config = run("goldfish", "flooding", "ngram_penalty", "npo", forget_repetitions=3)
    assert config.data.forget == ("forget.jsonl",)


@pytest.mark.parametrize(
    ("names", "settings", "reason"),
    [
        ((), {}, "'data.forget' without 'npo' or 'gradient_ascent' in 'mitigations' would be"),
        (("npo",), {"forget": ()}, "has npo, which is for the documents of 'data.forget'"),
        (("gradient_ascent",), {"forget": ()}, "has gradient_ascent, which is for the documents"),
        (
            ("npo", "gradient_ascent"),
            {},
            "gradient_ascent and npo cannot be combined: each defines how",
        ),
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
