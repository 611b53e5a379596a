"""What a gate judged, as texts: for the summary of a pull request and the page to sign.

    worst_first          the judgements in the order in which they decide
    describe_judgement   counts, value with interval, limit and documents needed of one of them
    write_contrast       the sentence for a gate that passes under a verdict that alarms
    write_acceptances    how many documents were accepted, and how many count again
    build_gate_head      all of it at the head of an audit's page, to read and to sign

The gate's outcome and the verdict below it are two statements: a policy can pass what the verdict
calls memorized. Texts are cleaned, not yet escaped.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from memguard.errors import plural
from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, make_table, show_name
from memguard.pages.page import Cell, Fact, GateHead, Notice, PageColour, Table
from memguard.records import LEVEL_NAMES, AuditReport, Tables
from memguard.records.audit_files import FINDINGS
from memguard.records.gate import (
    EXIT_CODES,
    GATE,
    Acceptance,
    GateResult,
    Judgement,
    Outcome,
    ReleaseContext,
)
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
_MOST_DOCUMENTS = 10
"""Largest number of documents that the head names."""


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
    return f"{plural(len(result.judgements), 'judgement')}: {', '.join(parts) or 'none'}"


def describe_judgement(
    judgement: Judgement, tables: Tables, name_limit: int = 200
) -> JudgementText:
    """Format one judgement; the tables of the audit say whether the value is a share."""
    is_share = judgement.num_matched is not None
    if not is_share and judgement.probe is not None and judgement.metric is not None:
        metric = tables.find_metric(judgement.probe, judgement.metric, judgement.parameters or "")
        is_share = metric is not None and (metric.statistic == "rate" or metric.unit == "share")
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
    documents, limit, needed = judgement.num_documents, fmt.MISSING, fmt.MISSING
    counts = fmt.MISSING if documents is None else f"{documents:,} documents"
    if documents is not None and judgement.num_matched is not None:
        counts = fmt.of(judgement.num_matched, documents)
    if judgement.limit is not None and not is_share:
        limit = f"{judgement.limit:g}"
    elif judgement.limit is not None and judgement.compared_with is not None:
        limit = f"{100 * judgement.limit:.4g}{fmt.NBSP}pp"
    elif judgement.limit is not None:
        limit = fmt.threshold(judgement.limit)
    if judgement.outcome == "inconclusive":
        number = judgement.num_documents_needed
        needed = "no number decides" if number is None else f"{number:,}"
    return JudgementText(
        outcome=OUTCOME_NAMES[judgement.outcome],
        name=fmt.clean_name(judgement.name, name_limit),
        counts=counts,
        value=written.value,
        interval=written.interval,
        limit=limit,
        needed=needed,
    )


def write_contrast(result: GateResult) -> str:
    """Return the sentence for a gate that passes although the verdict alarms; "" otherwise."""
    if result.outcome != "pass" or result.level == "none-found":
        return ""
    why = "trained documents were extracted, within the limits of the policy"
    if result.level == "inconclusive":
        why = "the audit could not show that nothing is extracted, which the policy allows"
    level = LEVEL_NAMES[result.level]
    return (
        f"The gate passes, but the verdict of the audit is '{level}': {why}. Read both before you "
        "sign."
    )


def sort_acceptances(result: GateResult) -> list[Acceptance]:
    """Return the acceptances, those that no longer hold first."""
    return sorted(result.accepted, key=lambda accepted: _STATE_ORDER.index(accepted.state))


def write_acceptances(result: GateResult) -> str:
    """Count the documents that came out and acceptances, in one sentence or two."""
    if result.num_findings is None:
        findings = "The documents that came out could not be counted."
    else:
        ending = "" if result.num_findings == 1 else "s"
        findings = f"{result.num_findings or 'No'} document{ending} came out."
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


_LOOKS: dict[Outcome, tuple[PageColour, str]] = {
    "fail": ("red", "memorized"),
    "cannot-be-judged": ("amber", "extracted"),
    "inconclusive": ("grey", "inconclusive"),
    "pass": ("green", "none-found"),
}
"""Colour of an outcome, and the level whose icon it has."""
_STATES = {
    "accepted": Cell("accepted", kind="level", level="low"),
    "expired": Cell("expired: counts again", kind="level", level="warning"),
    "not-found": Cell("not in this audit", kind="level", level="low"),
}
_RELEASES: dict[ReleaseContext | None, tuple[str, str]] = {
    "internal": (
        "internal",
        "Attackers are the people who can reach the model. Who that is, and filters around the "
        "model, were not part of the audit.",
    ),
    "api": (
        "API",
        "Attackers send queries: what they obtain within a number of queries counts. Limits and "
        "filters of the API were not part of the audit.",
    ),
    "open-weights": (
        "open weights",
        "Anyone can query the model without limit, read its probabilities and attack its weights. "
        "The audit did not attack the weights themselves, and a release cannot be withdrawn.",
    ),
    None: (
        "not declared",
        "The policy does not declare how the model will be released ('release: internal', 'api' or "
        "'open-weights'). Read the results as if anyone had the weights.",
    ),
}
"""Name of a declared release, and what depends on it."""
_NO_PROBE = (
    "No probe of memguard tests attribute inference, model inversion, reconstruction from weights "
    "or gradients, theft of the weights, or facts that the model repeats in other words."
)


def build_gate_head(result: GateResult, report: AuditReport, policy: str) -> GateHead:
    """Convert the result of a gate into the head of the audit's page."""
    colour, level = _LOOKS[result.outcome]
    release, release_note = _RELEASES[result.release]
    return GateHead(
        colour=colour,
        outcome=Notice(
            level=level,
            label=f"Gate: {OUTCOME_NAMES[result.outcome].lower()}",
            text=f"{count_outcomes(result)} (exit code {result.exit_code}).",
        ),
        decision=fmt.clean_text(result.decision),
        verdict=f"Verdict of the audit: {fmt.clean_text(result.verdict, 2 * fmt.SENTENCE_LIMIT)}",
        contrast=write_contrast(result),
        facts=(
            Fact("Policy", fmt.clean_name(policy), detail=f"Its text is in {GATE}."),
            Fact(
                "Judged",
                fmt.time(result.created),
                detail=f"memguard {fmt.clean_name(result.tool_version, 40)}",
            ),
            Fact(
                "Report",
                fmt.clean_name(result.report_sha256),
                detail="SHA-256 of report.json",
                code=True,
            ),
            Fact("Release", release, detail=release_note),
            *_list_documents(report),
        ),
        judgements=_build_judgements(result, report),
        accepted_note=write_acceptances(result),
        accepted=_build_accepted(result),
    )


def _list_documents(report: AuditReport) -> Iterator[Fact]:
    """Yield the first documents that came out, and where all of them are."""
    ids = [fmt.clean_name(finding.id) for finding in report.findings[:_MOST_DOCUMENTS]]
    if (more := report.num_findings - len(ids)) > 0:
        ids.append(f"and {more:,} more")
    if ids:
        detail = f"{', '.join(ids)}; all are in {FINDINGS} of the audit."
        yield Fact("Can be extracted", f"{report.num_findings:,} documents", detail=detail)


def _build_judgements(result: GateResult, report: AuditReport) -> Table:
    def name(pair: tuple[Judgement, JudgementText]) -> Cell:
        judgement, text = pair
        is_told = judgement.outcome != "pass"
        why = fmt.clean_text(fmt.hide_paths(judgement.sentence)) if is_told else ""
        return show_name(text.name, why)

    columns: tuple[Column[tuple[Judgement, JudgementText]], ...] = (
        Column("Rule", name),
        Column(
            "Outcome",
            lambda pair: Cell(pair[1].outcome, kind="level", level=_LOOKS[pair[0].outcome][1]),
        ),
        Column("Counts", lambda pair: pair[1].counts),
        Column("Value", lambda pair: pair[1].value),
        Column("Interval", lambda pair: pair[1].interval or fmt.MISSING),
        Column("Limit", lambda pair: pair[1].limit),
        Column("Documents needed", lambda pair: pair[1].needed),
    )
    pairs = [(one, describe_judgement(one, report.tables)) for one in worst_first(result)]
    caption = "Judgements, those that decide first"
    return make_table(caption, columns, pairs, notes=(INTERVAL_NOTE, _NO_PROBE), compact=True)


def _build_accepted(result: GateResult) -> Table | None:
    columns: tuple[Column[Acceptance], ...] = (
        Column("Document", lambda one: Cell(fmt.hash(one.document), kind="hash")),
        Column("State", lambda one: _STATES[one.state]),
        Column("By", lambda one: show_name(fmt.clean_name(one.by, 80))),
        Column("Until", lambda one: show_name(fmt.clean_text(one.until or "without end", 40))),
        Column("Why", lambda one: show_name(fmt.clean_text(one.reason, 200))),
    )
    accepted = sort_acceptances(result)
    return make_table("Accepted documents", columns, accepted, compact=True) if accepted else None
