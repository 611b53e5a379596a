"""The components of a page; templates only arrange them.

Strings are ready to show: cleaned and formatted, not yet escaped. Numbers occur only in charts.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

PageColour = Literal["red", "amber", "green", "grey"]
Audience = Literal["public", "owner"]
"""Who may read a text. Public ones are fixed words and checked values: never a name, id or path."""
Tone = Literal["", "base", "control", "dominated"]
"""Style of a row: base model, control, dominated setting (grey), or "" for all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A small bar behind a rate; CSS lengths in percent of the cell."""

    fill: str
    low: str
    width: str
    """Length of the line that shows the interval; it starts at ``low``."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table."""

    text: str
    _: KW_ONLY
    detail: str = ""
    """A second, smaller line."""
    note: str = ""
    """A third line, of the same size as the second."""
    bar: Bar | None = None
    kind: Literal["number", "text", "code", "hash", "level"] = "number"
    level: str = ""
    """For `kind="level"`: selects the icon and the colour."""


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
    """Collapsed rows, under the label `more_label`."""
    more_label: str = ""
    notes: tuple[str, ...] = ()
    """Sentences below the table; always visible."""
    compact: bool = False
    """Whether to use a small font, for tables beside a chart or with many columns."""
    one_line: bool = False
    """Whether the cells of a row stay on one line; the table scrolls sideways."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A term and its value."""

    term: str
    value: str
    _: KW_ONLY
    detail: str = ""
    code: bool = False


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence that stands alone, e.g. a limitation."""

    text: str
    audience: Audience = "owner"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Facts, or a command, under a heading of their own within a section."""

    title: str
    facts: tuple[Fact, ...] = ()
    command: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """A link to another page of the same run or comparison."""

    label: str
    target: str
    """Relative URL, percent-encoded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A message above the results; a word, an icon and a colour show its level."""

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
    """Name in the legend; "" if another series of the same name is in the legend."""
    style: str
    """Colour, dashes and marker: a name that `charts` defines, or a number."""
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
class Panel:
    """Axes of a chart of curves, with their own vertical scale."""

    y_label: str
    lines: tuple[Line, ...]
    is_percent: bool = False
    """Whether the scale is that of shares, 0 to 100."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveChart:
    """Series over numbers, in panels above each other, with one position marked in all of them."""

    description: str
    panels: tuple[Panel, ...]
    x_label: str
    mark_at: float | None
    mark_label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A setting in the chart: a point with an interval along each axis, in units of the axis."""

    label: str
    x: float
    x_ends: tuple[float, float] | None
    y: float
    y_ends: tuple[float, float] | None
    is_dominated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontChart:
    """Settings as points, a line through those that are not dominated, and a reference line."""

    description: str
    marks: tuple[Mark, ...]
    x_label: str
    y_label: str
    reference_x: float | None
    """Position of the vertical line; outside the range of the marks only the label is drawn."""
    reference_label: str
    is_right_better: bool = False
    """Whether a larger x is better, as for an accuracy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RocChart:
    """Shares against shares, both from `least` to 1 on a logarithmic axis, as steps."""

    description: str
    least: float
    """First value of both axes."""
    ticks: tuple[tuple[float, str], ...]
    """Positions and labels on both axes."""
    lines: tuple[Line, ...]
    """The styles are "0", "1", "2" and "blind"."""
    marks: tuple[Point, ...]
    """Values of the first line with their intervals."""
    x_label: str
    y_label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A chart, and its data as a table."""

    key: str
    """Unique on its page; prefix of the ids in the drawing."""
    title: str
    chart: LineChart | FrontChart | RocChart | CurveChart
    caption: str
    table: Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A section of a page: sentences, then facts, a figure, tables, a list and groups of facts."""

    key: str
    """Target of links."""
    title: str
    lead: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    figure: Figure | None = None
    tables: tuple[Table, ...] = ()
    points_title: str = ""
    points: tuple[str, ...] = ()
    """Items of a list at the end of the section."""
    groups: tuple[Group, ...] = ()
    brief: tuple[Fact | Table, ...] = ()
    """What cards show of the section; the term of a fact may be ""."""
    audience: Audience = "owner"


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What every page shows at its beginning and end."""

    title: str
    heading: str
    tool_version: str
    confidentiality: str
    glossary: tuple[Fact, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPage(Page):
    """The page of a run that was not audited."""

    state: str
    section: Section


@dataclass(frozen=True, kw_only=True, slots=True)
class GateHead:
    """What a gate decided of the audit, above its results."""

    colour: PageColour
    outcome: Notice
    decision: str = ""
    """What to do, in one sentence with its numbers."""
    verdict: str
    """That of the audit, which a policy may overrule."""
    contrast: str
    """"" unless the gate passes under a verdict that alarms."""
    facts: tuple[Fact, ...]
    judgements: Table
    accepted_note: str
    accepted: Table | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonPage(Page):
    """Everything that the comparison template shows."""

    identity: tuple[Fact, ...]
    front: Figure | None
    """Risk against utility; None if no setting has both."""
    sentences: tuple[Fact, ...]
    """What is recommended, then why others are not; the term is the setting's name."""
    guide: tuple[str, ...]
    headline: Table
    gains: Section | None
    paired: tuple[Table, ...]
    figures: tuple[Figure, ...]
    extraction: Table
    others: tuple[Table, ...]
    """Metrics of probes that memguard does not define."""
    settings: Table
    command: str
    environment: tuple[Fact, ...]
