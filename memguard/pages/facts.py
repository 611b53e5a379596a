"""What pages say of an audit; which probes ran, and why others did not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memguard.pages import formatting as fmt
from memguard.pages.page import Fact, GateHead, Notice, Page, Section, Statement
from memguard.records import MEMBERS, AuditReport, Badge, ProbeRun, write_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts(Page):
    """What pages say of an audit, in order; a renderer decides form, never content."""

    gate: GateHead | None
    """None except on the page of a gate."""
    badges: tuple[Badge, Badge]
    """Of the text, and of membership."""
    verdict: Notice
    counts: tuple[Fact, ...]
    """Trained documents, control and base model, as the verdict counts them."""
    membership: Notice
    next_steps: tuple[str, ...]
    scope: str
    notices: tuple[Notice, ...]
    """Warnings, then notes."""
    limits: tuple[Statement, ...]
    sections: tuple[Section, ...]
    """In the order of the page; a section for the public repeats others by counts and roles."""

    def find(self, key: str) -> Section:
        """Return the section of a key."""
        return next(section for section in self.sections if section.key == key)

    def count_notices(self) -> str:
        """Count warnings and notes: ``1 warning, 3 notes``."""
        num_warnings = sum(notice.level == "warning" for notice in self.notices)
        counts = ((num_warnings, "warning"), (len(self.notices) - num_warnings, "note"))
        return ", ".join(f"{n:,} {what}{'' if n == 1 else 's'}" for n, what in counts if n)


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
        for run in report.probe_runs
        if run.num_documents is not None
    )


def describe_not_run(report: AuditReport) -> tuple[Fact, ...]:
    """List the probes of the suite that did not run, each with its reason."""
    return tuple(
        Fact(fmt.clean_name(run.name), "not run", detail=_explain(run))
        for run in report.probe_runs
        if run.num_documents is None
    )


def write_ran(report: AuditReport) -> str:
    """List the probes that ran: ``extraction (80 documents), canaries (32 canaries)``."""
    return ", ".join(f"{fact.term} ({fact.value})" for fact in describe_probes(report)) or "none"


def write_not_run(report: AuditReport) -> str:
    """List the probes of the suite that did not run, with their reasons; "" if all ran."""
    return "; ".join(f"{fact.term} ({fact.detail})" for fact in describe_not_run(report))


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
    missing = []
    for score in map(str, listed):
        parameters = write_parameters({"score": score})
        row = report.tables.find("membership", "auc", MEMBERS, parameters=parameters)
        if row is None or not row.is_known:
            missing.append(fmt.clean_name(score, 40))
    return f"; not computed: {', '.join(missing)}" if missing else ""


def _describe_settings(run: ProbeRun, probe: dict[str, Any]) -> str:
    settings = {key: value for key, value in probe.items() if key not in ("name", "version")}
    version = f"version {fmt.count(run.version)}"
    return f"{version}; {fmt.settings(settings)}" if settings else version


def explain_absence(report: AuditReport, probe: str, what: str) -> str:
    """Return why a report has no results of a probe; ``what`` is as in ``runs no attacks``."""
    run = next((run for run in report.probe_runs if run.name == probe), None)
    if run is not None and run.reason_not_run is not None:
        return f"Probe '{probe}' did not run: {_explain(run)}."
    if run is not None:
        return f"Probe '{probe}' ran, but this report has no results of it."
    suite, version = fmt.clean_name(report.method.suite), report.method.suite_version
    other = "" if suite == "full" else "; '--suite full' does"
    return f"Suite '{suite}' (version {version:,}) {what}{other}."


def name_scheme(scheme: Mapping[str, Any]) -> str:
    """Format a sampling scheme: ``temperature 1, top-k 40``."""
    parts = (f"{key.replace('_', '-')} {fmt.value(v)}" for key, v in scheme.items() if v)
    return fmt.clean_text(", ".join(parts), 80)
