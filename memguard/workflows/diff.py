"""`memguard diff`: what became of each finding between two audits. No torch."""

from datetime import date
from pathlib import Path

from memguard.errors import MAX_PATH, RecordError, UnreadableError, shorten
from memguard.gate.audited import find_audit_folder
from memguard.gate.diff_result import diff_audits
from memguard.gate.diff_sides import DiffSide, load_side
from memguard.gate.triage import load_triage
from memguard.records import format_now
from memguard.records.audit_files import CARDS, find_audit_damage
from memguard.records.diff import AuditDiff


def diff(old: Path, new: Path, *, triage: Path | None = None) -> AuditDiff:
    """Compare the findings and rates of two audits, also of different documents.

    Args:
        old: folder of the earlier run or audit.
        new: folder of the later one.
        triage: file with accepted findings of the new audit.

    Raises:
        ConfigError: the triage is not valid, or a folder is not of a run or an audit.
        RecordError: a run was not audited, an audit is damaged or cannot be read, or no document of
            the two can be matched.
    """
    accepted = None if triage is None else load_triage(triage)
    sides = [_load(folder) for folder in (old, new)]
    # Of the same clock as the times in records.
    today = date.fromisoformat(format_now()[:10])
    return diff_audits(*sides, triage=accepted, today=today)


def _load(folder: Path) -> DiffSide:
    audit = find_audit_folder(folder)
    check_audit(audit)
    return load_side(audit)


def check_audit(audit: Path) -> None:
    """Check that an audit's own files are those that it wrote, which excludes a model card.

    Raises:
        UnreadableError: only another user can read one of them.
        RecordError: one is missing or damaged, or the audit is incomplete.
    """
    for damage in find_audit_damage(audit):
        if damage.file in CARDS:
            continue
        name = shorten(str(audit / damage.file), MAX_PATH)
        if damage.is_unreadable:
            raise UnreadableError(f"'{name}' {damage.what}. Run this command as its owner")
        raise RecordError(
            f"'{name}' {damage.what}: the audit is damaged. Run 'memguard audit' again; it reuses "
            "the cached scores"
        )
