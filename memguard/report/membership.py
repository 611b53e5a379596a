"""How well trained and never-trained documents can be told apart: table and note."""

from memguard.records import AuditReport, MembershipScores
from memguard.report.cells import make_headings, show_estimate
from memguard.report.formatting import CI, format_count, format_interval
from memguard.report.page import Cell, Row, Table
from memguard.report.text import clean_name

_NAMES = {
    "loss": ("Loss", "mean log-probability of a continuation token"),
    "loss_minus_base": ("Loss minus base", "the same, minus the base model's"),
}


def build_membership(report: AuditReport) -> Table | None:
    """Build the table of scores; None without any."""
    if not report.membership:
        return None
    return Table(
        caption="Telling trained documents from never-trained ones",
        columns=make_headings(
            "Score",
            ("AUC", f"0.5 is chance ({CI})"),
            ("Trained", "documents"),
            ("Control", "documents"),
        ),
        rows=tuple(_build_row(score) for score in report.membership),
    )


def _build_row(score: MembershipScores) -> Row:
    name, detail = _NAMES.get(score.score, (clean_name(score.score), ""))
    return Row(
        head=Cell(text=name, detail=detail, kind="text"),
        cells=(
            show_estimate(format_interval(score.auc)),
            Cell(text=format_count(score.num_members)),
            Cell(text=format_count(score.num_nonmembers)),
        ),
    )


def write_membership_note(report: AuditReport) -> str:
    """Say what the scores mean, or why there are none."""
    if not report.membership:
        return (
            "No membership score: it needs documents that were never trained. Where there are "
            "some, it says how well one can tell which documents were trained."
        )
    text = (
        "AUC is the chance that a trained document scores higher than a never-trained one: 0.5 is "
        "a coin toss, 1 tells every document apart, recited or not. An interval that holds 0.5 "
        "shows no signal with this many documents."
    )
    if report.training is None:
        return text
    return (
        f"{text} Trained documents of all buckets stand together; those that training never "
        "reached are left out."
    )
