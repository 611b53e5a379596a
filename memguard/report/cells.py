"""Headings and cells that several tables are made of."""

from collections.abc import Sequence

from memguard.records import Rate
from memguard.report.formatting import (
    MISSING,
    NOT_AVAILABLE,
    Estimate,
    format_of,
    format_percent,
    format_percent_range,
)
from memguard.report.page import Bar, Cell, Row


def make_headings(*labels: str | tuple[str, str]) -> tuple[Cell, ...]:
    """Make column headings; a pair is a heading with a smaller line."""
    return tuple(
        Cell(text=label, kind="text")
        if isinstance(label, str)
        else Cell(text=label[0], detail=label[1], kind="text")
        for label in labels
    )


def make_rate_cell(
    rate: float | None, ci: tuple[float, float] | None, num_matched: int, num_documents: int
) -> Cell:
    """Show counts, percentage, interval and a bar."""
    if rate is None:
        return Cell(text=MISSING, detail="no documents")
    low, high = ci or (rate, rate)
    return Cell(
        text=format_of(num_matched, num_documents),
        detail=f"{format_percent(rate)} ({format_percent_range(ci)})",
        bar=Bar(fill=_css(rate), low=_css(low), width=_css(high - low)),
    )


def _css(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"


def show_rate(rate: Rate | None) -> Cell:
    """Show a rate as `make_rate_cell` does; None where nothing was generated."""
    if rate is None:
        return show_missing("not generated")
    return make_rate_cell(rate.rate, rate.ci, rate.num_matched, rate.num_documents)


def show_narrow_rate(rate: Rate | None, note: str = "") -> Cell:
    """Show a rate where columns are many: counts, bar and interval, whose middle is plain then."""
    cell = show_rate(rate)
    if rate is None or cell.bar is None:
        return cell
    return Cell(text=cell.text, detail=format_percent_range(rate.ci), bar=cell.bar, note=note)


def show_estimate(estimate: Estimate) -> Cell:
    """Show an estimate above its interval."""
    return Cell(text=estimate.value, detail=estimate.interval)


def show_missing(reason: str) -> Cell:
    """Say that there is no number, and why."""
    return Cell(text=NOT_AVAILABLE, detail=reason, kind="text")


def fold_rows(rows: Sequence[Row], most: int) -> tuple[tuple[Row, ...], tuple[Row, ...], str]:
    """Part rows into those shown, those shown on demand, and what then stands before them."""
    rest = tuple(rows[most:])
    return tuple(rows[:most]), rest, f"Show {len(rest):,} more" if rest else ""
