"""Compares a row of results with the same row of an earlier audit: `than` of a rule.

    paired     both audits asked the same documents: matched by the keyed hash of the text, with
               Tango's interval, at the effective number of their clusters
    unpaired   other documents, another identity key, records that this user may not read, or a
               metric that is not yes or no by document: two independent estimates (Newcombe 1998;
               Zou & Donner 2008)

A probe with other settings measures something else, and cannot be compared.
"""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit.statistics import compute_difference, compute_paired_interval, subtract
from memguard.audit.statistics.rates import count_effective, find_clusters
from memguard.gate.deciding import Unit, find_effective
from memguard.gate.gaps import Audited
from memguard.gate.measured import Measured, NotJudged, count_row
from memguard.records import Interval, MetricRow, Rate, ResultRow, Texts

_NO_SETTING = ("package", "in_verdict")
"""Entries of a probe in `method.probes` that do not change what it measures."""


def measure_increase(
    now: Audited, earlier: Audited, metric: MetricRow, row: ResultRow, unit: Unit
) -> Measured:
    """Return the increase of a row's value since an earlier audit, or raise `NotJudged`."""
    before = _find_same(earlier, row)
    _check_settings(now, earlier, metric)
    counted = f"{count_row(row)}, minus {count_row(before)} of {earlier.name}"
    paired, why_not = None, "the metric is not yes or no by document"
    if row.statistic == "rate" and row.model == "trained":
        paired, why_not = _pair(now, earlier, metric, row, before)
    if paired is not None:
        difference, how = paired, "; paired, on the same documents"
    else:
        unpaired = _subtract(row, before, metric)
        if unpaired is None or unpaired.ci is None:
            raise NotJudged(f"its difference from {earlier.name} has no interval")
        difference, how = unpaired, f"; not paired: {why_not}"
    assert difference.ci is not None, "checked"
    return Measured(
        value=difference.value,
        low=difference.ci[0],
        high=difference.ci[1],
        unit=unit,
        num_documents=row.num_documents,
        num_matched=row.num_matched,
        counted=counted,
        compared_with=earlier.name,
        how=how,
    )


def _find_same(earlier: Audited, row: ResultRow) -> ResultRow:
    before = next((one for one in earlier.report.tables.results if one.key == row.key), None)
    what = f"{row.probe} {row.metric} on {row.bucket}"
    if before is None:
        raise NotJudged(f"{earlier.name} has no row of {what}")
    if not before.is_known:
        raise NotJudged(
            f"{earlier.name} has no value of {what}: "
            f"{before.missing_because or 'no reason is recorded'}"
        )
    return before


def _check_settings(now: Audited, earlier: Audited, metric: MetricRow) -> None:
    """Check that the probe measured the same in both audits; `NotJudged` names what differs."""
    ones, others = (_describe_probe(audited, metric) for audited in (now, earlier))
    for name in sorted(ones.keys() | others.keys()):
        if ones.get(name) != others.get(name):
            raise NotJudged(
                f"{earlier.name} was audited with another '{name}' of the probe {metric.probe}: "
                f"{others.get(name)!r} there, {ones.get(name)!r} here"
            )


def _describe_probe(audited: Audited, metric: MetricRow) -> dict[str, Any]:
    """Return the settings that decide what a probe's numbers mean, with those of its windows."""
    method = audited.report.method
    probe = next((one for one in method.probes if one.get("name") == metric.probe), {})
    return {
        **{name: value for name, value in probe.items() if name not in _NO_SETTING},
        "continuation_tokens": method.continuation_tokens,
        "prefix_tokens": method.prefix_tokens,
        "window": method.window,
        "load_as": audited.report.model.load_as,
    }


def _subtract(row: ResultRow, before: ResultRow, metric: MetricRow) -> Interval | None:
    """Return the difference of two independent estimates."""
    if "clopper-pearson" == row.interval == before.interval:
        return compute_difference(_restore_rate(row), _restore_rate(before))
    ones, others = (
        Interval(value=one.value or 0.0, ci=one.ci) for one in (row, before) if one.is_known
    )
    low, high = metric.bounds or (None, None)
    if metric.statistic in ("rate", "auc"):
        low, high = 0.0, 1.0
    width = np.inf if low is None or high is None else high - low
    return subtract(ones, others, (-float(width), float(width)))


def _restore_rate(row: ResultRow) -> Rate:
    """Return a row as the rate that it was written from."""
    texts = None
    if row.num_clusters is not None:
        texts = Texts(
            num_texts=row.num_clusters,
            num_matched=row.num_matched_clusters or 0,
            num_effective=find_effective(row),
        )
    return Rate(
        num_documents=row.num_documents,
        num_matched=row.num_matched or 0,
        rate=row.value,
        ci=row.ci,
        texts=texts,
    )


def _pair(
    now: Audited, earlier: Audited, metric: MetricRow, row: ResultRow, before: ResultRow
) -> tuple[Interval | None, str]:
    """Return the paired difference of a rate, or None and the reason why it cannot be paired."""
    if now.documents is None or earlier.documents is None:
        return None, "only another user may read the records of the documents"
    keys = [audited.report.data.identity_key for audited in (now, earlier)]
    if keys[0] != keys[1]:
        return None, "the audits have different identity keys, so that texts cannot be matched"
    sides = []
    for audited, counted in ((now, row), (earlier, before)):
        side = _read_side(audited, metric, counted)
        if side is None:
            return None, "the records do not tell the answer of each document"
        sides.append(side)
    (ids, yes_N, clusters_N), (other_ids, other_N, _) = sides
    if None in ids or None in other_ids:
        return None, "the documents have no keyed hash"
    if Counter(ids) != Counter(other_ids):
        shared = len(set(ids) & set(other_ids))
        return None, (
            f"{shared:,} texts are in both audits, of {len(set(ids)):,} here and "
            f"{len(set(other_ids)):,} there"
            if shared
            else "the audits have no text in common"
        )
    # Equal texts have one id: within one id the order cannot matter but for its own copies.
    ones, others = (
        answers_N[np.lexsort((answers_N, np.array(names)))]
        for names, answers_N in ((ids, yes_N), (other_ids, other_N))
    )
    only_now, only_before = int((ones & ~others).sum()), int((others & ~ones).sum())
    _, size_C = find_clusters(len(ids), clusters_N)
    ci = compute_paired_interval(only_now, only_before, len(ids), count_effective(size_C))
    if ci is None:
        return None, "there are fewer than two texts"
    return Interval(value=(only_now - only_before) / len(ids), ci=ci), ""


Side = tuple[list[Any], NDArray[np.bool_], NDArray[np.int64]]
"""Ids, answers and clusters of the documents of a row."""


def _read_side(audited: Audited, metric: MetricRow, row: ResultRow) -> Side | None:
    """Return the documents of a row, or None if the records do not give its counts."""
    documents = audited.documents
    assert documents is not None, "checked"
    column = f"{metric.probe}.{metric.metric}"
    if metric.parameters or column not in documents.names:
        return None
    value_N = documents.numbers(column)
    here_N = (documents.bucket_N == row.bucket) & ~np.isnan(value_N)
    yes_N = value_N[here_N] == 1
    if (len(yes_N), int(yes_N.sum())) != (row.num_documents, row.num_matched):
        return None
    return documents.text_hmac_N[here_N].tolist(), yes_N, documents.cluster_N[here_N]
