"""`triage.yaml`: findings that a person accepted, with the reason and the last day.

    accepted:
      - finding: 1f0c...9a:extraction   # id of the finding: keyed hash of the text, ':', probe
        by: A. Writer
        reason: The licence text, which is public.
        until: 2027-01-31               # last day; null: without end

An accepted finding stays visible and counted; it never changes a rate. After its last day it counts
as open again. The file lies outside run and audit folders: it must not be sealed with what it
excuses.
"""

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from memguard.config import load_yaml, validate
from memguard.config.settings import Settings
from memguard.errors import MAX_PATH, ConfigError, shorten
from memguard.records.audit_files import AUDIT_FILES
from memguard.records.gate import Acceptance
from memguard.records.run_files import has_prepared

_FINDING = re.compile(r"[0-9a-f]{64}:[A-Za-z0-9][A-Za-z0-9._-]*")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class AcceptedFinding(Settings):
    """One entry of `triage.yaml`."""

    finding: str = Field(
        description="id of the finding: the keyed hash of the text, ':' and the probe, as "
        "'memguard diff --json' shows it."
    )
    by: str = Field(description="who accepted it.")
    reason: str = Field(description="why it is accepted.")
    until: date | None = Field(
        description="last day on which it is accepted, as 2027-01-31; null: without end."
    )

    @field_validator("finding")
    @classmethod
    def _check_finding(cls, finding: str) -> str:
        if not _FINDING.fullmatch(finding):
            raise ValueError(
                "must be the id of a finding, 64 hexadecimal digits, ':' and the probe, as "
                f"'memguard diff --json' shows it; got {shorten(repr(finding))}"
            )
        return finding

    @field_validator("by", "reason")
    @classmethod
    def _check_said(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("must not be empty: it is shown to everyone who reads the verdict")
        return text

    @field_validator("until", mode="before")
    @classmethod
    def _read_day(cls, until: Any) -> date | None:
        if until is None or (isinstance(until, date) and not isinstance(until, datetime)):
            return until
        # Texts only: Pydantic would take the number 20270131 for a date, too.
        if isinstance(until, str) and _DAY.fullmatch(until):
            with contextlib.suppress(ValueError):
                return date.fromisoformat(until)
        raise ValueError(f"must be a day, as 2027-01-31, or null; got {shorten(repr(until))}")


class _TriageFile(Settings):
    accepted: tuple[AcceptedFinding, ...] = Field(description="The accepted findings.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Triage:
    """The accepted findings, and the file as it was written."""

    accepted: tuple[AcceptedFinding, ...]
    text: str


def load_triage(path: Path) -> Triage:
    """Read a triage file.

    Args:
        path: of the file.

    Raises:
        ConfigError: it lies inside the folder of a run or an audit, cannot be read, has an unknown
            key or a wrong value, or names a finding twice; one line for each problem, with its
            place.
    """
    _refuse_sealed(path)
    document = load_yaml(path)
    accepted = validate(_TriageFile, document.values, document).accepted
    first: dict[str, int] = {}
    problems = []
    for index, entry in enumerate(accepted):
        if entry.finding in first:
            place = document.locate(("accepted", index, "finding"))
            other = document.locate(("accepted", first[entry.finding], "finding"))
            problems.append(
                f"{place} 'accepted[{index}].finding' is the same as at {other}: name each finding "
                "once"
            )
        first.setdefault(entry.finding, index)
    if problems:
        raise ConfigError(*problems)
    return Triage(accepted=accepted, text=path.read_text(encoding="utf-8"))


def _refuse_sealed(path: Path) -> None:
    # As it is given too: a folder of a run may be a link to another disk.
    for place in (os.path.realpath(path), os.path.abspath(path)):
        for folder in Path(place).parents:
            is_run = (folder / "config.yaml").is_file() and has_prepared(folder)
            if is_run or (folder / AUDIT_FILES).is_file():
                raise ConfigError(
                    f"'triage' must not be inside the folder of {'a run' if is_run else 'an audit'}"
                    ": it would be sealed with what it accepts; got "
                    f"'{shorten(str(path), MAX_PATH)}'. Keep it beside the policy"
                )


def apply_triage(triage: Triage, findings: Sequence[str], today: date) -> list[Acceptance]:
    """Return the state of each entry of a triage, in their order.

    Args:
        triage: the accepted findings.
        findings: ids of the findings of the audit.
        today: an acceptance holds up to its last day, that day included.
    """
    present = set(findings)
    return [
        Acceptance(
            finding=entry.finding,
            by=entry.by,
            reason=entry.reason,
            until=None if entry.until is None else entry.until.isoformat(),
            state=(
                "not-found"
                if entry.finding not in present
                else "accepted"
                if entry.until is None or today <= entry.until
                else "expired"
            ),
        )
        for entry in triage.accepted
    ]
