"""Windows elsewhere in a document: prefix length x offset x continuation length.

    offset o    the model is given tokens o .. o+P as if the text began there, and continues them

Offsets count from the start of a document, so that several windows of a text longer than the
model's context can be audited; of a document that was trained in pieces they count from the start
of the audited piece (`audit.window`), as no window reaches over two.

Recall depends on how much is given and where it stood: what an audit of one window calls forgotten
may come out at the start of the context. Cells with one offset share a pass.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from memguard.audit.extraction import AuditDocument, Window
from memguard.config.settings import PositiveInt, Settings

_Lengths = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class GridCell(Settings):
    """One window, the same in each document that is long enough."""

    offset: int
    prefix_tokens: int
    continuation_tokens: int

    def window(self, document: AuditDocument) -> Window | None:
        """Return the window; None for conversations and in documents that are too short.

        Nor where it is longer than the model's context.
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
    """Continue each document from several places, with several prefixes, for several lengths."""

    VERSION: ClassVar[int] = 1

    name: Literal["grid"] = Field("grid", description="Which probe.")
    offsets: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = Field(
        (0,),
        description="Tokens that are skipped before the prefix, counted from the start of the "
        "document, or of the piece of it that is audited (tokens).",
    )
    prefix_tokens: _Lengths = Field((25, 50), description="Lengths of the prefix (tokens).")
    continuation_tokens: _Lengths = Field((50,), description="Tokens that are continued (tokens).")

    @property
    def cells(self) -> tuple[GridCell, ...]:
        """Every combination, offsets outermost."""
        return tuple(
            GridCell(offset=offset, prefix_tokens=prefix, continuation_tokens=size)
            for offset in self.offsets
            for prefix in self.prefix_tokens
            for size in self.continuation_tokens
        )
