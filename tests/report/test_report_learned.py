"""Learned token by token: said only of what training added beyond the control."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import report_examples as examples
from numpy.typing import NDArray
from record_examples import make_document, make_outline
from result_examples import auc_row, change_rows, make_interval, rate_row

from memguard import records as r
from memguard.audit.metrics import Evidence, Metric, tabulate_metric
from memguard.audit.requests import Inputs
from memguard.audit.windows import Window
from memguard.report.audit_summary import describe_learned, find_learned

NUM_DOCUMENTS = 40
BUCKETS = (("control", "control", 0), ("r16", "trained", 16))
CHANCE = make_interval(0.52, 0.06)
ACCURACY = Metric(name="token_accuracy", meaning="x", unit="share", bounds=(0.0, 1.0))


def make_blind(auc: r.Interval | None) -> list[r.ResultRow]:
    return [auc_row("blind", auc, 40), auc_row("loss", make_interval(0.88, 0.05))]


def measure(
    model_2N: NDArray[np.float64], base_2N: NDArray[np.float64] | None
) -> list[r.ResultRow]:
    """Return what an audit makes of token accuracies of the control's and the bucket's documents.

    Args:
        model_2N: ``[2 * NUM_DOCUMENTS]``, the control's first.
        base_2N: the same of the model before training.
    """
    windows = [
        Window(
            document=make_document(
                np.zeros(60), name=f"{name}-{n}", bucket=name, role=role, num_repetitions=count
            ),
            start=0,
            prefix_tokens=10,
            continuation_tokens=50,
        )
        for name, role, count in BUCKETS
        for n in range(NUM_DOCUMENTS)
    ]
    evidence = Evidence(
        inputs=Inputs(windows=windows, max_edit_share=0.1, seed=0, tiny_margin=1e-3),
        buckets=[make_outline(*bucket) for bucket in BUCKETS],
        trained={},
    )
    row = rate_row("extraction", "token_accuracy", "", None)
    row = replace(row, missing_because=None)
    return list(tabulate_metric(evidence, row, ACCURACY, model_2N, base_2N, continuation_tokens=50))


def make_report(
    measured: list[r.ResultRow], membership: list[r.ResultRow], *others: r.ResultRow
) -> r.AuditReport:
    """Return a report of a bucket none of whose documents greedy decoding extracts."""
    report = examples.make_report(doses=[(0, 0, 0, 0.2), (16, 0, 0, 0.6)])
    return change_rows(
        report,
        lambda row: None if row.metric == "token_accuracy" or row.probe == "membership" else row,
        [*measured, *membership, *others],
    )


def draw(means: Sequence[float], seed: int = 0, *, num_tokens: int = 50) -> NDArray[np.float64]:
    """Return token accuracies of documents whose tokens are right with these probabilities."""
    generator = np.random.default_rng(seed)
    return np.concatenate(
        [generator.binomial(num_tokens, mean, NUM_DOCUMENTS) / num_tokens for mean in means]
    )


def test_a_gain_beyond_the_controls_is_said_with_its_numbers() -> None:
    model, base = draw([0.3, 0.7]), draw([0.2, 0.2], 1)
    report = make_report(measure(model, base), make_blind(CHANCE))
    (found,) = find_learned(report)
    gains = (model - base).reshape(2, NUM_DOCUMENTS).mean(1)
    assert found.bucket == "r16"
    assert found.value == pytest.approx(gains[1])
    assert found.minus_control == pytest.approx(gains[1] - gains[0])
    told = describe_learned(report, [found]).replace("\u00a0", " ")
    numbers = re.search(r"r16: \+([\d.]+) pp, \+([\d.]+) pp more than", told)
    expected = (100 * gains[1], 100 * (gains[1] - gains[0]))
    # Half of the last digit: a mean of 40 shares of 50 tokens may lie just there.
    assert tuple(map(float, numbers.groups())) == pytest.approx(expected, abs=0.0501)
    assert "partly learned these texts but did not reproduce them" in told
    assert describe_learned(report, []) == ""


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
    row = report.tables.find("extraction", "token_accuracy", "r16", against="base")
    assert row.minus_control_low > 0, "beyond the control's, which fell by more"
    assert find_learned(report) == []


@pytest.mark.parametrize(
    "membership",
    [
        make_blind(make_interval(0.8, 0.05)),
        # Nonmembers score higher: that tells them apart as well.
        make_blind(make_interval(0.2, 0.05)),
        make_blind(r.Interval(value=0.5, ci=None)),
        make_blind(None),
        make_blind(CHANCE)[1:],
        [],
    ],
    ids=["apart", "apart, reversed", "no interval", "could not run", "did not run", "nothing ran"],
)
def test_where_the_texts_tell_the_kinds_apart_nothing_is_said(
    membership: list[r.ResultRow],
) -> None:
    measures = measure(draw([0.2, 0.7]), draw([0.2, 0.2], 1))
    assert find_learned(make_report(measures, make_blind(CHANCE)))
    assert find_learned(make_report(measures, membership)) == []


@pytest.mark.parametrize("way", ["attack", "attack_cost"])
def test_what_is_extracted_in_any_way_is_more_than_learned(way: r.RiskName) -> None:
    measured = measure(draw([0.2, 0.7]), draw([0.2, 0.2], 1))
    probe, metric, parameters = r.RISK_PLACES[way]
    for matched in (1, 0):
        row = rate_row(probe, metric, "r16", matched, parameters=parameters)
        learned = find_learned(make_report(measured, make_blind(CHANCE), row))
        assert bool(learned) == (matched == 0)


@pytest.mark.parametrize(
    "change",
    [
        {"minus_control": None, "minus_control_low": None, "minus_control_high": None},
        {"value": None, "low": None, "high": None},
        {"low": None, "high": None},
        {"minus_control_low": None, "minus_control_high": None},
        {"minus_control_low": 0.0},
    ],
    ids=["no difference", "no gain", "no interval of it", "no interval", "begins at 0"],
)
def test_a_gain_that_is_not_known_is_not_said(change: dict[str, Any]) -> None:
    measured = measure(draw([0.2, 0.7]), draw([0.2, 0.2], 1))
    changed = [replace(row, **change) if row.against else row for row in measured]
    assert find_learned(make_report(changed, make_blind(CHANCE))) == []
