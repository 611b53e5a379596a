"""Which probes ran, their results by bucket, and the sections of other windows and generation."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memguard.records import (
    AuditReport,
    BucketScores,
    Interval,
    Measure,
    MeasuredBucket,
    ProbeRun,
    Rate,
)
from memguard.report import formatting as fmt
from memguard.report.page import Cell, Fact, Section, Table
from memguard.report.tables import (
    Column,
    Content,
    make_cell,
    make_table,
    name_bucket,
    show_missing,
    show_name,
    show_rate,
    tone_of_bucket,
)

_MOST_PROBES = 50


def describe_probes(report: AuditReport) -> tuple[Fact, ...]:
    """List the probes that ran, each with its number of documents, version and settings."""
    settings = {str(probe.get("name")): probe for probe in report.method.probes}
    return tuple(
        Fact(
            fmt.clean_name(run.name),
            _count_documents(run),
            detail=_describe_settings(run, settings.get(run.name, {}))
            + (_name_missing_scores(report) if run.name == "membership" else ""),
        )
        for run in _list_ran(report)
    )


def describe_not_run(report: AuditReport) -> tuple[Fact, ...]:
    """List the probes of the suite that did not run, each with its reason."""
    return tuple(
        Fact(fmt.clean_name(run.name), "not run", detail=_explain(run))
        for run in _list_not_run(report)
    )


def write_ran(report: AuditReport) -> str:
    """List the probes that ran: ``extraction (80 documents), canaries (32 canaries)``."""
    ran = [f"{fmt.clean_name(run.name)} ({_count_documents(run)})" for run in _list_ran(report)]
    return ", ".join(ran) or "none"


def write_not_run(report: AuditReport) -> str:
    """List the probes of the suite that did not run, with their reasons; "" if all ran."""
    return "; ".join(
        f"{fmt.clean_name(run.name)} ({_explain(run)})" for run in _list_not_run(report)
    )


def _list_ran(report: AuditReport) -> list[ProbeRun]:
    """Return the probes that ran, in the order of the suite."""
    return [run for run in report.probe_runs[:_MOST_PROBES] if run.num_documents is not None]


def _list_not_run(report: AuditReport) -> list[ProbeRun]:
    """Return the probes that did not run, in the order of the suite."""
    return [run for run in report.probe_runs[:_MOST_PROBES] if run.num_documents is None]


def _count_documents(run: ProbeRun) -> str:
    """Format the number of documents that a probe has a result for: ``80 documents``."""
    assert run.num_documents is not None, "only for probes that ran"
    unit = run.counted.removesuffix("s") if run.num_documents == 1 else run.counted
    return f"{fmt.count(run.num_documents)} {unit}"


def _explain(run: ProbeRun) -> str:
    """Return the reason why a probe did not run."""
    return fmt.clean_text(run.reason_not_run or "")


def _name_missing_scores(report: AuditReport) -> str:
    """Name the membership scores of the suite that could not be computed; "" for none."""
    probe = next((p for p in report.method.probes if p.get("name") == "membership"), {})
    requested = probe.get("scores")
    listed = requested if isinstance(requested, list) else []
    computed = {row.score for row in report.membership if row.auc is not None}
    missing = [str(score) for score in listed if score not in computed]
    names = ", ".join(fmt.clean_name(score, 40) for score in missing[:_MOST_PROBES])
    return f"; not computed: {names}" if names else ""


def _describe_settings(run: ProbeRun, probe: dict[str, Any]) -> str:
    settings = {key: value for key, value in probe.items() if key not in ("name", "version")}
    version = f"version {fmt.count(run.version)}"
    return f"{version}; {fmt.settings(settings)}" if settings else version


PLAIN = "plain"
"""Unit of a share that is written as a number from 0 to 1, as is usual in its literature."""
_DECIMALS = {"tokens": 1}
"""Decimals by unit; 3 for the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The measures of one probe with one setting."""

    parameters: Mapping[str, Any]
    measures: Mapping[str, Measure]
    """Measures by metric."""


def group_measures(report: AuditReport, probe: str) -> list[Group]:
    """Return the measures of a probe, one group per setting, in the order of the record."""
    groups: dict[str, tuple[Mapping[str, Any], dict[str, Measure]]] = {}
    for measure in report.measures:
        if measure.probe == probe:
            key = json.dumps(measure.parameters, sort_keys=True)
            _, measures = groups.setdefault(key, (measure.parameters, {}))
            measures.setdefault(measure.metric, measure)
    return [Group(parameters=p, measures=measures) for p, measures in groups.values()]


def find_measured(group: Group, metric: str, bucket: str) -> MeasuredBucket | None:
    """Return the value of a bucket; None if it was not measured."""
    measure = group.measures.get(metric)
    if measure is None:
        return None
    return next((row for row in measure.buckets if row.bucket == bucket), None)


def show_measured(group: Group, metric: str, bucket: str, unit: str = "") -> Content:
    """Show the model's value for a bucket, or why there is none.

    Args:
        group: measures of one setting.
        metric: name of the measure.
        bucket: name of the bucket.
        unit: unit to format the value in; "" takes the record's.
    """
    measured = find_measured(group, metric, bucket)
    if measured is None:
        return show_missing("not measured")
    if measured.model is None or not measured.num_documents:
        return show_missing(_explain_missing(measured))
    return _show_score(measured.model, unit or group.measures[metric].unit)


def show_measured_base(group: Group, metric: str, bucket: str, unit: str = "") -> Content | None:
    """Show the base model's value for a bucket; None if there is none."""
    measured = find_measured(group, metric, bucket)
    if measured is None or measured.base is None:
        return None
    return _show_score(measured.base, unit or group.measures[metric].unit)


def _show_score(score: Rate | Interval, unit: str) -> Content:
    if isinstance(score, Rate):
        return show_rate(score)
    return fmt.share(score) if unit == "share" else fmt.interval(score, _DECIMALS.get(unit, 3))


def explain_absence(report: AuditReport, probe: str, what: str) -> str:
    """Return the reason why a report has no results of a probe.

    Args:
        report: the record without these results.
        probe: name of the probe in suites.
        what: what a suite without the probe lacks, starting with a verb: ``runs no attacks``.
    """
    run = next((run for run in report.probe_runs if run.name == probe), None)
    if run is not None and run.reason_not_run is not None:
        return f"Probe '{probe}' did not run: {_explain(run)}."
    if run is not None:
        return f"Probe '{probe}' ran, but this report has no results of it."
    suite, version = fmt.clean_name(report.method.suite), report.method.suite_version
    other = "" if suite == "full" else "; '--suite full' does"
    return f"Suite '{suite}' (version {version:,}) {what}{other}."


def _explain_missing(measured: MeasuredBucket) -> str:
    if measured.num_missing:
        return f"{measured.num_missing:,} too short, or not in the sample"
    return "no documents"


_MOST_BUCKETS = 12
_SHOWN_WINDOWS = 12


def build_grid(report: AuditReport) -> Section | None:
    """Build the section; None if the suite has no other windows."""
    groups = group_measures(report, "grid")
    if not groups:
        return None
    tables = (
        _build_windows(report, groups, "verbatim", "Verbatim, by window"),
        _build_windows(report, groups, "token_accuracy", "Token accuracy, by window"),
    )
    return Section(
        key="grid",
        title="Other windows of the documents",
        short_title="Other windows",
        lead=(
            "The extraction rate depends on the length and position of the prefix and on the "
            "length of the continuation: text that is not extracted in one window may be extracted "
            "in another. The model receives each window as if the text began there."
            + (
                ""
                if report.cut is None
                else " In documents that were cut, token positions count from the audited part."
            ),
        ),
        tables=tuple(filter(None, tables)),
    )


def _build_windows(
    report: AuditReport, groups: list[Group], metric: str, caption: str
) -> Table | None:
    """Build the table of one metric, with a row per window and a column per bucket."""
    measured = [group for group in groups if metric in group.measures]
    if not measured:
        return None
    has_base = any(row.base for group in measured for row in group.measures[metric].buckets)

    def column_of(bucket: BucketScores) -> Column[Group]:
        head = name_bucket(bucket, report)
        return Column(
            (head.text, head.detail), lambda group: _show_window(group, metric, bucket.bucket)
        )

    columns: list[Column[Group]] = [
        Column(("Window", "prefix → continuation"), _name_window),
        *map(column_of, report.buckets[:_MOST_BUCKETS]),
    ]
    left_out = len(report.buckets) - _MOST_BUCKETS
    return make_table(
        f"{caption} ({fmt.CI}{'; below: base model' if has_base else ''})",
        columns,
        measured,
        shown=_SHOWN_WINDOWS,
        notes=[f"{left_out:,} more buckets are in the JSON."] if left_out > 0 else [],
        compact=True,
    )


def _name_window(group: Group) -> Cell:
    prefix, size, offset = (
        fmt.count(value) if isinstance(value, int) else "?"
        for value in map(group.parameters.get, ("prefix_tokens", "continuation_tokens", "offset"))
    )
    start = "from the first token" if offset == "0" else f"from token {offset}"
    return show_name(f"{prefix} → {size} tokens", start)


def _show_window(group: Group, metric: str, bucket: str) -> Cell:
    """Show the model's value, and below it the base model's without its interval."""
    cell = make_cell(show_measured(group, metric, bucket))
    base = make_cell(show_measured_base(group, metric, bucket))
    notes = (cell.note, f"base: {base.text}" if base.text else "")
    return replace(cell, note="; ".join(filter(None, notes)))


_WRITTEN_METRICS = (
    ("rouge_l", ("ROUGE-L", "mean"), PLAIN),
    ("longest_copied_run", ("Longest copied run", "tokens, mean"), ""),
    ("edit_distance", ("Edit distance", "share of the length, mean"), ""),
    ("near_verbatim", ("Near-verbatim", "documents"), ""),
    ("bleu_above_0.75", ("BLEU above 0.75", "documents"), ""),
    ("type_token_ratio", ("Type-token ratio", "generated, mean"), PLAIN),
)
"""Name of the metric, heading, and unit ("" for the record's)."""
_SHOWN_WRITTEN_ROWS = 16

_Written = tuple[BucketScores, Group]
"""A bucket, and the measures of one decoding method."""


def build_generation(report: AuditReport) -> Section | None:
    """Build the section; None if nothing was generated."""
    groups = group_measures(report, "generation")
    if not groups:
        return None

    def column_of(metric: str, heading: tuple[str, str], unit: str) -> Column[_Written]:
        return Column(
            heading,
            lambda row: show_measured(row[1], metric, row[0].bucket, unit),
            lambda row: show_measured_base(row[1], metric, row[0].bucket, unit),
        )

    columns: list[Column[_Written]] = [
        Column(
            ("Bucket", "decoding"),
            lambda row: show_name(name_bucket(row[0], report).text, _name_decoding(row[1])),
            lambda row: show_name("Base model", _name_decoding(row[1])),
        ),
        *(
            column_of(*metric)
            for metric in _WRITTEN_METRICS
            if any(metric[0] in group.measures for group in groups)
        ),
    ]
    written = [(bucket, group) for bucket in report.buckets for group in groups]
    table = make_table(
        f"Generated text compared with the true continuation ({fmt.CI})",
        columns,
        written,
        tone=lambda row: tone_of_bucket(row[0]),
        over_base=True,
        shown=_SHOWN_WRITTEN_ROWS,
        compact=True,
    )
    return Section(
        key="generation",
        title="Generated text",
        short_title="Generation",
        lead=(
            "Text generated from the prefix without correction by the true text: a passage that is "
            "shifted or changed in a few words still counts in part. Compare each overlap with "
            "that of the control, which texts of this kind have in common anyway, and with the "
            "type-token ratio: repetitive text overlaps by chance.",
        ),
        tables=(table,),
    )


def _name_decoding(group: Group) -> str:
    decoding = group.parameters.get("decoding")
    if not isinstance(decoding, str):
        return fmt.settings(group.parameters)
    return "greedy" if decoding == "greedy" else f"sampled, {fmt.clean_name(decoding, 40)}"
