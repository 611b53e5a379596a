"""The result of `memguard diff`: what became of each finding between two audits.

    counts     findings by kind and probe
    findings   each document and probe of which at least one of the two audits has a finding
    rates      each risk in each trained bucket, in both audits
    paired     rates of the texts that both audits tested in the same way, and their difference

A finding is "fixed" only if both audits tested the same text with the same probe and the same
settings, and only the old one extracted it. Everything else that the new audit does not find has a
kind of its own, with the reason.
"""

from typing import Final, Literal

from pydantic import ConfigDict, Field

from memguard.records.gate import Acceptance
from memguard.records.record import Record
from memguard.records.results import ResultRow
from memguard.records.scores import Interval

FindingKind = Literal[
    "new",
    "new-document",
    "newly-audited",
    "unmatched",
    "unchanged",
    "no-longer-found",
    "no-longer-audited",
    "fixed",
]
KINDS: Final[dict[FindingKind, str]] = {
    "new": "new",
    "new-document": "new document",
    "newly-audited": "newly audited",
    "unmatched": "cannot be matched",
    "unchanged": "unchanged",
    "no-longer-found": "no longer found under its id",
    "no-longer-audited": "no longer audited",
    "fixed": "fixed",
}
"""The kinds as texts name them, worst first."""
MEANINGS: Final[dict[FindingKind, str]] = {
    "new": "The old audit tested it in the same way and did not extract it.",
    "new-document": "The old audit did not have the document.",
    "newly-audited": "The old audit did not ask this document in this way.",
    "unmatched": "The other audit may have the document, which cannot be recognised.",
    "unchanged": "Both audits find it.",
    "no-longer-found": "Documents are matched by id: the text may have changed.",
    "no-longer-audited": "The new audit did not test this document in the same way.",
    "fixed": "The new audit tested all that the old one had tested, and did not extract it.",
}
MatchedBy = Literal["text", "id"]
"""text: the keyed hash, because both audits used one identity key; id: the user's own ids."""


class DiffedAudit(Record):
    """One of the two audits."""

    name: str
    """Of the run, or of the model."""
    created: str
    """UTC, ISO 8601."""
    report_sha256: str
    num_findings: int
    """Pairs of a trained text and a probe that extracts it."""
    num_documents: int
    """Trained documents that were audited."""
    num_texts: int
    """Different texts among them, as far as they can be told apart."""
    num_only_here: int
    """Of `num_texts`: those that the other audit did not audit, whether trained there or not."""
    num_unmatched: int
    """Of `num_documents`: without a keyed hash or an id of the user's own to match them by; each
    counts as a text."""
    num_not_sampled: int
    """Trained documents that were left out of the audit's sample."""


class DiffedFinding(Record):
    """What became of one finding."""

    kind: FindingKind
    finding: str | None
    """Its id: keyed hash of the text, ``:``, probe; that of the new audit, if it has the document.
    null without a key."""
    probe: str
    id: str
    """Of the document in the new audit, or in the old one if only that has it."""
    bucket: str
    """As above."""
    num_copies: int
    """Documents of that audit with this text."""
    is_verbatim: bool | None
    """Whether it was continued word for word, in the new audit if that finds it; null if the probe
    does not say."""
    continuation_tokens: int
    reason: str | None
    """Why it is of this kind, beyond what the kind means."""
    acceptance: Literal["accepted", "expired"] | None = None
    """null if the triage does not name it, or if only the old audit finds it."""


class DiffCount(Record):
    """Findings of one kind and probe."""

    kind: FindingKind
    probe: str
    num_findings: int
    num_accepted: int


class DiffedRate(Record):
    """One risk in one trained bucket."""

    risk: str
    spoken: str
    """As sentences name it."""
    bucket: str
    old: ResultRow | None
    """null if that audit has no such number."""
    new: ResultRow | None


class PairedRates(Record):
    """Rates of one probe on the trained texts that both audits tested in the same way."""

    probe: str
    num_texts: int
    num_old: int
    num_new: int
    num_only_old: int
    num_only_new: int
    difference: Interval | None
    """New minus old, with Tango's interval; null without such texts."""
    missing_because: str | None


class AuditDiff(Record):
    """The findings and rates of two audits, side by side."""

    schema_name: Literal["memguard.diff/1"] = Field("memguard.diff/1", alias="schema")
    tool_version: str
    old: DiffedAudit
    new: DiffedAudit
    matched_by: MatchedBy
    num_texts_in_both: int
    """Texts, trained in the new audit, that the old one audited, too."""
    notes: list[str]
    """How documents were matched, and what was not compared."""
    counts: list[DiffCount]
    """Each kind and probe, also those without findings."""
    findings: list[DiffedFinding]
    """Worst first."""
    rates: list[DiffedRate]
    paired: list[PairedRates]
    accepted: list[Acceptance]
    """Entries of the triage; empty without one."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    def count(self, kind: FindingKind, probe: str | None = None) -> int:
        """Return the number of findings of a kind, accepted ones included.

        Args:
            kind: of the findings.
            probe: only of this one; None: of all.
        """
        return sum(
            count.num_findings
            for count in self.counts
            if count.kind == kind and probe in (None, count.probe)
        )

    def select(self, kind: FindingKind) -> list[DiffedFinding]:
        """Return the findings of a kind, worst first."""
        return [finding for finding in self.findings if finding.kind == kind]
