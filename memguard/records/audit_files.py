"""The files of an audit, and `audit.json`, which is written last.

    report.json      the report
    records.parquet  the scores of each document; only the owner of the audit can read them
    results.parquet  every number of the report, one row each; see `results.py`
    canaries.parquet the score of each canary, if there are any; only for the owner too
    utility.parquet  the score of each item of the benchmark tasks, if any ran; as above
    findings.csv     every extracted document, worst first; as above
    report.html      the page
    audit.json       sizes and hashes of these, and of the run's model card

An audit without an intact `audit.json` is incomplete: its report is not read.
"""

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from memguard.errors import RecordError, UnreadableError
from memguard.records.audit import AuditReport
from memguard.records.record import load_record
from memguard.records.run_files import CARD, find_weights_folder
from memguard.records.sealed import (
    FileSum,
    SealedRecord,
    find_damage,
    load_sealed,
    refuse_damage,
    save_sealed,
    sum_file,
)
from memguard.records.utility import ITEM_SCORES

AUDIT_FILES = "audit.json"
REPORT: Final = "report.json"
SCORES: Final = "records.parquet"
RESULTS: Final = "results.parquet"
CANARIES: Final = "canaries.parquet"
FINDINGS: Final = "findings.csv"
PAGE = "report.html"
AUDITED: Final = (REPORT, SCORES, RESULTS, CANARIES, ITEM_SCORES, FINDINGS, PAGE)
"""Files in the folder of an audit whose hashes `audit.json` has."""
MAY_LACK: Final = {CANARIES, ITEM_SCORES}
"""Those of audits with canaries, or with benchmark tasks."""
CARDS = ("model/README.md", "adapter/README.md")
"""Model cards, relative to the run folder; a run has one of them."""
AGAIN = "Run 'memguard audit' again: it reuses the cached scores"


class AuditFiles(SealedRecord):
    """`audit/audit.json`."""

    schema_name: Literal["memguard.audit_files/5"] = Field("memguard.audit_files/5", alias="schema")
    files: dict[str, FileSum]
    """The files in the audit folder, by name."""
    card: FileSum | None
    """null if the audit is not the run's own: with --out, or of a model without a run folder."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if missing := set(AUDITED) - MAY_LACK - self.files.keys():
            raise ValueError(f"an audit has the files {', '.join(sorted(missing))}")
        return self


def save_audit_files(folder: Path, *, has_card: bool) -> None:
    """Write `audit.json` for the files of an audit folder; the last step of an audit.

    With ``has_card`` the run folder around it has a model card that shows this audit.
    """
    left_out = {name for name in MAY_LACK if not (folder / name).exists()}
    files = {name: sum_file(folder / name) for name in AUDITED if name not in left_out}
    card = sum_file(find_card(folder.resolve().parent)) if has_card else None
    save_sealed(AuditFiles(files=files, card=card), folder / AUDIT_FILES)


def save_page_sums(folder: Path) -> None:
    """Update `audit.json` after the pages were rendered again; other entries stay unchanged."""
    written = load_audit_files(folder)
    card = None if written.card is None else sum_file(find_card(folder.resolve().parent))
    files = {**written.files, PAGE: sum_file(folder / PAGE)}
    save_sealed(AuditFiles(files=files, card=card), folder / AUDIT_FILES)


def load_audit_files(folder: Path) -> AuditFiles:
    """Read `audit.json`; RecordError if it is damaged or the audit is incomplete."""
    try:
        return load_sealed(AuditFiles, folder / AUDIT_FILES)
    except UnreadableError:
        raise
    except RecordError as error:
        is_there = (folder / AUDIT_FILES).exists()
        what = error if is_there else f"the audit in '{folder}' did not end (no {AUDIT_FILES})"
        raise RecordError(f"{what}. {AGAIN}") from error


def find_card(run_folder: Path) -> Path:
    """Return the path of a run's model card, which need not exist."""
    return find_weights_folder(run_folder) / CARD


def has_audit(folder: Path) -> bool:
    """Return whether an audit has written files here; it may be incomplete."""
    return any((folder / name).exists() for name in (REPORT, SCORES, PAGE, AUDIT_FILES))


def load_audit_report(folder: Path) -> AuditReport:
    """Read the report of an audit folder and check its hash; damage raises RecordError."""
    check_audit_file(folder, REPORT)
    return load_record(AuditReport, folder / REPORT)


def check_audit_file(folder: Path, name: str) -> None:
    """Check that a file is the one that the audit wrote.

    Raises UnreadableError if this user may not read it, RecordError if it is damaged or not of it.
    """
    written = load_audit_files(folder).files.get(name)
    if written is None:
        raise RecordError(f"the audit in '{folder}' wrote no '{name}'. {AGAIN}")
    refuse_damage(folder, find_damage(folder, {name: written}), AGAIN, said="is damaged: it ")
