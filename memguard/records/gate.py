"""The result of `memguard gate`: what a policy asked of an audit, and what was answered.

    gate.json      the result; its last field is the hash of the rest
    junit.xml, summary.md    the same for other programs and for a pull request
    report.html    the report of the audit with the decision at its head, to sign

Judged is the 95 % interval of a row of results: within the limit it passes, beyond it it fails,
across it nothing is decided. What a policy names and the audit lacks cannot be judged.
"""

from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from memguard.records.audit_files import PAGE
from memguard.records.record import Record
from memguard.records.sealed import FileSum, SealedRecord, is_closed, load_sealed
from memguard.records.verdict import Level

GATE: Final = "gate.json"
GATE_FOLDER = "gate"
JUNIT, SUMMARY = "junit.xml", "summary.md"
GATE_FILES = (GATE, JUNIT, SUMMARY, PAGE)

Outcome = Literal["pass", "fail", "cannot-be-judged", "inconclusive"]
EXIT_CODES: dict[Outcome, int] = {"fail": 10, "cannot-be-judged": 12, "inconclusive": 11, "pass": 0}
"""In the order in which one of several decides."""
ReleaseContext = Literal["internal", "api", "open-weights"]


class Judgement(Record):
    """One rule of a policy, judged on one row of results."""

    rule: int
    """Place of the rule in the policy, from 1; 0: the verdict's level, or a gap of the audit."""
    name: str
    """The rule and what it was judged on, as ``risk on documents trained 4 times at most 10 %``;
    unique."""
    outcome: Outcome
    sentence: str
    """The counts and the interval, the limit, and what follows; or why it cannot be judged."""
    probe: str | None = None
    """null with `metric` and `bucket` if no row of results was judged."""
    metric: str | None = None
    parameters: str | None = None
    bucket: str | None = None
    compared_with: str | None = None
    """null: the value itself; else ``control``, ``base`` or the name of an earlier audit."""
    limit: float | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    num_documents: int | None = None
    num_matched: int | None = None
    num_documents_needed: int | None = None
    """Fewest documents, not below today's, that would decide at today's rate; null if none would,
    or if the rule is decided."""


class Acceptance(Record):
    """A document that came out, and that a person accepted in `triage.yaml`."""

    document: str
    """Keyed hash of its text."""
    by: str
    reason: str
    until: str | None
    """Last day, ISO 8601; null: without end."""
    state: Literal["accepted", "expired", "not-found"]
    """not-found: no such document came out in this audit, so that nothing is accepted."""


class GateResult(SealedRecord):
    """`gate.json`."""

    schema_name: Literal["memguard.gate/2"] = Field("memguard.gate/2", alias="schema")
    tool_version: str
    created: str
    """UTC, ISO 8601."""
    audit: str
    """Name of the run, or of the model."""
    report_sha256: str
    """Hash of the report.json that was judged."""
    policy: str
    """The policy as it was written."""
    triage: str | None
    """triage.yaml as it was written; null if the policy names none."""
    release: ReleaseContext | None
    """How the model will be released, as the policy declares it."""
    level: Level
    """Level of the audit's verdict."""
    verdict: str
    """Its sentence, with the name of the level."""
    badges: list[str]
    """Its two badges: text and membership."""
    outcome: Outcome
    decision: str
    """What to do, in words; what came out and, if it passes, what was not run is said."""
    judgements: list[Judgement]
    accepted: list[Acceptance]
    num_findings: int | None
    """Documents that came out; null if they could not be counted."""
    files: dict[str, FileSum] = Field(default_factory=dict)
    """The other files in the folder."""

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return EXIT_CODES[self.outcome]


def decide(outcomes: list[Outcome]) -> Outcome:
    """Return the outcome that decides: the first one in the order of `EXIT_CODES`."""
    return next(outcome for outcome in EXIT_CODES if outcome in outcomes)


def load_gate(folder: Path) -> GateResult:
    """Read `gate.json` of a folder and check its hash; RecordError if it is missing or damaged."""
    return load_sealed(GateResult, folder / GATE)


def has_gate(folder: Path) -> bool:
    """Return whether a gate has written files here; they may be damaged."""
    return is_closed(folder) or any((folder / name).exists() for name in GATE_FILES)
