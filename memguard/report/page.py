"""The pieces a page is made of; templates only place them.

Strings are ready to show (cleaned and formatted, not yet escaped). Numbers appear only in what a
chart draws.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

Tone = Literal["", "base", "control", "dominated"]
"""How a row is set: for whose numbers, or grey."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A small bar behind a rate; CSS lengths in percent of the cell."""

    fill: str
    low: str
    width: str
    """Length of the interval's whisker, which starts at ``low``."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table."""

    text: str
    _: KW_ONLY
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
    tone: Tone = ""


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


@dataclass(frozen=True, slots=True)
class Fact:
    """A term and its value."""

    term: str
    value: str
    _: KW_ONLY
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
