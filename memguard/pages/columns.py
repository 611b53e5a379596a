"""Tables built from columns: a column has a heading and makes the cell of each row.

    make_table     Column(heading, model, base) and items -> Table; columns[0] names the rows
    show_row       a row of results -> the cell that shows its number

`model` and `base` return a cell, or a value that `make_cell` converts into one: text, a count, or
an estimate with its interval. Tables of results are made by `pivot.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from memguard.pages import formatting as fmt
from memguard.pages.page import Bar, Cell, Row, Table, Tone
from memguard.records import (
    MIN_FOR_MEANS,
    NO_DOCUMENTS,
    AuditReport,
    BucketRow,
    Interval,
    MetricRow,
    ResultRow,
)

Item = TypeVar("Item")
"""Subject of a row: a bucket, a setting, a finding."""
Heading = str | tuple[str, str]
"""Text, or a pair of text and a second, smaller line."""
Content = Cell | fmt.Estimate | int | str
How = Literal["full", "narrow", "plain"]
"""full: with counts, percentage, interval and bar; narrow: a rate without its percentage, for
tables with many columns; plain: the number only."""
PLAIN = "plain"
"""Unit of a share that is written as a number from 0 to 1, as is usual in its literature."""
_DECIMALS = {"tokens": 1}
_LONGEST_HEADING = 120
_IN_POINTS = ("documents", "share")
"""Units whose differences are percentage points."""


@dataclass(frozen=True, slots=True)
class Column(Generic[Item]):
    """A column: its heading, and functions that make the cell of a row."""

    heading: Heading
    model: Callable[[Item], Content]
    base: Callable[[Item], Content | None] | None = None
    """The cell of the base model's row; None leaves it empty."""


def count_columns(
    counted: Heading, share: Heading, count: Callable[[Item], tuple[int, int]], reason: str
) -> tuple[Column[Item], Column[Item]]:
    """Make two columns: counts and their share, or the reason if the total is 0."""

    def column(heading: Heading, write: Callable[[int, int], str]) -> Column[Item]:
        def show(item: Item) -> Content:
            part, whole = count(item)
            return write(part, whole) if whole else show_missing(reason)

        return Column(heading, show)

    return (column(counted, fmt.of), column(share, lambda part, whole: fmt.percent(part / whole)))


def _make_row(contents: Iterable[Content | None], tone: Tone) -> Row:
    head, *cells = contents
    return Row(
        head=show_name(head) if isinstance(head, str) else make_cell(head),
        cells=tuple(map(make_cell, cells)),
        tone=tone,
    )


def make_cell(content: Content | None) -> Cell:
    """Convert the return value of a column's function into a cell."""
    if isinstance(content, Cell):
        return content
    if isinstance(content, fmt.Estimate):
        return Cell(content.value, detail=content.interval)
    return Cell(fmt.count(content) if isinstance(content, int) else content or "")


def make_table(
    caption: str,
    columns: Sequence[Column[Item]],
    items: Iterable[Item],
    *,
    tone: Callable[[Item], Tone] = lambda item: "",
    over_base: Callable[[Item], bool] = lambda item: False,
    base: Item | None = None,
    shown: int | None = None,
    more_label: str = "",
    notes: Sequence[str] = (),
    compact: bool = False,
    one_line: bool = False,
) -> Table:
    """Make a table with a row for each item, named by the first column.

    ``over_base`` says whether the base model's row follows an item's; that of ``base`` is the last.
    Rows after the first ``shown`` are collapsed under ``more_label``, "" for their number.
    """
    rows = []
    for item in items:
        rows.append(_make_row([column.model(item) for column in columns], tone(item)))
        rows += [_make_base_row(columns, item)] if over_base(item) else []
    rows += [] if base is None else [_make_base_row(columns, base)]
    rest = () if shown is None else tuple(rows[shown:])
    return Table(
        caption=caption,
        columns=tuple(_make_heading(column.heading) for column in columns),
        rows=tuple(rows[:shown]),
        more_rows=rest,
        more_label=(more_label or f"Show {len(rest):,} more") if rest else "",
        notes=tuple(notes),
        compact=compact,
        one_line=one_line,
    )


def _make_base_row(columns: Sequence[Column[Item]], item: Item) -> Row:
    return _make_row([column.base(item) if column.base else None for column in columns], "base")


def _make_heading(heading: Heading) -> Cell:
    # The headings of metrics come from the record, which is untrusted.
    parts = (heading, "") if isinstance(heading, str) else heading
    text, detail = (fmt.clean_text(part, _LONGEST_HEADING) for part in parts)
    return Cell(text, detail=detail, kind="text")


def drop_zero_columns(table: Table) -> Table:
    """Remove the columns in which every value is 0, and name them in a note below the table."""
    rows = (*table.rows, *table.more_rows)
    numbers = range(len(table.columns) - 1)
    kept = [number for number in numbers if not _is_zero([row.cells[number] for row in rows])]
    if not kept or len(kept) == len(numbers):
        return table
    headings = [table.columns[number + 1] for number in numbers if number not in kept]
    names = ", ".join(f"{h.text} ({h.detail})" if h.detail else h.text for h in headings)

    def select(row: Row) -> Row:
        return replace(row, cells=tuple(row.cells[number] for number in kept))

    return replace(
        table,
        columns=(table.columns[0], *(table.columns[number + 1] for number in kept)),
        rows=tuple(map(select, table.rows)),
        more_rows=tuple(map(select, table.more_rows)),
        notes=(*table.notes, f"Not shown because every value is 0: {names}."),
    )


def _is_zero(cells: Sequence[Cell]) -> bool:
    # A cell of the base model's row may be empty.
    texts = {cell.text for cell in cells} - {""}
    return bool(texts) and texts <= {"0", f"0{fmt.PERCENT}"}


_ROLES = {
    "trained": "trained",
    "control": "never trained",
    "background": "background, trained",
    "heldout": "held out, never trained",
    "canary": "random secrets",
    "forget": "to be forgotten",
    "removed": "removed as copies",
}


def tone_of_bucket(bucket: BucketRow) -> Tone:
    """Return the style of a bucket's row."""
    return "control" if bucket.role == "control" else ""


def describe_times(bucket: BucketRow, report: AuditReport) -> str:
    """Describe the role of a bucket and how often its documents were trained."""
    role = _ROLES[bucket.role]
    if bucket.role in ("control", "heldout", "forget") or not report.dose_response:
        return role
    if bucket.num_repetitions is None:
        return f"{role}, different numbers of times"
    return f"{role} {fmt.times(bucket.num_repetitions)}"


def name_bucket(bucket: BucketRow, report: AuditReport) -> Cell:
    """Show the name of a bucket, and below it how often its documents were trained."""
    name, times = fmt.clean_name(bucket.bucket), describe_times(bucket, report)
    return show_name(name, "" if name == times else times)


def show_name(text: str, detail: str = "", note: str = "") -> Cell:
    """Make a text cell, with smaller lines below."""
    return Cell(text, detail=detail, note=note, kind="text")


def show_missing(reason: str) -> Cell:
    """Make a cell that gives the reason why there is no value."""
    return show_name(fmt.NOT_AVAILABLE, reason)


def show_row(
    row: ResultRow | None,
    metric: MetricRow | None = None,
    *,
    how: How = "full",
    unit: str = "",
    note: str = "",
    why_not: str = "",
) -> Cell:
    """Show the number of a row of results; a rate with its counts, interval and a bar.

    A difference of shares is in percentage points; of copies, it says how many texts match.
    ``unit`` "" takes the metric's. ``why_not`` stands in place of the row's reason if it has
    documents and no value, and of a missing row's "not measured".
    """
    if row is None:
        return show_missing(why_not or "not measured")
    unit = unit or ("" if metric is None else metric.unit)
    decimals = _DECIMALS.get(unit, 3)
    if row.value is None:
        return _explain(row, why_not)
    if how == "plain":
        in_percent = row.statistic == "rate" or unit == "share"
        return Cell(fmt.percent(row.value) if in_percent else fmt.number(row.value, decimals))
    if row.statistic == "rate":
        cell = _show_rate(row, row.value, how)
    elif row.statistic == "difference":
        is_share = unit in _IN_POINTS
        cell = make_cell(fmt.points(row) if is_share else fmt.difference(row))
    elif row.statistic in ("mean", "auc", "score"):
        cell = make_cell(fmt.share(row) if unit == "share" else fmt.interval(row, decimals))
    else:
        cell = Cell(fmt.number(row.value, decimals))
    few = "few documents" if is_few(row, metric) else ""
    return replace(cell, note="; ".join(filter(None, (cell.note, few, note))))


def show_minus_control(
    row: ResultRow | None, control: ResultRow | None, metric: MetricRow | None = None
) -> Cell:
    """Show by how much a row's value exceeds that of the control, whose row is ``control``."""
    if row is None or row.minus_control is None:
        return Cell(fmt.MISSING)
    minus = Interval(value=row.minus_control, ci=row.minus_control_ci)
    is_share = row.statistic == "rate" or (metric is not None and metric.unit in _IN_POINTS)
    estimate = fmt.points(minus) if is_share else fmt.difference(minus)
    few = any(one is not None and is_few(one, metric) for one in (row, control))
    return Cell(estimate.value, detail=estimate.interval, note="few documents" if few else "")


def is_few(row: ResultRow, metric: MetricRow | None) -> bool:
    """Return whether the interval is that of a mean of bounded values of few documents."""
    if row.interval != "jackknife" or metric is None:
        return False
    is_bounded = metric.unit == "tokens" or None not in (metric.bounds or (None,))
    count = row.num_documents if row.num_clusters is None else row.num_clusters
    return is_bounded and count < MIN_FOR_MEANS


def _explain(row: ResultRow, why_not: str) -> Cell:
    """Show the reason why a row has no value."""
    if row.missing_because != NO_DOCUMENTS:
        return show_missing(why_not or fmt.clean_text(row.missing_because or "not measured"))
    if row.num_missing:
        return show_missing(f"{row.num_missing:,} too short, or not in the sample")
    return Cell(fmt.MISSING, detail=NO_DOCUMENTS)


def _show_rate(row: ResultRow, value: float, how: How) -> Cell:
    low, high = row.ci or (value, value)
    ends = fmt.percent_range(row.ci)
    share = fmt.percent(value)
    return Cell(
        share if row.num_matched is None else fmt.of(row.num_matched, row.num_documents),
        detail=ends if how == "narrow" or row.num_matched is None else f"{share} ({ends})",
        note=fmt.texts(row),
        bar=Bar(fill=_css(value), low=_css(low), width=_css(high - low)),
    )


def _css(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"
