"""`report.sarif`: findings and judgements as SARIF 2.1.0, for programs that show static analyses.

    rules      one for each probe with findings, one for each rule of the policy
    results    each finding: a trained document that one probe extracts; a warning, located by the
               document's id, with the id of the finding as its fingerprint; an accepted one is
               suppressed, one whose acceptance has expired is not
               each judgement: kind fail, review (inconclusive), notApplicable (cannot be judged),
               or pass

At most 5,000 results, because programs refuse more: judgements first, then open findings, then
accepted ones. The file says how many were left out. A gate that does not pass is also a
notification of the invocation, because a list of problems does not show a rule that cannot be
judged. No text of a document is in the file; an id that reads like a text is replaced by its hash.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from memguard.gate.sarif_rules import RuleTable
from memguard.pages import formatting as fmt
from memguard.pages.judgements import OUTCOME_NAMES, count_outcomes, worst_first
from memguard.records import AuditReport
from memguard.records.audit import name_finding
from memguard.records.audit_files import SCORES
from memguard.records.documents import DocumentTable as Answers
from memguard.records.gate import Acceptance, GateResult, Judgement, Outcome

MOST_RESULTS: Final = 5_000
FINGERPRINT: Final = "memguardFinding/v1"
_SCHEMA: Final = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_KINDS: Mapping[Outcome, str] = {
    "fail": "fail",
    "inconclusive": "review",
    "cannot-be-judged": "notApplicable",
    "pass": "pass",
}
_LONGEST_ID, _MOST_WORDS = fmt.NAME_LIMIT, 4
_SENTENCE_LIMIT = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finding:
    """A trained text that one probe extracts, and the documents that have it."""

    probe: str
    id: str | None
    """None where the audit had no key."""
    document: str
    """Id of the first of the documents."""
    bucket: str
    num_documents: int
    acceptances: tuple[Acceptance, ...]

    @property
    def is_accepted(self) -> bool:
        return any(accepted.state == "accepted" for accepted in self.acceptances)


def render_sarif(result: GateResult, report: AuditReport, answers: Answers | None) -> bytes:
    """Render a result and the findings of its audit as SARIF 2.1.0, UTF-8.

    Args:
        result: of the gate.
        report: the audit that was judged.
        answers: which documents it found extracted; None if they could not be read.
    """
    findings = [] if answers is None else list(_list_findings(answers, result.accepted))
    findings.sort(key=lambda finding: finding.is_accepted)
    judgements = worst_first(result)
    room = max(0, MOST_RESULTS - len(judgements))
    rules = RuleTable(result.judgements, sorted({finding.probe for finding in findings}))
    results = [
        *(_show_judgement(judgement, rules) for judgement in judgements[:MOST_RESULTS]),
        *(_show_finding(finding, rules) for finding in findings[:room]),
    ]
    num_left_out = len(judgements) + len(findings) - len(results)
    log = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "memguard",
                        "version": fmt.clean_name(result.tool_version, 40),
                        "rules": rules.describe(),
                    }
                },
                "automationDetails": {"id": f"memguard/{fmt.clean_name(result.audit)}"},
                "originalUriBaseIds": {
                    "AUDIT": {"description": {"text": "The folder of the audit that was judged."}}
                },
                "invocations": [
                    {
                        "executionSuccessful": True,
                        "exitCode": result.exit_code,
                        "exitCodeDescription": OUTCOME_NAMES[result.outcome],
                        "toolExecutionNotifications": _list_notifications(
                            result, answers, num_left_out, len(findings)
                        ),
                    }
                ],
                "columnKind": "utf16CodeUnits",
                "properties": {
                    "outcome": result.outcome,
                    "verdict": fmt.clean_text(result.verdict, _SENTENCE_LIMIT),
                    "verdictLevel": result.level,
                    "reportSha256": fmt.clean_name(result.report_sha256),
                    "releaseContext": result.release,
                    "numFindings": None if answers is None else len(findings),
                    "numResultsLeftOut": num_left_out,
                },
                "results": results,
            }
        ],
    }
    text = json.dumps(log, ensure_ascii=False, allow_nan=False, indent=1)
    return text.encode() + b"\n"


# Findings.


def _list_findings(answers: Answers, accepted: Sequence[Acceptance]) -> Iterator[_Finding]:
    """Yield the findings by probe, then in the order of the documents; equal texts are one."""
    is_trained_N = answers.is_trained_N
    for probe in sorted(answers.extracted):
        documents: dict[Any, list[int]] = {}
        for index in np.flatnonzero((answers.extracted[probe] == 1) & is_trained_N).tolist():
            text_hmac = answers.text_hmac_N[index]
            # Without a key, nothing shows which texts are equal.
            documents.setdefault(index if text_hmac is None else str(text_hmac), []).append(index)
        for indices in documents.values():
            first = indices[0]
            text_hmac = answers.text_hmac_N[first]
            name = None if text_hmac is None else name_finding(str(text_hmac), probe)
            yield _Finding(
                probe=probe,
                id=name,
                document=_name_document(str(answers.id_N[first]), text_hmac),
                bucket=fmt.clean_name(str(answers.bucket_N[first])),
                num_documents=len(indices),
                acceptances=tuple(entry for entry in accepted if entry.finding == name),
            )


def _name_document(identifier: str, text_hmac: Any) -> str:
    """Return the id of a document, or its hash if the id reads like a text."""
    if len(identifier) <= _LONGEST_ID and len(identifier.split()) <= _MOST_WORDS:
        return fmt.clean_name(identifier)
    return "(long id)" if text_hmac is None else f"document {fmt.hash(str(text_hmac))}"


def _show_finding(finding: _Finding, rules: RuleTable) -> dict[str, Any]:
    more = f" {finding.num_documents:,} documents have this text." * (finding.num_documents > 1)
    expired = [entry for entry in finding.acceptances if entry.state == "expired"]
    ended = f" It was accepted until {fmt.clean_name(expired[0].until or '')}." if expired else ""
    probe = fmt.clean_name(finding.probe)
    suppressions = [
        {"kind": "external", "status": "accepted", "justification": _justify(entry)}
        for entry in finding.acceptances
        if entry.state == "accepted"
    ]
    fingerprint = {} if finding.id is None else {FINGERPRINT: fmt.clean_name(finding.id, 300)}
    return {
        **rules.refer_to_probe(finding.probe),
        "kind": "fail",
        "level": "warning",
        "message": {
            "text": f"A document of bucket '{finding.bucket}' that the model was trained on is "
            f"extracted by the probe '{probe}'.{more}{ended}"
        },
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": SCORES, "uriBaseId": "AUDIT"}},
                "logicalLocations": [
                    {
                        "name": finding.document,
                        "fullyQualifiedName": f"{finding.bucket}/{finding.document}",
                        "kind": "document",
                    }
                ],
            }
        ],
        **({"partialFingerprints": fingerprint} if fingerprint else {}),
        "suppressions": suppressions,
        "properties": {"bucket": finding.bucket, "numDocuments": finding.num_documents},
    }


def _justify(accepted: Acceptance) -> str:
    until = "without end" if accepted.until is None else f"until {fmt.clean_name(accepted.until)}"
    by, reason = fmt.clean_name(accepted.by), fmt.clean_text(accepted.reason, _SENTENCE_LIMIT)
    return f"Accepted by {by} {until}: {reason}"


# Judgements.


def _show_judgement(judgement: Judgement, rules: RuleTable) -> dict[str, Any]:
    numbers = {
        "value": judgement.value,
        "low": judgement.low,
        "high": judgement.high,
        "limit": judgement.limit,
        "numDocuments": judgement.num_documents,
        "numMatched": judgement.num_matched,
        "numDocumentsNeeded": judgement.num_documents_needed,
    }
    name = fmt.clean_name(judgement.name, 300)
    return {
        **rules.refer_to_rule(judgement.rule),
        "kind": _KINDS[judgement.outcome],
        # SARIF allows a level only where something is wrong.
        "level": "error" if judgement.outcome == "fail" else "none",
        "message": {"text": f"{name}: {fmt.clean_text(judgement.sentence, _SENTENCE_LIMIT)}"},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": "report.json", "uriBaseId": "AUDIT"}
                },
                "logicalLocations": [
                    {"name": fmt.clean_name(judgement.bucket or "audit"), "kind": "bucket"}
                ],
            }
        ],
        "partialFingerprints": {"memguardJudgement/v1": name},
        "suppressions": [],
        "properties": {
            "outcome": judgement.outcome,
            **{key: value for key, value in numbers.items() if value is not None},
        },
    }


def _list_notifications(
    result: GateResult, answers: Answers | None, num_left_out: int, num_findings: int
) -> list[dict[str, Any]]:
    notes: list[tuple[str, str]] = []
    if result.outcome != "pass":
        notes.append(
            (
                "error",
                f"The gate does not pass: {OUTCOME_NAMES[result.outcome].lower()}, exit code "
                f"{result.exit_code}; {count_outcomes(result)}.",
            )
        )
    notes.append(
        (
            "note" if result.level == "none-found" else "warning",
            f"Verdict of the audit: {fmt.clean_text(result.verdict, _SENTENCE_LIMIT)}",
        )
    )
    if answers is None:
        notes.append(
            ("warning", "The findings are not listed: the audit's records could not be read.")
        )
    elif not answers.extracted:
        notes.append(("warning", "The findings are not listed: no probe recorded its answers."))
    if num_left_out:
        notes.append(
            (
                "warning",
                f"{num_left_out:,} results are left out, because a file has at most "
                f"{MOST_RESULTS:,}; the audit has {num_findings:,} findings.",
            )
        )
    return [{"level": level, "message": {"text": text}} for level, text in notes]
