"""Learned token by token: said only of what training added beyond the control."""

import re
from collections.abc import Callable, Sequence

import evidence_examples as evidence
import numpy as np
import pytest
import report_examples as examples
from numpy.typing import NDArray
from record_examples import make_document, make_outline

from memguard import records as r
from memguard.audit.tables import ProbeTable, build_measures
from memguard.report.audit_summary import describe_learned, find_learned

NUM_DOCUMENTS = 40
CONTROL_AND_TRAINED = ("control", "r16")
CHANCE = examples.make_interval(0.52, 0.06)


def make_blind(auc: r.Interval | None) -> list[r.MembershipScores]:
    return [
        r.MembershipScores(score="blind", num_members=40, num_nonmembers=40, auc=auc),
        *evidence.make_membership()[:1],
    ]


def measure(model_2N: NDArray[np.float64], base_2N: NDArray[np.float64] | None) -> list[r.Measure]:
    """Return what an audit makes of token accuracies of the control's and the bucket's documents.

    Args:
        model_2N: ``[2 * NUM_DOCUMENTS]``, the control's first.
        base_2N: the same of the model before training.
    """
    documents = [
        make_document(
            np.zeros(60),
            name=f"{bucket}-{number}",
            bucket=bucket,
            role="trained" if count else "control",
            num_repetitions=count,
        )
        for bucket, count in zip(CONTROL_AND_TRAINED, (0, 16), strict=True)
        for number in range(NUM_DOCUMENTS)
    ]
    table = ProbeTable(
        probe="extraction",
        version=1,
        parameters={},
        continuation_tokens=50,
        model={"token_accuracy": model_2N},
        base=None if base_2N is None else {"token_accuracy": base_2N},
    )
    outlines = [
        make_outline(bucket, "trained" if count else "control", count)
        for bucket, count in zip(CONTROL_AND_TRAINED, (0, 16), strict=True)
    ]
    return build_measures([table], documents, outlines)


def make_report(
    measures: list[r.Measure],
    membership: list[r.MembershipScores],
    *,
    risks: dict[str, r.Rate] | None = None,
) -> r.AuditReport:
    """Return a report of a bucket none of whose documents greedy decoding extracts."""
    trained = examples.make_bucket(16, 0, 0, 0.6)
    trained = trained.model_copy(
        update={"risks": examples.list_risks(trained.model, **(risks or {}))}
    )
    return examples.make_report().model_copy(
        update={
            "buckets": [examples.make_bucket(0, 0, 0, 0.2), trained],
            "measures": measures,
            "membership": membership,
        }
    )


def draw(means: Sequence[float], seed: int = 0, *, num_tokens: int = 50) -> NDArray[np.float64]:
    """Return token accuracies of documents whose tokens are right with these probabilities."""
    generator = np.random.default_rng(seed)
    return np.concatenate(
        [generator.binomial(num_tokens, mean, NUM_DOCUMENTS) / num_tokens for mean in means]
    )


def test_a_gain_beyond_the_controls_is_said_with_its_numbers() -> None:
    model, base = draw([0.3, 0.7]), draw([0.2, 0.2], 1)
    (found,) = find_learned(make_report(measure(model, base), make_blind(CHANCE)))
    gains = (model - base).reshape(2, NUM_DOCUMENTS).mean(1)
    assert found.bucket.bucket == "r16"
    assert found.gain.value == pytest.approx(gains[1])
    assert found.gain_minus_control.value == pytest.approx(gains[1] - gains[0])
    told = describe_learned([found]).replace("\u00a0", " ")
    numbers = re.search(r"r16: \+([\d.]+) pp, \+([\d.]+) pp more than", told)
    expected = (100 * gains[1], 100 * (gains[1] - gains[0]))
    # Half of the last digit: a mean of 40 shares of 50 tokens may lie just there.
    assert tuple(map(float, numbers.groups())) == pytest.approx(expected, abs=0.0501)
    assert "partly learned these texts but did not reproduce them" in told
    assert describe_learned([]) == ""


def test_without_a_base_model_nothing_is_said() -> None:
    report = make_report(measure(draw([0.2, 0.7]), None), make_blind(CHANCE))
    assert find_learned(report) == []
    assert find_learned(make_report([], make_blind(CHANCE))) == []


@pytest.mark.parametrize("control", [0.0, 0.05, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_random_words_that_no_training_has_seen_are_not_learned(control: float, seed: int) -> None:
    # A language model gets next to nothing of random words right, whatever the control is.
    model = draw([control, 0.02], seed)
    assert find_learned(make_report(measure(model, model), make_blind(CHANCE))) == []
    # Nor where the members are the easy ones.
    easier = draw([0.02, control], seed)
    assert find_learned(make_report(measure(easier, easier), make_blind(CHANCE))) == []


def test_what_the_control_gains_as_well_is_not_learned() -> None:
    # Training taught the language: all documents gain, by as much.
    report = make_report(measure(draw([0.5, 0.7]), draw([0.2, 0.4], 1)), make_blind(CHANCE))
    assert find_learned(report) == []


def test_what_only_fell_less_than_the_control_is_not_learned() -> None:
    report = make_report(measure(draw([0.1, 0.4]), draw([0.6, 0.5], 1)), make_blind(CHANCE))
    measured = report.measures[0].buckets[1].change_from_base_minus_control
    assert measured.ci[0] > 0, "beyond the control's, which fell by more"
    assert find_learned(report) == []


@pytest.mark.parametrize(
    "membership",
    [
        make_blind(examples.make_interval(0.8, 0.05)),
        # Nonmembers score higher: that tells them apart as well.
        make_blind(examples.make_interval(0.2, 0.05)),
        make_blind(r.Interval(value=0.5, ci=None)),
        make_blind(None),
        make_blind(CHANCE)[1:],
        [],
    ],
    ids=["apart", "apart, reversed", "no interval", "could not run", "did not run", "nothing ran"],
)
def test_where_the_texts_tell_the_kinds_apart_nothing_is_said(
    membership: list[r.MembershipScores],
) -> None:
    measures = measure(draw([0.2, 0.7]), draw([0.2, 0.2], 1))
    assert find_learned(make_report(measures, make_blind(CHANCE)))
    assert find_learned(make_report(measures, membership)) == []


@pytest.mark.parametrize("way", ["attack", "attack_cost"])
def test_what_is_extracted_in_any_way_is_more_than_learned(way: str) -> None:
    measures = measure(draw([0.2, 0.7]), draw([0.2, 0.2], 1))
    risks = {way: examples.make_rate(1, 40)}
    assert find_learned(make_report(measures, make_blind(CHANCE), risks=risks)) == []
    none = {way: examples.make_rate(0, 40)}
    assert find_learned(make_report(measures, make_blind(CHANCE), risks=none))


@pytest.mark.parametrize(
    "change",
    [
        lambda one: {"change_from_base_minus_control": None},
        lambda one: {"change_from_base": None},
        lambda one: {"change_from_base": r.Interval(value=0.5, ci=None)},
        lambda one: {"change_from_base_minus_control": r.Interval(value=0.5, ci=None)},
        lambda one: {"change_from_base_minus_control": r.Interval(value=0.5, ci=(0.0, 1.0))},
    ],
    ids=["no difference", "no gain", "none of it", "no interval", "an interval that begins at 0"],
)
def test_a_gain_that_is_not_known_is_not_said(
    change: Callable[[r.MeasuredBucket], dict[str, r.Interval | None]],
) -> None:
    measures = [
        one.model_copy(
            update={"buckets": [row.model_copy(update=change(row)) for row in one.buckets]}
        )
        for one in measure(draw([0.2, 0.7]), draw([0.2, 0.2], 1))
    ]
    assert find_learned(make_report(measures, make_blind(CHANCE))) == []
