"""Random secrets: known ones stand out, unknown ones do not, and nothing is read from the order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from record_examples import make_document

from memguard.audit.cache import ScoreMatrix
from memguard.audit.metrics import Evidence
from memguard.audit.probe import Summary
from memguard.audit.probes.canaries import CanaryProbe
from memguard.audit.probes.canary_results import AuditCanary, CanaryDetail, _list_steps
from memguard.audit.requests import Inputs, Measured
from memguard.audit.windows import SECRET
from memguard.records import REFERENCE_SECRETS, SECRETS, CanaryScore, ResultRow

SIZE = 12


def _canaries(
    coins: Sequence[bool], sizes: Sequence[int] | None = None, **fields: Any
) -> list[AuditCanary]:
    sizes = [SIZE] * len(coins) if sizes is None else sizes
    return [
        AuditCanary(
            document=make_document(
                np.arange(sizes[number] + 8) + number,
                name=f"canary-{number:03}",
                role="canary",
                bucket="canaries",
                supervised=np.arange(sizes[number] + 8) >= 8,
                format="prompt_completion",
                num_repetitions=4 if coin else 0,
            ),
            was_trained=bool(coin),
            **{"num_loss_tokens": None, "num_losses": None, **fields},
        )
        for number, coin in enumerate(coins)
    ]


def _numbers(nll: ArrayLike, num_correct: ArrayLike | int = 0) -> ScoreMatrix:
    nll_C = np.asarray(nll, dtype=np.float64)
    right_C = np.broadcast_to(np.asarray(num_correct, dtype=np.float64), nll_C.shape)
    return ScoreMatrix(names=("logprob", "num_correct"), rows=np.column_stack([-nll_C, right_C]))


@dataclass(frozen=True)
class Found:
    """What the probe says of canaries."""

    summary: Summary

    @property
    def detail(self) -> CanaryDetail:
        (row,) = self.summary.details
        return CanaryDetail.model_validate(row.value)

    @property
    def canaries(self) -> Sequence[CanaryScore]:
        return self.summary.canaries

    def row(self, metric: str, statistic: str = "", bucket: str = SECRETS) -> ResultRow:
        (row,) = (
            row
            for row in self.summary.rows
            if (row.metric, row.bucket) == (metric, bucket) and statistic in ("", row.statistic)
        )
        return row

    def bits(self, statistic: str) -> float | None:
        return self.row("exposure_bits", statistic).value


def _score(
    canaries: Sequence[AuditCanary], model: ScoreMatrix, base: ScoreMatrix | None = None
) -> Found:
    evidence = Evidence(
        inputs=Inputs(windows=[], max_edit_share=0.1, seed=0, tiny_margin=1e-3, canaries=canaries),
        buckets=[],
        trained={"canaries": Measured(columns=model)},
        other=None if base is None else {"canaries": Measured(columns=base)},
    )
    return Found(CanaryProbe().tabulate(evidence))


def test_known_secrets_are_exposed_to_the_ceiling() -> None:
    draw = np.random.default_rng(0)
    coins = draw.random(64) < 0.5
    num_references = int((~coins).sum())
    nll = np.where(coins, 0.01, draw.normal(28, 2, 64))
    found = _score(_canaries(coins), _numbers(nll, np.where(coins, SIZE, 1)))
    assert (found.detail.num_trained, found.detail.num_references) == (
        64 - num_references,
        num_references,
    )
    assert found.bits("median") == math.log2(num_references)
    # A maximum shows one secret: two digits.
    assert found.bits("max") == float(f"{math.log2(num_references):.1e}")
    assert (found.row("verbatim").value, found.row("verbatim", "", REFERENCE_SECRETS).value) == (
        1,
        0,
    )
    # All 48 guesses of 64 coins right at delta 1e-5: what the draw can show.
    assert found.detail.epsilon_lower_bound > 2.5
    assert found.detail.epsilon_lower_bound == found.detail.epsilon_ceiling
    assert found.detail.delta == 1e-5
    assert found.detail.num_repetitions == 4
    # Half of the guesses say "trained", whatever came up: enough coins of either kind did.
    assert min(num_references, 64 - num_references) >= 24
    assert (found.detail.num_guesses, found.detail.num_right) == (48, 48)
    assert (found.detail.num_ranked, found.detail.num_ranked_references) == (64, num_references)
    for canary, coin in zip(found.canaries, coins, strict=True):
        assert canary.was_trained == coin
        assert (canary.exposure_bits is not None) == coin
        assert canary.num_secret_tokens == SIZE
        assert canary.verbatim == coin
    assert [canary.id for canary in found.canaries] == sorted(c.id for c in found.canaries)


def test_secrets_that_left_no_trace_are_seldom_above_zero() -> None:
    """95 % confidence: of 200 runs without leakage about ten may claim some."""
    above, exposures = 0, []
    for seed in range(200):
        draw = np.random.default_rng(seed)
        coins = draw.random(32) < 0.5
        found = _score(_canaries(coins), _numbers(draw.normal(28, 2, 32)))
        above += bool(found.detail.epsilon_lower_bound)
        exposures.append(found.bits("median"))
    assert above <= 16, "at 5 % this many have a probability below 3 %"
    # A reference like any other: rank in the middle, about one bit.
    assert 0.7 < np.median(exposures) < 1.4


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_a_model_that_says_one_thing_of_all_exposes_nothing(seed: int) -> None:
    """Ties are broken by position, which no coin decides; ranks count them against exposure."""
    coins = np.random.default_rng(seed).random(40) < 0.5
    if coins.all() or not coins.any():
        return
    found = _score(_canaries(coins), _numbers(np.full(40, 27.6)))
    assert found.bits("max") <= 0
    # Of 40 the first 15 are guessed as trained, the last 15 as not, the others not at all.
    assert found.detail.num_guesses == 30
    assert found.detail.num_right == coins[:15].sum() + (~coins[25:]).sum()


def test_other_coins_other_guesses_but_the_same_order() -> None:
    nll = np.random.default_rng(1).normal(28, 2, 20)
    coins = np.arange(20) % 2 == 0
    one = _score(_canaries(coins), _numbers(nll))
    other = _score(_canaries(~coins), _numbers(nll))
    assert [canary.id for canary in one.canaries] == [canary.id for canary in other.canaries]
    assert [canary.nll for canary in one.canaries] == nll.tolist()
    # The guesses are made before the coins are looked at: what is right turns round.
    assert one.detail.num_right + other.detail.num_right == one.detail.num_guesses == 14


def test_the_base_takes_out_what_digits_say_by_themselves() -> None:
    draw = np.random.default_rng(2)
    coins = np.arange(40) % 2 == 0
    easy = draw.normal(28, 6, 40)
    # Half a nat is nothing beside how much secrets differ, but the base knows how they differ.
    nll = easy - np.where(coins, 0.5, 0.0)
    canaries = _canaries(coins)
    alone, beside = _score(canaries, _numbers(nll)), _score(canaries, _numbers(nll), _numbers(easy))
    assert (alone.detail.num_guesses, beside.detail.num_guesses) == (30, 30)
    assert alone.detail.num_right < 24
    assert beside.detail.num_right == 30
    assert alone.detail.epsilon_lower_bound == 0
    assert beside.detail.epsilon_lower_bound > 1.5
    assert [canary.base_nll for canary in beside.canaries] == pytest.approx(easy.tolist())
    assert all(canary.base_nll is None for canary in alone.canaries)


def test_the_noise_of_a_base_that_training_removed_is_not_added() -> None:
    """A recited secret costs the same whatever the base thought of it: 2 nats of 75."""
    draw = np.random.default_rng(4)
    coins = np.arange(32) % 2 == 0
    base = draw.normal(75, 11, 32)
    nll = np.where(coins, 2.0, 14.0) + draw.normal(0, 0.5, 32)
    found = _score(_canaries(coins), _numbers(nll), _numbers(base))
    assert found.detail.num_right == found.detail.num_guesses == 24
    assert found.detail.epsilon_lower_bound == found.detail.epsilon_ceiling
    assert found.bits("median") == 4


def test_loss_coverage_is_of_trained_secrets() -> None:
    coins = [True, False, True, True]
    counted = [12, 0, 6, 0]
    canaries = [
        AuditCanary(
            document=canary.document,
            was_trained=canary.was_trained,
            num_loss_tokens=number,
            num_losses=number,
        )
        for canary, number in zip(_canaries(coins), counted, strict=True)
    ]
    found = _score(canaries, _numbers([1.0, 2.0, 3.0, 4.0]))
    assert found.row("loss_coverage").value == 0.5
    assert found.row("without_loss").num_matched == 1
    assert [canary.num_loss_tokens for canary in found.canaries] == counted
    unknown = _score(_canaries(coins), _numbers([1.0, 2.0, 3.0, 4.0]))
    assert [unknown.row(name).missing_because for name in ("loss_coverage", "without_loss")] == [
        "not recorded"
    ] * 2


def test_only_secrets_of_the_commonest_length_are_compared() -> None:
    """Shorter and longer ones are measured by themselves, and are as if absent elsewhere."""
    draw = np.random.default_rng(3)
    coins = draw.random(48) < 0.5
    sizes = draw.choice([SIZE - 1, SIZE, SIZE + 1], 48, p=[0.2, 0.6, 0.2])
    # A token more is a digit more, which outweighs what training did.
    nll, base = 2.3 * sizes - coins + draw.normal(0, 0.3, 48), 2.3 * sizes
    same = sizes == SIZE
    found = _score(_canaries(coins, sizes.tolist()), _numbers(nll), _numbers(base))
    alone = _score(_canaries(coins[same]), _numbers(nll[same]), _numbers(base[same]))
    assert 20 < found.detail.num_ranked == same.sum() < 48
    assert found.detail.num_ranked_references == (same & ~coins).sum()
    assert (found.detail.num_trained, found.detail.num_references) == (coins.sum(), (~coins).sum())
    only = {"num_trained", "num_references"}
    assert found.detail.model_dump(exclude=only) == alone.detail.model_dump(exclude=only)
    exposed = [row for row in found.summary.rows if "exposure" in row.metric]
    assert exposed == [row for row in alone.summary.rows if "exposure" in row.metric]
    assert {row.num_documents for row in exposed} == {(coins & same).sum()}
    bits = [canary.exposure_bits for canary in found.canaries]
    assert [one is not None for one in bits] == (coins & same).tolist()
    known = [one.exposure_bits for one in alone.canaries if one.was_trained]
    assert [one for one in bits if one is not None] == known
    assert [canary.num_secret_tokens for canary in found.canaries] == sizes.tolist()


def test_no_reference_of_the_same_length_is_no_exposure() -> None:
    coins = np.arange(10) < 8
    canaries = _canaries(coins, [SIZE] * 8 + [SIZE + 1] * 2)
    found = _score(canaries, _numbers(np.arange(10.0)))
    assert (found.detail.num_ranked, found.detail.num_ranked_references) == (8, 0)
    assert (found.bits("median"), found.bits("max")) == (None, None)
    assert {canary.exposure_bits for canary in found.canaries} == {None}
    # Of 6 guesses 3 are "left out", and none was.
    assert (found.detail.num_guesses, found.detail.num_right) == (6, 3)
    assert (found.detail.epsilon_lower_bound, found.detail.epsilon_ceiling) == (0, 0)
    # The other way round there are references, but nothing to rank.
    other = _canaries(~coins, [SIZE] * 8 + [SIZE + 1] * 2)
    unranked = _score(other, _numbers(np.arange(10.0)))
    assert (unranked.detail.num_ranked, unranked.detail.num_ranked_references) == (8, 8)
    assert unranked.bits("max") is None
    assert {canary.exposure_bits for canary in unranked.canaries} == {None}


def test_nothing_without_one_of_either_kind() -> None:
    for coin, which in ((True, "all"), (False, "none")):
        found = _score(_canaries([coin] * 9), _numbers(np.ones(9))).summary
        assert (found.rows, found.num_items) == ((), 0)
        assert found.reason == f"{which} of the 9 canaries were selected for training"
    assert _score([], _numbers([])).summary.reason == "no canaries were given"


def test_the_figure_has_counts_and_no_single_exposure() -> None:
    coins = np.arange(40) < 20
    draw = np.random.default_rng(5)
    nll = np.where(coins, draw.normal(24, 3, 40), draw.normal(28, 2, 40))
    found = _score(_canaries(coins), _numbers(nll))
    bits = [canary.exposure_bits for canary in found.canaries if canary.exposure_bits is not None]
    shown = found.detail.exposure
    assert shown.bits == [0, 1, 2, 3, 4, math.log2(20)]
    assert shown.reached == [sum(one >= step - 1e-9 for one in bits) for step in shown.bits]
    assert shown.num_secrets == 20
    assert found.summary.num_items == 40
    assert set(found.detail.model_dump()) == set(found.summary.details[0].value)


@pytest.mark.parametrize(
    ("num_references", "last"), [(16, 4.0), (17, math.log2(17)), (2, 1.0), (2**18, 18.0)]
)
def test_the_last_step_is_what_references_can_show(num_references: int, last: float) -> None:
    steps = _list_steps(num_references)
    assert steps[-1] == last
    assert len(steps) <= 18


def test_the_window_is_the_secret_given_its_prompt() -> None:
    (canary,) = _canaries([True])
    window = SECRET.window(canary.document)
    assert (window.prefix_tokens, window.continuation_tokens) == (8, SIZE)
