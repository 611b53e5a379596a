"""The gate's decision at the head of an audit's page, to read and to sign.

The gate's outcome and the verdict below it are two statements: a policy can pass what the verdict
calls memorized. Then the judgements, those that decide first, and who accepted which findings.
"""

from memguard.pages import formatting as fmt
from memguard.pages.judgements import (
    INTERVAL_NOTE,
    OUTCOME_NAMES,
    count_outcomes,
    describe_judgement,
    sort_acceptances,
    worst_first,
    write_acceptances,
    write_contrast,
)
from memguard.pages.page import Cell, Fact, GateHead, Notice, PageColour, Row, Table
from memguard.records import AuditReport
from memguard.records.gate import GATE, Acceptance, GateResult, Judgement, Outcome, ReleaseContext

_MOST_JUDGEMENTS, _MOST_ACCEPTED = 60, 30
_LOOKS: dict[Outcome, tuple[PageColour, str]] = {
    "fail": ("red", "memorized"),
    "cannot-be-judged": ("amber", "extracted"),
    "inconclusive": ("grey", "inconclusive"),
    "pass": ("green", "none-found"),
}
"""Colour of an outcome, and the level whose icon it has."""
_COLUMNS = ("Rule", "Outcome", "Counts", "Value", "Interval", "Limit", "Documents needed")
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
    """Convert the result of a gate into the head of the audit's page.

    Args:
        result: of the gate.
        report: the audit that was judged.
        policy: name of the policy.
    """
    colour, level = _LOOKS[result.outcome]
    release, release_note = _RELEASES[result.release]
    return GateHead(
        colour=colour,
        outcome=Notice(
            level=level,
            label=f"Gate: {OUTCOME_NAMES[result.outcome].lower()}",
            text=f"{count_outcomes(result)} (exit code {result.exit_code}).",
        ),
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
        ),
        judgements=_build_judgements(result, report),
        accepted_note=write_acceptances(result),
        accepted=_build_accepted(result),
    )


def _build_judgements(result: GateResult, report: AuditReport) -> Table:
    judgements = worst_first(result)
    more = len(judgements) - _MOST_JUDGEMENTS
    return Table(
        caption="Judgements, those that decide first",
        columns=tuple(map(Cell, _COLUMNS)),
        rows=tuple(_show_judgement(one, report) for one in judgements[:_MOST_JUDGEMENTS]),
        notes=(*((f"And {more:,} more in {GATE}.",) if more > 0 else ()), INTERVAL_NOTE, _NO_PROBE),
        compact=True,
    )


def _show_judgement(judgement: Judgement, report: AuditReport) -> Row:
    text = describe_judgement(judgement, report.tables)
    why = "" if judgement.outcome == "pass" else fmt.clean_text(fmt.hide_paths(judgement.sentence))
    numbers = (text.counts, text.value, text.interval or fmt.MISSING, text.limit, text.needed)
    return Row(
        head=Cell(text.name, detail=why, kind="text"),
        cells=(
            Cell(text.outcome, kind="level", level=_LOOKS[judgement.outcome][1]),
            *map(Cell, numbers),
        ),
    )


def _build_accepted(result: GateResult) -> Table | None:
    accepted = sort_acceptances(result)
    if not accepted:
        return None
    more = len(accepted) - _MOST_ACCEPTED
    return Table(
        caption="Accepted findings",
        columns=tuple(map(Cell, ("Finding", "State", "By", "Until", "Why"))),
        rows=tuple(map(_show_acceptance, accepted[:_MOST_ACCEPTED])),
        notes=(f"And {more:,} more in {GATE}.",) if more > 0 else (),
        compact=True,
    )


def _show_acceptance(entry: Acceptance) -> Row:
    text_hmac, _, probe = entry.finding.partition(":")
    state, level = {
        "accepted": ("accepted", "low"),
        "expired": ("expired: counts again", "warning"),
        "not-found": ("not in this audit", "low"),
    }[entry.state]
    until = "without end" if entry.until is None else fmt.clean_text(entry.until, 40)
    return Row(
        head=Cell(f"{fmt.hash(text_hmac)}:{fmt.clean_text(probe, 40)}", kind="hash"),
        cells=(
            Cell(state, kind="level", level=level),
            Cell(fmt.clean_name(entry.by, 80), kind="text"),
            Cell(until, kind="text"),
            Cell(fmt.clean_text(entry.reason, 200), kind="text"),
        ),
    )
