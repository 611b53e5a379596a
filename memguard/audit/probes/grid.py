"""The grid: other windows of the documents, by prefix, offset and length of the continuation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from memguard.audit.extraction import AuditDocument, Window
from memguard.audit.passages import TokenResult, stack_by_size
from memguard.audit.probe import Inputs, Measured, Model, Rounds, Score, View, join, key_of_window
from memguard.audit.probes.extraction import IN_A_WINDOW, describe_tokens
from memguard.config.settings import Count, PositiveInt, Settings

_Lengths = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


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


class GridProbe(Settings):
    """Other windows of a document: prefix length x offset x continuation length.

    At offset o the model receives tokens o .. o+P as if the text began there, and continues them.
    Offsets count from the start of a document, so that several windows of a text longer than the
    model's context can be audited. In a document that was trained in pieces they count from the
    start of the audited piece (`audit.window`), because no window spans two pieces.

    Extraction depends on the length and the position of the prefix: text that is not extracted in
    one window may be extracted in another. Cells with the same offset share a pass.
    """

    VERSION: ClassVar[int] = 1
    models: ClassVar[tuple[Model, ...]] = ("trained", "base")
    after: ClassVar[tuple[str, ...]] = ()

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
