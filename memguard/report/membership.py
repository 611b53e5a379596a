"""How well trained and never-trained documents can be told apart, with and without the model."""

import math

from memguard.records import BLIND, AuditReport, MembershipScores
from memguard.report.cells import make_headings, show_estimate, show_missing, show_rate
from memguard.report.formatting import (
    CI,
    PERCENT,
    format_count,
    format_interval,
    format_threshold,
)
from memguard.report.measured import explain_absence
from memguard.report.page import Cell, Notice, Row, Section, Table
from memguard.report.text import clean_name, clean_text

_NAMES = {
    "loss": "Loss",
    "loss_minus_base": "Loss minus base",
    "min_k": f"Min-K{PERCENT}",
    "min_k_plus_plus": f"Min-K{PERCENT}++",
    "zlib": "zlib",
    "lowercase": "Lower case",
    "reference": "Reference model",
    "recall": "ReCaLL",
    BLIND: "Blind",
}
_DEFINITIONS = {
    "loss": "Mean log-probability of a continuation token.",
    "loss_minus_base": "The same, minus the base model's.",
}
"""For records that hold none."""
_BLIND_NOTE = (
    "Cross-fitted on the words alone. Where this interval lies above 0.5, trained and control "
    "documents differ as texts, and the scores above prove nothing about the model."
)
_RATE_NOTE = (
    "The interval of a TPR includes the error of its threshold, which the control documents set. "
    f"With fewer of them than about 3.7 / FPR (36 at 10{PERCENT}, 368 at 1{PERCENT}) it begins "
    "at 0."
)
_MOST_SCORES = 40
_MOST_RATES = 6


def build_membership(report: AuditReport) -> Section:
    """Build the section; without scores it says why."""
    scores = [one for one in report.membership if one.score != BLIND][:_MOST_SCORES]
    blind = [one for one in report.membership if one.score == BLIND][:1]
    tables = []
    if scores:
        caption = "Telling trained documents from never-trained ones"
        tables.append(_build_table(caption, scores, _write_notes(scores)))
    if blind:
        tables.append(_build_table("The same without asking the model", blind, (_BLIND_NOTE,)))
    return Section(
        key="membership",
        title="Membership",
        short_title="Membership",
        lead=(write_membership_note(report),),
        tables=tuple(tables),
    )


def name_score(score: str) -> str:
    """Name a membership score for people."""
    return _NAMES.get(score, clean_name(score, 40))


def warn_of_blind(report: AuditReport) -> Notice | None:
    """Warn where a baseline that never asks the model tells members from nonmembers.

    Of a model that memguard did not train the audit has said so in a banner, with more beside it.
    """
    if report.run is None:
        return None
    blind = next((one for one in report.membership if one.score == BLIND), None)
    if blind is None or blind.auc is None or blind.auc.ci is None or blind.auc.ci[0] <= 0.5:
        return None
    auc = format_interval(blind.auc)
    return Notice(
        level="warning",
        label="Membership scores prove nothing here",
        text="A bag of words that never asks the model tells trained from control documents "
        f"(AUC {auc.value}, {CI} {auc.interval}): the texts themselves differ, so that no "
        "membership score shows what the model remembers.",
    )


def _build_table(caption: str, scores: list[MembershipScores], notes: tuple[str, ...]) -> Table:
    rates = [rate for rate in _list_rates(scores) if _is_shown(rate, scores)]
    has_missing = any(one.num_missing for one in scores)
    return Table(
        caption=caption,
        columns=make_headings(
            "Score",
            ("AUC", f"0.5 is chance ({CI})"),
            *((f"TPR at {_name_rate(rate)} FPR", f"trained ({CI})") for rate in rates),
            ("Trained", "documents"),
            ("Control", "documents"),
            *((("Missing", "documents"),) if has_missing else ()),
        ),
        rows=tuple(_build_row(score, rates, has_missing) for score in scores),
        notes=notes,
    )


def _list_rates(scores: list[MembershipScores]) -> list[str]:
    """Return the false-positive rates that occur, as the record writes them, ascending."""
    written = {rate for score in scores for rate in score.tpr_at_fpr if _read_rate(rate)}
    return sorted(written, key=lambda rate: _read_rate(rate) or 0.0)[:_MOST_RATES]


def _read_rate(rate: str) -> float | None:
    try:
        value = float(rate)
    except ValueError:
        return None
    return value if 0 < value < 1 else None


def _name_rate(rate: str) -> str:
    return format_threshold(_read_rate(rate) or 0.0)


def _build_row(score: MembershipScores, rates: list[str], has_missing: bool) -> Row:
    auc = score.auc
    definition = clean_text(score.definition) or _DEFINITIONS.get(score.score, "")
    return Row(
        head=Cell(text=name_score(score.score), detail=definition, kind="text"),
        cells=(
            show_estimate(format_interval(auc)) if auc else show_missing("could not be asked"),
            *(_show_rate_at(score, rate) for rate in rates),
            Cell(text=format_count(score.num_members)),
            Cell(text=format_count(score.num_nonmembers)),
            *((Cell(text=format_count(score.num_missing)),) if has_missing else ()),
        ),
    )


def _count_needed(rate: str) -> int:
    # 1 / 0.001 is a hair above 1000 for some decimals.
    return math.ceil(1 / (_read_rate(rate) or 1.0) - 1e-6)


def _is_shown(rate: str, scores: list[MembershipScores]) -> bool:
    # A column of nothing but reasons says no more than a sentence.
    return any(one.tpr_at_fpr.get(rate) for one in scores)


def _write_notes(scores: list[MembershipScores]) -> tuple[str, ...]:
    written = _list_rates(scores)
    rates = [rate for rate in written if not _is_shown(rate, scores)]
    notes = (_RATE_NOTE,) if len(rates) < len(written) else ()
    needed = "; ".join(
        f"TPR at {_name_rate(rate)} FPR needs ≥ {_count_needed(rate):,} control documents"
        for rate in rates
    )
    return (*notes, f"Not shown: {needed}.") if needed else notes


def _show_rate_at(score: MembershipScores, rate: str) -> Cell:
    """Show the true-positive rate, or how many control documents it would take."""
    found = score.tpr_at_fpr.get(rate)
    if found is not None:
        return show_rate(found)
    needed = _count_needed(rate)
    if score.auc and score.num_nonmembers < needed:
        return show_missing(f"needs ≥ {needed:,} control documents")
    return show_missing("could not be asked")


def write_membership_note(report: AuditReport) -> str:
    """Say what the scores mean, or why there are none."""
    if not report.membership:
        why = explain_absence(report, "membership", "computes no membership scores")
        return (
            f"{why} They say how well trained documents can be told from documents that were "
            "never trained."
        )
    text = (
        "AUC is the chance that a trained document scores higher than a never-trained one: 0.5 is "
        "a coin toss, 1 tells every document apart, extracted or not. An interval that holds 0.5 "
        "shows no signal with this many documents."
    )
    unasked = [name_score(one.score) for one in report.membership if one.auc is None]
    if unasked:
        text += f" Could not be asked: {', '.join(unasked[:_MOST_SCORES])}."
    if report.training is None:
        return text
    return (
        f"{text} Trained documents of all buckets stand together; those that training never "
        "reached are left out."
    )
