"""Headings and cells that several tables are made of."""

from memguard.records import Rate
from memguard.report.formatting import (
    MISSING,
    Estimate,
    format_of,
    format_percent,
    format_percent_range,
)
from memguard.report.page import Bar, Cell


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


def show_rate(rate: Rate) -> Cell:
    """Show a rate as `make_rate_cell` does."""
    return make_rate_cell(rate.rate, rate.ci, rate.num_matched, rate.num_documents)


def show_estimate(estimate: Estimate) -> Cell:
    """Show an estimate above its interval."""
    return Cell(text=estimate.value, detail=estimate.interval)
