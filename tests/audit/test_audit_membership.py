"""Members above nonmembers is an AUC above one half, and nothing is guessed."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from record_examples import make_document
from sklearn.metrics import roc_auc_score

from memguard.audit.cache import ScoreMatrix
from memguard.audit.metrics import Evidence
from memguard.audit.probe import Summary
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.membership_scores import MEMBERSHIP_SCORES
from memguard.audit.requests import Inputs, Measured
from memguard.audit.windows import AuditDocument, Window, is_member
from memguard.pages.roc import read_score
from memguard.records import MEMBERS, ResultRow

Scores = Mapping[str, NDArray[np.float64]]


def _documents(
    num_members: int, num_nonmembers: int, *, apart: bool = False
) -> list[AuditDocument]:
    """Members, then nonmembers, of random tokens; ``apart`` gives each kind its own."""
    draw = np.random.default_rng(0)
    members = [
        make_document(draw.integers(0, 50, 40), name=f"m{number}") for number in range(num_members)
    ]
    shift = 50 if apart else 0
    return members + [
        make_document(
            draw.integers(shift, shift + 50, 40),
            name=f"c{number}",
            bucket="x0",
            role="control",
            num_repetitions=0,
        )
        for number in range(num_nonmembers)
    ]


def _measure(scores: Scores) -> Measured:
    rows = np.column_stack(list(scores.values()))
    return Measured(columns=ScoreMatrix(names=tuple(scores), rows=rows))


def _tabulate(
    documents: list[AuditDocument],
    scores: Scores,
    *,
    base: Scores | None = None,
    reference: Scores | None = None,
    **fields: Any,
) -> Summary:
    windows = [
        Window(document=d, start=0, prefix_tokens=1, continuation_tokens=len(d.input_ids) - 1)
        for d in documents
    ]
    probe = MembershipProbe(scores=tuple(name for name in scores if "." not in name))
    evidence = Evidence(
        inputs=Inputs(windows=windows, max_edit_share=0.1, seed=0, tiny_margin=1e-3),
        buckets=[],
        trained={"membership": _measure(scores)},
        other=None if base is None else {"membership": _measure(base)},
        reference={} if reference is None else {"membership": _measure(reference)},
        **fields,
    )
    return probe.tabulate(evidence)


def _aucs(summary: Summary) -> dict[str, ResultRow]:
    return {read_score(row): row for row in summary.rows if row.metric == "auc"}


def _compute(documents: list[AuditDocument], **scores: NDArray[np.float64]) -> dict[str, ResultRow]:
    return _aucs(_tabulate(documents, scores))


def test_orientation_counts_and_definitions() -> None:
    documents = _documents(30, 20)
    background = make_document(np.arange(40), name="b", role="background", bucket="b")
    never = make_document(np.arange(40), name="never", num_repetitions=0)
    uncounted = make_document(np.arange(40), name="uncounted", num_repetitions=None)
    assert [is_member(d) for d in (background, never, uncounted)] == [False, False, True]
    draw = np.random.default_rng(0)
    # Neither the background nor what training never reached is on either side.
    loss_N = np.concatenate([draw.normal(-1, 0.1, 30), draw.normal(-3, 0.1, 20), [9.0, 9.0]])
    found = _tabulate([*documents, background, never], {"loss": loss_N})
    loss = _aucs(found)["loss"]
    assert (loss.num_documents, loss.num_other, loss.num_missing) == (30, 20, 0)
    assert (loss.bucket, loss.parameters, loss.interval) == (MEMBERS, "score=loss", "delong")
    assert loss.value == 1
    assert loss.ci is not None
    assert loss.ci[0] < 1
    assert found.num_items == 50
    assert list(found.columns) == ["membership.loss", "membership.blind"]
    np.testing.assert_array_equal(found.columns["membership.loss"].values, loss_N)
    # The baseline reads only the texts that it compares.
    blind_N = found.columns["membership.blind"].values
    np.testing.assert_array_equal(np.isfinite(blind_N), np.arange(52) < 50)
    keys = {(metric.metric, metric.parameters): metric for metric in found.metrics}
    assert {(row.metric, row.parameters) for row in found.rows} == set(keys)
    auc = keys["auc", "score=loss"]
    assert (auc.meaning, auc.higher_is_better) == (MEMBERSHIP_SCORES["loss"].definition, False)


def test_auc_is_that_of_scikit_learn() -> None:
    documents = _documents(40, 25)
    draw = np.random.default_rng(1)
    # Rounded: ties must count half.
    score_N = (draw.normal(size=65) + np.repeat([0.5, 0.0], [40, 25])).round(1)
    expected = roc_auc_score(np.repeat([1, 0], [40, 25]), score_N)
    assert _compute(documents, loss=score_N)["loss"].value == pytest.approx(expected, abs=1e-12)


def test_scores_of_other_models_and_passes() -> None:
    documents = _documents(3, 3)
    loss_N = -np.arange(1.0, 7)
    scores = {"loss": loss_N, "recall.mean_logprob": 2 * loss_N, "plain.mean_logprob": loss_N}
    reference = {"reference.mean_logprob": loss_N - 1}
    columns = _tabulate(documents, scores, base={"loss": loss_N - 3}, reference=reference).columns
    values = {name.removeprefix("membership."): one.values for name, one in columns.items()}
    assert list(values) == ["loss", "loss_minus_base", "recall", "reference"]
    assert [set(values[name]) for name in list(values)[1:]] == [{3.0}, {2.0}, {1.0}]
    # Without scores of the base there is nothing to compare.
    assert list(_aucs(_tabulate(documents, {"loss": loss_N}))) == ["loss"]


def test_missing_scores_are_counted_and_never_ranked() -> None:
    documents = _documents(10, 10)
    score_N = np.concatenate([np.full(10, 2.0), np.full(10, 1.0)])
    score_N[[0, 1, 12]] = np.nan
    row = _compute(documents, zlib=score_N)["zlib"]
    assert (row.num_documents, row.num_other, row.num_missing, row.value) == (8, 9, 3, 1)
    score_N[1:9] = np.nan
    found = _tabulate(documents, {"zlib": score_N})
    row, *rates = (row for row in found.rows if "zlib" in row.parameters)
    assert (row.num_documents, row.num_missing) == (1, 10)
    assert row.value is None, "one member is no ranking"
    assert row.missing_because == "fewer than two trained or control documents have the score"
    assert [rate.value for rate in rates] == [None] * 3
    assert (found.num_items, found.reason) == (0, "none of its scores could be computed")


@pytest.mark.parametrize(
    ("num_nonmembers", "known"), [(9, []), (10, ["0.1"]), (99, ["0.1"]), (100, ["0.01", "0.1"])]
)
def test_no_fpr_below_one_over_the_nonmembers(num_nonmembers: int, known: list[str]) -> None:
    documents = _documents(12, num_nonmembers)
    score_N = np.concatenate([np.linspace(1, 2, 12), np.linspace(0, 1.5, num_nonmembers)])
    rows = [row for row in _tabulate(documents, {"loss": score_N}).rows if row.metric == "tpr"]
    rates = {row.parameters.split(", ")[0][4:]: row for row in rows if "=loss" in row.parameters}
    assert list(rates) == ["0.001", "0.01", "0.1"]
    assert [name for name, row in rates.items() if row.is_known] == known
    for name, row in rates.items():
        if name not in known:
            assert row.missing_because == f"fewer than 1 / {name} control documents"
            continue
        allowed = int(float(name) * num_nonmembers)
        threshold = sorted(score_N[12:], reverse=True)[allowed]
        assert row.num_matched == sum(score_N[:12] > threshold)
        assert (row.num_documents, row.interval) == (12, "threshold")


def test_the_blind_baseline_stands_beside_them_last() -> None:
    score_N = np.linspace(0, 1, 60)
    found = _tabulate(_documents(30, 30), {"loss": score_N, "zlib": score_N})
    alike = _aucs(found)
    assert list(alike) == ["loss", "zlib", "blind"]
    assert any("no model access" in metric.meaning for metric in found.metrics)
    blind_N = found.columns["membership.blind"].values
    assert alike["blind"].value == roc_auc_score(np.repeat([1, 0], 30), blind_N)
    # Texts of one kind: chance lies inside the interval.
    assert alike["blind"].ci is not None
    assert alike["blind"].ci[0] < 0.5 < alike["blind"].ci[1]
    told = _compute(_documents(30, 30, apart=True), loss=score_N)["blind"]
    assert told.value == 1
    # Fewer than five of a kind cannot be cross-fitted.
    few = _tabulate(_documents(4, 30), {"loss": np.linspace(0, 1, 34)})
    assert list(_aucs(few)) == ["loss"]
    assert "membership.blind" not in few.columns


def test_the_blind_baseline_does_not_recognise_copies() -> None:
    """Each text twice: alone it would be found again in the other folds."""

    def compute(clustered: bool) -> float:
        draw, documents = np.random.default_rng(2), []
        for number in range(40):
            ids = draw.integers(0, 4000, 30)
            kind = {"bucket": "x0", "role": "control", "num_repetitions": 0} if number % 2 else {}
            cluster = {"cluster": number} if clustered else {}
            documents += [
                make_document(ids, name=f"{number} {copy}", **kind, **cluster) for copy in (1, 2)
            ]
        return _compute(documents, loss=np.linspace(0, 1, 80))["blind"].value or 0.0

    assert compute(clustered=False) > 0.9
    assert 0.2 < compute(clustered=True) < 0.8


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ([0, 1, 2], "no control documents"),
        ([0, 1, 2, 3], "3 trained and 1 control documents; it needs 2 of each"),
        ([0, 3, 4], "1 trained and 2 control documents; it needs 2 of each"),
    ],
)
def test_no_rows_without_enough_of_either(chosen: list[int], reason: str) -> None:
    documents = [_documents(3, 3)[index] for index in chosen]
    scores = {"loss": np.linspace(0, 1, len(chosen))}
    found = _tabulate(documents, scores)
    assert (found.rows, found.num_items, found.reason) == ((), 0, reason)
    # The verdict still reads the scores.
    assert list(found.columns) == ["membership.loss"]
