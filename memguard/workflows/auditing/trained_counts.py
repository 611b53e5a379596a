"""How often each document was trained, as counted while a model was trained, for its audit.

cut      a document longer than `max_tokens` was trained on its first `max_tokens` only
split    it was trained in pieces of `max_tokens`; the first may be shorter
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

_MAX_UNMATCHED = 0.01
"""Share of sequences that match no document, above which the counts are not used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedCounts:
    """Repetitions of each document, and what is not known about them."""

    num_repetitions: Mapping[str, int]
    """Times that each document was trained in full, by its id; of a document in several pieces,
    that of the piece trained least often."""
    num_runs: int
    """Sequences that the model was trained on, summed over all processes and steps."""
    num_unmatched: int
    """Of these, sequences that are neither a document nor a piece of one."""
    num_equal: int
    """Documents of which each piece is the same tokens as a piece of another document; their
    sequences cannot be told apart and are counted for each of them."""
    max_tokens: int | None = None
    """Length at which training cut or split documents (tokens)."""
    piece: Literal["cut", "split"] | None = None
    """What happened to longer documents; None if there was none."""
    first_piece_tokens: Mapping[str, int] = field(default_factory=dict)
    """Length of the first piece of a document, if it is not `max_tokens` (tokens)."""
    reason: str = ""
    """Why the numbers of repetitions are not known; empty if they are."""

    def list_spans(self, id: str, num_tokens: int) -> list[tuple[int, int]]:
        """Return begin and end of each piece of a document that was trained, in order."""
        if self.max_tokens is None or self.piece is None:
            return [(0, num_tokens)]
        if self.piece == "cut":
            return [(0, min(num_tokens, self.max_tokens))]
        first = self.first_piece_tokens.get(id, self.max_tokens)
        ends = [*range(first, num_tokens, self.max_tokens), num_tokens]
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def describe(self) -> tuple[str, ...]:
        """Return sentences for the report: how many sequences were matched, or why none counts."""
        if self.reason:
            return (
                f"Repetitions were not counted because {self.reason}. Members that were never "
                "trained, if there are any, are audited too and lower the rates.",
            )
        num = self.num_runs - self.num_unmatched
        text = (
            f"Repetitions were counted during training: {num:,} of {self.num_runs:,} sequences "
            "that were trained match members."
        )
        if self.num_unmatched:
            text += (
                f" {self.num_unmatched:,} {'matches' if self.num_unmatched == 1 else 'match'} no "
                "member: some repetitions may be missing."
            )
        if not self.num_equal:
            return (text,)
        return (
            text,
            f"{self.num_equal:,} members were trained as the same tokens as another member: equal "
            "members are counted together, so each has the sum of their repetitions.",
        )


def describe_unmatched(num_unmatched: int, num_runs: int, *, is_in_order: bool) -> str:
    """Return why counts are not used with ``num_unmatched`` sequences that match no document.

    Empty if they are. ``is_in_order``: documents match in the order of the training dataset only.
    """
    if not num_runs:
        return "no training step has ended"
    if num_unmatched <= _MAX_UNMATCHED * num_runs:
        return ""
    return (
        f"{num_unmatched:,} of {num_runs:,} sequences that were trained "
        f"({100 * num_unmatched / num_runs:.3g} %) match no member, and at most "
        f"{100 * _MAX_UNMATCHED:g} % may: the members must be all training documents"
        f"{', in the order of the training dataset' if is_in_order else ''}"
    )
