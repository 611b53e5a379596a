"""Results of one teacher-forced pass over a document, as a row of numbers.

    main        the extraction probe's window: correct tokens, divergence, margins, log-probability
    sampled.0   log-probability of that continuation under the first sampling scheme, ...
    membership.loss, ...      over every token of the passage that received loss in training
    grid.0.num_correct, ...   for the first cell of the grid, ...

Missing numbers are NaN here and None in records.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    find_greedy_margin,
    find_min_margin,
    is_near_tie,
)
from memguard.audit.membership_scores import (
    MEMBERSHIP_SCORES,
    compute_loss,
    compute_min_k,
    compute_min_k_plus_plus,
    compute_zlib,
)
from memguard.audit.overlap import longest_true_run
from memguard.audit.passages import Decode, Passage, ScoreSelection, TokenResult, stack
from memguard.audit.suite import GridCell
from memguard.config.settings import SamplingScheme

MAIN = (
    "num_correct",
    "first_divergence",
    "extraction_strength",
    "longest_run",
    "logprob",
    "min_margin",
    "is_near_tie",
    "argmax_type_token_ratio",
    "greedy_margin",
)
IN_A_CELL = ("num_correct", "first_divergence", "extraction_strength", "longest_run", "logprob")


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherForcedScores:
    """Everything that a suite measures in one pass over each document."""

    extraction: ExtractionProbe
    tiny_margin: float
    """Margin in logits, see `TINY_MARGINS`."""
    schemes: tuple[SamplingScheme, ...] = ()
    cells: tuple[GridCell, ...] = ()
    membership: tuple[str, ...] = ()
    """Names in `MEMBERSHIP_SCORES` that need no additional pass."""
    decode: Decode | None = None
    """Decodes tokens for scores that need the text; without it they are missing."""

    @property
    def requested(self) -> ScoreSelection:
        """Results to compute for each token."""
        needs = frozenset().union(*(MEMBERSHIP_SCORES[name].needs for name in self.membership))
        return ScoreSelection(needs=needs & {"entropy", "variance_logprob"}, schemes=self.schemes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the numbers of a row."""
        return (
            *MAIN,
            *(f"sampled.{index}" for index in range(len(self.schemes))),
            *(f"membership.{name}" for name in self.membership),
            *(f"grid.{index}.{name}" for index in range(len(self.cells)) for name in IN_A_CELL),
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """Settings that the numbers depend on, in addition to model and document."""
        return {
            "version": 2,
            "extraction": self.extraction.model_dump(
                mode="json",
                include={"continuation_tokens", "prefix_tokens", "min_prefix_tokens"},
            ),
            "tiny_margin": self.tiny_margin,
            "schemes": [scheme.model_dump(mode="json") for scheme in self.schemes],
            "cells": [cell.model_dump(mode="json") for cell in self.cells],
            "membership": list(self.membership),
            "text": self.decode is not None,
        }

    def plan(self, window: Window) -> list[Passage]:
        """Return the passages of a document, starting with that of the main window."""
        passages = []
        for start, cells in self._group(window).items():
            choices = [cell.prefix_tokens for cell in cells]
            ends = [cell.prefix_tokens + cell.continuation_tokens for cell in cells]
            is_main = start == _place(window)
            if is_main:
                choices.append(window.prefix_tokens)
                ends.append(window.prefix_tokens + window.continuation_tokens)
            first_choice = min(choices)
            passages.append(
                Passage(
                    input_ids=window.document.grid_ids[start : start + max(ends)],
                    first_label=1 if is_main and self.membership else first_choice,
                    first_choice=first_choice,
                )
            )
        return passages

    def measure(
        self, windows: Sequence[Window], results: Sequence[TokenResult]
    ) -> NDArray[np.float64]:
        """Return the numbers ``[N, len(names)]`` of N documents.

        Args:
            windows: ``[N]`` main windows.
            results: results of the passages that `plan` returns for them, document by document.
        """
        remaining = iter(results)
        answers = [self._sort(window, remaining) for window in windows]
        mains = [
            answer.cut(_place(window), window.prefix_tokens, window.continuation_tokens)
            for window, answer in zip(windows, answers, strict=True)
        ]
        blocks = [self._measure_mains(mains)]
        if self.membership:
            wholes = [
                answer.results[_place(window)]
                for window, answer in zip(windows, answers, strict=True)
            ]
            blocks.append(self._measure_membership(windows, wholes))
        for cell in self.cells:
            parts = [
                None
                if cell.window(window.document) is None
                else answer.cut(cell.offset, cell.prefix_tokens, cell.continuation_tokens)
                for window, answer in zip(windows, answers, strict=True)
            ]
            blocks.append(_measure_cells(parts))
        return np.concatenate(blocks, axis=1)

    def _group(self, window: Window) -> dict[int, list[GridCell]]:
        """Return the cells that the document is long enough for, by their start."""
        groups: dict[int, list[GridCell]] = {_place(window): []}
        for cell in self.cells:
            if cell.window(window.document) is not None:
                groups.setdefault(cell.offset, []).append(cell)
        return groups

    def _sort(self, window: Window, remaining: Iterator[TokenResult]) -> "_Answer":
        """Take the results of a document from ``remaining``, by the start of their passages."""
        plan = self.plan(window)
        starts = self._group(window)
        return _Answer(
            results={start: next(remaining) for start in starts},
            first_choices={
                start: passage.first_choice for start, passage in zip(starts, plan, strict=True)
            },
        )

    def _measure_mains(self, mains: Sequence[TokenResult]) -> NDArray[np.float64]:
        """Return ``[N, columns of MAIN and one per scheme]``."""
        block = np.full((len(mains), len(MAIN) + len(self.schemes)), np.nan)
        for where, stacked in _stack_by_size(mains):
            columns = [
                *_describe_cells(stacked),
                find_min_margin(stacked.margin, stacked.correct),
                is_near_tie(stacked.margin, self.tiny_margin),
                compute_type_token_ratio(stacked.argmax),
                find_greedy_margin(stacked.margin, stacked.correct),
            ]
            if self.schemes:
                assert stacked.sampled is not None, "schemes were requested"
                columns += list(stacked.sampled.sum(2, dtype=np.float64))
            block[where] = np.stack(columns, axis=1)
        return block

    def _measure_membership(
        self, windows: Sequence[Window], wholes: Sequence[TokenResult]
    ) -> NDArray[np.float64]:
        """Return ``[N, membership]``, over the tokens that received loss in training."""
        trained, kept = [], []
        for window, whole in zip(windows, wholes, strict=True):
            # Only tokens of the window, because a cell of the grid may be longer.
            size = window.prefix_tokens + window.continuation_tokens
            supervised = window.document.supervised[window.start + 1 : window.start + size]
            trained.append(supervised)
            kept.append(whole.keep_labels(supervised) if supervised.any() else None)
        block = np.full((len(windows), len(self.membership)), np.nan)
        for where, stacked in _stack_by_size(kept):
            loss_N = compute_loss(stacked.logprob)
            for column, name in enumerate(self.membership):
                if name == "loss":
                    score_N = loss_N
                elif name == "min_k":
                    score_N = compute_min_k(stacked.logprob)
                elif name == "min_k_plus_plus":
                    assert stacked.entropy is not None, "entropy was requested"
                    assert stacked.variance_logprob is not None, "the variance was requested"
                    score_N = compute_min_k_plus_plus(
                        stacked.logprob, -stacked.entropy, stacked.variance_logprob
                    )
                elif self.decode is None:
                    continue
                else:
                    texts = [self.decode(windows[i].input_ids[1:][trained[i]]) for i in where]
                    score_N = np.array(
                        [
                            compute_zlib(float(loss), text)
                            for loss, text in zip(loss_N, texts, strict=True)
                        ]
                    )
                block[where, column] = score_N
        return block


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Answer:
    """A model's results for a document, by the start of its passages."""

    results: Mapping[int, TokenResult]
    first_choices: Mapping[int, int]

    def cut(self, start: int, prefix_tokens: int, size: int) -> TokenResult:
        """Return the results of a continuation."""
        first = prefix_tokens - self.first_choices[start]
        return self.results[start].cut(first, first + size)


def _place(window: Window) -> int:
    """Return the start of a main window in the document's `grid_ids`."""
    document = window.document
    return window.start + (0 if document.whole_ids is None else document.first_position)


def _stack_by_size(
    results: Sequence[TokenResult | None],
) -> Iterator[tuple[list[int], TokenResult]]:
    """Yield the indices of results with equal numbers of tokens, and these stacked ``[n, ...]``."""
    by_size: dict[int, list[int]] = {}
    for index, result in enumerate(results):
        if result is not None:
            by_size.setdefault(len(result.logprob), []).append(index)
    for where in by_size.values():
        yield where, stack([result for index in where if (result := results[index]) is not None])


def _measure_cells(parts: Sequence[TokenResult | None]) -> NDArray[np.float64]:
    """Return ``[N, IN_A_CELL]``; NaN where a document is too short."""
    block = np.full((len(parts), len(IN_A_CELL)), np.nan)
    for where, stacked in _stack_by_size(parts):
        block[where] = np.stack(_describe_cells(stacked), axis=1)
    return block


def _describe_cells(stacked: TokenResult) -> list[NDArray[Any]]:
    """Return the numbers of `IN_A_CELL`, ``[n]`` each."""
    correct = stacked.correct
    return [
        correct.sum(1),
        compute_first_divergence(correct),
        compute_extraction_strength(correct),
        longest_true_run(correct),
        stacked.logprob.sum(1, dtype=np.float64),
    ]
