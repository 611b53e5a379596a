"""Numbers of one probe, found among the measures of a report and shown."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memguard.records import AuditReport, Interval, Measure, MeasuredBucket, Rate
from memguard.report.cells import show_estimate, show_missing, show_rate
from memguard.report.formatting import format_interval, format_share
from memguard.report.page import Cell
from memguard.report.probes import explain, find_run
from memguard.report.text import clean_name

PLAIN = "plain"
"""A share that is written as a number from 0 to 1, as its field does."""
_DECIMALS = {"tokens": 1}
"""Of each unit; others have three."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """What one probe measured with one setting."""

    parameters: Mapping[str, Any]
    measures: Mapping[str, Measure]
    """By metric."""


def group_measures(report: AuditReport, probe: str) -> list[Group]:
    """Return what a probe measured, one group a setting, in the order of the record."""
    groups: dict[str, tuple[Mapping[str, Any], dict[str, Measure]]] = {}
    for measure in report.measures:
        if measure.probe == probe:
            key = json.dumps(measure.parameters, sort_keys=True)
            _, measures = groups.setdefault(key, (measure.parameters, {}))
            measures.setdefault(measure.metric, measure)
    return [Group(parameters=one, measures=measures) for one, measures in groups.values()]


def find_measured(group: Group, metric: str, bucket: str) -> MeasuredBucket | None:
    """Return a bucket's number; None where it was not measured."""
    measure = group.measures.get(metric)
    if measure is None:
        return None
    return next((one for one in measure.buckets if one.bucket == bucket), None)


def show_measured(group: Group, metric: str, bucket: str, unit: str = "") -> Cell:
    """Show the model's number of a bucket, or why there is none.

    Args:
        group: of one setting.
        metric: which number.
        bucket: of which documents.
        unit: how to write it; "" takes the record's.
    """
    found = find_measured(group, metric, bucket)
    if found is None:
        return show_missing("not measured")
    if found.model is None or not found.num_documents:
        return show_missing(_explain(found))
    return show_score(found.model, unit or group.measures[metric].unit)


def show_measured_base(group: Group, metric: str, bucket: str, unit: str = "") -> Cell:
    """Show the base model's number of a bucket; an empty cell where there is none."""
    found = find_measured(group, metric, bucket)
    if found is None or found.base is None:
        return Cell(text="")
    return show_score(found.base, unit or group.measures[metric].unit)


def show_score(score: Rate | Interval, unit: str) -> Cell:
    """Show a number in the spelling of its unit."""
    if isinstance(score, Rate):
        return show_rate(score)
    if unit == "share":
        return show_estimate(format_share(score))
    return show_estimate(format_interval(score, _DECIMALS.get(unit, 3)))


def explain_absence(report: AuditReport, probe: str, what: str) -> str:
    """Say why a probe's numbers are not there.

    Args:
        report: without them.
        probe: its name in suites.
        what: what a suite without it does not do, a verb first: ``attacks nothing``.
    """
    run = find_run(report, probe)
    if run is not None and run.reason_not_run is not None:
        return f"Probe '{probe}' did not run: {explain(run)}."
    if run is not None:
        return f"Probe '{probe}' ran, but this report holds no number of it."
    suite, version = clean_name(report.method.suite), report.method.suite_version
    other = "" if suite == "full" else "; '--suite full' does"
    return f"Suite '{suite}' (version {version:,}) {what}{other}."


def _explain(found: MeasuredBucket) -> str:
    if found.num_missing:
        return f"{found.num_missing:,} too short, or not in the sample"
    return "no documents"
