"""Attacks on a sample of the documents as rows of numbers, and these as rows of the report.

beam_search.best   1 where the first answer was the true continuation
beam_search.any    1 where one of the answers was
beam_search.right  right tokens of the first answer
sampling., fill.   the same; fill only where a goldfish dropped labels
"""

from collections.abc import Callable, Sequence

import numpy as np

from memguard.audit.attacks import (
    TIGHTENED_MASK,
    UNKNOWN_MASK,
    AttackResult,
    attack_by_beam_search,
    attack_by_filling,
    attack_by_sampling,
)
from memguard.audit.decoding import Decoder
from memguard.audit.extraction import Window, list_clusters
from memguard.audit.numbers import Numbers
from memguard.audit.probes import AttackProbe
from memguard.audit.rounds import Progress
from memguard.audit.scoring import Scorer
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import clopper_pearson, compute_mean
from memguard.mitigation import Goldfish
from memguard.records import AttackedBucket

_OF_EACH = ("best", "any", "right")


def name_numbers(goldfish: Goldfish | None) -> tuple[str, ...]:
    """Return what `attack` measures of a document."""
    return tuple(f"{name}.{each}" for name in _list_attacks(goldfish) for each in _OF_EACH)


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
        progress: given the attack, returns who is told of the documents done and all.
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
        [number for result in results for number in _describe(result)]
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


def _describe(result: AttackResult) -> list[float]:
    return [float(result.best_verbatim), float(result.any_verbatim), float(result.num_correct)]
