"""The pieces a page is made of; templates only place them.

Strings are ready to show (cleaned and formatted, not yet escaped). Numbers appear only in what a
chart draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memguard.records import Rate
from memguard.report.formatting import (
    MISSING,
    NOT_AVAILABLE,
    Estimate,
    format_of,
    format_percent,
    format_percent_range,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A small bar behind a rate; CSS lengths in percent of the cell."""

    fill: str
    low: str
    width: str
    """Length of the interval's whisker, which starts at ``low``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One cell of a table."""

    text: str
    detail: str = ""
    """A second, smaller line."""
    note: str = ""
    """A third, as small."""
    bar: Bar | None = None
    kind: Literal["number", "text", "code", "hash", "level"] = "number"
    level: str = ""
    """For `kind="level"`: which icon and colour stand beside the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row; its first cell names it."""

    head: Cell
    cells: tuple[Cell, ...]
    tone: Literal["", "base", "control", "dominated"] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table with a caption; `columns` includes the heading of the row names."""

    caption: str
    columns: tuple[Cell, ...]
    rows: tuple[Row, ...]
    more_rows: tuple[Row, ...] = ()
    """Shown on demand, under `more_label`."""
    more_label: str = ""
    notes: tuple[str, ...] = ()
    """Sentences below the rows that are always shown."""
    compact: bool = False
    """Beside a chart, where there is little room."""
    long_names: bool = False
    """Its first column holds sentences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A term and its value."""

    term: str
    value: str
    detail: str = ""
    code: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """Something to know before the numbers; the level is told by word, shape and colour."""

    level: str
    label: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A drawn value with its interval, in units of the axis."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A drawn series."""

    label: str
    """Name in the legend; "" where another series of the same name has it."""
    style: str
    """Colour, dashes and marker: a name `charts` knows, or a number."""
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LineChart:
    """Series over ordinal positions 0, 1, 2, ..., one for each label in `ticks`."""

    description: str
    ticks: tuple[str, ...]
    lines: tuple[Line, ...]
    y_label: str
    control_at: int | None
    """Position of the never-trained documents."""
    x_label: str = "times trained (repetitions)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A setting as a cross: a point with an interval along each axis, in units of the axis."""

    label: str
    x: float
    x_ends: tuple[float, float] | None
    y: float
    y_ends: tuple[float, float] | None
    is_dominated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontChart:
    """Crosses, those that nothing beats joined by a line, and one vertical reference line."""

    description: str
    marks: tuple[Mark, ...]
    x_label: str
    y_label: str
    reference_x: float | None
    reference_label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A chart and the same numbers as a table."""

    key: str
    """Unique on its page; ids inside the drawing begin with it."""
    title: str
    chart: LineChart | FrontChart
    caption: str
    table: Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a page: sentences, then what they are about."""

    key: str
    """Where links lead."""
    title: str
    short_title: str
    """What links say."""
    lead: tuple[str, ...]
    facts: tuple[Fact, ...] = ()
    figure: Figure | None = None
    tables: tuple[Table, ...] = ()
    points_title: str = ""
    points: tuple[str, ...] = ()
    """Sentences of a list that ends the section."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditPage:
    """Everything the audit template shows, in its order."""

    title: str
    heading: str
    tool_version: str
    confidentiality: str
    identity: tuple[Fact, ...]
    notices: tuple[Notice, ...]
    verdict: Notice
    key_figures: tuple[Fact, ...]
    limits: tuple[str, ...]
    next_steps: tuple[str, ...]
    summary_lead: tuple[str, ...]
    summary: tuple[Table, ...]
    attacks: Section
    dose_response: Figure | None
    dose_response_note: str
    dose_tables: tuple[Table, ...]
    evidence: tuple[Section, ...]
    """What further probes showed, in their order."""
    findings: Table | None
    findings_note: str
    training: tuple[Fact, ...]
    training_note: str
    data: tuple[Fact, ...]
    method: tuple[Fact, ...]
    probes: tuple[Fact, ...]
    """Those that ran."""
    probes_not_run: tuple[Fact, ...]
    command: str
    environment: tuple[Fact, ...]
    glossary: tuple[Fact, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonPage:
    """Everything the comparison template shows, in its order."""

    title: str
    heading: str
    tool_version: str
    confidentiality: str
    identity: tuple[Fact, ...]
    recommendation: Fact
    """The sentence, and the rule that made it."""
    in_short_lead: str
    in_short: tuple[Fact, ...]
    guide: tuple[str, ...]
    headline: Table
    gains: Section | None
    paired: tuple[Table, ...]
    figures: tuple[Figure, ...]
    extraction: Table
    settings: Table
    command: str
    environment: tuple[Fact, ...]
    glossary: tuple[Fact, ...]


# Headings and cells that several tables are made of.


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
