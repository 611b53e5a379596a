"""Rows of results and their tables, made up: for tests of pages and records.

rate_row, value_row   a row of results
make_tables           rows, buckets, tests and details -> tables; metrics follow from the rows
change_rows           a report -> the report with other rows
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from scipy.stats import beta

from memguard import records as r
from memguard.audit.metrics import Metric
from memguard.audit.suite import PROBES
from memguard.records.results import Method, Statistic

RecordT = TypeVar("RecordT", r.AuditReport, r.Comparison)
KINDS = {(probe, m.name): m for probe, kind in PROBES.items() for m in kind.metrics}
"""What memguard's probes measure."""


def make_rate(matched: int, documents: int) -> r.Rate:
    if documents == 0:
        return r.Rate(num_documents=0, num_matched=0, rate=None, ci=None)
    low = 0.0 if matched == 0 else float(beta.ppf(0.025, matched, documents - matched + 1))
    high = 1.0 if matched == documents else float(beta.ppf(0.975, matched + 1, documents - matched))
    return r.Rate(
        num_documents=documents,
        num_matched=matched,
        rate=matched / documents,
        ci=(low, high) if documents > 1 else None,
    )


def make_interval(value: float, half: float, low: float = 0.0, high: float = 1.0) -> r.Interval:
    return r.Interval(value=value, ci=(max(low, value - half), min(high, value + half)))


def rate_row(
    probe: str,
    metric: str,
    bucket: str,
    matched: int | None,
    documents: int = 40,
    *,
    minus: r.Interval | None = None,
    why_not: str = r.NO_DOCUMENTS,
    settings: Mapping[str, Any] | None = None,
    **key: Any,
) -> r.ResultRow:
    """Return a rate; ``matched`` None: it was not measured because of ``why_not``."""
    row = r.ResultRow(
        probe=probe,
        metric=metric,
        bucket=bucket,
        statistic="rate",
        num_documents=documents,
        **{"parameters": r.write_parameters(settings or {}), **key},
    )
    rate = None if matched is None else make_rate(matched, documents)
    return r.fill_row(row, rate, "clopper-pearson", minus_control=minus, why_not=why_not)


def value_row(
    probe: str,
    metric: str,
    bucket: str,
    value: r.Interval | float | None,
    documents: int = 40,
    *,
    statistic: Statistic = "mean",
    interval: Method = "jackknife",
    minus: r.Interval | None = None,
    why_not: str = r.NO_DOCUMENTS,
    settings: Mapping[str, Any] | None = None,
    **key: Any,
) -> r.ResultRow:
    """Return a mean, a median, an AUC or a difference (`against`)."""
    row = r.ResultRow(
        probe=probe,
        metric=metric,
        bucket=bucket,
        statistic="difference" if key.get("against") else statistic,
        num_documents=documents,
        **{"parameters": r.write_parameters(settings or {}), **key},
    )
    return r.fill_row(row, value, interval, minus_control=minus, why_not=why_not)


def make_metric(probe: str, metric: str, parameters: str = "", **changes: Any) -> r.MetricRow:
    """Return what a metric means; its settings are read from the parameters."""
    pairs = [pair.split("=", 1) for pair in re.split(r", (?=[a-z_]+=)", parameters) if pair]
    kind = KINDS.get((probe, metric)) or Metric(
        name=metric, meaning="What it is.", unit="documents", statistic="rate"
    )
    ranks = {place: rank for rank, place in enumerate(r.RISK_PLACES.values(), start=1)}
    words, bounds = metric.replace("_", " "), kind.bounds
    values: dict[str, Any] = {
        "settings": {name: int(v) if v.isdigit() else v for name, v in pairs},
        "version": 1,
        "meaning": kind.meaning,
        "unit": kind.unit,
        "statistic": kind.statistic,
        "bounds": bounds and tuple(end if math.isfinite(end) else None for end in bounds),
        "heading": kind.heading or words.capitalize(),
        "spoken": kind.spoken or words,
        "risk_rank": ranks.get((probe, metric, parameters)),
    }
    return r.MetricRow(probe=probe, metric=metric, parameters=parameters, **{**values, **changes})


def make_tables(
    rows: Iterable[r.ResultRow],
    buckets: Iterable[r.BucketRow] = (),
    tests: Iterable[r.TestRow] = (),
    details: Iterable[r.DetailRow] = (),
    metrics: Iterable[r.MetricRow] = (),
) -> r.Tables:
    """Return tables; metrics that are not given follow from the rows."""
    rows, given = list(rows), {(m.probe, m.metric, m.parameters): m for m in metrics}
    places = dict.fromkeys([(row.probe, row.metric, row.parameters) for row in rows] + [*given])
    known = {place: given.get(place) or make_metric(*place) for place in places}
    return r.Tables(
        results=tuple(rows),
        metrics=tuple(known.values()),
        buckets=tuple(buckets),
        tests=tuple(tests),
        details=tuple(details),
    )


def change_tables(report: RecordT, **changes: Any) -> RecordT:
    """Return the report with other tables: results, buckets, tests, details, metrics."""
    old = report.tables
    tables = make_tables(
        changes.get("results", old.results),
        changes.get("buckets", old.buckets),
        changes.get("tests", old.tests),
        changes.get("details", old.details),
        changes.get("metrics", old.metrics),
    )
    return report.model_copy(update={"tables": tables})


def change_rows(
    report: RecordT,
    change: Callable[[r.ResultRow], r.ResultRow | None] = lambda row: row,
    add: Sequence[r.ResultRow] = (),
) -> RecordT:
    """Return the report with rows changed, without those that became None, and with new ones."""
    new = {row.key for row in add}
    kept = [row for old in report.tables.results if (row := change(old)) and row.key not in new]
    return change_tables(report, results=[*kept, *add])


def change_buckets(report: RecordT, **changes: Any) -> RecordT:
    """Return the report with these values in every bucket."""
    return change_tables(report, buckets=[replace(b, **changes) for b in report.tables.buckets])


def auc_row(score: str, auc: r.Interval | None, members: int = 120, **key: Any) -> r.ResultRow:
    return value_row(
        *("membership", "auc", r.MEMBERS, auc, members),
        statistic="auc",
        interval="delong",
        settings={"score": score},
        why_not="fewer than two trained or control documents have the score",
        **{"num_other": 40, **key},
    )


def make_badges(
    text: str = "None found",
    membership: str = "no sign",
    text_detail: str = "0 of 40 documents",
    membership_detail: str = "AUC 0.50",
) -> tuple[r.Badge, r.Badge]:
    """Return the badges of a setting; the colours are not those of the states."""
    return (
        r.Badge(title="Text", state=text, colour="grey", detail=text_detail),
        r.Badge(title="Membership", state=membership, colour="grey", detail=membership_detail),
    )
