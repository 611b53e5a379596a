"""The result of `memguard diff`: what became of each document that an audit extracted."""

from typing import Final, Literal

from pydantic import Field

from memguard.records.record import Record
from memguard.records.results import Interval

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
    """Documents that were extracted."""


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
    """What became of a document by one probe."""

    kind: FindingKind
    found_by: FoundBy
    probe: str
    parts: list[str]
    """Measurements that are yes, as "verbatim" for extraction.verbatim."""
    reason: str | None
    """Why it is of this kind, beyond what the kind means."""


class DiffedDocument(Record):
    """What became of one document that an audit extracted."""

    kind: FindingKind
    found_by: FoundBy
    text_hmac: str
    """Keyed hash of its text."""
    id: str
    """In the new audit, or in the old one if only that finds it."""
    bucket: str
    """As above."""
    continuation_tokens: int
    probes: list[DiffedFinding]
    """Of each probe that extracts it in one of the audits."""


class AuditDiff(Record):
    """The findings of two audits, side by side."""

    schema_name: Literal["memguard.diff/3"] = Field("memguard.diff/3", alias="schema")
    tool_version: str
    old: DiffedAudit
    new: DiffedAudit
    num_texts_in_both: int
    """Texts, trained in the new audit, that the old one audited, too."""
    notes: list[str]
    """What was not compared."""
    probes: list[DiffedProbe]
    documents: list[DiffedDocument]
    """Worst first."""

    def select(self, kind: FindingKind, found_by: FoundBy | None = None) -> list[DiffedDocument]:
        """Return the documents of a kind, worst first; None: found by either."""
        of_kind = (one for one in self.documents if one.kind == kind)
        return [one for one in of_kind if found_by in (None, one.found_by)]

    def count(self, kind: FindingKind, probe: str, found_by: FoundBy) -> int:
        """Return the number of documents of a kind by one probe."""
        found = (one for document in self.documents for one in document.probes)
        return sum((one.kind, one.probe, one.found_by) == (kind, probe, found_by) for one in found)
