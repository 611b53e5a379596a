"""Judges what is no row of results: the documents that came out, and epsilon.

Findings are the documents that came out, without those that a person accepted: a count, judged as
it is. Of epsilon, the low end is the lower bound that the canaries show (95 %, one-sided), the high
end the value that dp_sgd spent, by accounting. A bound above the limit fails; else the spent value
decides; without it nothing does, because no lower bound shows that epsilon is low.
"""

from collections.abc import Sequence

from memguard.errors import plural
from memguard.gate.deciding import end_sentence
from memguard.gate.gaps import Audited
from memguard.gate.policy import Rule
from memguard.records import AuditReport
from memguard.records.audit_files import FINDINGS
from memguard.records.documents import TRAINED_ROLES
from memguard.records.gate import Acceptance, Judgement, Outcome

_CANARIES = "canaries"


def list_came_out(audited: Audited, probe: str | None = None) -> list[str | None] | str:
    """Return the keyed hash of each document that came out, or why they cannot be counted.

    A document without a hash counts, as None; ``probe``: only those that it extracts.
    """
    documents = audited.documents
    if documents is None:
        return "only another user may read the records of the documents (records.parquet)"
    if not documents.is_trained_N.any():
        return "no trained document was audited"
    risky = {m.probe for m in audited.report.tables.metrics if m.risk_rank is not None}
    for name in sorted(risky) if probe is None else [probe]:
        if name not in documents.extracted:
            return f"the records have no answers of the probe {name}"
    came_out_N = documents.came_out_N
    if probe is not None:
        came_out_N = came_out_N & (documents.extracted[probe] == 1)
    texts: list[str | None] = documents.text_hmac_N[came_out_N].tolist()
    return texts


def list_held(accepted: Sequence[Acceptance], state: str = "accepted") -> set[str | None]:
    """Return the texts whose acceptance is in this state."""
    return {entry.document for entry in accepted if entry.state == state}


def judge_findings(
    number: int, rule: Rule, audited: Audited, accepted: Sequence[Acceptance]
) -> Judgement:
    """Return whether few enough documents that came out are open: not accepted by a person."""
    report, by_probe = audited.report, "" if rule.probe is None else f" by {rule.probe}"
    limit = int(rule.limit)

    def answer(outcome: Outcome, sentence: str, value: float | None = None) -> Judgement:
        return Judgement(
            rule=number,
            name=f"findings{by_probe} at most {limit:,}",
            outcome=outcome,
            sentence=sentence,
            limit=limit,
            value=value,
        )

    not_run = [run.name for run in report.probe_runs if run.num_documents is None]
    if rule.probe is not None and rule.probe in not_run:
        return answer("cannot-be-judged", f"The probe {rule.probe} did not run.")
    texts = list_came_out(audited, rule.probe)
    if isinstance(texts, str):
        return answer("cannot-be-judged", f"The findings cannot be counted: {texts}.")
    num_held, num_expired = (
        sum(text in held for text in texts)
        for held in (list_held(accepted), list_held(accepted, "expired"))
    )
    num_open = len(texts) - num_held
    trained = (row for row in report.tables.buckets if row.role in TRAINED_ROLES)
    num_by_method = 0 if rule.probe else report.num_by_method
    counts = {
        "findings by method": num_by_method if num_by_method > len(texts) > 0 else 0,
        "accepted": num_held,
        "accepted until a day that has passed, so open again": num_expired,
        "without a keyed hash, which cannot be accepted": texts.count(None),
        "trained documents could not be audited": sum(row.num_not_auditable for row in trained),
    }
    parts = [f"{count:,} {what}" for what, count in counts.items() if count or what == "accepted"]
    if not_run and rule.probe is None:
        parts.append(f"not run: {', '.join(not_run)}")
    came_out = f"{plural(len(texts), 'document')} came out{by_probe} ({'; '.join(parts)})"
    side = "within" if num_open <= limit else "above"
    return answer(
        "pass" if num_open <= limit else "fail",
        f"{came_out}: {num_open:,} open, {side} the limit of {limit:,}"
        f"{f', listed in {FINDINGS}' if texts else ''}.",
        num_open,
    )


def judge_epsilon(number: int, rule: Rule, report: AuditReport) -> Judgement:
    """Return whether epsilon is within its limit, by what was spent and what canaries show."""
    limit, training = rule.limit, report.training
    spent = None if training is None else training.epsilon
    run = next((run for run in report.probe_runs if run.name == _CANARIES), None)
    detail = report.tables.find_detail(_CANARIES) or {}
    bound = detail.get("epsilon_lower_bound")
    shown = "no lower bound was measured with canaries"
    if bound is not None:
        shown = (
            f"the canaries show an epsilon of at least {bound:.4g} (95 % confidence, delta "
            f"{detail.get('delta')}, one canary with all its repetitions)"
        )
    accounted = "no epsilon was accounted, as training had no dp_sgd"
    if spent is not None and training is not None:
        at = "" if training.delta is None else f" at delta {training.delta:g}"
        accounted = f"dp_sgd spent {spent:.4g}{at} (by accounting, a row)"
    outcome: Outcome = "cannot-be-judged"
    if bound is not None and bound > limit:
        outcome, conclusion = "fail", f"The shown bound is above the limit of {limit:g}."
    elif run is not None and run.num_documents is not None and not detail:
        conclusion = "The probe canaries ran, and its bound is not recorded."
    elif spent is not None:
        outcome = "pass" if spent <= limit else "fail"
        side = "within" if spent <= limit else "above"
        conclusion = f"The spent value is {side} the limit of {limit:g}."
    elif bound is None:
        conclusion = "There is nothing to judge."
    else:
        outcome = "inconclusive"
        conclusion = (
            f"The shown bound is within the limit of {limit:g}, and no number of canaries shows "
            "that epsilon is: it has no upper end without dp_sgd."
        )
    return Judgement(
        rule=number,
        name=f"epsilon at most {limit:g}",
        outcome=outcome,
        sentence=f"{end_sentence(f'{shown}; {accounted}')} {conclusion}",
        probe=None if bound is None else _CANARIES,
        metric="epsilon",
        limit=limit,
        value=spent,
        low=bound,
        high=spent,
    )
