"""Which probes ran, on how many documents, and why the others did not."""

from typing import Any

from memguard.records import AuditReport, ProbeRun
from memguard.report.formatting import format_count, format_settings
from memguard.report.page import Fact
from memguard.report.text import clean_name, clean_text

_MOST_PROBES = 50


def describe_probes(report: AuditReport) -> tuple[Fact, ...]:
    """List the probes that ran: documents, version and settings."""
    settings = {str(probe.get("name")): probe for probe in report.method.probes}
    return tuple(
        Fact(
            term=clean_name(run.name),
            value=count_documents(run),
            detail=_describe_settings(run, settings.get(run.name, {}))
            + (_name_missing_scores(report) if run.name == "membership" else ""),
        )
        for run in list_ran(report)
    )


def describe_not_run(report: AuditReport) -> tuple[Fact, ...]:
    """List the probes of the suite that did not run, and why."""
    return tuple(
        Fact(term=clean_name(run.name), value="not run", detail=explain(run))
        for run in list_not_run(report)
    )


def write_ran(report: AuditReport) -> str:
    """List the probes that ran: ``extraction (80 documents), canaries (32 canaries)``."""
    ran = [f"{clean_name(run.name)} ({count_documents(run)})" for run in list_ran(report)]
    return ", ".join(ran) or "none"


def write_not_run(report: AuditReport) -> str:
    """List the probes of the suite that did not run, with their reasons; "" where all ran."""
    return "; ".join(f"{clean_name(run.name)} ({explain(run)})" for run in list_not_run(report))


def list_ran(report: AuditReport) -> list[ProbeRun]:
    """Return the probes that ran, in the suite's order."""
    return [run for run in report.probe_runs[:_MOST_PROBES] if run.num_documents is not None]


def list_not_run(report: AuditReport) -> list[ProbeRun]:
    """Return the probes of the suite that did not run, in its order."""
    return [run for run in report.probe_runs[:_MOST_PROBES] if run.num_documents is None]


def find_run(report: AuditReport, probe: str) -> ProbeRun | None:
    """Return what a probe ran on; None where the suite does not hold it."""
    return next((run for run in report.probe_runs if run.name == probe), None)


def count_documents(run: ProbeRun) -> str:
    """Write what a probe that ran has a result for: ``80 documents``."""
    assert run.num_documents is not None, "it ran"
    unit = run.counted.removesuffix("s") if run.num_documents == 1 else run.counted
    return f"{format_count(run.num_documents)} {unit}"


def explain(run: ProbeRun) -> str:
    """Say why a probe did not run."""
    return clean_text(run.reason_not_run or "")


def _name_missing_scores(report: AuditReport) -> str:
    """Name the membership scores of the suite that could not be computed; "" for none."""
    probe = next((one for one in report.method.probes if one.get("name") == "membership"), {})
    asked = probe.get("scores")
    known = {one.score for one in report.membership if one.auc is not None}
    missing = [str(one) for one in asked if one not in known] if isinstance(asked, list) else []
    names = ", ".join(clean_name(one, 40) for one in missing[:_MOST_PROBES])
    return f"; not computed: {names}" if names else ""


def _describe_settings(run: ProbeRun, probe: dict[str, Any]) -> str:
    settings = {key: value for key, value in probe.items() if key not in ("name", "version")}
    version = f"version {format_count(run.version)}"
    return f"{version}; {format_settings(settings)}" if settings else version
