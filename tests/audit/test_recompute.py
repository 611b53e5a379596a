"""Every row of results is computed again from records.parquet, by other code.

records.parquet    values of each document under both models, its bucket, role and cluster
canaries.parquet   the same of each canary
plain_statistics   rates, means, AUC and TPR with their intervals, without memguard
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import plain_statistics as plain
import pytest
from numpy.typing import NDArray
from recompute_examples import Audited, make_audited
from recomputed_rows import recompute, select_scores
from scipy import stats
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import roc_curve

from memguard.audit.suite import PROBES
from memguard.records import ResultRow, Verdict, VerdictCounts

NOT_STORED = {
    ("mask_consistency", "mask_changed"): "it compares rewritten texts, which no document has",
    ("mask_consistency", "leaked_share"): "it compares rewritten texts, which no document has",
}
"""Probe and metric of the rows that have no values of documents, with the reason."""
NOT_ATTACKS = ("extraction", "sampling")
OF_CLUSTERS = ("clopper-pearson", "jackknife", "tango")
"""Methods of intervals that count copies of a text once."""


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    return make_audited(tmp_path_factory.mktemp("recompute"))


NUMBERS = ("value", "low", "high")


def round_single(row: ResultRow, estimate: plain.Estimate | None) -> list[float | None]:
    """Return the numbers of a row; those that show a single document have two digits."""
    numbers = list(estimate or (None,) * 3)
    if row.num_documents > 1 and row.statistic != "max":
        return numbers
    return [None if number is None else float(f"{number:.1e}") for number in numbers]


def check(audited: Audited, row: ResultRow) -> None:
    """Compare a row with what is computed again."""
    numbers = recompute(audited, row)
    counts = dict(numbers.counts or {})
    group = numbers.group
    if group is not None:
        counts |= {"num_documents": len(group.values)}
        if row.statistic == "rate" and group.values:
            counts["num_matched"] = int(sum(group.values))
        num_texts = len(set(group.clusters))
        if row.interval in OF_CLUSTERS and num_texts < len(group.values):
            counts["num_clusters"] = num_texts
        if row.interval == "clopper-pearson" and num_texts < len(group.values):
            matched = {c for c, v in zip(group.clusters, group.values, strict=True) if v}
            counts["num_matched_clusters"] = len(matched)
    assert {name: getattr(row, name) for name in counts} == counts, row
    expected = [
        *round_single(row, numbers.estimate),
        *round_single(row, numbers.minus_control if numbers.estimate else None),
    ]
    shown = [
        *(getattr(row, name) for name in NUMBERS),
        *(row.minus_control, row.minus_control_low, row.minus_control_high),
    ]
    assert (row.value is None) == (row.missing_because is not None), row
    # Two ways to sum, and to find a root, differ by less than 1e-9.
    assert [number is None for number in shown] == [number is None for number in expected], row
    known = [number for number in expected if number is not None]
    assert [n for n in shown if n is not None] == pytest.approx(known, rel=1e-9, abs=1e-9), row


def check_all(audited: Audited, rows: Iterable[ResultRow]) -> None:
    for row in rows:
        check(audited, row)


def test_every_row_of_results(audited: Audited) -> None:
    rows = audited.outcome.summary.tables.results
    stored = [row for row in rows if (row.probe, row.metric) not in NOT_STORED]
    assert {row.probe for row in rows} == set(PROBES)
    check_all(audited, stored)
    assert (len(stored), len(rows)) == (666, 668)
    # The numbers are no constants: a fourth of the rows are away from both edges.
    inside = [row for row in stored if row.ci is not None and 0.02 < (row.value or 0) < 0.98]
    assert len(inside) > len(stored) / 4
    intervals = Counter(row.interval for row in stored)
    assert set(intervals) >= {"clopper-pearson", "jackknife", "tango", "delong", "threshold"}
    assert sum(row.minus_control_ci is not None for row in stored) > 100
    assert sum(row.num_clusters is not None for row in stored) > 200


@pytest.mark.parametrize(
    ("column", "probe"),
    [
        ("membership.blind", "membership"),
        ("membership.reference", "membership"),
        ("base.extraction.logprob", "extraction"),
        ("sampling.log10_floor", "sampling"),
        ("cluster", "extraction"),
        ("bucket", "grid"),
    ],
)
def test_a_changed_record_changes_a_row(audited: Audited, column: str, probe: str) -> None:
    """Each column is read: two of its values, exchanged, contradict the results."""
    values = audited.records[column].copy()
    values[[0, 24]] = values[[24, 0]]
    changed = replace(audited, records={**audited.records, column: values})
    rows = [row for row in audited.outcome.summary.tables.results if row.probe == probe]
    with pytest.raises(AssertionError):
        check_all(changed, rows)


def test_the_curves_are_those_of_scikit_learn(audited: Audited) -> None:
    tables = audited.outcome.summary.tables
    detail = tables.find_detail("membership")
    assert detail is not None
    aucs = [row.parameters for row in tables.select("membership", "auc")]
    assert [f"score={curve['score']}" for curve in detail["roc"]] == aucs
    for curve in detail["roc"]:
        members, control, _ = select_scores(audited, curve["score"])
        truth = [1] * len(members) + [0] * len(control)
        fpr, tpr, _ = roc_curve(truth, [*members, *control], drop_intermediate=False)
        above = np.rint(fpr * len(control)).astype(int)
        points = zip(curve["num_allowed"], curve["num_matched"], strict=True)
        for allowed, matched in points:
            assert matched == round(max(tpr[above <= allowed]) * len(members))
        assert (curve["num_members"], curve["num_control"]) == (len(members), len(control))
        assert curve["num_allowed"][0] == 0
        assert curve["num_allowed"][-1] == len(control)
        at = dict(zip(curve["num_allowed"], curve["num_matched"], strict=True))
        row = tables.find(
            "membership", "tpr", "(members)", parameters=f"fpr=0.1, score={curve['score']}"
        )
        assert row is not None
        # 24 control documents: 2 of them are allowed.
        assert row.num_matched == at[2]


def count(audited: Audited, where: NDArray[np.bool_], matched: NDArray[np.bool_]) -> VerdictCounts:
    """Return the counts of a tile."""
    clusters = audited.records["cluster"]
    share, low, high = plain.estimate_rate(
        matched[where].astype(float).tolist(), clusters[where].tolist()
    )
    assert low is not None
    assert high is not None
    return VerdictCounts(
        num_documents=int(where.sum()),
        num_matched=int((where & matched).sum()),
        num_clusters=len(set(clusters[where])),
        num_matched_clusters=len(set(clusters[where & matched])),
        rate=share,
        ci=(low, high),
    )


def test_the_numbers_of_the_verdict(audited: Audited) -> None:
    """The three tiles, and the AUC of the second line: one document of each cluster, by id."""
    verdict: Verdict = audited.outcome.summary.verdict
    assert verdict.test is not None
    assert (verdict.level, verdict.test.documents) == ("memorized", "bucket")
    extracted, of_base = (
        np.logical_or(*(audited.read(f"{start}{n}.extracted") == 1 for n in NOT_ATTACKS))
        for start in ("", "base.")
    )
    here = audited.records["bucket"] == verdict.bucket
    control = audited.records["role"] == "control"
    for counts, expected in (
        (verdict.trained, count(audited, here, extracted)),
        (verdict.control, count(audited, control, extracted)),
        (verdict.base, count(audited, here, of_base)),
    ):
        assert counts is not None
        assert counts.model_copy(update={"ci": None}) == expected.model_copy(update={"ci": None})
        assert counts.ci == pytest.approx(expected.ci, abs=1e-9)
    membership = verdict.membership
    assert membership.score == "loss_minus_base"
    firsts: dict[Any, int] = {}
    for index in np.argsort(audited.records["id"].astype(str), kind="stable").tolist():
        firsts.setdefault(
            (audited.records["role"][index], audited.records["cluster"][index]), index
        )
    scores = audited.read("membership.loss_minus_base")
    members, others = (
        [scores[index] for (role, _), index in firsts.items() if role == name]
        for name in ("trained", "control")
    )
    assert membership.auc is not None
    assert membership.auc.ci is not None
    shown = [membership.auc.value, *membership.auc.ci]
    assert shown == pytest.approx(plain.estimate_auc(members, others), abs=1e-9)
    assert (membership.num_members, membership.num_nonmembers) == (len(members), len(others))


def test_the_trends(audited: Audited) -> None:
    """Cochran and Armitage's test by its formula, and rates that never fall by scikit-learn."""
    doses = {"x0": 0, "x4": 4, "x9": 9, "x64": 64}
    tests = audited.outcome.summary.tables.tests
    assert [test.metric for test in tests] == ["verbatim", "near_verbatim"]
    for test in tests:
        values = audited.read(f"extraction.{test.metric}")
        dose = np.array([doses[bucket] for bucket in audited.records["bucket"]], dtype=float)
        rate, count = values.mean(), len(values)
        spread = (dose**2).sum() - dose.sum() ** 2 / count
        z = (dose * (values - rate)).sum() / math.sqrt(rate * (1 - rate) * spread)
        assert (test.statistic, test.p_value) == pytest.approx(
            (z, 2 * stats.norm.sf(abs(z))), abs=1e-9
        )
        fitted = IsotonicRegression().fit(dose, values).predict(sorted(doses.values()))
        assert test.fitted == pytest.approx(fitted.tolist(), abs=1e-9)
        assert test.num_documents == count
