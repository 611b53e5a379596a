"""What an audit leaves in its folder, and `audit.json`, which is written after all of it.

    report.json      what was found
    records.parquet  the scores of each document
    report.html      the page
    audit.json       sizes and hashes of these three, and of the model card of the run

An audit without a whole `audit.json` did not end: its report is not read.
"""

from pathlib import Path
from typing import Final, Literal

from pydantic import ConfigDict, Field

from memguard.errors import RecordError
from memguard.records.audit import AuditReport
from memguard.records.record import load_record
from memguard.records.sealed import (
    Damage,
    FileSum,
    SealedRecord,
    find_damage,
    load_sealed,
    save_sealed,
    sum_file,
)

AUDIT_FILES = "audit.json"
REPORT: Final = "report.json"
SCORES: Final = "records.parquet"
PAGE = "report.html"
CARD = "model/README.md"
"""Below the folder of the run."""
_AGAIN = "Run 'memguard audit' again: it takes the scores that are kept"


class AuditFiles(SealedRecord):
    """`audit/audit.json`."""

    schema_name: Literal["memguard.audit_files/1"] = Field("memguard.audit_files/1", alias="schema")
    report: FileSum
    scores: FileSum
    page: FileSum
    card: FileSum | None
    """null where the audit is not the run's own: in a folder of its own, or of any model."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    @property
    def files(self) -> dict[str, FileSum]:
        """What lies beside it, by name."""
        return {REPORT: self.report, SCORES: self.scores, PAGE: self.page}


def save_audit_files(folder: Path, *, has_card: bool) -> None:
    """Write `audit.json` for the files of an audit folder; the last thing an audit does.

    Args:
        folder: of the audit.
        has_card: whether the model card of the run, which ``folder`` lies in, shows this audit.
    """
    written = AuditFiles(
        report=sum_file(folder / REPORT),
        scores=sum_file(folder / SCORES),
        page=sum_file(folder / PAGE),
        card=sum_file(folder.resolve().parent / CARD) if has_card else None,
    )
    save_sealed(written, folder / AUDIT_FILES)


def save_page_sums(folder: Path) -> None:
    """Write `audit.json` again for pages that were rendered again; the rest of it stays.

    Raises:
        RecordError: there is no `audit.json`, or it is damaged.
    """
    written = load_audit_files(folder)
    card = None if written.card is None else sum_file(folder.resolve().parent / CARD)
    pages = {"page": sum_file(folder / PAGE), "card": card}
    save_sealed(written.model_copy(update=pages), folder / AUDIT_FILES)


def load_audit_files(folder: Path) -> AuditFiles:
    """Read `audit.json`.

    Raises:
        RecordError: the audit did not end, or it is damaged.
    """
    if not (folder / AUDIT_FILES).exists():
        raise RecordError(f"the audit in '{folder}' did not end (no {AUDIT_FILES}). {_AGAIN}")
    try:
        return load_sealed(AuditFiles, folder / AUDIT_FILES)
    except RecordError as error:
        raise RecordError(f"{error}. {_AGAIN}") from error


def has_audit(folder: Path) -> bool:
    """Tell whether an audit has begun to write here; it may not have come to its end."""
    return any((folder / name).exists() for name in (REPORT, SCORES, PAGE, AUDIT_FILES))


def find_audit_damage(folder: Path) -> list[Damage]:
    """Return which files of an audit are missing or are not those that it wrote.

    Of an audit that did not end, or whose `audit.json` is damaged, that file alone: what the others
    should be is not known. The model card is called `model/README.md`.
    """
    try:
        written = load_sealed(AuditFiles, folder / AUDIT_FILES)
    except RecordError:
        is_there = (folder / AUDIT_FILES).exists()
        return [Damage(file=AUDIT_FILES, what="is damaged" if is_there else "is missing")]
    damages = find_damage(folder, written.files)
    if written.card is not None:
        card = folder.resolve().parent / CARD
        found = find_damage(card.parent, {card.name: written.card})
        damages += [Damage(file=CARD, what=damage.what) for damage in found]
    return damages


def load_audit_report(folder: Path) -> AuditReport:
    """Read the report of an audit folder, which must be the one that the audit wrote.

    Raises:
        RecordError: the audit did not end, or report.json or audit.json is damaged.
    """
    check_audit_file(folder, REPORT)
    return load_record(AuditReport, folder / REPORT)


def check_audit_file(folder: Path, name: Literal["report.json", "records.parquet"]) -> None:
    """Refuse a file that is not the one that the audit wrote.

    Raises:
        RecordError: the audit did not end, or the file or audit.json is damaged.
    """
    written = load_audit_files(folder)
    for damage in find_damage(folder, {name: written.files[name]}):
        raise RecordError(f"'{folder / damage.file}' is damaged: it {damage.what}. {_AGAIN}")
