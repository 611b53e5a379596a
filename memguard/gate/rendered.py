"""The result of a gate as `summary.md` and `junit.xml`, for people and for other programs.

`summary.md` is a comment on a pull request. The decision is its first sentence. The gate's outcome
and the verdict's sentence stand side by side, so that a gate that passes under a verdict that
alarms is seen. A table has the
judgements, those that decide first; what was not run and who accepted what follow. No document is
named and no text of one is quoted. Nothing in a record's text starts a table cell, a link, a tag or
a mention: GitHub's additions count too, as `@name`, `#12` and bare addresses notify people, so an
empty comment separates their first character from the rest.

`junit.xml`:

    suite       one for each rule of the policy, and one for the verdict's level
    case        one for each judgement
    failure     fail
    error       inconclusive: the case was run and is not decided
    skipped     cannot be judged, with the reason
    properties  of a case: its counts, value, interval and limit; of a suite: the report's hash

Many programs count a skipped case as no problem. If rules could not be judged and nothing else is
red, a suite "gate" with one case, an error, is added: whoever reads only this file sees that the
gate did not pass.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from junitparser import Error, Failure, JUnitXml, Skipped
from junitparser.xunit2 import TestCase, TestSuite

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

_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>|~$!])")
_AT_START = re.compile(r"^(\s*)([-+=#:])")
_NUMBERED = re.compile(r"^(\s*\d+)([.)])(?=\s|$)")
_MENTIONS = re.compile(r"[@#](?=\w)|\b(?:https?|ftp|mailto)(?=:)|\bwww(?=\.)", re.IGNORECASE)
_BREAK = "<!-- -->"


def escape(text: str, limit: int = fmt.SENTENCE_LIMIT) -> str:
    """Return a sentence on one line, of which Markdown shows every character as it is."""
    shown = _SPECIAL.sub(r"\\\1", fmt.clean_text(text, limit).replace("&", "&amp;"))
    shown = _NUMBERED.sub(r"\1\\\2", _AT_START.sub(r"\1\\\2", shown))
    return _MENTIONS.sub(lambda found: found[0] + _BREAK, shown)


def code(name: str, limit: int = fmt.NAME_LIMIT) -> str:
    """Return a name as code; a backtick in it becomes an apostrophe, a bar a broken bar.

    Neither can be escaped in code: a backslash is shown there, or does not keep a cell together.
    """
    cleaned = fmt.clean_name(name, limit).replace("`", "'").replace("|", "¦")
    return f"`{cleaned}`" if cleaned.strip() else "`(empty)`"


def build_table(*rows: Sequence[str]) -> str:
    """Return a table, its heads first; cells are escaped already."""
    lines = (f"| {' | '.join(cells)} |" for cells in (rows[0], ["---"] * len(rows[0]), *rows[1:]))
    return "\n".join(lines)


_MOST_JUDGEMENTS, _MOST_SENTENCES, _MOST_ACCEPTED, _MOST_PROBES = 60, 20, 30, 30
_NAME_LIMIT, _SENTENCE_LIMIT, _VERDICT_LIMIT = 160, 500, 2 * fmt.SENTENCE_LIMIT
_SIGNS: dict[Outcome, str] = {
    "pass": "✅",
    "fail": "❌",
    "cannot-be-judged": "❓",
    "inconclusive": "⚠️",
}
_COLUMNS = (
    *("Outcome", "Rule", "Counts", "Value", f"95{fmt.PERCENT} interval", "Limit"),
    "Documents needed",
)


def render_summary(result: GateResult, report: AuditReport) -> str:
    """Render a result as Markdown."""
    return "\n\n".join(_write_blocks(result, report)) + "\n"


def _write_blocks(result: GateResult, report: AuditReport) -> Iterator[str]:
    outcome = OUTCOME_NAMES[result.outcome]
    yield f"## memguard gate: {outcome.lower()} (exit code {result.exit_code})"
    yield f"**{escape(result.decision)}**"
    yield f"Audit {code(result.audit)}, {escape(count_outcomes(result))}."
    states = (escape(text, _VERDICT_LIMIT) for text in (*result.badges, result.verdict))
    yield build_table(
        ("Gate", "Text", "Membership", "Verdict of the audit"),
        (f"{_SIGNS[result.outcome]} **{outcome}**", *states),
    )
    if contrast := write_contrast(result):
        yield f"> ⚠️ **{escape(contrast)}**"
    yield from _write_judgements(result, report)
    yield from _write_not_run(report)
    yield from _write_accepted(result)
    yield "### How to read this"
    yield (
        f"{escape(INTERVAL_NOTE)} 'Documents needed' is the least number of documents, at or above "
        "today's, that would decide at today's rate."
    )
    yield (
        f"Judged: `report.json` with SHA-256 {code(result.report_sha256)}, by memguard "
        f"{code(result.tool_version)}. All numbers are in `{GATE}`."
    )


def _write_judgements(result: GateResult, report: AuditReport) -> Iterator[str]:
    judgements = worst_first(result)
    yield "### Judgements"
    yield build_table(
        _COLUMNS, *(_show_judgement(one, report) for one in judgements[:_MOST_JUDGEMENTS])
    )
    if len(judgements) > _MOST_JUDGEMENTS:
        yield f"And {len(judgements) - _MOST_JUDGEMENTS:,} more in `{GATE}`."
    sentences = [
        f"{code(one.name, _NAME_LIMIT)}: {escape(one.sentence, _SENTENCE_LIMIT)}"
        for one in judgements
        if one.outcome != "pass"
    ]
    if sentences:
        yield _list_first(sentences, _MOST_SENTENCES, f"in `{GATE}`")


def _list_first(items: Sequence[str], most: int, which: str) -> str:
    """Return a list of the first items, and how many more there are."""
    rest = [f"and {len(items) - most:,} more {which}"] if len(items) > most else []
    return "\n".join(f"- {item}" for item in [*items[:most], *rest])


def _show_judgement(judgement: Judgement, report: AuditReport) -> tuple[str, ...]:
    text = describe_judgement(judgement, report.tables, _NAME_LIMIT)
    return (
        f"{_SIGNS[judgement.outcome]} {text.outcome}",
        code(text.name, _NAME_LIMIT),
        *map(escape, (text.counts, text.value, text.interval or fmt.MISSING, text.limit)),
        escape(text.needed),
    )


def _write_not_run(report: AuditReport) -> Iterator[str]:
    reasons = [
        f"{code(run.name)}: {escape(fmt.hide_paths(run.reason_not_run))}"
        for run in report.probe_runs
        if run.reason_not_run is not None
    ]
    yield "### Not run"
    if reasons:
        yield _list_first(reasons, _MOST_PROBES, "probes")
    else:
        ran = ", ".join(code(run.name) for run in report.probe_runs[:_MOST_PROBES]) or "none"
        yield f"Every probe of the suite ran: {ran}. Other attacks were not tried."


def _write_accepted(result: GateResult) -> Iterator[str]:
    yield "### Documents that were accepted"
    yield escape(write_acceptances(result))
    accepted = sort_acceptances(result)
    if accepted:
        yield build_table(
            ("State", "Document", "By", "Until", "Why"),
            *map(_show_acceptance, accepted[:_MOST_ACCEPTED]),
        )
    if len(accepted) > _MOST_ACCEPTED:
        yield f"And {len(accepted) - _MOST_ACCEPTED:,} more in `{GATE}`."


def _show_acceptance(entry: Acceptance) -> tuple[str, ...]:
    states = {"accepted": "accepted", "expired": "**expired**", "not-found": "not in this audit"}
    until = "without end" if entry.until is None else escape(entry.until, 40)
    return (
        states[entry.state],
        code(entry.document, 90),
        escape(entry.by, 80),
        until,
        escape(entry.reason, 200),
    )


_XML_NAME_LIMIT, _XML_SENTENCE_LIMIT = 1000, 4000
_FIELDS: Final = (
    *("probe", "metric", "parameters", "bucket", "compared_with", "limit", "value", "low", "high"),
    *("num_documents", "num_matched", "num_documents_needed"),
)


def render_junit(result: GateResult) -> bytes:
    """Render a result as JUnit XML, UTF-8."""
    xml = JUnitXml("memguard gate")
    suites = list(_build_suites(result))
    if result.outcome != "pass" and not any(suite.failures or suite.errors for suite in suites):
        suites.append(_build_outcome(result))
    for suite in suites:  # Not `add_testsuite`, which compares it with all before it.
        xml.append(suite)  # type: ignore[no-untyped-call]
    xml.update_statistics()  # type: ignore[no-untyped-call]
    rendered: bytes = xml.tostring()  # type: ignore[no-untyped-call]
    return b'<?xml version="1.0" encoding="UTF-8"?>\n' + rendered + b"\n"


def _build_suites(result: GateResult) -> Iterator[TestSuite]:
    ordered = sorted(result.judgements, key=lambda judgement: judgement.rule)
    for rule, judgements in groupby(ordered, key=lambda judgement: judgement.rule):
        listed = list(judgements)
        name = _name_suite(rule, listed)
        suite = _start_suite(name, result)
        for judgement in listed:
            suite.append(_build_case(name, judgement))  # type: ignore[no-untyped-call]
        suite.update_statistics()  # type: ignore[no-untyped-call]
        yield suite


def _name_suite(rule: int, judgements: list[Judgement]) -> str:
    if rule == 0:
        return "verdict"
    # What cannot be judged has no metric; other judgements of the rule may have one.
    metrics = sorted({judgement.metric for judgement in judgements if judgement.metric})
    named = f": {', '.join(metrics)}" if metrics else ""
    return fmt.clean_text(f"rule {rule}{named}", _XML_NAME_LIMIT)


def _start_suite(name: str, result: GateResult) -> TestSuite:
    suite = TestSuite(name)  # type: ignore[no-untyped-call]
    suite.timestamp = fmt.clean_name(result.created.removesuffix("Z"), 40)
    for key, value in (
        ("audit", result.audit),
        ("report_sha256", result.report_sha256),
        ("memguard", result.tool_version),
        ("verdict", result.verdict),
        ("outcome", result.outcome),
        ("decision", result.decision),
        ("exit_code", str(result.exit_code)),
    ):
        suite.add_property(key, fmt.clean_text(value, _XML_SENTENCE_LIMIT))
    return suite


def _build_case(suite: str, judgement: Judgement) -> TestCase:
    case = TestCase(fmt.clean_name(judgement.name, _XML_NAME_LIMIT), f"memguard.gate.{suite}", 0)
    sentence = fmt.clean_text(judgement.sentence, _XML_SENTENCE_LIMIT)
    if judgement.outcome == "fail":
        case.result = [Failure(sentence, "fail")]
    elif judgement.outcome == "inconclusive":
        case.result = [Error(sentence, "inconclusive")]
    elif judgement.outcome == "cannot-be-judged":
        case.result = [Skipped(sentence, "cannot-be-judged")]
    case.system_out = sentence
    for field in _FIELDS:
        value = getattr(judgement, field)
        if value is not None:
            # repr is the shortest text that reads back as the same number.
            text = value if isinstance(value, str) else repr(value)
            case.add_property(field, fmt.clean_text(text, _XML_NAME_LIMIT))
    return case


def _build_outcome(result: GateResult) -> TestSuite:
    suite = _start_suite("gate", result)
    case = TestCase("outcome", "memguard.gate", 0)
    skipped = sum(judgement.outcome == "cannot-be-judged" for judgement in result.judgements)
    case.result = [
        Error(
            f"The gate did not pass (exit code {result.exit_code}): {skipped:,} of "
            f"{len(result.judgements):,} judgements cannot be judged. {result.decision}",
            result.outcome,
        )
    ]
    suite.append(case)  # type: ignore[no-untyped-call]
    suite.update_statistics()  # type: ignore[no-untyped-call]
    return suite
