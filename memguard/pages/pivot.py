"""Draws every table of rates: finds the row of results for each cell.

A column of results is data, the key of its rows and how they are shown:

    ResultColumn(("Verbatim", "documents"), "extraction", "verbatim")
    ResultColumn("Within 1,000", "sampling", "within_queries", key={"parameters": "queries=1000"})
    ResultColumn("Change", "extraction", "logprob", key={"against": "base"})
    ResultColumn("Verbatim − control", "extraction", "verbatim", minus_control=True)
    ResultColumn("Median", "extraction", "first_divergence", key={"statistic": "median"})

    bucket_table   a row for each bucket, below it that of the base model
    pivot          a row for each item; `key` gives what an item adds to the key of each column:
                   a seed, the parameters of a window, a bucket

    pivot(tables, "By window", Column("Window", name), values_by_bucket, windows,
          key=lambda window: {"parameters": window.parameters})

A cell that needs more than one row of results is a `Column` among them. What is no table uses
`Tables.find` and `show_row`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from memguard.pages.columns import (
    Column,
    Heading,
    How,
    Item,
    make_table,
    name_bucket,
    show_minus_control,
    show_name,
    show_row,
    tone_of_bucket,
)
from memguard.pages.page import Cell, Table, Tone
from memguard.records import AuditReport, BucketRow, ResultRow, Tables


@dataclass(frozen=True, slots=True)
class ResultColumn:
    """A column of results: the key of its rows, and how they are shown."""

    heading: Heading
    probe: str
    metric: str
    _: KW_ONLY
    key: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `Tables.find`: parameters, statistic, against, bucket, ..."""
    minus_control: bool = False
    """Whether to show the difference from the control in place of the value."""
    how: How = "full"
    unit: str = ""
    """Unit to write the numbers in; "" takes the metric's."""
    base: Literal["row", "note", ""] = "row"
    """Where the base model's value stands: in its own row, below the model's, or nowhere."""
    why_not: str = ""
    """Reason in place of a row's own; see `show_row`."""

    def find(self, tables: Tables, **key: Any) -> ResultRow | None:
        """Return the row of a cell; ``key`` is added to that of the column."""
        return tables.find(self.probe, self.metric, **{"bucket": "", **self.key, **key})

    def show(self, tables: Tables, **key: Any) -> Cell:
        """Return a cell."""
        parameters = {**self.key, **key}.get("parameters", "")
        metric = tables.find_metric(self.probe, self.metric, parameters)
        row = self.find(tables, **key)
        if self.minus_control:
            bucket = None if tables.control is None else tables.control.bucket
            beside = None if bucket is None else self.find(tables, **{**key, "bucket": bucket})
            return show_minus_control(row, beside, metric)
        note = ""
        if self.base == "note":
            base = self.find(tables, **{**key, "model": "base"})
            if base is not None and base.is_known:
                note = f"base: {show_row(base, metric, unit=self.unit).text}"
        return show_row(row, metric, how=self.how, unit=self.unit, note=note, why_not=self.why_not)

    def make_column(self, tables: Tables, key: Callable[[Item], Mapping[str, Any]]) -> Column[Item]:
        """Return the column for items; ``key`` gives what an item adds to the key."""

        def show_base(item: Item) -> Cell | None:
            base = {**key(item), "model": "base"}
            return None if self.find(tables, **base) is None else self.show(tables, **base)

        is_row = self.base == "row" and not self.minus_control and "against" not in self.key
        return Column(
            self.heading, lambda item: self.show(tables, **key(item)), show_base if is_row else None
        )

    def has_base(self, tables: Tables, **key: Any) -> bool:
        """Return whether the base model has a value."""
        row = self.find(tables, **{**key, "model": "base"})
        return self.base == "row" and row is not None and row.is_known


def pivot(
    tables: Tables,
    caption: str,
    head: Column[Item],
    columns: Sequence[ResultColumn | Column[Item]],
    items: Iterable[Item],
    *,
    key: Callable[[Item], Mapping[str, Any]],
    tone: Callable[[Item], Tone] = lambda item: "",
    over_base: bool = False,
    shown: int | None = None,
    notes: Sequence[str] = (),
    compact: bool = False,
) -> Table:
    """Make a table of results with a row for each item.

    ``key`` gives what an item adds to the key of each column; ``head`` names the rows, its `base`
    those of the base model, which follow with ``over_base`` if they have any value.
    """
    values = [column for column in columns if isinstance(column, ResultColumn)]

    def has_base(item: Item) -> bool:
        return over_base and any(one.has_base(tables, **key(item)) for one in values)

    made = [
        column.make_column(tables, key) if isinstance(column, ResultColumn) else column
        for column in columns
    ]
    return make_table(
        caption,
        [head, *made],
        items,
        tone=tone,
        over_base=has_base,
        shown=shown,
        notes=notes,
        compact=compact,
    )


def bucket_table(
    report: AuditReport,
    caption: str,
    columns: Sequence[ResultColumn | Column[BucketRow]],
    *,
    base_detail: str = "",
    notes: Sequence[str] = (),
    compact: bool = False,
) -> Table:
    """Make a table with a row for each bucket, followed by the base model's row if it was scored.

    The column that names the buckets is added; ``base_detail`` stands below the base model's name.
    """
    head: Column[BucketRow] = Column(
        "Bucket", lambda b: name_bucket(b, report), lambda b: show_name("Base model", base_detail)
    )
    return pivot(
        report.tables,
        caption,
        head,
        columns,
        report.tables.buckets,
        key=lambda bucket: {"bucket": bucket.bucket},
        tone=tone_of_bucket,
        over_base=True,
        notes=notes,
        compact=compact,
    )
