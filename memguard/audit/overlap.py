"""Overlap of a generated continuation with the true one.

    truth      [S]  token ids that follow the prefix in the document
    generated  [G]  token ids that the model generated; G < S if it stopped early

    rouge_l             2PR/(P+R), P = LCS/G, R = LCS/S, LCS the longest common subsequence
    longest_run_tokens  longest run of tokens that occurs in both, at any position
    edit_distance       insertions, deletions and substitutions / max(S, G)
    bleu                geometric mean of the n-gram precisions, n = 1..4, with brevity penalty

All measures use token ids and therefore do not depend on how a tokenizer decodes its tokens;
published values on words differ. Interpret them together with the type-token ratio: repetitive text
overlaps with many texts.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import LCSseq, Levenshtein

from memguard.audit.windows import compute_type_token_ratio

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
    """Compare a generated with the true continuation.

    Args:
        truth: ``[S]`` token ids, at least one.
        generated: ``[G]`` token ids; an empty text has no overlap.
    """
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
    at least as long as the run before the first divergence.

    Args:
        correct: ``[..., S]`` whether the first choice is the true token, given all before it.
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
