"""N-gram penalty: windows by hand, and what its weight does to a gradient."""

import pytest
import torch
from torch import Tensor

from memguard.config.mitigations import FloodingConfig, NgramPenaltyConfig
from memguard.mitigation import Mitigations, TokenTerms, build_mitigations


def penalty(**settings: float) -> Mitigations:
    config = NgramPenaltyConfig.model_validate({"name": "ngram_penalty", **settings})
    return build_mitigations([config], special_ids=[])


def terms(nll: list[float], reference: list[float], pieces: list[int]) -> TokenTerms:
    return TokenTerms(
        nll_N=torch.tensor(nll, requires_grad=True),
        reference_nll_N=torch.tensor(reference),
        piece_N=torch.tensor(pieces, dtype=torch.int64),
    )


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
    gradient: Tensor | None = given.nll_N.grad
    assert gradient is not None
    # At the ends of a piece a label is part of one window, then of two.
    parts = torch.tensor([1, 2, 3, 3, 3, 3, 3, 2, 1]) / 3
    torch.testing.assert_close(gradient, 1 - weight * parts)


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
