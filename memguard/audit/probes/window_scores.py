"""Numbers of one window of each document, from one teacher-forced pass, and their metrics.

    TokenResult of the continuation  ->  numbers (IN_A_WINDOW, MAIN)  ->  values by metric

The extraction probe, the grid and the canaries use them.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit.cache import ScoreMatrix
from memguard.audit.metrics import Metric
from memguard.audit.overlap import longest_true_run
from memguard.audit.passages import TokenResult, stack_by_size
from memguard.audit.requests import Score, key_of_window
from memguard.audit.windows import (
    Window,
    compute_extraction_strength,
    compute_first_divergence,
    compute_type_token_ratio,
    count_needed_90,
    find_greedy_margin,
    find_min_margin,
    is_near_tie,
)

IN_A_WINDOW = (
    "num_correct",
    "first_divergence",
    "extraction_strength",
    "longest_run",
    "logprob",
)
"""Numbers of any window."""
MAIN = (
    *IN_A_WINDOW,
    "min_margin",
    "is_near_tie",
    "argmax_type_token_ratio",
    "greedy_margin",
)
"""Numbers of a document's main window."""


def share_metric(name: str, meaning: str, heading: str, **others: Any) -> Metric:
    """Return a metric with values from 0 to 1."""
    bounds = (0.0, 1.0)
    return Metric(
        name=name, meaning=meaning, unit="share", bounds=bounds, heading=heading, **others
    )


NEAR_VERBATIM = Metric(
    name="near_verbatim",
    meaning="Greedy text within 10 % edits of the true one.",
    unit="documents",
    statistic="rate",
    heading="Near-verbatim",
    spoken="near-verbatim",
    risk_rank=2,
)
WINDOW_METRICS = (
    Metric(
        name="verbatim",
        meaning="All tokens match.",
        unit="documents",
        statistic="rate",
        heading="Verbatim",
        spoken="verbatim",
        risk_rank=1,
    ),
    Metric(
        name="teacher_forced_90",
        meaning="At least 90 % of the tokens are the most likely ones, given the true text before "
        "each.",
        unit="documents",
        statistic="rate",
        heading="90 % teacher-forced",
    ),
    share_metric(
        "token_accuracy",
        "Tokens that are the most likely ones, given the true text before each.",
        "Token accuracy",
    ),
    share_metric(
        "extraction_strength",
        "Share at the end that is predicted without a wrong token.",
        "Extraction strength",
    ),
    Metric(
        name="first_divergence",
        meaning="Tokens that greedy decoding matches before its first wrong one.",
        unit="tokens",
        is_length=True,
        heading="First divergence",
    ),
    Metric(
        name="longest_run",
        meaning="Longest run of correct tokens.",
        unit="tokens",
        is_length=True,
        heading="Longest run",
    ),
    Metric(
        name="logprob",
        meaning="Mean log-probability of a token.",
        unit="nats",
        bounds=(-math.inf, 0.0),
        is_confidential=True,
        heading="Log-probability",
    ),
)
"""Metrics of any window."""


def describe_window(
    numbers: ScoreMatrix, size_N: NDArray[np.int64], place: str = ""
) -> dict[str, NDArray[np.float64]]:
    """Return the metrics of one window of each document; NaN if the document is too short.

    Args:
        numbers: what was measured on one model.
        size_N: tokens of the continuation.
        place: the window, given by the prefix of its names in the matrix.
    """
    correct_N = numbers[f"{place}num_correct"]
    missing_N = np.isnan(correct_N)
    return {
        "verbatim": np.where(missing_N, np.nan, correct_N == size_N),
        "teacher_forced_90": np.where(missing_N, np.nan, correct_N >= count_needed_90(size_N)),
        "token_accuracy": correct_N / size_N,
        "extraction_strength": numbers[f"{place}extraction_strength"],
        "first_divergence": numbers[f"{place}first_divergence"],
        "longest_run": numbers[f"{place}longest_run"],
        "logprob": numbers[f"{place}logprob"] / size_N,
    }


def score_windows(windows: Sequence[Window], tiny_margin: float, *, stage: str = "") -> Score:
    """Return the request for the numbers `MAIN` of N windows.

    Args:
        windows: ``[N]`` main windows.
        tiny_margin: margin in logits, see `TINY_MARGINS`.
        stage: name in progress lines.
    """

    def reduce(_: Sequence[int], results: Sequence[TokenResult]) -> NDArray[np.float64]:
        rows = np.full((len(results), len(MAIN)), np.nan)
        for where, stacked in stack_by_size(results):
            columns = [
                *describe_tokens(stacked),
                find_min_margin(stacked.margin, stacked.correct),
                is_near_tie(stacked.margin, tiny_margin),
                compute_type_token_ratio(stacked.argmax),
                find_greedy_margin(stacked.margin, stacked.correct),
            ]
            rows[where] = np.stack(columns, axis=1)
        return rows

    return Score(
        items=windows,
        passages=[window.passage() for window in windows],
        keys=[key_of_window(window, window.continuation_tokens) for window in windows],
        names=MAIN,
        reduce=reduce,
        parameters={"kind": "extraction", "version": 3, "tiny_margin": tiny_margin},
        stage=stage,
    )


def describe_tokens(stacked: TokenResult) -> list[NDArray[np.generic]]:
    """Return the numbers of `IN_A_WINDOW`, ``[n]`` each, of n continuations of one length."""
    correct = stacked.correct
    return [
        correct.sum(1),
        compute_first_divergence(correct),
        compute_extraction_strength(correct),
        longest_true_run(correct),
        stacked.logprob.sum(1, dtype=np.float64),
    ]
