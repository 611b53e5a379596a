"""Assigns documents to buckets and repetitions, by clusters of near-duplicates.

The control is a valid baseline only if no copy of it was trained, so whole clusters are held out
instead of single documents. The cluster of a document to be forgotten is excluded from training,
since a copy would teach the document again. A study uses only one document of each cluster, since a
second copy in another bucket would change the number of repetitions of both. Canaries are not
clustered; a coin decides whether each is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memguard.config import DataConfig
from memguard.errors import DataError
from memguard.records import Role
from memguard.seeds import derive_generator

_CONTROL_GOAL, _CONTROL_LIMIT = 200, 0.1
_SMALL_CONTROL_GOAL, _SMALL_CONTROL_PARTS = 30, 5
"""A control below 30 documents takes up to a fifth of the documents instead of a tenth."""
_LEFT_OUT = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Bucket, role and planned repetitions of one document."""

    bucket: str
    role: Role
    repetitions: int
    """Planned number; 0 for background documents, whose number follows from the schedule."""


def place_for_training(
    *,
    data: DataConfig,
    origin: Sequence[str],
    cluster: NDArray[np.int64],
    auditable: NDArray[np.bool_],
    epochs: int,
    seed: int,
    min_documents: int,
) -> list[Placement | None]:
    """Place the documents of a fine-tune: all are trained except control and held-out ones.

    ``origin`` is the setting each document came from: train, control, heldout or forget;
    ``cluster [num_documents]`` are near-duplicates; ``auditable [num_documents]`` documents count
    for the control: they are long enough. No control is drawn if fewer than ``min_documents``
    auditable trained documents would remain.

    Returns:
        One placement per document; None for one in a cluster with one to be forgotten, and for a
        held-out one in a cluster with a trained one.

    Raises:
        DataError: no document is left to train on.
    """
    role = np.array(origin, dtype=object)
    forgotten = cluster[role == "forget"]
    role[(role == "train") & np.isin(cluster, forgotten)] = _LEFT_OUT
    is_train = role == "train"
    if forgotten.size and not is_train.any():
        raise DataError(
            "every document of 'data.train' is also in 'data.forget', or is a near-duplicate of "
            "one there: add documents that the model must retain"
        )
    if data.heldout_documents:
        goal = data.heldout_documents
        role[_choose_clusters(role, "heldout", goal, goal, cluster, is_train, seed)] = "heldout"
    if draws_control(data):
        pool = role == "train"
        counted = pool & auditable
        goal = size_control(int(counted.sum()), data.control_fraction)
        limit = size_control(int(pool.sum()), _CONTROL_LIMIT)
        control = _choose_clusters(role, "control", goal, limit, cluster, counted, seed)
        if (counted & ~control).sum() >= min_documents:
            role[control] = "control"
    trained_clusters = set(cluster[role == "train"].tolist())
    if not trained_clusters:
        raise DataError(
            f"'data.heldout_documents' must be below the {int(is_train.sum())} documents of "
            f"'data.train'; got {data.heldout_documents}, which leaves none to train on"
        )
    trained = Placement(bucket="trained", role="trained", repetitions=epochs)
    placed: dict[str, Placement | None] = {
        "train": trained,
        "control": Placement(bucket="control", role="control", repetitions=0),
        "heldout": Placement(bucket="heldout", role="heldout", repetitions=0),
        "forget": Placement(
            bucket="forget", role="forget", repetitions=data.forget_repetitions or epochs
        ),
        _LEFT_OUT: None,
    }
    fed_clusters = trained_clusters | set(forgotten.tolist())
    return [
        None if name == "heldout" and int(number) in fed_clusters else placed[name]
        for name, number in zip(role, cluster, strict=True)
    ]


def draws_control(data: DataConfig) -> bool:
    """Return whether a control is drawn from the documents of a fine-tune."""
    return data.study is None and not data.control and data.control_fraction > 0


def size_control(num_documents: int, fraction: float) -> int:
    """Return how many of a fine-tune's auditable documents are held out as control.

    This is ``fraction`` (above 0), raised towards 200 documents but not above a tenth; of small
    sets a fifth, up to 30 documents. 30 documents of which none is extracted bound the rate by 11.6
    %.
    """
    raised = min(max(fraction * num_documents, _CONTROL_GOAL), _CONTROL_LIMIT * num_documents)
    return max(int(raised), min(_SMALL_CONTROL_GOAL, num_documents // _SMALL_CONTROL_PARTS))


def _choose_clusters(
    role: NDArray[np.object_],
    name: str,
    goal: int,
    limit: int,
    cluster: NDArray[np.int64],
    counted: NDArray[np.bool_],
    seed: int,
) -> NDArray[np.bool_]:
    """Return the documents of whole clusters that hold out at most ``goal`` counted documents.

    A cluster larger than the remaining number is skipped, so that one large cluster of copies does
    not become the whole control. At most ``limit`` documents are held out, counted or not.
    """
    is_train = role == "train"
    num_numbers = int(cluster.max(initial=-1)) + 1
    num_counted = np.bincount(cluster[counted], minlength=num_numbers)
    num_all = np.bincount(cluster[is_train], minlength=num_numbers)
    held = []
    for number in derive_generator(seed, name).permutation(np.unique(cluster[counted])):
        if num_counted[number] <= goal and num_all[number] <= limit:
            held.append(number)
            goal -= int(num_counted[number])
            limit -= int(num_all[number])
    return np.asarray(is_train & np.isin(cluster, held), dtype=bool)


def place_for_study(
    *,
    data: DataConfig,
    origin: Sequence[str],
    cluster: NDArray[np.int64],
    auditable: NDArray[np.bool_],
    seed: int,
) -> list[Placement | None]:
    """Place the documents of a controlled experiment: buckets of equal size, one per repetitions.

    See `place_for_training` for the arguments; only auditable documents are put into buckets.

    Returns:
        One placement per document; None if it is left out (a near-duplicate of a document in a
        bucket or of a held-out one, or not needed).

    Raises:
        DataError: fewer clusters than the buckets need.
    """
    study = data.study
    assert study is not None, "called for studies only"
    is_train = np.array([name == "train" for name in origin])
    draw = derive_generator(seed, "buckets")
    # One document of each cluster; clusters are in random order.
    candidates = draw.permutation(np.flatnonzero(is_train & auditable))
    _, first = np.unique(cluster[candidates], return_index=True)
    # Shuffled again: large clusters appear early and would otherwise fill the first buckets.
    candidates = draw.permutation(candidates[first])

    num_buckets = len(study.num_repetitions)
    per_bucket = study.documents_per_bucket
    if per_bucket is None:
        per_bucket = (len(candidates) - data.heldout_documents) // num_buckets
    needed = max(per_bucket, 1) * num_buckets + data.heldout_documents
    if needed > len(candidates):
        raise DataError(
            f"'data.study' needs {needed} documents that are long enough and no near-duplicates of "
            f"each other; 'data.train' has {len(candidates)}. Lower "
            "'data.study.documents_per_bucket'."
        )
    placements: list[Placement | None] = [None] * len(origin)
    taken = 0
    for repetitions in study.num_repetitions:
        role: Role = "trained" if repetitions else "control"
        name = f"x{repetitions}" if repetitions else "control"
        for document in candidates[taken : taken + per_bucket]:
            placements[document] = Placement(bucket=name, role=role, repetitions=repetitions)
        taken += per_bucket
    heldout = Placement(bucket="heldout", role="heldout", repetitions=0)
    for document in candidates[taken : taken + data.heldout_documents]:
        placements[document] = heldout
    used = {int(cluster[d]) for d, placement in enumerate(placements) if placement is not None}

    background = Placement(bucket="background", role="background", repetitions=0)
    takes_remainder = "remainder" in data.background
    for document, name in enumerate(origin):
        if placements[document] is not None or int(cluster[document]) in used:
            continue
        if name == "background" or (name == "train" and takes_remainder):
            placements[document] = background
    seen = used | {int(cluster[d]) for d, p in enumerate(placements) if p is background}
    for document, name in enumerate(origin):
        if name == "heldout" and int(cluster[document]) not in seen:
            placements[document] = heldout
    return placements


def place_canaries(is_in: Sequence[bool], *, repetitions: int) -> list[Placement]:
    """Place canaries according to their coins; a trained one is repeated so often."""
    trained = Placement(bucket="canary-in", role="canary", repetitions=repetitions)
    never = Placement(bucket="canary-out", role="canary", repetitions=0)
    return [trained if is_trained else never for is_trained in is_in]
