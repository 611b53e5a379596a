"""Results of a gate, made up: for tests of the files that the gate writes."""

from typing import Any

from result_examples import make_rate

from memguard.records.gate import Acceptance, GateResult, Judgement, decide

SENTENCES = {
    "pass": "all of it is within the limit",
    "fail": "all of it is beyond the limit",
    "inconclusive": "the interval contains the limit; 154 documents would decide",
    "cannot-be-judged": "the audit has no such metric; did you mean 'near_verbatim'?",
}


def make_judgement(
    outcome: Any, matched: int = 0, documents: int = 40, **changes: Any
) -> Judgement:
    """Return the judgement of a rate of so many documents at most 10 %."""
    rate = make_rate(matched, documents)
    low, high = rate.ci or (None, None)
    bucket = changes.get("bucket", "r64")
    values: dict[str, Any] = {
        "rule": 1,
        "name": f"near_verbatim on {bucket} at most 10 %",
        "outcome": outcome,
        "sentence": f"{matched} of {documents} documents: {SENTENCES[outcome]}.",
        "probe": "extraction",
        "metric": "near_verbatim",
        "parameters": "",
        "bucket": bucket,
        "limit": 0.1,
        "value": rate.rate,
        "low": low,
        "high": high,
        "num_documents": documents,
        "num_matched": matched,
        "num_documents_needed": 154 if outcome == "inconclusive" else None,
    }
    return Judgement(**{**values, **changes})


def make_unjudged(metric: str = "near_verbatm", **changes: Any) -> Judgement:
    """Return a judgement about what the audit lacks."""
    values: dict[str, Any] = {
        "rule": 2,
        "name": f"{metric} on trained at most 10 %",
        "outcome": "cannot-be-judged",
        "sentence": f"The audit has no metric '{metric}'; did you mean 'near_verbatim'?",
    }
    return Judgement(**{**values, **changes})


def make_acceptance(document: str, state: Any = "accepted", **changes: Any) -> Acceptance:
    values: dict[str, Any] = {
        "document": document,
        "by": "Ada Lovelace",
        "reason": "public text, printed in the manual",
        "until": "2027-01-31",
        "state": state,
    }
    return Acceptance(**{**values, **changes})


def make_result(*judgements: Judgement, **changes: Any) -> GateResult:
    """Return the result of these judgements, of the audit that `report_examples` makes."""
    listed = list(judgements) or [make_judgement("fail", 40)]
    values: dict[str, Any] = {
        "tool_version": "0.1.0",
        "created": "2026-11-26T08:00:00Z",
        "audit": "quickstart-plain",
        "report_sha256": "7d" * 32,
        "policy": "gate: [{metric: near_verbatim, on: trained, at_most: 0.10}]\n",
        "triage": None,
        "release": "open-weights",
        "level": "memorized",
        "verdict": "Memorized. 40 of 40 documents trained 64 times were extracted, 0 of 40 unseen "
        "ones: the model memorized training text.",
        "badges": ["Text: Memorized (40 of 40 documents)", "Membership: no sign (AUC 0.51)"],
        "outcome": decide([judgement.outcome for judgement in listed]),
        "decision": "Do not release: 65 documents can be extracted, listed in findings.csv.",
        "judgements": listed,
        "accepted": [],
        "num_findings": 65,
    }
    return GateResult(**{**values, **changes})


def make_mixed() -> GateResult:
    """Return a result with every outcome: 2 fail, 1 cannot be judged, 1 inconclusive, 3 pass."""
    return make_result(
        make_judgement("pass", 0, bucket="r4"),
        make_judgement("fail", 25, bucket="r16"),
        make_judgement("fail", 40),
        make_unjudged(),
        make_judgement("inconclusive", 2, rule=3, name="attack on r4 at most 10 %", bucket="r4"),
        make_judgement("pass", 1, 400, rule=3, name="attack on r16 at most 10 %", bucket="r16"),
        make_judgement(
            "pass",
            rule=4,
            name="epsilon at most 8",
            probe=None,
            metric="epsilon",
            parameters=None,
            bucket=None,
            limit=8.0,
            value=3.0,
            low=None,
            high=None,
            num_documents=None,
            num_matched=None,
        ),
    )
