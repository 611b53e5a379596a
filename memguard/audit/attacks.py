"""Extraction by an attacker who submits several answers, and by one who knows the mask.

    beam_search   the W most likely continuations
    sampling      N samples; the first answer is the most frequent one
    fill          beam search that knows which labels a goldfish dropped: at those it tries many
                  tokens, and the learned tokens after them select the right one

    windows -> requests (`probes/attacks.py`) -> answers -> numbers -> rows (`tabulate`)

A goldfish's mask is a function of the text without any secret: an attacker who knows k, h and mode
can compute for every text, and so for every guess, which tokens had no loss. A wrong guess has two
effects: the tokens after it are less likely, and the mask of the next h tokens changes. Mode
``hash`` depends on the h tokens before a label, ``hash_reference`` on the h that end with it,
``static`` on its index in the document; the mask of mode ``random`` cannot be known. This is
memguard's version of an adaptive attack; Hans et al. (arXiv 2406.10209) evaluate beam search that
does not know the mask.

The cost of a guess (see `beams`) is computed from each document's own prefix, which the attacker
has, without the prefix's first tokens. It is between the cost of a learned token and the cost of
the model's first choice at a token that was not learned:

    guess_cost = sqrt(mean -log p(learned token) * mean -log p(first choice at a dropped one))

If guesses cost less than learned tokens, the search prefers texts with many guesses; if they cost
as much as unlearned tokens, it prefers any text with few guesses.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.audit.cache import ScoreMatrix
from memguard.audit.extraction import Window, list_clusters
from memguard.audit.passages import TokenResult
from memguard.audit.probe import IsFree
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import compute_mean, compute_rate
from memguard.mitigation import Goldfish
from memguard.mitigation.goldfish import LETTERS_PER_TOKEN
from memguard.records import AttackedBucket
from memguard.seeds import derive_generator

UNKNOWN_MASK = (
    "mode random drew a new mask in each epoch, which cannot be known: plain beam search was run"
)
"""Note of a fill attack without a known mask."""
TIGHTENED_MASK = (
    "the attack used the mask of each document's initial k; a risk budget lowered k for some "
    "documents during training"
)
"""Note of a fill attack that treats some labels as learned that were dropped for part of training
or all of it."""

# The probabilities of a prefix's first tokens contain little information about memorization.
SHORT_CONTEXT_TOKENS = 8
# Cost for a prefix without dropped or without learned tokens; and the smallest cost of a guess.
USUAL_GUESS_COST, _LEAST_GUESS_COST = 0.1, 1e-3


def drops_next(
    goldfish: Goldfish,
    ids_RT: NDArray[np.integer],
    candidates_RC: NDArray[np.integer],
    first_position: int = 0,
) -> NDArray[np.bool_]:
    """Return ``[R, C]`` whether training would have dropped each candidate as the next label.

    Args:
        goldfish: the goldfish used in training, of any mode except ``random``.
        ids_RT: ``[R, T]`` tokens of R texts.
        candidates_RC: ``[R, C]`` candidates for the next token of each text.
        first_position: number of unknown tokens of the document before these. If the mask depends
            on them, the result is False.
    """
    num_rows, num_candidates = candidates_RC.shape
    # With letters all tokens are needed, because a token may have no letters.
    needed = ids_RT.shape[1] if goldfish.letters else goldfish.config.context_width
    skipped = max(0, ids_RT.shape[1] - needed)
    before = np.repeat(ids_RT[:, skipped:], num_candidates, axis=0)
    rows = np.concatenate([before, candidates_RC.reshape(-1, 1)], axis=1)
    dropped = find_dropped(goldfish, rows, first_position + skipped)[:, -1]
    return dropped.reshape(num_rows, num_candidates)


def find_dropped(
    goldfish: Goldfish, ids_RT: NDArray[np.integer], first_position: int = 0
) -> NDArray[np.bool_]:
    """Return ``[R, T]`` whether training dropped each token of R texts as a label.

    Args:
        goldfish: the goldfish used in training, of any mode except ``random``.
        ids_RT: ``[R, T]`` tokens.
        first_position: as in `drops_next`.
    """
    config = goldfish.config
    assert config.mode != "random", "the mask of mode random cannot be known"
    # These modes draw no random numbers.
    generator = derive_generator(0, "goldfish")
    num_tokens = ids_RT.shape[1]
    if config.mode == "static":
        places = np.zeros((1, first_position + num_tokens), dtype=np.int64)
        dropped = goldfish.drop_mask(places, None, generator)[:, first_position:]
        return np.broadcast_to(dropped, ids_RT.shape)
    if first_position == 0:
        return goldfish.drop_mask(ids_RT, None, generator)
    # One arbitrary token replaces the unknown ones, so that the first known token is not treated as
    # the document's first.
    unknown = np.zeros((len(ids_RT), 1), dtype=ids_RT.dtype)
    dropped = goldfish.drop_mask(np.concatenate([unknown, ids_RT], axis=1), None, generator)[:, 1:]
    if goldfish.letters is not None:
        num_before_RT = np.cumsum(goldfish.letters.count(ids_RT), axis=1)
        num_before_RT = np.pad(num_before_RT, ((0, 0), (1, 0)))[:, :-1]
        return dropped & (num_before_RT >= LETTERS_PER_TOKEN * config.context_width)
    # Mode hash reads the h tokens before the label, hash_reference the h that end with it.
    width = config.context_width - (config.mode == "hash_reference")
    return dropped & (np.arange(num_tokens) >= width)


def measure_guess_cost(
    logprob_T: NDArray[np.floating],
    best_logprob_T: NDArray[np.floating],
    dropped_T: NDArray[np.bool_],
) -> float:
    """Return the cost of a guess (nats), from the supervised tokens of a prefix.

    Args:
        logprob_T: log-probability of each token.
        best_logprob_T: log-probability of the model's first choice at the same position.
        dropped_T: whether the mask dropped each token.
    """
    if dropped_T.all() or not dropped_T.any():
        return USUAL_GUESS_COST
    learned = -float(logprob_T[~dropped_T].mean(dtype=np.float64))
    unlearned = -float(best_logprob_T[dropped_T].mean(dtype=np.float64))
    # Rounding may make a probability exceed one, and its negative logarithm negative.
    return max(float(np.sqrt(max(learned, 0) * max(unlearned, 0))), _LEAST_GUESS_COST)


def read_guess_cost(window: Window, result: TokenResult, goldfish: Goldfish) -> float:
    """Return the cost of a guess (nats) in a window.

    Args:
        window: the window.
        result: of its prefix from token `SHORT_CONTEXT_TOKENS` on.
        goldfish: the goldfish used in training.
    """
    positions = slice(window.start + SHORT_CONTEXT_TOKENS, window.start + window.prefix_tokens)
    supervised_T = window.document.supervised[positions]
    dosed = goldfish.at_dose(window.document.dose)
    dropped_T = find_dropped(dosed, window.prefix_ids[None], _first_position(window))[0]
    # The margin is relative to the best other token; it is negative if the label is not the best.
    best_logprob_T = result.logprob - np.minimum(result.margin, 0)
    return measure_guess_cost(
        result.logprob[supervised_T],
        best_logprob_T[supervised_T],
        dropped_T[SHORT_CONTEXT_TOKENS:][supervised_T],
    )


def build_mask(goldfish: Goldfish, window: Window) -> IsFree:
    """Return which next tokens of a window training would have dropped."""
    dosed, first = goldfish.at_dose(window.document.dose), _first_position(window)
    return lambda ids_RT, candidates_RC: drops_next(dosed, ids_RT, candidates_RC, first)


def judge_answers(window: Window, answers_WS: NDArray[np.integer]) -> list[float]:
    """Return whether the first and any answer are the true continuation, and the correct tokens.

    Tokens of the first answer are compared index by index.
    """
    right_WS = answers_WS == window.continuation_ids
    verbatim_W = right_WS.all(axis=1)
    return [float(verbatim_W[0]), float(verbatim_W.any()), float(right_WS[0].sum())]


def _first_position(window: Window) -> int:
    """Return the number of tokens of the document before the window."""
    return window.document.first_position + window.start


def tabulate(
    windows: Sequence[Window],
    numbers: ScoreMatrix,
    outlines: Sequence[BucketOutline],
    goldfish: Goldfish | None,
    *,
    num_answers: Mapping[str, int],
    num_tightened: int = 0,
) -> list[AttackedBucket]:
    """Return a row for each attack and bucket with a document that was attacked.

    Args:
        windows: ``[N]`` windows of all documents.
        numbers: ``[N]``, NaN for documents that were not attacked.
        outlines: the buckets in the report's order.
        goldfish: the goldfish used in training.
        num_answers: answers per document, by attack.
        num_tightened: documents of which training dropped more labels than this goldfish does.
    """
    name_N = np.array([window.document.bucket for window in windows], dtype=object)
    size_N = np.array([window.continuation_tokens for window in windows])
    cluster_N = list_clusters([window.document for window in windows])
    attacked_N = ~np.isnan(numbers["beam_search.best"])
    rows = []
    for name in list_attacks(goldfish):
        note = ""
        if name == "fill" and goldfish is not None:
            is_blind = goldfish.config.mode == "random"
            note = UNKNOWN_MASK if is_blind else TIGHTENED_MASK if num_tightened else ""
        for outline in outlines:
            here_N = (name_N == outline.bucket) & attacked_N
            if not here_N.any():
                continue
            clusters = cluster_N[here_N]
            share = numbers[f"{name}.right"][here_N] / size_N[here_N]
            rows.append(
                AttackedBucket(
                    bucket=outline.bucket,
                    attack=name,
                    num_queries=num_answers[name],
                    best_verbatim=compute_rate(numbers[f"{name}.best"][here_N], clusters),
                    any_verbatim=compute_rate(numbers[f"{name}.any"][here_N], clusters),
                    mean_token_accuracy=compute_mean(share, bounds=(0, 1), clusters=clusters),
                    note=note,
                )
            )
    return rows


def find_extracted(numbers: ScoreMatrix) -> NDArray[np.float64]:
    """Return ``[N]`` 1 if any attack extracted a document, else 0; NaN if it was not attacked.

    Args:
        numbers: ``[N]``, NaN for documents that were not attacked.
    """
    names = [name for name in numbers.names if name.endswith(".any")]
    extracted_N: NDArray[np.float64] = np.stack([numbers[name] for name in names]).max(axis=0)
    return extracted_N


def list_attacks(goldfish: Goldfish | None) -> tuple[str, ...]:
    """Return the names of the attacks; filling needs a mask."""
    return ("beam_search", "sampling", *(() if goldfish is None else ("fill",)))
