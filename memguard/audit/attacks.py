"""What an attacker extracts who may submit several answers, and one who knows the mask.

    beam_search   the W most likely continuations
    sampling      N draws; the first answer is the one drawn most often
    fill          beam search that knows which labels a goldfish dropped: at those it tries many
                  tokens, and the learned tokens after them decide

    windows -> answers -> rows of numbers (`attack`) -> rows of the report (`tabulate`)

A goldfish's mask is a function of the text and of no secret: whoever knows k, h and mode can tell
for every text, and so for every guess, which tokens had no loss. A wrong guess shows in two ways:
the tokens after it are less likely, and the mask of the next h tokens changes. Mode ``hash`` looks
at the h tokens before a label, ``hash_reference`` at the h that end with it, ``static`` at its
index in the document; the mask of mode ``random`` cannot be known. This is our reading of an
adaptive attack; Hans et al. (arXiv 2406.10209) try beam search that does not know the mask.

What a guess costs (see `beams`) is set by each document's own prefix, which the attacker has, its
first tokens left out. It is between what a learned token costs and what the model's own choice
costs where nothing was learned:

    guess_cost = sqrt(mean -log p(learned token) * mean -log p(first choice at a dropped one))

Guesses that cost less than learned tokens lead the search from one guess to the next; guesses that
cost as much as not knowing lead it to any text that has few of them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memguard.audit.batching import Progress
from memguard.audit.beams import BeamRequest, IsFree, search_beams
from memguard.audit.cache import Numbers
from memguard.audit.decoding import Decoder, Request
from memguard.audit.extraction import Window, list_clusters
from memguard.audit.passages import Passage, TokenResult
from memguard.audit.probes import AttackProbe
from memguard.audit.scoring import Scorer
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import clopper_pearson, compute_mean
from memguard.mitigation import Goldfish
from memguard.mitigation.goldfish import LETTERS_PER_TOKEN
from memguard.records import AttackedBucket
from memguard.seeds import derive_generator

UNKNOWN_MASK = (
    "mode random drew the mask anew for each epoch and nobody can know it: plain beam search"
)
"""Note of a fill attack without a known mask."""
TIGHTENED_MASK = (
    "the mask known is that of the k each document began with; a risk budget lowered it for some "
    "while they were trained"
)
"""Note of a fill attack that takes some labels for learned that were not, or not for long."""

# The probabilities of a prefix's first tokens say little of what was memorised.
_SHORT_CONTEXT_TOKENS = 8
# Of a prefix that has no dropped or no learned token; and the least, below which guesses are free.
_USUAL_GUESS_COST, _LEAST_GUESS_COST = 0.1, 1e-3
_NUMBERS_OF_EACH = ("best", "any", "right")


def drops_next(
    goldfish: Goldfish,
    ids_RT: NDArray[np.integer],
    candidates_RC: NDArray[np.integer],
    first_position: int = 0,
) -> NDArray[np.bool_]:
    """Return ``[R, C]`` whether training would have dropped each candidate as the next label.

    Args:
        goldfish: that of the training, of any mode but ``random``.
        ids_RT: ``[R, T]`` tokens of R texts.
        candidates_RC: ``[R, C]`` what may come next in each.
        first_position: tokens of the document before these, which are not known. False where the
            mask depends on them.
    """
    num_rows, num_candidates = candidates_RC.shape
    # Letters are counted, and a token may have none.
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
        goldfish: that of the training, of any mode but ``random``.
        ids_RT: ``[R, T]`` tokens.
        first_position: as in `drops_next`.
    """
    config = goldfish.config
    assert config.mode != "random", "that mask cannot be known"
    # Draws nothing in these modes.
    generator = derive_generator(0, "goldfish")
    num_tokens = ids_RT.shape[1]
    if config.mode == "static":
        places = np.zeros((1, first_position + num_tokens), dtype=np.int64)
        dropped = goldfish.drop_mask(places, None, generator)[:, first_position:]
        return np.broadcast_to(dropped, ids_RT.shape)
    if first_position == 0:
        return goldfish.drop_mask(ids_RT, None, generator)
    # Any token stands for those before, so that the first that is known is not the document's.
    unknown = np.zeros((len(ids_RT), 1), dtype=ids_RT.dtype)
    dropped = goldfish.drop_mask(np.concatenate([unknown, ids_RT], axis=1), None, generator)[:, 1:]
    if goldfish.letters is not None:
        num_before_RT = np.cumsum(goldfish.letters.count(ids_RT), axis=1)
        num_before_RT = np.pad(num_before_RT, ((0, 0), (1, 0)))[:, :-1]
        return dropped & (num_before_RT >= LETTERS_PER_TOKEN * config.context_width)
    # One hashes h tokens before the label, the other h that end with it.
    width = config.context_width - (config.mode == "hash_reference")
    return dropped & (np.arange(num_tokens) >= width)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttackResult:
    """What one attack extracted of one document."""

    best_verbatim: bool
    """Whether the first answer is the true continuation."""
    any_verbatim: bool
    """Whether one of the answers is."""
    num_correct: int
    """Right tokens of the first answer, compared index by index."""


def attack_by_beam_search(
    probe: AttackProbe,
    decoder: Decoder,
    windows: Sequence[Window],
    on_progress: Progress | None = None,
) -> list[AttackResult]:
    """Submit the ``probe.width`` most likely continuations of each window.

    Raises:
        ModelError: see `Batching.run`.
    """
    return _submit_beams(probe, decoder, windows, on_progress=on_progress)


def attack_by_sampling(
    probe: AttackProbe,
    decoder: Decoder,
    windows: Sequence[Window],
    *,
    seed: int,
    on_progress: Progress | None = None,
) -> list[AttackResult]:
    """Submit ``probe.samples`` drawn continuations of each window, the most frequent one first.

    Raises:
        ModelError: see `Batching.run`.
    """
    requests = [
        Request(
            prompt_ids=_prefix(window),
            num_new=window.continuation_tokens,
            document=window.document.id,
        )
        for window in windows
    ]
    drawn = decoder.sample(requests, probe.scheme, probe.samples, seed, on_progress)
    # Counter keeps the order of the draws where several came equally often.
    answers = [
        np.array([text for text, _ in Counter(map(tuple, ids_NS.tolist())).most_common()])
        for ids_NS in drawn
    ]
    return [_judge(*pair) for pair in zip(windows, answers, strict=True)]


def attack_by_filling(
    probe: AttackProbe,
    decoder: Decoder,
    scorer: Scorer,
    windows: Sequence[Window],
    goldfish: Goldfish,
    on_progress: Progress | None = None,
) -> list[AttackResult]:
    """Submit ``probe.width`` continuations in which dropped tokens were guessed.

    Args:
        probe: width, and candidates for each guess.
        decoder: of the model.
        scorer: of the same model; scores the prefixes.
        windows: what is attacked.
        goldfish: that of the training; in mode ``random`` this is plain beam search.
        on_progress: see `batching.Progress`.

    Raises:
        ModelError: see `Batching.run`.
    """
    if goldfish.config.mode == "random":
        return _submit_beams(probe, decoder, windows, on_progress=on_progress)
    costs = _measure_guess_costs(scorer, windows, goldfish)
    return _submit_beams(
        probe, decoder, windows, goldfish=goldfish, costs=costs, on_progress=on_progress
    )


def measure_guess_cost(
    logprob_T: NDArray[np.floating],
    best_logprob_T: NDArray[np.floating],
    dropped_T: NDArray[np.bool_],
) -> float:
    """Return what a guess should cost (nats), from tokens of a prefix that receive loss.

    Args:
        logprob_T: log-probability of each token.
        best_logprob_T: of the model's first choice in its place.
        dropped_T: which of them the mask dropped.
    """
    if dropped_T.all() or not dropped_T.any():
        return _USUAL_GUESS_COST
    learned = -float(logprob_T[~dropped_T].mean(dtype=np.float64))
    unlearned = -float(best_logprob_T[dropped_T].mean(dtype=np.float64))
    # A sum of rounded probabilities may exceed one.
    return max(float(np.sqrt(max(learned, 0) * max(unlearned, 0))), _LEAST_GUESS_COST)


def _measure_guess_costs(
    scorer: Scorer, windows: Sequence[Window], goldfish: Goldfish
) -> list[float]:
    """Return one cost for each window, measured where the prefix is long enough."""
    asked = [i for i, window in enumerate(windows) if window.prefix_tokens > _SHORT_CONTEXT_TOKENS]
    passages = [
        Passage(
            input_ids=_prefix(windows[index]),
            first_label=_SHORT_CONTEXT_TOKENS,
            first_choice=_SHORT_CONTEXT_TOKENS,
        )
        for index in asked
    ]
    costs = [_USUAL_GUESS_COST] * len(windows)
    for index, result in zip(asked, scorer.score(passages), strict=True):
        costs[index] = _read_guess_cost(windows[index], result, goldfish)
    return costs


def _read_guess_cost(window: Window, result: TokenResult, goldfish: Goldfish) -> float:
    places = slice(window.start + _SHORT_CONTEXT_TOKENS, window.start + window.prefix_tokens)
    supervised_T = window.document.supervised[places]
    known = goldfish.at_dose(window.document.dose)
    dropped_T = find_dropped(known, _prefix(window)[None], _first_position(window))[0]
    # The margin is to the best other token, or, where the label is the best, above 0.
    best_logprob_T = result.logprob - np.minimum(result.margin, 0)
    return measure_guess_cost(
        result.logprob[supervised_T],
        best_logprob_T[supervised_T],
        dropped_T[_SHORT_CONTEXT_TOKENS:][supervised_T],
    )


def _submit_beams(
    probe: AttackProbe,
    decoder: Decoder,
    windows: Sequence[Window],
    *,
    goldfish: Goldfish | None = None,
    costs: Sequence[float] = (),
    on_progress: Progress | None = None,
) -> list[AttackResult]:
    requests = [
        BeamRequest(
            prompt_ids=_prefix(window),
            num_new=window.continuation_tokens,
            is_free=None if goldfish is None else _know_mask(goldfish, window),
            guess_cost=costs[index] if costs else 0.0,
        )
        for index, window in enumerate(windows)
    ]
    candidates = None if goldfish is None else probe.candidates
    found = search_beams(
        decoder, requests, probe.width, candidates=candidates, on_progress=on_progress
    )
    return [_judge(window, beams.ids_WS) for window, beams in zip(windows, found, strict=True)]


def _know_mask(goldfish: Goldfish, window: Window) -> IsFree:
    known, first = goldfish.at_dose(window.document.dose), _first_position(window)
    return lambda ids_RT, candidates_RC: drops_next(known, ids_RT, candidates_RC, first)


def _judge(window: Window, answers_WS: NDArray[np.integer]) -> AttackResult:
    right_WS = answers_WS == window.continuation_ids
    return AttackResult(
        best_verbatim=bool(right_WS[0].all()),
        any_verbatim=bool(right_WS.all(axis=1).any()),
        num_correct=int(right_WS[0].sum()),
    )


def _prefix(window: Window) -> NDArray[np.int32]:
    return window.input_ids[: window.prefix_tokens]


def _first_position(window: Window) -> int:
    """Return how many tokens of the document come before the window."""
    return window.document.first_position + window.start


def name_numbers(goldfish: Goldfish | None) -> tuple[str, ...]:
    """Return the names of what `attack` measures of a document, e.g. ``beam_search.best``.

    ``best`` and ``any`` are 1 where the first answer, or one of the answers, was the true
    continuation; ``right`` counts right tokens of the first; ``fill`` needs a mask.
    """
    return tuple(f"{name}.{each}" for name in _list_attacks(goldfish) for each in _NUMBERS_OF_EACH)


def attack(
    probe: AttackProbe,
    decoder: Decoder,
    scorer: Scorer,
    windows: Sequence[Window],
    goldfish: Goldfish | None,
    *,
    seed: int,
    progress: Callable[[str], Progress | None],
) -> list[list[float]]:
    """Return the numbers of each document, in the order of `name_numbers`.

    Args:
        probe: settings.
        decoder: of the model.
        scorer: of the same model.
        windows: what is attacked.
        goldfish: that of the training; None where it dropped no labels, and there is no mask.
        seed: owns what is drawn.
        progress: given the attack, returns the callback for the documents done and all.
    """
    found = [
        attack_by_beam_search(probe, decoder, windows, progress("beam search")),
        attack_by_sampling(probe, decoder, windows, seed=seed, on_progress=progress("sampling")),
    ]
    if goldfish is not None:
        found.append(
            attack_by_filling(
                probe, decoder, scorer, windows, goldfish, progress("filling what was dropped")
            )
        )
    return [
        [
            float(number)
            for result in results
            for number in (result.best_verbatim, result.any_verbatim, result.num_correct)
        ]
        for results in zip(*found, strict=True)
    ]


def tabulate(
    probe: AttackProbe,
    windows: Sequence[Window],
    numbers: Numbers,
    outlines: Sequence[BucketOutline],
    goldfish: Goldfish | None,
    *,
    num_tightened: int = 0,
) -> list[AttackedBucket]:
    """Return a row for each attack and bucket with a document that was attacked.

    Args:
        probe: settings.
        windows: ``[N]`` all documents.
        numbers: ``[N]``, NaN where one was not attacked.
        outlines: the buckets in the report's order.
        goldfish: that of the training.
        num_tightened: documents of which more labels were dropped than it says.
    """
    name_N = np.array([window.document.bucket for window in windows], dtype=object)
    size_N = np.array([window.continuation_tokens for window in windows])
    cluster_N = list_clusters([window.document for window in windows])
    attacked_N = ~np.isnan(numbers["beam_search.best"])
    rows = []
    for name in _list_attacks(goldfish):
        note = ""
        if name == "fill" and goldfish is not None:
            is_blind = goldfish.config.mode == "random"
            note = UNKNOWN_MASK if is_blind else TIGHTENED_MASK if num_tightened else ""
        for outline in outlines:
            here_N = (name_N == outline.bucket) & attacked_N
            count = int(here_N.sum())
            if not count:
                continue
            share = numbers[f"{name}.right"][here_N] / size_N[here_N]
            rows.append(
                AttackedBucket(
                    bucket=outline.bucket,
                    attack=name,
                    num_queries=probe.samples if name == "sampling" else probe.width,
                    best_verbatim=clopper_pearson(
                        int(numbers[f"{name}.best"][here_N].sum()), count
                    ),
                    any_verbatim=clopper_pearson(int(numbers[f"{name}.any"][here_N].sum()), count),
                    mean_token_accuracy=compute_mean(
                        share, bounds=(0, 1), clusters=cluster_N[here_N]
                    ),
                    note=note,
                )
            )
    return rows


def _list_attacks(goldfish: Goldfish | None) -> tuple[str, ...]:
    return ("beam_search", "sampling", *(() if goldfish is None else ("fill",)))
