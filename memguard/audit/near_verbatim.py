"""Near-verbatim extraction: its results, and the edits of a text while it is generated."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NearVerbatim:
    """Near-verbatim extraction of N documents by one model."""

    matched_N: NDArray[np.bool_]
    """False where a document was not generated."""
    num_edits_N: NDArray[np.float64]
    """NaN where a document was not generated, infinite beyond the limit."""
    min_gap_N: NDArray[np.float64]
    """Smallest gap on the greedy path (logits); NaN if no token of it was computed."""
    num_verbatim: int
    """Documents that the teacher-forced pass shows to be verbatim."""
    num_generated: int
    """Documents for which tokens were generated."""
    num_below_floor: int
    num_checked: int
    """Documents below the floor that were generated."""
    num_matched_below_floor: int
    """Documents below the floor that matched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NotGenerated:
    """Reason why near-verbatim matches are not known."""

    reason: str


def count_edits_allowed(max_edit_share: float, continuation_tokens: int) -> int:
    """Return the maximum number of edits of a near-verbatim text of S tokens, rounded down."""
    return int(Fraction(repr(max_edit_share)) * continuation_tokens)


class EditDistance:
    """Levenshtein distance between M true tokens and a text to which M tokens are appended.

        row[j]       edits between the tokens so far and the first j true ones
        lower_bound  min over j of row[j] + |j - tokens so far|, the smallest possible distance of
                     the complete text: the rests of both texts differ in length by this amount

    After M tokens, the bound equals the distance.
    """

    def __init__(self, truth: NDArray[np.integer]) -> None:
        """Start with an empty text."""
        self._truth_M = truth
        self._place_J = np.arange(len(truth) + 1)
        self._row_J = self._place_J.copy()
        self._num_tokens = 0

    def append(self, token: int) -> None:
        """Append a token to the text."""
        before_J = self._row_J
        row_J = before_J + 1
        row_J[1:] = np.minimum(row_J[1:], before_J[:-1] + (self._truth_M != token))
        # Inserting true token j costs row[j - 1] + 1: a running minimum of row - j.
        self._row_J = np.minimum.accumulate(row_J - self._place_J) + self._place_J
        self._num_tokens += 1

    @property
    def lower_bound(self) -> int:
        """Smallest number of edits that the complete text can have."""
        if self._num_tokens >= len(self._truth_M):
            return int(self._row_J[-1])
        return int((self._row_J + np.abs(self._place_J - self._num_tokens)).min())
