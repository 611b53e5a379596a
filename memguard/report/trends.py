"""Whether rates rise with repetitions, and what is recited although few documents hold it."""

from memguard.records import AuditReport, DoseTrend, ExtractedCopies
from memguard.report.cells import make_headings, show_missing
from memguard.report.formatting import (
    format_number,
    format_of,
    format_p,
    format_percent,
)
from memguard.report.page import Cell, Row, Table
from memguard.report.text import clean_name

_MOST_DOSES = 20


def build_trends(report: AuditReport) -> Table | None:
    """Build the table of monotone fits and trend tests; None where no dose is known."""
    trends = report.trends if report.dose_response else []
    if not trends:
        return None
    doses = trends[0].doses[:_MOST_DOSES]
    return Table(
        caption="Does it rise with the number of repetitions?",
        columns=make_headings(
            ("Rate", "monotone fit"),
            *((f"{dose:,}", "control" if dose == 0 else "repetitions") for dose in doses),
            ("z", "trend"),
            ("p", "trend"),
        ),
        rows=tuple(
            _build_row(trend, doses) for trend in trends[:8] if trend.doses[:_MOST_DOSES] == doses
        ),
        notes=(
            "The fit never falls with the dose and is the closest such one to the measured rates "
            "(isotonic regression). p: Cochran-Armitage test of a trend over the doses, two-sided; "
            "a large one is no proof that there is none.",
        ),
        compact=True,
    )


def _build_row(trend: DoseTrend, doses: list[int]) -> Row:
    fitted = trend.fitted[:_MOST_DOSES]
    cells = (
        [Cell(text=format_percent(rate)) for rate in fitted]
        if len(fitted) == len(doses)
        else [show_missing("no documents") for _ in doses]
    )
    untold = show_missing("rates are all 0, or all 1")
    return Row(
        head=Cell(text=_name(trend.metric), kind="text"),
        cells=(
            *cells,
            Cell(text=format_number(trend.z, 2)),
            Cell(text=format_p(trend.p_value)) if trend.p_value is not None else untold,
        ),
    )


def _name(metric: str) -> str:
    return clean_name(metric.replace("_", "-"), 40).capitalize()


def build_copies(report: AuditReport) -> Table | None:
    """Build the k-eidetic table; None where clusters are not known."""
    copies = report.extracted_copies[:20]
    if not copies:
        return None
    return Table(
        caption="Recited verbatim although few trained documents hold the text",
        columns=make_headings(
            ("Copies", "trained documents that hold it"),
            ("Recited", "of the audited documents with so few"),
            ("Share", "of them"),
        ),
        rows=tuple(_build_copies_row(one) for one in copies),
        notes=(
            "k-eidetic memorisation: documents that share a run of words count as copies, so k is "
            "never understated. How often each was trained is not in k.",
        ),
        compact=True,
    )


def _build_copies_row(one: ExtractedCopies) -> Row:
    head = Cell(text="only itself" if one.k == 1 else f"at most {one.k:,}", kind="text")
    if not one.num_documents:
        none = show_missing("no such document")
        return Row(head=head, cells=(none, none))
    return Row(
        head=head,
        cells=(
            Cell(text=format_of(one.num_extracted, one.num_documents)),
            Cell(text=format_percent(one.num_extracted / one.num_documents)),
        ),
    )
