"""`summary.html`: the result of a gate and its audit for people who sign, printed on one A4 page.

The gate's outcome and the audit's verdict stand side by side, as two statements: a policy can pass
what the verdict calls memorized. Then what was trained, asked, found, judged, not tested and
accepted, and the attack classes for the declared release. No claim about law.
"""

from dataclasses import dataclass

from memguard.pages import formatting as fmt
from memguard.pages.judgements import (
    INTERVAL_NOTE,
    OUTCOME_NAMES,
    count_outcomes,
    write_acceptances,
    write_contrast,
)
from memguard.pages.page import Fact, Notice, Table
from memguard.records import LEVEL_NAMES, AuditReport
from memguard.records.gate import GateResult, Outcome
from memguard.report.attack_classes import NOT_READ, list_sources
from memguard.report.engine import render_template
from memguard.report.release_sections import (
    OUTCOME_LEVELS,
    RELEASES,
    build_accepted,
    build_classes,
    build_found,
    build_judged,
    describe_asked,
    describe_trained,
    list_not_tested,
)

_COLOURS: dict[Outcome, str] = {
    "fail": "red",
    "cannot-be-judged": "amber",
    "inconclusive": "grey",
    "pass": "green",
}
_HEADING_LIMIT, _VERDICT_LIMIT, _MEMBERSHIP_LIMIT = 64, 220, 180
_CONFIDENTIALITY = (
    "Contains no excerpts and no document IDs. Names, reasons and hashes may be sensitive."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleasePage:
    """The contents of the page."""

    title: str
    heading: str
    tool_version: str
    confidentiality: str
    judged: str
    """Hash of the report that was judged, and when."""
    colour: str
    gate: Notice
    contrast: str
    """"" unless the gate passes under a verdict that alarms."""
    verdict_colour: str
    verdict: Notice
    membership: str
    trained: tuple[Fact, ...]
    asked: tuple[Fact, ...]
    found: Table | None
    judgements: Table | None
    not_tested: tuple[str, ...]
    accepted_note: str
    accepted: Table | None
    release: str
    release_note: str
    classes: Table
    classes_note: str
    interval_note: str


def render_release_page(report: AuditReport, result: GateResult) -> str:
    """Render the page as one offline HTML file. Encode it as UTF-8.

    Args:
        report: the audit that was judged.
        result: of the gate.
    """
    return render_template("release.html.j2", digest_release(report, result))


def digest_release(report: AuditReport, result: GateResult) -> ReleasePage:
    """Convert the result of a gate and its audit into the contents of the page.

    Args:
        report: the audit that was judged.
        result: of the gate.
    """
    heading = fmt.clean_name(fmt.shorten_place(result.audit), _HEADING_LIMIT)
    verdict = report.verdict
    release, release_note = RELEASES[result.release]
    return ReleasePage(
        title=f"{heading}: summary for release",
        heading=heading,
        tool_version=fmt.clean_name(result.tool_version, 40),
        confidentiality=_CONFIDENTIALITY,
        judged=f"Judged {fmt.time(result.created)}; report.json has SHA-256 "
        f"{fmt.clean_name(result.report_sha256)}.",
        colour=_COLOURS[result.outcome],
        gate=Notice(
            level=OUTCOME_LEVELS[result.outcome],
            label=f"Gate: {OUTCOME_NAMES[result.outcome].lower()}",
            text=f"{count_outcomes(result)} (exit code {result.exit_code}).",
        ),
        contrast=write_contrast(result),
        verdict_colour=verdict.page_colour,
        verdict=Notice(
            level=verdict.level,
            label=f"Verdict: {LEVEL_NAMES[verdict.level].lower()}",
            text=fmt.clean_text(verdict.sentence, _VERDICT_LIMIT),
        ),
        membership=fmt.clean_text(verdict.membership.sentence, _MEMBERSHIP_LIMIT),
        trained=describe_trained(report),
        asked=describe_asked(report),
        found=build_found(report),
        judgements=build_judged(result, report),
        not_tested=list_not_tested(report),
        accepted_note=write_acceptances(result),
        accepted=build_accepted(result),
        release=release,
        release_note=release_note,
        classes=build_classes(report, result.release),
        classes_note=f"The table is incomplete: {' and '.join(NOT_READ)} are left out; their text "
        "was not read at the source. Documents are counted; whether they contain personal data or "
        "protected works, and what follows in law, is not judged. Source: "
        f"{'; '.join(list_sources())}.",
        interval_note=INTERVAL_NOTE,
    )
