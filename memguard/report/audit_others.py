"""Sections of probes of other packages, drawn from the report alone where they have none."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from pydantic import TypeAdapter

from memguard.audit.plugins import contain, load_foreign
from memguard.audit.probe import Probe
from memguard.audit.suite import PROBES
from memguard.errors import ConfigError
from memguard.pages import formatting as fmt
from memguard.pages.page import Section
from memguard.pages.pivot import ResultColumn, bucket_table
from memguard.records import AuditReport, MetricRow

_MOST_METRICS = 60
_SECTIONS = TypeAdapter(Section)


def build_others(report: AuditReport) -> Iterator[Section]:
    """Yield a section for each probe that memguard does not define, in the order of the report."""
    packages = {m.probe: m.package for m in report.tables.metrics if m.is_foreign}
    for probe, package in packages.items():
        try:
            foreign = load_foreign(probe, PROBES)
        except ConfigError:
            foreign = None  # The page needs no package that cannot be imported.
        section = None
        if foreign is not None:
            write = partial(_write, foreign.kind, report)
            section = contain(package, write, lambda _: None)
        yield section or _build_default(report, probe, package, is_installed=foreign is not None)


def _write(kind: type[Probe], report: AuditReport) -> Section | None:
    """Return the section that a probe writes, with every part checked."""
    section = kind.section(report)
    return None if section is None else _SECTIONS.validate_python(asdict(section))


def _build_default(report: AuditReport, probe: str, package: str, *, is_installed: bool) -> Section:
    """Build a table of every metric, and sentences that say what each means."""
    metrics = report.tables.list_metrics(probe)[:_MOST_METRICS]
    name = fmt.clean_name(probe, 40)
    lead = [f"Probe '{name}' of package {fmt.clean_name(package, 60)}."]
    if not is_installed:
        lead.append("The details need this package, which is not installed.")
    columns = [column for metric in metrics for column in _list_columns(report, metric)]
    table = bucket_table(
        report,
        f"Results of '{name}' ({fmt.CI})",
        columns,
        notes=tuple(dict.fromkeys(map(_explain, metrics))),
    )
    return Section(
        key=f"probe-{[metric.probe for metric in report.tables.metrics].index(probe)}",
        title=fmt.clean_words(probe),
        short_title=fmt.clean_words(probe),
        lead=tuple(lead),
        tables=(table,),
    )


def _explain(metric: MetricRow) -> str:
    note = f" {fmt.clean_text(metric.note)}" if metric.note else ""
    return f"{fmt.clean_text(metric.heading, 60)}: {fmt.clean_text(metric.meaning)}{note}"


def _list_columns(report: AuditReport, metric: MetricRow) -> list[ResultColumn]:
    """Return the column of the values, and that of their differences from the control."""
    heading = fmt.clean_text(metric.heading, 60)
    of = fmt.clean_text(metric.parameters or metric.unit, 60)
    key = {"parameters": metric.parameters}
    column = ResultColumn((heading, of), metric.probe, metric.metric, key=key)
    minus = ResultColumn(
        (f"{heading} − control", of), metric.probe, metric.metric, key=key, minus_control=True
    )
    rows = report.tables.select(metric.probe, metric.metric, parameters=metric.parameters)
    is_compared = any(row.minus_control is not None for row in rows if row.against is None)
    return [column, minus] if is_compared else [column]
