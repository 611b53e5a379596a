"""Judges what is no row of results: the number of findings, and epsilon.

findings   documents that the model was trained on and that a probe extracts, without those that
a person accepted; a count, judged as it is
epsilon    low: the lower bound that the canaries show (95 %, one-sided); high: the value that
dp_sgd spent, by accounting. A bound above the limit fails; else the spent value
decides; without it nothing does, because no lower bound shows that epsilon is low
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memguard.gate.audited import Audited
from memguard.gate.policy import Rule
from memguard.records import AuditReport
from memguard.records.gate import Acceptance, Judgement, Outcome

_CANARIES = "canaries"


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The findings of an audit."""

    ids: list[str] | None
    """None if they could not be counted."""
    num_without_id: int = 0
    """Findings of documents without a keyed hash: they count, and cannot be accepted."""
    why_not: str | None = None

    @property
    def count(self) -> int:
        """Number of findings."""
        return len(self.ids or ()) + self.num_without_id


def list_findings(audited: Audited) -> Findings:
    """Return the findings of an audit, by their ids."""
    documents = audited.documents
    if documents is None:
        why_not = "only another user may read the records of the documents (records.parquet)"
        return Findings(ids=None, why_not=why_not)
    risky = {m.probe for m in audited.report.tables.metrics if m.risk_rank is not None}
    if lost := sorted(risky - set(documents.extracted)):
        return Findings(ids=None, why_not=f"the records have no answers of the probe {lost[0]}")
    without_N = documents.is_trained_N & [one is None for one in documents.text_hmac_N]
    num_without = sum(
        int(((extracted_N == 1) & without_N).sum()) for extracted_N in documents.extracted.values()
    )
    return Findings(ids=documents.list_findings(), num_without_id=num_without)


def judge_findings(
    number: int,
    rule: Rule,
    findings: Findings,
    accepted: Sequence[Acceptance],
    report: AuditReport,
) -> Judgement:
    """Return whether few enough findings are open: not accepted by a person.

    Args:
        number: of the rule.
        rule: about findings.
        findings: of the audit.
        accepted: entries of the triage.
        report: of the audit.
    """
    of_probe = "" if rule.probe is None else f" of {rule.probe}"
    limit = int(rule.limit)
    name = f"findings{of_probe} at most {limit:,}"

    def answer(outcome: Outcome, sentence: str, value: float | None = None) -> Judgement:
        return Judgement(
            rule=number, name=name, outcome=outcome, sentence=sentence, limit=limit, value=value
        )

    if findings.ids is None:
        return answer("cannot-be-judged", f"The findings cannot be counted: {findings.why_not}.")
    runs = {run.name: run for run in report.probe_runs}
    not_run = [run.name for run in runs.values() if run.num_documents is None]
    if rule.probe is not None and (rule.probe not in runs or rule.probe in not_run):
        return answer("cannot-be-judged", f"The probe {rule.probe} did not run.")
    ids, num_without = set(findings.ids), findings.num_without_id
    if rule.probe is not None:
        ids = {one for one in ids if one.partition(":")[2] == rule.probe}
    held = ids & {entry.finding for entry in accepted if entry.state == "accepted"}
    expired = ids & {entry.finding for entry in accepted if entry.state == "expired"}
    num_open = len(ids) - len(held) + num_without
    noun = "finding" if len(ids) + num_without == 1 else "findings"
    parts = [f"{len(held):,} accepted"]
    if expired:
        parts.append(f"{len(expired):,} accepted until a day that has passed, so open again")
    if num_without:
        parts.append(f"{num_without:,} without an id, which cannot be accepted")
    if not_run and rule.probe is None:
        parts.append(f"not run: {', '.join(not_run)}")
    side = "within" if num_open <= limit else "above"
    return answer(
        "pass" if num_open <= limit else "fail",
        f"{len(ids) + num_without:,} {noun}{of_probe} ({'; '.join(parts)}): {num_open:,} open, "
        f"{side} the limit of {limit:,}.",
        num_open,
    )


def judge_epsilon(number: int, rule: Rule, report: AuditReport) -> Judgement:
    """Return whether epsilon is within its limit, by what was spent and what canaries show.

    Args:
        number: of the rule.
        rule: about epsilon.
        report: of the audit.
    """
    limit, training = rule.limit, report.training
    spent = None if training is None else training.epsilon
    run = next((run for run in report.probe_runs if run.name == _CANARIES), None)
    detail = report.tables.find_detail(_CANARIES)
    bound = None if detail is None else detail.get("epsilon_lower_bound")
    said = []
    if bound is not None and detail is not None:
        said.append(
            f"the canaries show an epsilon of at least {bound:.4g} (95 % confidence, delta "
            f"{detail.get('delta')}, one canary with all its repetitions)"
        )
    else:
        said.append("no lower bound was measured with canaries")
    if spent is not None and training is not None:
        said.append(
            f"dp_sgd spent {spent:.4g} at delta {training.delta:g} (by accounting, a row)"
            if training.delta is not None
            else f"dp_sgd spent {spent:.4g} (by accounting, a row)"
        )
    else:
        said.append("no epsilon was accounted, as training had no dp_sgd")
    facts = "; ".join(said)
    facts = facts[:1].upper() + facts[1:]

    def answer(outcome: Outcome, conclusion: str) -> Judgement:
        return Judgement(
            rule=number,
            name=f"epsilon at most {limit:g}",
            outcome=outcome,
            sentence=f"{facts}. {conclusion}",
            probe=None if bound is None else _CANARIES,
            metric="epsilon",
            limit=limit,
            value=spent,
            low=bound,
            high=spent,
        )

    if bound is not None and bound > limit:
        return answer("fail", f"The shown bound is above the limit of {limit:g}.")
    if run is not None and run.num_documents is not None and detail is None:
        return answer("cannot-be-judged", "The probe canaries ran, and its bound is not recorded.")
    if spent is not None:
        if spent > limit:
            return answer("fail", f"The spent value is above the limit of {limit:g}.")
        return answer("pass", f"The spent value is within the limit of {limit:g}.")
    if bound is None:
        return answer("cannot-be-judged", "There is nothing to judge.")
    return answer(
        "inconclusive",
        f"The shown bound is within the limit of {limit:g}, and no number of canaries shows that "
        "epsilon is: it has no upper end without dp_sgd.",
    )
