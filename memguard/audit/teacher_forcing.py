"""What one pass over a document shows, as a row of numbers.

    main        the extraction probe's window: right tokens, divergence, margins, log-probability
    sampled.0   log-probability of that continuation under the first sampling scheme, ...
    membership.loss, ...      over every token of the passage that training gave loss to
    grid.0.num_correct, ...   of the grid's first cell, ...

A number that is missing is NaN here and None in records.
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
    hangs_on_margin,
)
from memguard.audit.membership_scores import (
    MEMBERSHIP_SCORES,
    compute_loss,
    compute_min_k,
    compute_min_k_plus_plus,
    compute_zlib,
)
from memguard.audit.overlap import longest_true_run
from memguard.audit.passages import Asked, Decode, Passage, TokenResult, stack
from memguard.audit.probes import GridCell
from memguard.config.sampling import SamplingScheme

MAIN = (
    "num_correct",
    "first_divergence",
    "extraction_strength",
    "longest_run",
    "logprob",
    "min_margin",
    "hangs_on_margin",
    "argmax_type_token_ratio",
    "greedy_margin",
)
IN_A_CELL = ("num_correct", "first_divergence", "extraction_strength", "longest_run", "logprob")


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
        """Return the passages of a document, that of the window first."""
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
            windows: ``[N]`` the main ones.
            results: of the passages that `plan` returns for them, one document's after the other.
        """
        answered = iter(results)
        answers = [self._sort(window, answered) for window in windows]
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
        """Return the cells that the document is long enough for, by where they start."""
        groups: dict[int, list[GridCell]] = {_place(window): []}
        for cell in self.cells:
            if cell.window(window.document) is not None:
                groups.setdefault(cell.offset, []).append(cell)
        return groups

    def _sort(self, window: Window, answered: Iterator[TokenResult]) -> "_Answer":
        """Take a document's results by where their passages start."""
        plan = self.plan(window)
        starts = self._group(window)
        return _Answer(
            results={start: next(answered) for start in starts},
            first_choices={
                start: each.first_choice for start, each in zip(starts, plan, strict=True)
            },
        )

    def _measure_mains(self, mains: Sequence[TokenResult]) -> NDArray[np.float64]:
        """Return ``[N, MAIN and one of each scheme]``."""
        block = np.full((len(mains), len(MAIN) + len(self.schemes)), np.nan)
        for where, stacked in _stack_by_size(mains):
            columns = [
                *_describe_cells(stacked),
                find_min_margin(stacked.margin, stacked.correct),
                hangs_on_margin(stacked.margin, self.tiny_margin),
                compute_type_token_ratio(stacked.argmax),
                find_greedy_margin(stacked.margin, stacked.correct),
            ]
            if self.schemes:
                assert stacked.sampled is not None, "schemes were asked for"
                columns += list(stacked.sampled.sum(2, dtype=np.float64))
            block[where] = np.stack(columns, axis=1)
        return block

    def _measure_membership(
        self, windows: Sequence[Window], wholes: Sequence[TokenResult]
    ) -> NDArray[np.float64]:
        """Return ``[N, membership]``, of the tokens that training gave loss to."""
        trained, kept = [], []
        for window, whole in zip(windows, wholes, strict=True):
            # Of the window itself, where a cell of the grid reaches further.
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
                    assert stacked.entropy is not None, "entropy was asked for"
                    assert stacked.variance_logprob is not None, "the variance was asked for"
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
    """What a model says of a document, by where its passages start."""

    results: Mapping[int, TokenResult]
    first_choices: Mapping[int, int]

    def cut(self, start: int, prefix_tokens: int, size: int) -> TokenResult:
        """Return the tokens of a continuation."""
        first = prefix_tokens - self.first_choices[start]
        return self.results[start].cut(first, first + size)


def _place(window: Window) -> int:
    """Return where a main window starts in the document's `grid_ids`."""
    document = window.document
    return window.start + (0 if document.whole_ids is None else document.first_position)


def _stack_by_size(
    results: Sequence[TokenResult | None],
) -> Iterator[tuple[list[int], TokenResult]]:
    """Yield results of as many tokens one upon the other, ``[n, ...]``, and which these are."""
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
