"""What pages say of an audit: verdict, notices and sections, in the order of the page.

Every section has one home: `Probe.section` for what a probe measured, a function of this package
for the rest. A section for the public repeats the results by counts and roles: its texts are fixed
words, and its values are numbers, or texts of a fixed form.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

from pydantic import TypeAdapter

from memguard.audit.plugins import contain, load_foreign
from memguard.audit.probe import Probe
from memguard.audit.suite import PROBES
from memguard.errors import ConfigError
from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, make_table
from memguard.pages.doses import build_doses
from memguard.pages.facts import Facts, describe_not_run, describe_probes
from memguard.pages.membership import warn_of_blind
from memguard.pages.page import Fact, GateHead, Group, Notice, Section, Table
from memguard.pages.pivot import ResultColumn, bucket_table
from memguard.records import (
    LEVEL_NAMES,
    REFERENCE_SECRETS,
    SECRETS,
    AuditReport,
    BucketRow,
    MetricRow,
    RiskName,
    Verdict,
    VerdictCounts,
)
from memguard.records.texts import format_at_most
from memguard.records.verdict import REASON_NAMES
from memguard.report.audit_summary import (
    build_findings,
    build_summary,
    describe_learned,
    find_learned,
)
from memguard.report.audit_training import build_training, build_utility
from memguard.report.next_steps import write_next_steps
from memguard.report.texts import (
    CONFIDENTIALITY,
    describe_data,
    describe_environment,
    describe_identity,
    describe_method,
    write_glossary,
    write_limits,
    write_origin,
)
from memguard.report.training_curve import build_during

_EVIDENCE = ("sampling", "grid", "generation", "membership", "canaries", "mask_consistency")
"""Probes of memguard with sections of their own, in the order of the page; that of sampling stands
beside the extraction rates, with or without results."""


def collect_facts(
    report: AuditReport, *, gate: GateHead | None = None, run_path: str | None = None
) -> Facts:
    """Collect what pages say of an audit.

    ``gate`` is what a gate decided of it; ``run_path`` is the run's folder from the working
    directory, for commands: None if the page is not stored or is not of a run.
    """
    # The name alone can be a word such as "none", which reads as a missing title.
    of = f"Model '{fmt.clean_name(report.model.name, 120)}'"
    if report.run is not None:
        of = f"Run '{fmt.clean_name(report.run, 120)}'"
    heading = f"{of}{report.model.write_form()}"
    verdict = report.verdict
    sections = (
        build_doses(report),
        build_findings(report),
        build_summary(report),
        *(PROBES[name].section(report) for name in _EVIDENCE if name in PROBES),
        build_utility(report),
        *_build_others(report),
        build_during(report.training, report.tables),
        build_training(report),
        _build_identity(report),
        _build_method(report),
        _build_public(report),
    )
    return Facts(
        title=f"{heading}: {'gate and ' if gate else ''}extraction-risk report",
        heading=heading,
        tool_version=fmt.clean_name(report.tool_version, 40),
        confidentiality=CONFIDENTIALITY,
        gate=gate,
        badges=verdict.badges,
        verdict=Notice(
            level=verdict.level,
            label=LEVEL_NAMES[verdict.level],
            text=fmt.clean_text(verdict.sentence, 2 * fmt.SENTENCE_LIMIT),
        ),
        counts=(
            _build_count(_name_trained(report), verdict.trained, "none audited"),
            _build_count("Control", verdict.control, "none"),
            _build_count(
                "Base model", verdict.base, "not used" if report.model.base else "not scored"
            ),
        ),
        membership=Notice(
            level=verdict.membership.level,
            label="Membership",
            text=fmt.clean_text(verdict.membership.sentence),
        ),
        next_steps=write_next_steps(report, run_path),
        scope=fmt.clean_text(verdict.scope, 2 * fmt.SENTENCE_LIMIT),
        notices=_collect_notices(report),
        limits=write_limits(report),
        sections=tuple(section for section in sections if section),
        glossary=write_glossary(report),
    )


def _collect_notices(report: AuditReport) -> tuple[Notice, ...]:
    notices = [
        Notice(
            level=banner.level, label=banner.level.capitalize(), text=fmt.clean_text(banner.text)
        )
        for banner in report.banners
    ]
    blind = warn_of_blind(report)
    if blind:
        notices.append(blind)
    learned = describe_learned(report, find_learned(report))
    if learned and report.verdict.level == "none-found":
        # Without it the green verdict would suggest that nothing was learned.
        notices.append(Notice(level="warning", label="Partly learned", text=learned))
    return tuple(sorted(notices, key=lambda notice: notice.level != "warning"))


def _name_trained(report: AuditReport) -> str:
    """Name the trained documents that the verdict counts: ``Trained 64 times``, if it is known."""
    test = report.verdict.test if report.verdict.reason == "control" else None
    row = None if test is None else report.tables.find_bucket(test.bucket)
    if row is None or row.num_repetitions is None or not report.dose_response:
        return "Trained"
    return f"Trained {fmt.times(row.num_repetitions)}"


def _build_count(term: str, counts: VerdictCounts | None, missing: str) -> Fact:
    if counts is None or counts.rate is None:
        return Fact(term, missing)
    detail = f"{fmt.percent(counts.rate)}, {fmt.percent_ci(counts.ci)}"
    if counts.num_clusters != counts.num_documents:
        texts = fmt.of(counts.num_matched_clusters, counts.num_clusters)
        detail = f"{texts}{fmt.NBSP}texts; {detail}"
    return Fact(term, fmt.of(counts.num_matched, counts.num_documents), detail=detail)


def _build_identity(report: AuditReport) -> Section:
    return Section(
        key="identity",
        title="Weights and documents",
        facts=describe_identity(report),
        groups=(Group(title="Documents", facts=describe_data(report)),),
        brief=(Fact("", write_origin(report), code=True),),
    )


def _build_method(report: AuditReport) -> Section:
    groups = (
        Group(title="Probes that ran", facts=describe_probes(report)),
        Group(title="Probes that did not run", facts=describe_not_run(report)),
        Group(title="Command", command=fmt.clean_text(report.method.command, fmt.COMMAND_LIMIT)),
        Group(title="Environment", facts=describe_environment(report.environment)),
    )
    return Section(
        key="method",
        title="Method",
        facts=describe_method(report),
        groups=tuple(group for group in groups if group.facts or group.command),
    )


_SECTIONS = TypeAdapter(Section)


def _build_others(report: AuditReport) -> Iterator[Section]:
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
    if section is None:
        return None
    # It may hold what a reader elsewhere must not see: cards leave it out, whatever it declares.
    return replace(_SECTIONS.validate_python(asdict(section)), audience="owner", brief=())


def _build_default(report: AuditReport, probe: str, package: str, *, is_installed: bool) -> Section:
    """Build a table of every metric, and sentences that say what each means."""
    metrics = report.tables.list_metrics(probe)
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


# -- for the public --------------------------------------------------------------------------------

_ROLES = {"control": "never trained", "trained": "trained", "forget": "to be forgotten"}
_VERSION = re.compile(r"\d+(?:\.\d+){1,3}(?:(?:a|b|rc|\.dev|\.post)\d+)?")
_HASH = re.compile(r"[0-9a-f]{64}")


def _build_public(report: AuditReport) -> Section:
    """Repeat the results for readers elsewhere: verdict, membership, canaries, rates by role."""
    ran, not_run = (
        [run.name for run in report.probe_runs if (run.num_documents is None) == is_missing]
        for is_missing in (False, True)
    )
    version = report.tool_version if _VERSION.fullmatch(report.tool_version) else "(unknown)"
    weights = report.model.weights_sha256
    weights = fmt.hash(weights) if _HASH.fullmatch(weights) else "(unknown)"
    return Section(
        key="public",
        title="Memorization audit",
        lead=(
            _write_verdict(report.verdict),
            _write_membership(report.verdict),
            *_write_canaries(report),
        ),
        brief=(Fact("", f"Measured by memguard {version} on weights '{weights}'.", code=True),),
        tables=(_build_roles(report),),
        points=(
            _write_coverage(report),
            f"Only these probes ran: {_name_probes(ran)}. Not run: {_name_probes(not_run)}.",
        ),
        audience="public",
    )


def _write_verdict(verdict: Verdict) -> str:
    """Return level, counts and reason of a verdict, without the name of a bucket."""
    trained, control, base = verdict.trained, verdict.control, verdict.base
    counts = ["no trained document counts"]
    if trained.num_documents:
        counts = [f"{_count(trained)} counted trained documents were extracted"]
    if verdict.true_share is not None:
        counts[0] += f" ({format_at_most(verdict.true_share)} could be)"
    counts += [f"{_count(control)} unseen ones"] if control.num_documents else []
    if base is not None and base.num_documents:
        counts.append(f"{_count(base)} by the base model")
    reason = "" if verdict.reason is None else f"; {REASON_NAMES[verdict.reason]}"
    return f"{LEVEL_NAMES[verdict.level]}: {', '.join(counts)}{reason}."


def _count(counts: VerdictCounts) -> str:
    return f"{counts.num_matched:,} of {counts.num_documents:,}"


def _write_membership(verdict: Verdict) -> str:
    """Return the badge of membership, with the interval of its AUC."""
    membership, badge = verdict.membership, verdict.badges[1]
    if membership.auc is None or membership.lack is not None:
        return f"{badge.describe()}."
    estimate = fmt.interval(membership.auc, 2)
    numbers = f"AUC {estimate.value}, {fmt.CI} {estimate.interval}; 0.5 is guessing"
    return f"{badge.title}: {badge.state} ({numbers})."


def _write_canaries(report: AuditReport) -> Iterator[str]:
    """Count the secrets that were extracted, which no table of documents has."""
    trained, references = (
        report.tables.find("canaries", "verbatim", bucket, statistic="rate")
        for bucket in (SECRETS, REFERENCE_SECRETS)
    )
    if trained and references and trained.is_known and references.is_known:
        yield (
            f"Random secrets extracted: {fmt.counts(trained)} trained ones, and "
            f"{fmt.counts(references)} that were never trained."
        )


def _write_coverage(report: AuditReport) -> str:
    """Return how many trained documents were audited, and how many of these were attacked."""
    trained = [bucket for bucket in report.tables.buckets if bucket.role == "trained"]
    num_audited = sum(bucket.num_documents for bucket in trained)
    num_left_out = sum(bucket.num_not_auditable + bucket.num_not_sampled for bucket in trained)
    rates = [report.tables.risks(bucket.bucket).get("attack") for bucket in trained]
    num_attacked = sum(rate.num_documents for rate in rates if rate is not None)
    attacked = f"attacked: {num_attacked:,}" if num_attacked else "none was attacked"
    return (
        f"Audited: {num_audited:,} of {num_audited + num_left_out:,} trained documents; {attacked}."
    )


def _name_probes(names: list[str]) -> str:
    """Name memguard's own probes, and count the others."""
    own = [name for name in names if name in PROBES]
    others = [f"{len(names) - len(own):,} more"] if len(own) < len(names) else []
    return ", ".join([*own, *others]) or "none"


def _build_roles(report: AuditReport) -> Table:
    """Build a row for each bucket, since a sum over them would hide the highest rate."""
    buckets = [bucket for bucket in report.tables.buckets if bucket.role in _ROLES]
    rates = {bucket.bucket: report.tables.risks(bucket.bucket) for bucket in buckets}
    is_shown = {"verbatim", "near_verbatim"}.union(*rates.values())

    def column(risk: RiskName) -> Column[BucketRow]:
        def show(bucket: BucketRow) -> str:
            rate = rates[bucket.bucket].get(risk)
            return "not measured" if rate is None else fmt.rate(rate)

        return Column(fmt.RISK_LABELS[risk], show)

    columns: tuple[Column[BucketRow], ...] = (
        Column("Documents", lambda bucket: _ROLES[bucket.role]),
        Column("Repetitions", lambda bucket: fmt.repetitions(bucket.num_repetitions)),
        *(column(risk) for risk in fmt.RISK_LABELS if risk in is_shown),
    )
    return make_table("Extraction by role", columns, buckets)
