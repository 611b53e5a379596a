"""What a gate judged, as texts: for the summary of a pull request and the page to sign.

    worst_first          the judgements in the order in which they decide
    describe_judgement   counts, value with interval, limit and documents needed of one of them
    write_contrast       the sentence for a gate that passes under a verdict that alarms
    write_acceptances    how many findings were accepted, by whom, and how many count again

Texts are cleaned, not yet escaped.
"""

from collections import Counter
from dataclasses import dataclass, replace

from memguard.pages import formatting as fmt
from memguard.records import LEVEL_NAMES, Tables
from memguard.records.gate import EXIT_CODES, Acceptance, GateResult, Judgement, Outcome
from memguard.records.results import Interval

OUTCOME_NAMES: dict[Outcome, str] = {
    "pass": "Pass",
    "fail": "Fail",
    "cannot-be-judged": "Cannot be judged",
    "inconclusive": "Inconclusive",
}
"""The word of each outcome on pages and in summaries."""
INTERVAL_NOTE = (
    f"Intervals are two-sided 95{fmt.PERCENT} intervals, of clusters where documents are copies of "
    "each other. They are not corrected for the number of rules and buckets."
)
_STATE_ORDER = ("expired", "not-found", "accepted")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgementText:
    """The numbers of one judgement; an en dash is a number that it does not have."""

    outcome: str
    name: str
    counts: str
    """``4 of 40``; the number of documents if the value is no rate."""
    value: str
    interval: str
    limit: str
    needed: str
    """Documents that would decide at today's rate; only of one that is inconclusive."""


def worst_first(result: GateResult) -> list[Judgement]:
    """Return the judgements in the order in which they decide, those of one outcome by rule."""
    order = list(EXIT_CODES)
    return sorted(result.judgements, key=lambda judgement: order.index(judgement.outcome))


def count_outcomes(result: GateResult) -> str:
    """Count the judgements by outcome: ``5 judgements: 1 fail, 4 pass``."""
    counts = Counter(judgement.outcome for judgement in result.judgements)
    parts = [
        f"{counts[name]:,} {OUTCOME_NAMES[name].lower()}" for name in EXIT_CODES if counts[name]
    ]
    total = len(result.judgements)
    return f"{total:,} judgement{'' if total == 1 else 's'}: {', '.join(parts) or 'none'}"


def describe_judgement(
    judgement: Judgement, tables: Tables, name_limit: int = 200
) -> JudgementText:
    """Format one judgement.

    Args:
        judgement: one of the result.
        tables: of the audit, which say whether the value is a share.
        name_limit: largest number of characters of the name.
    """
    is_share = _is_share(judgement, tables)
    low, high = judgement.low, judgement.high
    ci = None if low is None or high is None else (low, high)
    estimate = None if judgement.value is None else Interval(value=judgement.value, ci=ci)
    if judgement.compared_with is not None:
        written = fmt.points(estimate) if is_share else fmt.difference(estimate)
        if is_share and ci is not None:
            written = replace(written, interval=f"{written.interval}{fmt.NBSP}pp")
    else:
        # Counts of findings are whole numbers.
        is_count = ci is None and judgement.value is not None and judgement.value.is_integer()
        written = fmt.share(estimate) if is_share else fmt.interval(estimate, 0 if is_count else 3)
    return JudgementText(
        outcome=OUTCOME_NAMES[judgement.outcome],
        name=fmt.clean_name(judgement.name, name_limit),
        counts=_write_counts(judgement),
        value=written.value,
        interval=written.interval,
        limit=_write_limit(judgement, is_share),
        needed=_write_needed(judgement),
    )


def _is_share(judgement: Judgement, tables: Tables) -> bool:
    if judgement.num_matched is not None:
        return True
    if judgement.probe is None or judgement.metric is None:
        return False
    metric = tables.find_metric(judgement.probe, judgement.metric, judgement.parameters or "")
    return metric is not None and (metric.statistic == "rate" or metric.unit == "share")


def _write_counts(judgement: Judgement) -> str:
    documents = judgement.num_documents
    if documents is None:
        return fmt.MISSING
    if judgement.num_matched is None:
        return f"{documents:,} documents"
    return fmt.of(judgement.num_matched, documents)


def _write_limit(judgement: Judgement, is_share: bool) -> str:
    limit = judgement.limit
    if limit is None:
        return fmt.MISSING
    if not is_share:
        return f"{limit:g}"
    if judgement.compared_with is not None:
        return f"{100 * limit:.4g}{fmt.NBSP}pp"
    return fmt.threshold(limit)


def _write_needed(judgement: Judgement) -> str:
    if judgement.outcome != "inconclusive":
        return fmt.MISSING
    needed = judgement.num_documents_needed
    return "no number decides" if needed is None else f"{needed:,}"


def write_contrast(result: GateResult) -> str:
    """Return the sentence for a gate that passes although the verdict alarms; "" otherwise."""
    if result.outcome != "pass" or result.level == "none-found":
        return ""
    level = LEVEL_NAMES[result.level]
    if result.level == "inconclusive":
        return (
            f"The gate passes, but the verdict of the audit is '{level}': the audit could not show "
            "that nothing is extracted. The policy allows this verdict."
        )
    return (
        f"The gate passes, but the verdict of the audit is '{level}': trained documents were "
        "extracted, within the limits of the policy. Read both before you sign."
    )


def sort_acceptances(result: GateResult) -> list[Acceptance]:
    """Return the acceptances, those that no longer hold first."""
    return sorted(result.accepted, key=lambda accepted: _STATE_ORDER.index(accepted.state))


def write_acceptances(result: GateResult) -> str:
    """Count findings and acceptances in one sentence or two."""
    if result.num_findings is None:
        findings = "The findings of the audit could not be counted."
    else:
        plural = "" if result.num_findings == 1 else "s"
        findings = f"The audit has {result.num_findings:,} finding{plural}, by document and probe."
    states = Counter(accepted.state for accepted in result.accepted)
    if not states:
        return f"{findings} None was accepted by a person."
    parts = [
        f"{number:,} {words}"
        for number, words in (
            (states["accepted"], "in force"),
            (states["expired"], "expired, counted again"),
            (states["not-found"], "not in this audit"),
        )
        if number
    ]
    return f"{findings} Accepted in the triage file: {'; '.join(parts)}. Rates stay as measured."
