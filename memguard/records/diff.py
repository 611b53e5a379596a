"""The result of `memguard diff`: what became of each finding between two audits.

findings   each text and probe of which at least one of the two audits has a finding
probes     their rates on the texts that both audits measured in the same way
"""

from typing import Final, Literal

from pydantic import ConfigDict, Field

from memguard.records.record import Record
from memguard.records.scores import Interval

FindingKind = Literal["new", "unchanged", "not-audited", "gone"]
FoundBy = Literal["new", "both", "old"]
KINDS: Final[dict[FindingKind, str]] = {
    "new": "The new audit finds it. The old one measured the same and did not find it.",
    "unchanged": "Both audits find it.",
    "not-audited": "One audit finds it. The other one did not measure the same.",
    "gone": "The old audit finds it. The new one measured the same and did not find it.",
}
"""What each kind means, worst first."""


class DiffedAudit(Record):
    """One of the two audits."""

    name: str
    """Of the run, or of the model."""
    created: str
    """UTC, ISO 8601."""
    report_sha256: str
    num_texts: int
    """Different texts of its trained documents."""
    num_findings: int
    """Pairs of a trained text and a probe that extracts it."""


class DiffedProbe(Record):
    """Rates of one probe on the texts, trained in both audits, that both measured the same."""

    probe: str
    num_texts: int
    num_old: int
    """Texts that the old audit extracts."""
    num_new: int
    difference: Interval | None
    """New minus old, with Tango's interval; null without such texts."""
    missing_because: str | None


class DiffedFinding(Record):
    """What became of one finding."""

    kind: FindingKind
    found_by: FoundBy
    finding: str
    """Its id: keyed hash of the text, ``:``, probe."""
    probe: str
    id: str
    """Of the document in the new audit, or in the old one if only that finds it."""
    bucket: str
    """As above."""
    parts: list[str]
    """Measurements that are yes, as "verbatim" for extraction.verbatim."""
    continuation_tokens: int
    reason: str | None
    """Why it is of this kind, beyond what the kind means."""


class AuditDiff(Record):
    """The findings of two audits, side by side."""

    schema_name: Literal["memguard.diff/2"] = Field("memguard.diff/2", alias="schema")
    tool_version: str
    old: DiffedAudit
    new: DiffedAudit
    num_texts_in_both: int
    """Texts, trained in the new audit, that the old one audited, too."""
    notes: list[str]
    """What was not compared."""
    probes: list[DiffedProbe]
    findings: list[DiffedFinding]
    """Worst first."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    def select(
        self, kind: FindingKind, probe: str | None = None, found_by: FoundBy | None = None
    ) -> list[DiffedFinding]:
        """Return the findings of a kind, worst first; None: of any probe, found by either."""
        return [
            one
            for one in self.findings
            if (one.kind, probe or one.probe, found_by or one.found_by)
            == (kind, one.probe, one.found_by)
        ]
