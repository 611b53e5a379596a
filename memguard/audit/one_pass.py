"""What one pass over a document shows, as a row of numbers.

    main        the extraction probe's window: right tokens, divergence, margins, log-probability
    sampled.0   log-probability of that continuation under the first sampling scheme, ...
    membership.loss, ...      over every token of the passage that training gave loss to
    grid.0.num_correct, ...   of the grid's first cell, ...

A number that is missing is NaN here and None in records.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit.extraction import (
    ExtractionProbe,
    Window,
    compute_extraction_strength,
    compute_first_divergence,
    compute_type_token_ratio,
    find_min_margin,
)
from memguard.audit.grid import GridCell
from memguard.audit.membership_scores import (
    MEMBERSHIP_SCORES,
    compute_loss,
    compute_min_k,
    compute_min_k_plus_plus,
    compute_zlib,
)
from memguard.audit.overlap import longest_true_run
from memguard.audit.passages import Asked, Passage, TokenResult
from memguard.audit.probabilistic import SamplingScheme

MAIN = (
    "num_correct",
    "first_divergence",
    "extraction_strength",
    "longest_run",
    "logprob",
    "min_margin",
    "hangs_on_margin",
    "argmax_type_token_ratio",
    "argmax_at_divergence",
)
IN_A_CELL = ("num_correct", "first_divergence", "extraction_strength", "longest_run", "logprob")

Decode = Callable[[NDArray[np.int32]], str]
"""Token ids to text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnePass:
    """Everything that a suite asks of one pass over each document."""

    extraction: ExtractionProbe
    tiny_margin: float
    """Logits, see `TINY_MARGINS`."""
    schemes: tuple[SamplingScheme, ...] = ()
    cells: tuple[GridCell, ...] = ()
    membership: tuple[str, ...] = ()
    """Names of `MEMBERSHIP_SCORES` that need no pass of their own."""
    decode: Decode | None = None
    """For scores that need the text; without it they are missing."""

    @property
    def asked(self) -> Asked:
        """What the model has to say of each token."""
        needs = frozenset().union(*(MEMBERSHIP_SCORES[name].needs for name in self.membership))
        return Asked(needs=needs & {"entropy", "variance_logprob"}, schemes=self.schemes)

    @property
    def names(self) -> tuple[str, ...]:
        """What the numbers of a row are."""
        return (
            *MAIN,
            *(f"sampled.{index}" for index in range(len(self.schemes))),
            *(f"membership.{name}" for name in self.membership),
            *(f"grid.{index}.{name}" for index in range(len(self.cells)) for name in IN_A_CELL),
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """What the numbers depend on beside the model and the document."""
        return {
            "version": 1,
            "extraction": self.extraction.model_dump(mode="json"),
            "tiny_margin": self.tiny_margin,
            "schemes": [scheme.model_dump(mode="json") for scheme in self.schemes],
            "cells": [cell.model_dump(mode="json") for cell in self.cells],
            "membership": list(self.membership),
            "text": self.decode is not None,
        }

    def plan(self, window: Window) -> list[Passage]:
        """Return the passages of a document, that of the window first."""
        passages = []
        for start, cells in self._group(window).items():
            choices = [cell.prefix_tokens for cell in cells]
            ends = [cell.prefix_tokens + cell.continuation_tokens for cell in cells]
            is_main = start == window.start
            if is_main:
                choices.append(window.prefix_tokens)
                ends.append(window.prefix_tokens + window.continuation_tokens)
            first_choice = min(choices)
            passages.append(
                Passage(
                    input_ids=window.document.input_ids[start : start + max(ends)],
                    first_label=1 if is_main and self.membership else first_choice,
                    first_choice=first_choice,
                )
            )
        return passages

    def measure(self, window: Window, results: Sequence[TokenResult]) -> list[float]:
        """Return the numbers of a document, in the order of `names`."""
        groups = self._group(window)
        whole_of = dict(zip(groups, results, strict=True))
        first_of = dict(zip(groups, (p.first_choice for p in self.plan(window)), strict=True))

        def cut(start: int, prefix_tokens: int, size: int) -> TokenResult:
            first = prefix_tokens - first_of[start]
            return whole_of[start].cut(first, first + size)

        main = cut(window.start, window.prefix_tokens, window.continuation_tokens)
        row = self._measure_main(main)
        if self.schemes:
            assert main.sampled is not None, "schemes were asked for"
            row += main.sampled.sum(1, dtype=np.float64).tolist()
        row += self._measure_membership(window, whole_of[window.start])
        for cell in self.cells:
            if cell.window(window.document) is None:
                row += [math.nan] * len(IN_A_CELL)
                continue
            part = cut(cell.offset, cell.prefix_tokens, cell.continuation_tokens)
            row += _measure_cell(part)
        return row

    def _group(self, window: Window) -> dict[int, list[GridCell]]:
        """Return the cells that the document is long enough for, by where they start."""
        groups: dict[int, list[GridCell]] = {window.start: []}
        for cell in self.cells:
            if cell.window(window.document) is not None:
                groups.setdefault(cell.offset, []).append(cell)
        return groups

    def _measure_main(self, main: TokenResult) -> list[float]:
        num_correct, divergence, strength, run, logprob = _measure_cell(main)
        margin = find_min_margin(main)
        return [
            num_correct,
            divergence,
            strength,
            run,
            logprob,
            math.nan if margin is None else margin,
            float(self.extraction.hangs_on_margin(main, self.tiny_margin)),
            compute_type_token_ratio(main.argmax),
            float(main.argmax[int(divergence)]) if divergence < len(main.argmax) else math.nan,
        ]

    def _measure_membership(self, window: Window, result: TokenResult) -> list[float]:
        if not self.membership:
            return []
        size = window.prefix_tokens + window.continuation_tokens
        # Of the window itself, where a cell of the grid reaches further.
        where = slice(0, size - 1)
        trained = window.document.supervised[window.start + 1 : window.start + size]
        logprob_T = result.logprob[where][trained]
        if not len(logprob_T):
            return [math.nan] * len(self.membership)
        row = []
        for name in self.membership:
            if name == "loss":
                row.append(compute_loss(logprob_T))
            elif name == "min_k":
                row.append(compute_min_k(logprob_T))
            elif name == "min_k_plus_plus":
                assert result.entropy is not None, "entropy was asked for"
                assert result.variance_logprob is not None, "the variance was asked for"
                row.append(
                    compute_min_k_plus_plus(
                        logprob_T,
                        -result.entropy[where][trained],
                        result.variance_logprob[where][trained],
                    )
                )
            elif self.decode is None:
                row.append(math.nan)
            else:
                row.append(compute_zlib(logprob_T, self.decode(window.input_ids[1:][trained])))
        return row


def _measure_cell(result: TokenResult) -> list[float]:
    """Return the numbers of `IN_A_CELL`."""
    correct = result.correct
    return [
        float(correct.sum()),
        float(compute_first_divergence(correct)),
        compute_extraction_strength(correct),
        float(longest_true_run(correct)),
        float(result.logprob.sum(dtype=np.float64)),
    ]
