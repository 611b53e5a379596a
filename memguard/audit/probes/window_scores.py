"""Numbers of one continuation: from a teacher-forced pass, and the overlap of a generated one.

    TokenResult of the continuation  ->  numbers (IN_A_WINDOW, MAIN)  ->  values by metric

    rouge_l             2PR/(P+R), P = LCS/G, R = LCS/S, LCS the longest common subsequence
    longest_run_tokens  longest run of tokens that occurs in both, at any position
    edit_distance       insertions, deletions and substitutions / max(S, G)
    bleu                geometric mean of the n-gram precisions, n = 1..4, with brevity penalty

S are the tokens of the true, G those of the generated continuation (fewer if it stopped early). All
measures use token ids and so do not depend on how a tokenizer decodes them; published values on
words differ. Read them with the type-token ratio: repetitive text overlaps with many texts.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import LCSseq, Levenshtein

from memguard.audit.cache import ScoreMatrix
from memguard.audit.metrics import Metric, rate_metric, share_metric
from memguard.audit.passages import Passage, ScoreSelection, TokenResult, stack_by_size
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

IN_A_WINDOW = ("num_correct", "first_divergence", "extraction_strength", "longest_run", "logprob")
"""Numbers of any window."""
MAIN = (*IN_A_WINDOW, "min_margin", "is_near_tie", "argmax_type_token_ratio", "greedy_margin")
"""Numbers of a document's main window."""
MIN_RUN_TOKENS = 50
"""First choices in a row that are right, for an extraction in another window."""
MIN_WINDOW_TOKENS = 25
"""The same of a window whose continuation is greedy text, or sampled text."""
_NUM_RUNS = 4
RUNS = tuple(f"run_{n}_{end}" for n in range(_NUM_RUNS) for end in ("begin", "end"))
"""Limits of the longest such runs in the tokens of a window, the longest first."""
PASSAGE = ("longest_run", *RUNS)
"""Numbers of a whole passage."""


NEAR_VERBATIM = rate_metric(
    "near_verbatim",
    "Greedy text within 10 % edits of the true one.",
    heading="Near-verbatim",
    spoken="near-verbatim",
    risk_rank=2,
)
WINDOW_METRICS = (
    rate_metric("verbatim", "All tokens match.", risk_rank=1),
    rate_metric(
        "teacher_forced_90",
        "At least 90 % of the tokens are the most likely ones, given the true text before each.",
        heading="90 % teacher-forced",
    ),
    share_metric(
        "token_accuracy", "Tokens that are the most likely ones, given the true text before each."
    ),
    share_metric(
        "extraction_strength", "Share at the end that is predicted without a wrong token."
    ),
    Metric(
        name="first_divergence",
        meaning="Tokens that greedy decoding matches before its first wrong one.",
        unit="tokens",
        is_length=True,
    ),
    Metric(
        name="longest_run", meaning="Longest run of correct tokens.", unit="tokens", is_length=True
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
    """Return the metrics of one window of each document; NaN if the document is too short."""
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
    """Return the request for the numbers `MAIN` of N windows."""

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
        parameters={"kind": "extraction", "version": 4, "tiny_margin": tiny_margin},
        stage=stage,
    )


def score_passages(windows: Sequence[Window]) -> Score:
    """Return the request for the numbers `PASSAGE` of N windows, NaN for those of too few tokens.

    Their pass is that of `score_windows`, and no token more has choices or sampling schemes.
    """

    def reduce(_: Sequence[int], results: Sequence[TokenResult]) -> NDArray[np.float64]:
        rows = np.full((len(results), len(PASSAGE)), np.nan)
        for row, result in zip(rows, results, strict=True):
            assert result.is_best is not None, "it was requested"
            edges = np.flatnonzero(np.diff(result.is_best > 0, prepend=False, append=False))
            # The first token has no label.
            runs = edges.reshape(-1, 2) + 1
            sizes = runs[:, 1] - runs[:, 0]
            order = np.argsort(-sizes, kind="stable")[:_NUM_RUNS]
            found = runs[order[sizes[order] >= MIN_RUN_TOKENS]].ravel()
            row[: 1 + len(found)] = [sizes.max(initial=0), *found]
        return rows

    return Score(
        items=windows,
        passages=[
            Passage(input_ids=w.input_ids, first_label=1, first_choice=len(w.input_ids))
            if len(w.input_ids) > MIN_RUN_TOKENS
            else None
            for w in windows
        ],
        keys=[key_of_window(window, window.continuation_tokens) for window in windows],
        names=PASSAGE,
        reduce=reduce,
        parameters={"kind": "other window", "version": 1},
        selection=ScoreSelection(needs=frozenset({"is_best"})),
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


APPROXIMATE_BLEU = 0.75
"""Threshold of approximate memorisation of Ippolito et al. 2022 (arXiv 2210.17546)."""

_BLEU_ORDER = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Overlap measures of one generated continuation."""

    rouge_l: float
    """F1 of the longest common subsequence, 0 to 1."""
    longest_run_tokens: int
    """Longest common contiguous substring (tokens)."""
    edit_distance: float
    """Levenshtein distance / length of the longer; 0 for equal texts, 1 for nothing in common."""
    bleu: float
    """Sentence BLEU, 0 to 1."""
    type_token_ratio: float | None
    """Distinct tokens / tokens of the generated text; None if it is empty."""


def compute_overlap(truth: NDArray[np.int32], generated: NDArray[np.int32]) -> Overlap:
    """Compare a generated with the true continuation."""
    assert len(truth), "a continuation has at least one token"
    true_ids, ids = truth.tolist(), generated.tolist()
    return Overlap(
        # 2PR/(P+R) = 2 LCS / (S + G), and 0 if nothing is common.
        rouge_l=2 * LCSseq.similarity(true_ids, ids) / (len(true_ids) + len(ids)),
        longest_run_tokens=_longest_common_run(truth, generated),
        edit_distance=Levenshtein.distance(true_ids, ids) / max(len(true_ids), len(ids)),
        bleu=_compute_bleu(true_ids, ids),
        type_token_ratio=float(compute_type_token_ratio(generated)) if ids else None,
    )


def longest_true_run(correct: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the longest run of correct tokens in one teacher-forced pass (tokens).

    This is the longest run that greedy decoding would generate if each error were corrected; it is
    at least as long as the run before the first divergence. ``[...]`` of ``[..., S]``.
    """
    places = np.arange(correct.shape[-1])
    last_wrong = np.maximum.accumulate(np.where(correct, -1, places), axis=-1)
    longest: NDArray[np.int64] = (places - last_wrong).max(-1, initial=0)
    return longest


def _longest_common_run(truth: NDArray[np.int32], generated: NDArray[np.int32]) -> int:
    """Return the longest common contiguous substring: S vector steps of length G."""
    ending_here = np.zeros(len(generated) + 1, dtype=np.int64)
    longest = 0
    for token in truth:
        ending_here[1:] = np.where(generated == token, ending_here[:-1] + 1, 0)
        longest = max(longest, int(ending_here.max()))
    return longest


def _compute_bleu(truth: list[int], generated: list[int]) -> float:
    """Return sentence BLEU (Papineni et al. 2002) with one reference.

    Smoothed as in NIST's mteval (method 3 of Chen & Cherry 2014): the first order without a match
    counts half a match, the next a quarter. Other orders are not affected. Five or more tokens
    without a common 4-gram stay below .25^(1/4) = .71 < `APPROXIMATE_BLEU`, so smoothing only
    grades texts that would otherwise have 0 and never changes a verdict. Texts of fewer than four
    tokens are compared up to their length, so that equal texts have 1.
    """
    order = min(_BLEU_ORDER, len(generated))
    halvings, log_sum = 0, 0.0
    for size in range(1, order + 1):
        num_matched = (_count_grams(truth, size) & _count_grams(generated, size)).total()
        if size == 1 and not num_matched:
            return 0.0
        halvings += num_matched == 0
        log_sum += math.log((num_matched or 0.5**halvings) / (len(generated) - size + 1))
    if not order:
        return 0.0
    brevity = min(0.0, 1 - len(truth) / len(generated))
    return math.exp(log_sum / order + brevity)


def _count_grams(ids: list[int], size: int) -> Counter[tuple[int, ...]]:
    return Counter(zip(*(ids[start:] for start in range(size)), strict=False))
