"""Copies of a text, formatted otherwise, that escape the mitigation's mask."""

from memguard.records import AuditReport, MaskChange
from memguard.report.cells import make_headings, show_missing
from memguard.report.formatting import format_of, format_percent
from memguard.report.measured import explain_absence
from memguard.report.page import Cell, Row, Section, Table
from memguard.report.text import clean_name

_MOST_CHANGES = 60


def build_masks(report: AuditReport) -> Section | None:
    """Build the section; None where no mitigation drops labels."""
    changes = report.mask_changes[:_MOST_CHANGES]
    if not changes and not _drops_labels(report):
        return None
    lead = (
        _write_lead(changes)
        if changes
        else explain_absence(
            report, "mask_consistency", "does not ask whether copies of a text escape the mask"
        )
    )
    return Section(
        key="masks",
        title="Copies that escape the mask",
        short_title="Mask",
        lead=(lead,),
        tables=(_build_table(changes),) if changes else (),
    )


def _drops_labels(report: AuditReport) -> bool:
    return report.training is not None and bool(report.training.dropped_fraction)


def _write_lead(changes: list[MaskChange]) -> str:
    """Name the rewriting of which most leaks, and say what that means."""
    known = [one for one in changes if one.num_passages]
    if not known:
        return "No passage differs from its rewritings: nothing can be said of copies."
    worst = max(known, key=lambda one: (one.mean_leaked_share or 0.0, one.num_changed))
    if not worst.num_changed:
        return (
            "No copy teaches a token that training dropped: the mask stays where it is, however "
            "the text is formatted."
        )
    share = worst.mean_leaked_share
    leaked = "some" if share is None else format_percent(share)
    return (
        f"What one copy hides another teaches: worst is '{_name(worst)}', where "
        f"{format_of(worst.num_changed, worst.num_passages)} passages have a token that training "
        f"dropped and the copy does not, {leaked} of a passage's dropped tokens in the mean."
    )


def _build_table(changes: list[MaskChange]) -> Table:
    return Table(
        caption="Tokens dropped in the text that receive loss in a copy of it",
        columns=make_headings(
            ("Copy", "how it differs"),
            ("Masks changed", "passages"),
            ("Share", "of the passages"),
            ("Leaked", "mean share of a passage's dropped tokens"),
        ),
        rows=tuple(_build_row(change) for change in changes),
        compact=True,
    )


def _build_row(change: MaskChange) -> Row:
    passages, share = change.num_passages, change.mean_leaked_share
    if not passages:
        none = show_missing("no passage differs")
        return Row(head=Cell(text=_name(change), kind="text"), cells=(none, none, none))
    return Row(
        head=Cell(text=_name(change), kind="text"),
        cells=(
            Cell(text=format_of(change.num_changed, passages)),
            Cell(text=format_percent(change.num_changed / passages)),
            Cell(text=format_percent(share)) if share is not None else show_missing("not measured"),
        ),
    )


def _name(change: MaskChange) -> str:
    spoken = clean_name(change.rewriting.replace("_", " "), 40)
    return spoken[:1].upper() + spoken[1:]
