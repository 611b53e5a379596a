"""Settings of the probes, and the table of all by the names that suites use.

    extraction        the documents' own continuation, by one pass (extraction.py)
    grid              other windows of the same documents (here)
    sampling          what it costs to draw the continuation (probabilistic.py)
    membership        trained against control documents (membership.py)
    canaries          random secrets, trained or not by a coin (canaries.py)
    generation        overlap of greedy and sampled text with the true one (generation.py)
    attacks           beam search, and one that knows the mask (attacks.py)
    mask_consistency  copies formatted otherwise escape the mask (mask_consistency.py)

What a probe's numbers mean changes with its VERSION, which every record carries.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from memguard.audit.extraction import AuditDocument, ExtractionProbe, Window
from memguard.audit.membership_scores import MEMBERSHIP_SCORES
from memguard.config.sampling import SamplingScheme
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
    """Windows elsewhere in a document: prefix length x offset x continuation length.

    At offset o the model is given tokens o .. o+P as if the text began there, and continues them.
    Offsets count from the start of a document, so that several windows of a text longer than the
    model's context can be audited; of a document that was trained in pieces they count from the
    start of the audited piece (`audit.window`), as no window reaches over two.

    Recall depends on the length and the position of the prefix: what an audit of one window calls
    forgotten may be recited at the start of the context. Cells with one offset share a pass.
    """

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


Share = Annotated[float, Field(gt=0, lt=1)]


class SamplingProbe(Settings):
    """Queries until sampling gives the continuation, from the probabilities of one pass."""

    VERSION: ClassVar[int] = 1

    name: Literal["sampling"] = Field("sampling", description="Which probe.")
    schemes: Annotated[tuple[SamplingScheme, ...], Field(min_length=1)] = Field(
        (SamplingScheme(), SamplingScheme(top_k=40)), description="Ways to draw; cheapest counts."
    )


class MembershipProbe(Settings):
    """Tell trained from control documents by what the model says of their tokens."""

    VERSION: ClassVar[int] = 2

    name: Literal["membership"] = Field("membership", description="Which probe.")
    scores: tuple[str, ...] = Field(
        ("loss", "zlib", "min_k", "min_k_plus_plus"),
        description="Scores; lowercase, recall and reference take a pass of their own.",
    )
    fpr: tuple[Share, ...] = Field(
        (0.001, 0.01, 0.1), description="False-positive rates at which the true ones are given."
    )
    recall_documents: PositiveInt = Field(
        4, description="Control documents that are put before a text for 'recall' (documents)."
    )

    @field_validator("scores")
    @classmethod
    def _check_scores(cls, scores: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [score for score in scores if score not in MEMBERSHIP_SCORES]
        if unknown:
            raise ValueError(f"must be of {', '.join(MEMBERSHIP_SCORES)}; got {unknown[0]!r}")
        return scores


class CanaryProbe(Settings):
    """How far trained secrets stand out from those that were never trained."""

    VERSION: ClassVar[int] = 2

    name: Literal["canaries"] = Field("canaries", description="Which probe.")
    delta: Annotated[float, Field(ge=0, lt=1)] = Field(
        1e-5, description="Delta of the (epsilon, delta) whose epsilon is bounded from below."
    )


class GenerationProbe(Settings):
    """Write on from the first wrong token, and compare what comes out with the true text."""

    VERSION: ClassVar[int] = 2

    name: Literal["generation"] = Field("generation", description="Which probe.")
    nucleus: SamplingScheme | None = Field(
        SamplingScheme(top_p=0.95), description="A draw beside greedy decoding; null draws none."
    )
    max_documents_per_bucket: PositiveInt | None = Field(
        100, description="Continue a seeded sample of this size of each bucket; null takes all."
    )


class AttackProbe(Settings):
    """What an attacker gets who may submit several answers, and knows the mask."""

    VERSION: ClassVar[int] = 1

    name: Literal["attacks"] = Field("attacks", description="Which probe.")
    width: PositiveInt = Field(16, description="Beams, and answers that may be submitted.")
    candidates: PositiveInt = Field(64, description="Tokens tried where one was dropped.")
    samples: PositiveInt = Field(16, description="Draws of the sampling attack.")
    scheme: SamplingScheme = Field(SamplingScheme(), description="How these are drawn.")
    max_documents_per_bucket: PositiveInt | None = Field(
        40, description="Attack a seeded sample of this size of each bucket; null takes all."
    )


class MaskConsistencyProbe(Settings):
    """Whether copies of a text, formatted otherwise, are masked as it is."""

    VERSION: ClassVar[int] = 1

    name: Literal["mask_consistency"] = Field("mask_consistency", description="Which probe.")
    max_passages: PositiveInt = Field(200, description="Trained documents that are rewritten.")


Probe = (
    ExtractionProbe
    | GridProbe
    | SamplingProbe
    | MembershipProbe
    | CanaryProbe
    | GenerationProbe
    | AttackProbe
    | MaskConsistencyProbe
)

PROBES: dict[str, type[Probe]] = {
    "extraction": ExtractionProbe,
    "grid": GridProbe,
    "sampling": SamplingProbe,
    "membership": MembershipProbe,
    "canaries": CanaryProbe,
    "generation": GenerationProbe,
    "attacks": AttackProbe,
    "mask_consistency": MaskConsistencyProbe,
}
"""Every probe by the name suites use; its class holds its settings."""
