"""Tables built from columns: a column has a heading and makes the cell of each row.

    make_table     Column(heading, model, base) and items -> Table; columns[0] names the rows
    bucket_table   the same for the buckets of a report

`model` and `base` return a cell, or a value that `make_cell` converts into one: text, a count, a
rate, or an estimate with its interval.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from memguard.records import AuditReport, BucketScores, ModelScores, Rate, Texts
from memguard.report import formatting as fmt
from memguard.report.page import Bar, Cell, Row, Table, Tone

Item = TypeVar("Item")
"""Subject of a row: a bucket, a setting, a finding."""
Value = TypeVar("Value")
Heading = str | tuple[str, str]
"""Text, or a pair of text and a second, smaller line."""
Content = Cell | fmt.Estimate | Rate | int | str


@dataclass(frozen=True, slots=True)
class Column(Generic[Item]):
    """A column: its heading, and functions that make the cell of a row."""

    heading: Heading
    model: Callable[[Item], Content]
    base: Callable[[Item], Content | None] | None = None
    """The cell of the base model's row; None leaves it empty."""


def scores_column(heading: Heading, show: Callable[[ModelScores], Content]) -> Column[BucketScores]:
    """Make a column that shows the same score of the model and of the base model."""
    return Column(
        heading, lambda b: show(b.model), lambda b: None if b.base is None else show(b.base)
    )


def count_columns(
    counted: Heading, share: Heading, count: Callable[[Item], tuple[int, int]], reason: str
) -> tuple[Column[Item], Column[Item]]:
    """Make two columns: counts and their share, or the reason if the total is 0."""

    def column(heading: Heading, write: Callable[[int, int], str]) -> Column[Item]:
        def show(item: Item) -> Content:
            part, whole = count(item)
            return write(part, whole) if whole else show_missing(reason)

        return Column(heading, show)

    return (
        column(counted, fmt.of),
        column(share, lambda part, whole: fmt.percent(part / whole)),
    )


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
        return Cell(content.value, detail=content.interval, note=content.note)
    if isinstance(content, Rate):
        return show_rate(content)
    return Cell(fmt.count(content) if isinstance(content, int) else content or "")


def make_table(
    caption: str,
    columns: Sequence[Column[Item]],
    items: Iterable[Item],
    *,
    tone: Callable[[Item], Tone] = lambda item: "",
    over_base: bool = False,
    base: Item | None = None,
    shown: int | None = None,
    more_label: str = "",
    notes: Sequence[str] = (),
    compact: bool = False,
    one_line: bool = False,
) -> Table:
    """Make a table with a row for each item.

    Args:
        caption: text above the table.
        columns: columns; the first one names the rows.
        items: subjects of the rows.
        tone: style of an item's row.
        over_base: whether the base model's row follows each item's row, if it has any text.
        base: item whose base model's row is the last one; None for no such row.
        shown: number of visible rows, the others are collapsed; None shows all.
        more_label: label of the collapsed rows; "" gives their number.
        notes: sentences below the rows.
        compact: whether to use a small font.
        one_line: whether the cells of a row stay on one line.
    """
    rows = []
    for item in items:
        rows.append(_make_row([column.model(item) for column in columns], tone(item)))
        below = _make_base_row(columns, item) if over_base else None
        rows += [below] if below and any(cell.text for cell in below.cells) else []
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
    text, detail = (heading, "") if isinstance(heading, str) else heading
    return Cell(text, detail=detail, kind="text")


def bucket_table(
    report: AuditReport,
    caption: str,
    columns: Sequence[Column[BucketScores]],
    *,
    base_detail: str = "",
    notes: Sequence[str] = (),
    compact: bool = False,
) -> Table:
    """Make a table with a row for each bucket, followed by the base model's row if it was scored.

    Args:
        report: record with the buckets.
        caption: text above the table.
        columns: all columns except the first one, which names the buckets.
        base_detail: text below the name of the base model.
        notes: sentences below the rows.
        compact: whether to use a small font.
    """
    named: list[Column[BucketScores]] = [
        Column(
            "Bucket",
            lambda b: name_bucket(b, report),
            lambda b: show_name("Base model", base_detail),
        ),
        *columns,
    ]
    return make_table(
        caption,
        named,
        report.buckets,
        tone=tone_of_bucket,
        over_base=True,
        notes=notes,
        compact=compact,
    )


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


def tone_of_bucket(bucket: BucketScores) -> Tone:
    """Return the style of a bucket's row."""
    return "control" if bucket.role == "control" else ""


def describe_times(bucket: BucketScores, report: AuditReport) -> str:
    """Describe the role of a bucket and how often its documents were trained."""
    role = _ROLES[bucket.role]
    if bucket.role in ("control", "heldout", "forget") or not report.dose_response:
        return role
    if bucket.num_repetitions is None:
        return f"{role}, different numbers of times"
    return f"{role} {fmt.times(bucket.num_repetitions)}"


def name_bucket(bucket: BucketScores, report: AuditReport) -> Cell:
    """Show the name of a bucket, and below it how often its documents were trained."""
    name, times = fmt.clean_name(bucket.bucket), describe_times(bucket, report)
    return show_name(name, "" if name == times else times)


def show_name(text: str, detail: str = "", note: str = "") -> Cell:
    """Make a text cell, with smaller lines below."""
    return Cell(text, detail=detail, note=note, kind="text")


def show_missing(reason: str) -> Cell:
    """Make a cell that gives the reason why there is no value."""
    return show_name(fmt.NOT_AVAILABLE, reason)


def show_known(value: Value | None, write: Callable[[Value], Content], reason: str) -> Content:
    """Show a value, or the reason why there is none."""
    return show_missing(reason) if value is None else write(value)


def make_rate_cell(
    rate: float | None,
    ci: tuple[float, float] | None,
    num_matched: int,
    num_documents: int,
    texts: Texts | None = None,
) -> Cell:
    """Show counts, percentage, interval and a bar; with copies, also how many texts match."""
    if rate is None:
        return Cell(fmt.MISSING, detail="no documents")
    low, high = ci or (rate, rate)
    return Cell(
        fmt.of(num_matched, num_documents),
        detail=f"{fmt.percent(rate)} ({fmt.percent_range(ci)})",
        note=fmt.texts(texts),
        bar=Bar(fill=_css(rate), low=_css(low), width=_css(high - low)),
    )


def _css(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"


def show_rate(rate: Rate | None) -> Cell:
    """Show a rate with `make_rate_cell`; None means that nothing was generated."""
    if rate is None:
        return show_missing("not generated")
    return make_rate_cell(rate.rate, rate.ci, rate.num_matched, rate.num_documents, rate.texts)


def show_narrow_rate(rate: Rate | None, note: str = "") -> Cell:
    """Show a rate for tables with many columns: counts, bar and interval, no percentage."""
    cell = show_rate(rate)
    if rate is None or cell.bar is None:
        return cell
    notes = "; ".join(filter(None, (cell.note, note)))
    return Cell(cell.text, detail=fmt.percent_range(rate.ci), bar=cell.bar, note=notes)
