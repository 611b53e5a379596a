"""The grid: other windows of the documents, by prefix, offset and length of the continuation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from memguard.audit.metrics import Evidence, Metric
from memguard.audit.passages import TokenResult, stack_by_size
from memguard.audit.probe import Probe, Values
from memguard.audit.probes.window_scores import (
    IN_A_WINDOW,
    MIN_WINDOW_TOKENS,
    WINDOW_METRICS,
    describe_tokens,
    describe_window,
)
from memguard.audit.requests import Inputs, Measured, Rounds, Score, View, join, key_of_window
from memguard.audit.windows import AuditDocument, Window
from memguard.config.settings import Count, PositiveInt, Settings
from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, name_bucket, show_name
from memguard.pages.page import Cell, Section, Table
from memguard.pages.pivot import ResultColumn, pivot
from memguard.records import AuditReport, BucketRow, MetricRow

_Lengths = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
_MOST_BUCKETS = 12
_SHOWN_WINDOWS = 12


class GridCell(Settings):
    """One window, the same in each document that is long enough."""

    offset: int
    prefix_tokens: int
    continuation_tokens: int

    def window(self, document: AuditDocument) -> Window | None:
        """Return the window.

        None for conversations, for documents that are too short, and for windows longer than the
        model's context.
        """
        size = self.prefix_tokens + self.continuation_tokens
        ids = document.grid_ids
        is_within = self.offset + size <= len(ids) and size <= len(document.input_ids)
        if document.format != "text" or not is_within:
            return None
        if ids is not document.input_ids:
            supervised = np.ones(len(ids), dtype=bool)
            document = replace(document, input_ids=ids, supervised=supervised)
        return Window(
            document=document,
            start=self.offset,
            prefix_tokens=self.prefix_tokens,
            continuation_tokens=self.continuation_tokens,
        )


class GridProbe(Probe):
    """Other windows of a document: prefix length x offset x continuation length.

    At offset o the model receives tokens o .. o+P as if the text began there, and continues them.
    Offsets count from the start of a document, so that several windows of a text longer than the
    model's context can be audited. In a document that was trained in pieces they count from the
    start of the audited piece (`audit.window`), because no window spans two pieces.

    Extraction depends on the length and the position of the prefix: text that is not extracted in
    one window may be extracted in another. Cells with the same offset share a pass.
    """

    metrics: ClassVar[tuple[Metric, ...]] = tuple(
        replace(metric, risk_rank=None) for metric in WINDOW_METRICS
    )
    no_result: ClassVar[str] = "every document is an answer, or too short for its windows"

    name: Literal["grid"] = Field("grid", description="Which probe.")
    offsets: Annotated[tuple[Count, ...], Field(min_length=1)] = Field(
        (0,),
        description="Tokens to skip before the prefix, counted from the start of the document, "
        "or of its audited piece (tokens).",
    )
    prefix_tokens: _Lengths = Field((25, 50), description="Lengths of the prefix (tokens).")
    continuation_tokens: _Lengths = Field(
        (50,), description="Lengths of the continuation (tokens)."
    )

    @property
    def cells(self) -> tuple[GridCell, ...]:
        """Every combination, offsets outermost."""
        return tuple(
            GridCell(offset=offset, prefix_tokens=prefix, continuation_tokens=size)
            for offset in self.offsets
            for prefix in self.prefix_tokens
            for size in self.continuation_tokens
        )

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Score every cell, in one round: cells with the same offset share passages."""
        numbers = yield [self._score(cell, inputs.windows) for cell in self.cells]
        return Measured(columns=join({f"{index}.": matrix for index, matrix in enumerate(numbers)}))

    def _score(self, cell: GridCell, windows: Sequence[Window]) -> Score:
        cut = [cell.window(window.document) for window in windows]

        def reduce(_: Sequence[int], results: Sequence[TokenResult]) -> NDArray[np.float64]:
            rows = np.full((len(results), len(IN_A_WINDOW)), np.nan)
            for where, stacked in stack_by_size(results):
                rows[where] = np.stack(describe_tokens(stacked), axis=1)
            return rows

        return Score(
            items=windows,
            passages=[None if window is None else window.passage() for window in cut],
            keys=[key_of_window(window or main) for window, main in zip(cut, windows, strict=True)],
            names=IN_A_WINDOW,
            reduce=reduce,
            parameters={"kind": "grid", "version": 3, "cell": cell.model_dump(mode="json")},
        )

    def list_values(self, measured: Measured, evidence: Evidence) -> list[Values]:
        """Return the metrics of each cell."""
        values = []
        for index, cell in enumerate(self.cells):
            size_N = np.full(len(evidence.size_N), cell.continuation_tokens, dtype=np.int64)
            values.append(
                Values(
                    parameters=cell.model_dump(mode="json"),
                    columns=describe_window(measured.columns, size_N, f"{index}."),
                    continuation_tokens=cell.continuation_tokens,
                )
            )
        return values

    def find_windows(self, measured: Measured, evidence: Evidence) -> NDArray[np.float64]:
        """Return whether a cell that is long enough is extracted verbatim and own text."""
        found_N = np.full(len(evidence.size_N), np.nan)
        for number, cell in enumerate(self.cells):
            begin, size = cell.offset + cell.prefix_tokens, cell.continuation_tokens
            if size >= MIN_WINDOW_TOKENS:
                correct_N = measured.columns[f"{number}.num_correct"]
                found_N = np.fmax(found_N, np.where(np.isnan(correct_N), np.nan, 0.0))
                for index in np.flatnonzero(correct_N == size).tolist():
                    ids = evidence.inputs.windows[index].document.grid_ids
                    is_own = evidence.own_text.is_own_span(ids, begin, begin + size)
                    found_N[index] = max(found_N[index], is_own)
        return found_N

    @classmethod
    def section(cls, report: AuditReport) -> Section | None:
        """Return the section of other windows; None if the suite has none."""
        tables = (
            _build_windows(report, "verbatim", "Verbatim, by window"),
            _build_windows(report, "token_accuracy", "Token accuracy, by window"),
        )
        if not any(tables):
            return None
        return Section(
            key="grid",
            title="Other windows of the documents",
            lead=(
                "The extraction rate depends on the length and position of the prefix and on the "
                "length of the continuation: text that is not extracted in one window may be "
                "extracted in another. The model receives each window as if the text began there."
                + (
                    ""
                    if report.cut is None
                    else " In documents that were cut, token positions count from the audited part."
                ),
            ),
            tables=tuple(filter(None, tables)),
        )


def _build_windows(report: AuditReport, metric: str, caption: str) -> Table | None:
    """Build the table of one metric, with a row per window and a column per bucket."""
    tables = report.tables
    windows = [row for row in tables.list_metrics("grid") if row.metric == metric]
    if not windows:
        return None
    has_base = any(row.is_known for row in tables.select("grid", metric, model="base"))

    def column_of(bucket: BucketRow) -> ResultColumn:
        head = name_bucket(bucket, report)
        key = {"bucket": bucket.bucket}
        return ResultColumn((head.text, head.detail), "grid", metric, key=key, base="note")

    left_out = len(tables.buckets) - _MOST_BUCKETS
    return pivot(
        tables,
        f"{caption} ({fmt.CI}{'; below: base model' if has_base else ''})",
        Column(("Window", "prefix → continuation"), _name_window),
        [column_of(bucket) for bucket in tables.buckets[:_MOST_BUCKETS]],
        windows,
        key=lambda window: {"parameters": window.parameters},
        shown=_SHOWN_WINDOWS,
        notes=[f"{left_out:,} more buckets are in the JSON."] if left_out > 0 else [],
        compact=True,
    )


def _name_window(window: MetricRow) -> Cell:
    prefix, size, offset = (
        fmt.count(value) if isinstance(value, int) else "?"
        for value in map(window.settings.get, ("prefix_tokens", "continuation_tokens", "offset"))
    )
    start = "from the first token" if offset == "0" else f"from token {offset}"
    return show_name(f"{prefix} → {size} tokens", start)
