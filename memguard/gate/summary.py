"""`summary.md`: the result of a gate as a comment on a pull request.

The gate's outcome and the verdict's sentence stand side by side, so that a gate that passes under
a verdict that alarms is seen. A table has the judgements, those that decide first; what was not
run and who accepted what follow. No document is named and no text of one is quoted.
"""

from collections.abc import Iterator, Sequence

from memguard.gate.markdown import build_row, code, escape
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
from memguard.records import AuditReport
from memguard.records.gate import GATE, Acceptance, GateResult, Judgement, Outcome

_MOST_JUDGEMENTS, _MOST_SENTENCES, _MOST_ACCEPTED, _MOST_PROBES = 60, 20, 30, 30
_NAME_LIMIT, _SENTENCE_LIMIT, _VERDICT_LIMIT = 160, 500, 2 * fmt.SENTENCE_LIMIT
_SIGNS: dict[Outcome, str] = {
    "pass": "✅",
    "fail": "❌",
    "cannot-be-judged": "❓",
    "inconclusive": "⚠️",
}
_COLUMNS = (
    "Outcome",
    "Rule",
    "Counts",
    "Value",
    f"95{fmt.PERCENT} interval",
    "Limit",
    "Documents needed",
)


def render_summary(result: GateResult, report: AuditReport) -> str:
    """Render a result as Markdown.

    Args:
        result: of the gate.
        report: the audit that was judged.
    """
    return "\n".join(_write_lines(result, report)) + "\n"


def _write_lines(result: GateResult, report: AuditReport) -> Iterator[str]:
    outcome = OUTCOME_NAMES[result.outcome]
    yield f"## memguard gate: {outcome.lower()} (exit code {result.exit_code})"
    yield ""
    yield f"Audit {code(result.audit)}, {escape(count_outcomes(result))}."
    yield ""
    yield build_row(("Gate", "Verdict of the audit"))
    yield build_row(("---", "---"))
    yield build_row(
        (f"{_SIGNS[result.outcome]} **{outcome}**", escape(result.verdict, _VERDICT_LIMIT))
    )
    yield ""
    contrast = write_contrast(result)
    if contrast:
        yield f"> ⚠️ **{escape(contrast)}**"
        yield ""
    yield from _write_judgements(result, report)
    yield from _write_not_run(report)
    yield from _write_accepted(result)
    yield "### How to read this"
    yield ""
    yield (
        f"{escape(INTERVAL_NOTE)} 'Documents needed' is the least number of documents, at or above "
        "today's, that would decide at today's rate."
    )
    yield ""
    yield (
        f"Judged: `report.json` with SHA-256 {code(result.report_sha256)}, by memguard "
        f"{code(result.tool_version)}. All numbers are in `{GATE}`."
    )


def _write_judgements(result: GateResult, report: AuditReport) -> Iterator[str]:
    judgements = worst_first(result)
    yield "### Judgements"
    yield ""
    yield build_row(_COLUMNS)
    yield build_row(["---"] * len(_COLUMNS))
    for judgement in judgements[:_MOST_JUDGEMENTS]:
        text = describe_judgement(judgement, report.tables, _NAME_LIMIT)
        yield build_row(
            (
                f"{_SIGNS[judgement.outcome]} {text.outcome}",
                code(text.name, _NAME_LIMIT),
                *map(escape, (text.counts, text.value, text.interval or fmt.MISSING, text.limit)),
                escape(text.needed),
            )
        )
    yield ""
    if len(judgements) > _MOST_JUDGEMENTS:
        yield f"And {len(judgements) - _MOST_JUDGEMENTS:,} more in `{GATE}`."
        yield ""
    yield from _explain([j for j in judgements if j.outcome != "pass"])


def _explain(judgements: Sequence[Judgement]) -> Iterator[str]:
    """Write the sentences of judgements that do not pass."""
    for judgement in judgements[:_MOST_SENTENCES]:
        name = code(judgement.name, _NAME_LIMIT)
        yield f"- {name}: {escape(judgement.sentence, _SENTENCE_LIMIT)}"
    if len(judgements) > _MOST_SENTENCES:
        yield f"- and {len(judgements) - _MOST_SENTENCES:,} more in `{GATE}`"
    if judgements:
        yield ""


def _write_not_run(report: AuditReport) -> Iterator[str]:
    not_run = [run for run in report.probe_runs if run.reason_not_run is not None]
    yield "### Not run"
    yield ""
    for run in not_run[:_MOST_PROBES]:
        yield f"- {code(run.name)}: {escape(fmt.hide_paths(run.reason_not_run or ''))}"
    if len(not_run) > _MOST_PROBES:
        yield f"- and {len(not_run) - _MOST_PROBES:,} more probes"
    if not not_run:
        ran = ", ".join(code(run.name) for run in report.probe_runs[:_MOST_PROBES]) or "none"
        yield f"Every probe of the suite ran: {ran}. Other attacks were not tried."
    yield ""


def _write_accepted(result: GateResult) -> Iterator[str]:
    yield "### Findings and who accepted them"
    yield ""
    yield escape(write_acceptances(result))
    yield ""
    accepted = sort_acceptances(result)
    if not accepted:
        return
    yield build_row(("State", "Finding", "By", "Until", "Why"))
    yield build_row(["---"] * 5)
    for entry in accepted[:_MOST_ACCEPTED]:
        yield build_row(_show_acceptance(entry))
    yield ""
    if len(accepted) > _MOST_ACCEPTED:
        yield f"And {len(accepted) - _MOST_ACCEPTED:,} more in `{GATE}`."
        yield ""


def _show_acceptance(entry: Acceptance) -> tuple[str, ...]:
    states = {"accepted": "accepted", "expired": "**expired**", "not-found": "not in this audit"}
    until = "without end" if entry.until is None else escape(entry.until, 40)
    return (
        states[entry.state],
        code(entry.finding, 90),
        escape(entry.by, 80),
        until,
        escape(entry.reason, 200),
    )
