"""What a reader is told of an audit: verdict, notices and sections, in the order of the page."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from pydantic import TypeAdapter

from memguard.audit.contained import contain
from memguard.audit.plugins import load_foreign
from memguard.audit.probe import Probe
from memguard.audit.suite import PROBES
from memguard.errors import ConfigError
from memguard.pages import formatting as fmt
from memguard.pages.facts import describe_not_run, describe_probes
from memguard.pages.membership import warn_of_blind
from memguard.pages.page import AuditPage, Fact, GateHead, Link, Notice, Section
from memguard.pages.pivot import ResultColumn, bucket_table
from memguard.records import LEVEL_NAMES, AuditReport, MetricRow, VerdictCounts
from memguard.report.audit_summary import (
    build_change_from_base,
    build_copies,
    build_details,
    build_dose_response,
    build_findings,
    build_summary,
    build_trends,
    describe_learned,
    explain_no_chart,
    find_learned,
    write_findings_note,
)
from memguard.report.audit_training import build_utility, build_watched, describe_training
from memguard.report.texts import (
    CONFIDENTIALITY,
    describe_data,
    describe_environment,
    describe_identity,
    describe_method,
    write_glossary,
    write_limits,
    write_next_steps,
)

_MOST_NOTICES = 50
_MOST_NAMED = 4
"""Buckets that a sentence lists by name."""
_EXTRACTION_COST = "sampling"
"""Probe whose section stands beside the extraction rates, with or without results."""
_EVIDENCE = ("grid", "generation", "membership", "canaries", "mask_consistency")
"""Probes of memguard with sections of their own, in the order of the page."""


def digest_report(
    report: AuditReport,
    links: tuple[Link, ...] = (),
    *,
    run_path: str | None = None,
    gate: GateHead | None = None,
) -> AuditPage:
    """Convert an audit report into the contents of its page.

    Args:
        report: the record.
        links: pages beside this one.
        run_path: path of the run's folder from the working directory; None if the page is not
            stored or is not of a run.
        gate: what a gate decided of the audit; None for the page of the audit itself.
    """
    heading = _write_heading(report)
    notices = _collect_notices(report)
    verdict = report.verdict
    return AuditPage(
        title=f"{heading}: {'gate and ' if gate else ''}extraction-risk report",
        heading=heading,
        links=links,
        tool_version=fmt.clean_name(report.tool_version, 40),
        confidentiality=CONFIDENTIALITY,
        identity=describe_identity(report),
        gate=gate,
        colour=verdict.page_colour,
        verdict=Notice(
            level=verdict.level,
            label=LEVEL_NAMES[verdict.level],
            text=fmt.clean_text(verdict.sentence, 2 * fmt.SENTENCE_LIMIT),
        ),
        tiles=_build_tiles(report),
        membership=Notice(
            level=verdict.membership.level,
            label="Membership",
            text=fmt.clean_text(verdict.membership.sentence),
        ),
        scope=fmt.clean_text(verdict.scope, 2 * fmt.SENTENCE_LIMIT),
        next_steps=write_next_steps(report, run_path),
        dose_response=build_dose_response(report),
        dose_response_note=explain_no_chart(report),
        findings=build_findings(report),
        findings_note=write_findings_note(report),
        notices=notices,
        notices_title=_count_notices(notices),
        limits=write_limits(report),
        summary_lead=_write_summary_lead(report),
        summary=tuple(
            filter(
                None,
                (build_summary(report), build_change_from_base(report), build_details(report)),
            )
        ),
        attacks=_build_attacks(report),
        dose_tables=tuple(filter(None, (build_trends(report), build_copies(report)))),
        evidence=_build_evidence(report),
        training=describe_training(report.training, report.model.load_as)
        if report.training
        else (),
        training_note=(
            "Held-out NLL measures utility: a mitigation should lower the extraction rate without "
            "raising it."
            if report.training
            else "memguard did not train this model, so its cost and utility are not known."
        ),
        data=describe_data(report),
        method=describe_method(report),
        probes=describe_probes(report),
        probes_not_run=describe_not_run(report),
        command=fmt.clean_text(report.method.command, fmt.COMMAND_LIMIT),
        environment=describe_environment(report.environment),
        glossary=write_glossary(report),
    )


def _write_heading(report: AuditReport) -> str:
    # The name alone can be a word such as "none", which reads as a missing title.
    if report.run is not None:
        heading = f"Run '{fmt.clean_name(report.run, 120)}'"
    else:
        heading = f"Model '{fmt.clean_name(report.model.name, 120)}'"
    return f"{heading}{report.model.write_form()}"


def _build_evidence(report: AuditReport) -> tuple[Section, ...]:
    """Build the sections of further probes; those that do not apply are omitted."""
    sections = (
        *(PROBES[name].section(report) for name in _EVIDENCE if name in PROBES),
        build_utility(report),
        *build_others(report),
        build_watched(report),
    )
    return tuple(section for section in sections if section)


def _build_attacks(report: AuditReport) -> Section:
    section = PROBES[_EXTRACTION_COST].section(report)
    assert section is not None, "without results it gives the reason"
    return section


def _collect_notices(report: AuditReport) -> tuple[Notice, ...]:
    notices = [
        Notice(
            level=banner.level, label=banner.level.capitalize(), text=fmt.clean_text(banner.text)
        )
        for banner in report.banners[:_MOST_NOTICES]
    ]
    blind = warn_of_blind(report)
    if blind:
        notices.append(blind)
    learned = describe_learned(report, find_learned(report)[:_MOST_NAMED])
    if learned and report.verdict.level == "none-found":
        # Without it the green verdict would suggest that nothing was learned.
        notices.append(Notice(level="warning", label="Partly learned", text=learned))
    return tuple(sorted(notices, key=lambda notice: notice.level != "warning"))


def _count_notices(notices: tuple[Notice, ...]) -> str:
    """Return the title of the notes: ``1 warning, 3 notes``."""
    num_warnings = sum(notice.level == "warning" for notice in notices)
    counts = ((num_warnings, "warning"), (len(notices) - num_warnings, "note"))
    return ", ".join(f"{n:,} {what}{'' if n == 1 else 's'}" for n, what in counts if n)


def _build_tiles(report: AuditReport) -> tuple[Fact, ...]:
    """Show the documents that the verdict's sentence counts: trained, control, base model."""
    verdict = report.verdict
    control = verdict.control if verdict.control.num_documents else None
    return (
        _build_tile("Trained", verdict.trained, "none audited"),
        _build_tile("Control", control, "none"),
        _build_tile("Base model", verdict.base, "not scored"),
    )


def _build_tile(term: str, counts: VerdictCounts | None, missing: str) -> Fact:
    if counts is None or counts.rate is None:
        return Fact(term, missing)
    detail = f"{fmt.percent(counts.rate)}, {fmt.percent_ci(counts.ci)}"
    if counts.num_clusters != counts.num_documents:
        texts = fmt.of(counts.num_matched_clusters, counts.num_clusters)
        detail = f"{texts}{fmt.NBSP}texts; {detail}"
    return Fact(term, fmt.of(counts.num_matched, counts.num_documents), detail=detail)


def _write_summary_lead(report: AuditReport) -> tuple[str, ...]:
    method = report.method
    share = fmt.threshold(method.max_edit_share)
    lead = [
        "Exact match understates memorization: one wrong token breaks it. Near-verbatim means "
        "that the text generated by greedy decoding from the prefix differs from the true one in "
        f"at most {share} of the tokens (inserted, deleted or replaced). The verdict counts a "
        "document that is extracted in any way: verbatim, near-verbatim, by sampling, or by an "
        "attack if they ran.",
        "Teacher-forced columns show which tokens the model predicts when it is given the true "
        "text before each one. They are not extraction and do not affect the verdict.",
        _describe_generated(report),
    ]
    learned = describe_learned(report, find_learned(report)[:_MOST_NAMED])
    if learned:
        lead.append(learned)
    base = report.tables.select("extraction", "verbatim", model="base")
    if not any(row.is_known for row in base):
        lead.append(
            "No base model was scored, so these numbers include what the model knew before this "
            "training."
        )
    return tuple(lead)


def _describe_generated(report: AuditReport) -> str:
    """Report for how many documents text was generated, and what is known of the others."""
    generated = report.tables.find_detail("extraction") or {}
    if generated.get("reason_not_generated") is not None:
        reason = fmt.clean_text(str(generated["reason_not_generated"]))
        if not generated.get("num_not_generated"):
            return f"Nothing was generated: {reason}."
        return (
            f"Text was generated for {fmt.count(generated['num_generated'])} documents, so "
            f"near-verbatim text has no rates: {reason}."
        )
    text = f"Text was generated for {fmt.count(generated.get('num_generated'))} documents"
    if generated.get("num_verbatim"):
        text += (
            f"; for {fmt.count(generated['num_verbatim'])} others the teacher-forced pass shows "
            "that the text is verbatim"
        )
    num_below, num_checked = (generated.get(n, 0) for n in ("num_below_floor", "num_checked"))
    if num_below:
        # The same two counts as in the note above the results (`audit.warnings`).
        text += (
            f". {fmt.count(num_below)} {'document' if num_below == 1 else 'documents'} looked "
            "unlikely to be extractable (teacher-forced accuracy below "
            f"{fmt.threshold(generated['floor'])})"
        )
        text += (
            f"; text was generated for {fmt.count(num_checked)} of them, a random sample, and none "
            "is near-verbatim"
            if num_checked < num_below
            else "; text was generated for all of them"
        )
    return f"{text}."


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
