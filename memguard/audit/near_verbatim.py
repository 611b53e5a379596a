"""Near-verbatim extraction: greedy text within a few edits of the true continuation.

    greedy   the S tokens that greedy decoding adds to the prefix, end-of-text tokens suppressed
    edits    Levenshtein distance between greedy and true token ids
    matched  edits <= floor(max_edit_share * S)

The rule of the reports on Gemini 1.5 (arXiv 2403.05530) and Gemma (arXiv 2403.08295): an edit
distance of at most 10 % of the continuation. Up to the first divergence the greedy text is the true
text, which one teacher-forced pass has shown; only what follows is generated, and no further than
until the edits are certain to exceed the limit.

Documents whose teacher-forced accuracy is below a floor are not generated: text within 10 % edits
has far more right tokens (measured: `scripts/check_near_verbatim.py`). A seeded sample of them is
generated in every audit; if one of the sample matches, all of them are generated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memguard.audit.extraction import ExtractionProbe, Window
from memguard.audit.numbers import Numbers
from memguard.audit.selection import choose_sample

NAMES = ("num_edits", "min_gap")
"""Of a generated document: edits, infinite beyond the limit, and the smallest gap between a chosen
and the next best token (logits)."""

Measure = Callable[[Sequence[int]], Numbers]
"""Returns `NAMES` of the documents with these indices."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NearVerbatim:
    """Which of N documents one model extracts near-verbatim."""

    matched_N: NDArray[np.bool_]
    """False where a document was not generated."""
    num_edits_N: NDArray[np.float64]
    """NaN where a document was not generated, infinite beyond the limit."""
    min_gap_N: NDArray[np.float64]
    """Smallest gap on the greedy path (logits); NaN where nothing of it was looked at."""
    num_verbatim: int
    """Documents whose greedy text the teacher-forced pass has shown."""
    num_generated: int
    """Documents of which tokens were generated."""
    num_below_floor: int
    num_checked: int
    """Documents below the floor that were generated."""
    num_matched_below_floor: int
    """Those of them that matched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NotGenerated:
    """Near-verbatim matches are not known."""

    reason: str


def find_near_verbatim(
    probe: ExtractionProbe,
    windows: Sequence[Window],
    one_pass: Numbers,
    measure: Measure,
    *,
    seed: int,
) -> NearVerbatim:
    """Decide which documents greedy decoding gives back within the probe's edits.

    Args:
        probe: the limit, the floor and the size of the sample below it.
        windows: ``[N]``.
        one_pass: ``[N]`` the same model's teacher-forced numbers.
        measure: generates documents; called on every rank with the same indices.
        seed: decides the sample.
    """
    size_N = np.array([window.continuation_tokens for window in windows], dtype=np.int64)
    num_correct_N = one_pass["num_correct"]
    verbatim_N = num_correct_N == size_N
    below_N = ~verbatim_N & (num_correct_N < probe.generation_floor * size_N)
    num_edits_N = np.where(verbatim_N, 0.0, np.nan)
    min_gap_N = np.where(verbatim_N, one_pass["greedy_margin"], np.nan)
    limit_N = np.array([probe.num_edits_allowed(int(size)) for size in size_N], dtype=np.int64)

    def generate(indices: NDArray[np.int64]) -> None:
        numbers = measure(indices.tolist())
        num_edits_N[indices] = numbers["num_edits"]
        # fmin: no token before the first divergence has no margin.
        min_gap_N[indices] = np.fmin(one_pass["greedy_margin"][indices], numbers["min_gap"])

    below = np.flatnonzero(below_N)
    drawn = choose_sample(
        [windows[index] for index in below.tolist()],
        probe.num_generated_below_floor,
        seed=seed,
        purpose="below the floor",
    )
    checked = below[drawn]
    above = np.flatnonzero(~verbatim_N & ~below_N)
    generate(np.concatenate([above, checked]))
    if (num_edits_N[checked] <= limit_N[checked]).any():
        rest = np.setdiff1d(below, checked)
        generate(rest)
        checked = below
    matched_N = num_edits_N <= limit_N
    return NearVerbatim(
        matched_N=matched_N,
        num_edits_N=num_edits_N,
        min_gap_N=min_gap_N,
        num_verbatim=int(verbatim_N.sum()),
        num_generated=len(above) + len(checked),
        num_below_floor=len(below),
        num_checked=len(checked),
        num_matched_below_floor=int(matched_N[checked].sum()),
    )


class EditDistance:
    """Levenshtein distance to a truth of M tokens, of a text of M tokens that is still growing.

        row[j]       edits between the tokens so far and the first j true ones
        lower_bound  min over j of row[j] + |j - tokens so far|, the least that can be reached in
                     the end: what is left of either text differs in length by so much

    With M tokens appended, the bound is the distance.
    """

    def __init__(self, truth: NDArray[np.integer]) -> None:
        """Begin with no tokens."""
        self._truth_M = truth
        self._place_J = np.arange(len(truth) + 1)
        self._row_J = self._place_J.copy()
        self._num_tokens = 0

    def append(self, token: int) -> None:
        """Add a token to the growing text."""
        before_J = self._row_J
        row_J = before_J + 1
        row_J[1:] = np.minimum(row_J[1:], before_J[:-1] + (self._truth_M != token))
        # An insertion of true token j costs 1 more than row[j - 1]: a running minimum of row - j.
        self._row_J = np.minimum.accumulate(row_J - self._place_J) + self._place_J
        self._num_tokens += 1

    @property
    def lower_bound(self) -> int:
        """Fewest edits that the whole text can have."""
        if self._num_tokens >= len(self._truth_M):
            return int(self._row_J[-1])
        return int((self._row_J + np.abs(self._place_J - self._num_tokens)).min())
