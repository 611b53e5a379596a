"""Reads an audit for the gate: undamaged, or refused; lists what it should hold and lacks.

    report.json, results.parquet   refused where damaged, or where they are not of one audit
    records.parquet                the documents; only the owner of the audit can read it
    gaps                           rows, buckets or probes without which other numbers do not count

Hashes show damage, not removal: who can write an audit can seal it again. An audit that memguard
wrote has no gap, so one with a gap is not judged as passed.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from memguard.errors import MAX_PATH, ConfigError, RecordError, UnreadableError, plural, shorten
from memguard.records import AuditReport
from memguard.records.audit_files import (
    CANARIES,
    CARDS,
    FINDINGS,
    REPORT,
    RESULTS,
    SCORES,
    has_audit,
    load_audit_files,
    load_audit_report,
)
from memguard.records.documents import TRAINED_ROLES, DocumentTable
from memguard.records.folders import AuditFolder
from memguard.records.record import describe_unread
from memguard.records.results import load_results
from memguard.records.utility import ITEM_SCORES, UTILITY


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Audited:
    """An undamaged audit."""

    folder: Path
    report: AuditReport
    report_sha256: str
    documents: DocumentTable | None
    """None if this user may not read the records."""
    gaps: tuple[str, ...]
    """What the audit should hold and lacks, as sentences; empty for an audit as it was written."""

    @property
    def name(self) -> str:
        """Name of the run, or of the model."""
        return self.report.subject


def find_audit_folder(folder: Path) -> Path:
    """Return the audit folder of a run, or the folder itself; RecordError without an audit."""
    if has_audit(folder / "audit"):
        return folder / "audit"
    if has_audit(folder):
        return folder
    shown = shorten(str(folder), MAX_PATH)
    if (folder / "config.yaml").is_file():
        raise RecordError(f"'{shown}' was not audited: 'memguard audit {shown}' does it")
    raise ConfigError(
        f"'{shown}' is neither the folder of a run (no config.yaml) nor of an audit (no {REPORT})"
    )


def load_audited(folder: Path, *, with_card: bool = True) -> Audited:
    """Read an audit folder; damage is refused, with ``with_card`` also that of a model card."""
    _refuse_damaged(folder, () if with_card else CARDS)
    report = load_audit_report(folder)
    _check_results(folder, report)
    documents = None
    with contextlib.suppress(UnreadableError):
        documents = DocumentTable.read(folder)
    return Audited(
        folder=folder,
        report=report,
        report_sha256=load_audit_files(folder).files[REPORT].sha256,
        documents=documents,
        gaps=tuple(list_gaps(report, documents)),
    )


def _refuse_damaged(folder: Path, ignored: Sequence[str]) -> None:
    damages = [one for one in AuditFolder(folder).find_damage() if one.file not in ignored]
    broken = [damage for damage in damages if not damage.is_unreadable]
    if broken:
        more = f" (and {len(broken) - 1:,} more)" if len(broken) > 1 else ""
        raise RecordError(
            f"the audit in '{folder}' is damaged and is not judged: {broken[0]}{more}. 'memguard "
            "verify' lists what is damaged and how to repair it"
        )
    for damage in damages:
        # These are private; what they hold is said not to be judged.
        if damage.file not in (SCORES, CANARIES, ITEM_SCORES, FINDINGS):
            raise describe_unread(folder / damage.file, PermissionError())


def _check_results(folder: Path, report: AuditReport) -> None:
    """Check that results.parquet has the rows of the report."""
    try:
        rows = tuple(load_results(folder / RESULTS))
    except (TypeError, ValueError, OSError) as error:
        raise RecordError(f"'{folder / RESULTS}' cannot be read as a table of results") from error
    if rows != report.tables.results:
        raise RecordError(
            f"'{folder / RESULTS}' and '{REPORT}' have different rows: they are not of one audit. "
            "Run 'memguard audit' again"
        )


def list_gaps(report: AuditReport, documents: DocumentTable | None) -> Iterator[str]:
    """Yield what an audit should hold and lacks, as clauses."""
    tables = report.tables
    twice = [key for key, count in Counter(row.key for row in tables.results).items() if count > 1]
    if twice:
        yield f"the results table has {plural(len(twice), 'key')} twice: rows cannot be told apart"
    named = [str(probe.get("name")) for probe in report.method.probes]
    if report.method.utility:
        named.append(UTILITY)  # The tasks of an audit are no part of its suite.
    runs = {run.name: run for run in report.probe_runs}
    if missing := [name for name in named if name not in runs]:
        yield f"the settings have the probe {missing[0]}, and the report has no run of it"
    ran = {name for name, run in runs.items() if run.num_documents is not None}
    # What a limit of time left out is named as a run that did not happen, beside the probes.
    if extra := [name for name in runs if name in ran and name not in named]:
        yield f"the report has a run of the probe {extra[0]}, and the settings have no such probe"
    with_rows = {row.probe for row in tables.results}
    for name in sorted(ran - with_rows):
        if tables.list_metrics(name):
            yield f"the probe {name} ran, and the results table has no row of it"
    if report.model.base is not None and not any(row.model == "base" for row in tables.results):
        yield "the base model was scored, and the results table has no row of it"
    steps = {row.step for row in tables.results}
    watched = report.training.watched if report.training is not None else []
    if lost := [step.step for step in watched if step.step not in steps]:
        yield f"training was audited after step {lost[0]}, and the results table has no row of it"
    if documents is not None:
        yield from _compare_documents(report, documents, ran)


def _compare_documents(
    report: AuditReport, documents: DocumentTable, ran: set[str]
) -> Iterator[str]:
    """Yield what the records of the documents have and the report has not."""
    answered = {name for name, by_N in documents.extracted.items() if (by_N >= 0).any()}
    for probe in sorted(answered - ran):
        yield f"the records have answers of the probe {probe}, which did not run by the report"
    roles = zip(documents.bucket_N.tolist(), documents.role_N.tolist(), strict=True)
    counts = Counter(bucket for bucket, role in roles if role in TRAINED_ROLES)
    for name, count in sorted(counts.items()):
        bucket = report.tables.find_bucket(name)
        if bucket is None or bucket.role not in TRAINED_ROLES:
            yield f"the records have the trained bucket {name}, and the report has not"
        elif bucket.num_documents != count:
            yield (
                f"the records have {count:,} documents of {name}, the report "
                f"{bucket.num_documents:,}"
            )
