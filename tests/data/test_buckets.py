"""Who is trained how often: zeros stay zeros, also for copies."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.config import DataConfig, StudyConfig
from memguard.data.buckets import Placement, place_canaries, place_for_study, place_for_training
from memguard.errors import DataError


def place(
    cluster: Sequence[int],
    *,
    origin: Sequence[str] | None = None,
    auditable: Any = None,
    seed: int = 0,
    **settings: Any,
) -> list[Placement | None]:
    """Place documents with the settings that differ from the defaults."""
    study = settings.pop("study", None)
    min_documents = settings.pop("min_documents", 5)
    size = len(cluster)
    data = DataConfig(
        train=("x",), study=None if study is None else StudyConfig(**study), **settings
    )
    common: dict[str, Any] = {
        "data": data,
        "origin": ["train"] * size if origin is None else origin,
        "cluster": np.asarray(cluster, dtype=np.int64),
        "auditable": np.ones(size, bool) if auditable is None else np.asarray(auditable),
        "seed": seed,
    }
    if study is not None:
        return place_for_study(**common)
    return place_for_training(**common, epochs=3, min_documents=min_documents)


def roles(placements: Sequence[Placement | None]) -> list[str | None]:
    return [None if placement is None else placement.role for placement in placements]


corpora = st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=120)
"""(cluster, auditable) of each document."""


@given(corpus=corpora, heldout=st.integers(0, 20), seed=st.integers(0, 99))
def test_what_is_held_back_shares_no_cluster_with_what_is_trained(
    corpus: list[tuple[int, bool]], heldout: int, seed: int
) -> None:
    cluster, auditable = zip(*corpus, strict=True)
    arguments: dict[str, Any] = {"auditable": auditable, "heldout_documents": heldout, "seed": seed}
    try:
        placed = place(cluster, **arguments)
    except DataError:
        # Only where every cluster fits into the held-out documents.
        assert heldout >= len(corpus), "some document is left to train on"
        return
    by_cluster = defaultdict(set)
    for number, role in zip(cluster, roles(placed), strict=True):
        by_cluster[number].add(role)
    assert all(len(found) == 1 for found in by_cluster.values())
    count = Counter(roles(placed))
    assert count["heldout"] <= heldout
    assert count["control"] <= 0.2 * (len(corpus) - count["heldout"])
    num_left = sum(
        is_auditable and role == "trained"
        for is_auditable, role in zip(auditable, roles(placed), strict=True)
    )
    assert not count["control"] or num_left >= 5
    assert count["trained"] >= 1
    assert placed == place(cluster, **arguments)


@pytest.mark.parametrize(
    ("num_documents", "fraction", "num_control"),
    [
        (5, 0.02, 0),  # a fifth of 5 would leave 4 to train
        (6, 0.02, 1),
        (10, 0.02, 2),
        (20, 0.02, 4),
        (30, 0.02, 6),
        (60, 0.02, 12),
        (100, 0.02, 20),
        (149, 0.02, 29),
        (150, 0.02, 30),
        (200, 0.02, 30),
        (300, 0.02, 30),
        (400, 0.02, 40),  # raised towards 200, stopped by a tenth
        (2_000, 0.02, 200),
        (9_000, 0.02, 200),
        (20_000, 0.02, 400),  # the fraction itself
        (20_000, 0.1, 2_000),
        (20_000, 0.0, 0),
        (60, 0.0, 0),
    ],
)
def test_the_size_of_the_control(num_documents: int, fraction: float, num_control: int) -> None:
    placed = place(range(num_documents), control_fraction=fraction)
    assert Counter(roles(placed))["control"] == num_control
    assert all(
        placement is not None and placement.repetitions == (0 if placement.role == "control" else 3)
        for placement in placed
    )


def test_documents_too_short_to_audit_do_not_count_for_the_control() -> None:
    auditable = np.arange(1000) % 2 == 0
    placed = place(range(1000), auditable=auditable)
    control = np.array(roles(placed)) == "control"
    assert control.sum() == 50
    assert auditable[control].all()


@pytest.mark.parametrize(("min_documents", "num_control"), [(0, 2), (8, 2), (9, 0)])
def test_the_documents_that_an_audit_needs_stay_in_training(
    min_documents: int, num_control: int
) -> None:
    placed = place(range(10), min_documents=min_documents)
    assert Counter(roles(placed))["control"] == num_control


def test_a_family_of_copies_is_no_control() -> None:
    # 20 clusters of one and one of 180: a tenth would be 20 documents, all of them single.
    cluster = [*range(20), *[20] * 180]
    for seed in range(10):
        control = np.array(roles(place(cluster, seed=seed))) == "control"
        assert control[:20].all()
        assert not control[20:].any()


def test_copies_too_short_to_audit_count_towards_the_limit() -> None:
    # One of ten auditable documents has 500 near-duplicates that are too short: holding it back
    # would take nearly everything out of training.
    cluster = [*range(10), *[0] * 500]
    auditable = [True] * 10 + [False] * 500
    for seed in range(20):
        assert Counter(roles(place(cluster, auditable=auditable, seed=seed)))["control"] <= 51


def test_which_documents_are_held_back_depends_on_the_seed_only() -> None:
    one, again, other = (roles(place(range(200), seed=seed)) for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_the_users_own_control_is_taken_as_it_is() -> None:
    origin = ["train"] * 100 + ["control"] * 5
    placed = place([0] * 105, origin=origin, control=("c",))
    assert roles(placed) == ["trained"] * 100 + ["control"] * 5


def test_heldout_documents_of_ones_own_that_were_trained_are_left_out() -> None:
    origin = ["train"] * 3 + ["heldout"] * 2
    placed = place([0, 1, 2, 2, 3], origin=origin, heldout=("h",))
    assert roles(placed) == ["trained"] * 3 + [None, "heldout"]


def test_heldout_documents_are_apart_from_the_control() -> None:
    placed = place(range(300), heldout_documents=50)
    assert Counter(roles(placed)) == {"heldout": 50, "control": 30, "trained": 220}


def test_holding_everything_out_is_an_error() -> None:
    with pytest.raises(DataError, match=r"'data.heldout_documents' must be below the 10 documents"):
        place(range(10), heldout_documents=50)


@given(
    corpus=corpora,
    doses=st.sampled_from([(0, 1), (0, 4, 16), (2,), (0, 1, 2, 3)]),
    heldout=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_a_study_has_equal_buckets_of_disjoint_clusters(
    corpus: list[tuple[int, bool]], doses: tuple[int, ...], heldout: int, seed: int
) -> None:
    cluster, auditable = zip(*corpus, strict=True)
    num_clusters = len({number for number, usable in corpus if usable})
    arguments: dict[str, Any] = {
        "auditable": auditable,
        "seed": seed,
        "study": {"num_repetitions": doses},
        "background": ("remainder",),
        "heldout_documents": heldout,
    }
    per_bucket = (num_clusters - heldout) // len(doses)
    if per_bucket < 1:
        with pytest.raises(DataError, match=rf"{len(doses) + heldout} documents.*{num_clusters}"):
            place(cluster, **arguments)
        return
    placed = place(cluster, **arguments)
    assert placed == place(cluster, **arguments)
    count = Counter(placement.bucket for placement in placed if placement is not None)
    names = ["control" if dose == 0 else f"x{dose}" for dose in doses]
    assert [count[name] for name in names] == [per_bucket] * len(doses)
    assert count["heldout"] == heldout
    owners = defaultdict(list)
    for number, usable, placement in zip(cluster, auditable, placed, strict=True):
        if placement is None:
            continue
        owners[number].append(placement.bucket)
        if placement.bucket != "background":
            assert usable, "too short to audit"
            dose = 0 if placement.bucket in ("control", "heldout") else int(placement.bucket[1:])
            assert placement.repetitions == dose
    for buckets in owners.values():
        assert buckets == ["background"] * len(buckets) or len(buckets) == 1
    # The remainder is every cluster of which nothing was drawn, whole.
    assert count["background"] == sum(
        number not in owners or owners[number][0] == "background" for number in cluster
    )


def test_documents_per_bucket_and_the_error_when_there_are_too_few() -> None:
    study = {"num_repetitions": (0, 4, 16, 64), "documents_per_bucket": 5}
    count = Counter(p.bucket for p in place(range(30), study=study, heldout_documents=3) if p)
    assert count == {"control": 5, "x4": 5, "x16": 5, "x64": 5, "heldout": 3}
    with pytest.raises(DataError, match=r"needs 23 documents .* 'data.train' has 22"):
        place(range(22), study=study, heldout_documents=3)
    with pytest.raises(DataError, match=r"needs 54 documents .* 'data.train' has 10"):
        place(range(10), study={"num_repetitions": (0, 1, 2, 3)}, heldout_documents=50)


def test_background_of_its_own_leaves_out_copies_of_bucket_documents() -> None:
    origin = ["train"] * 8 + ["background"] * 4 + ["heldout"] * 3
    cluster = [0, 1, 2, 3, 4, 5, 6, 7, 0, 50, 50, 51, 1, 50, 60]
    placed = place(
        cluster, origin=origin, study={"num_repetitions": (0, 1)}, background=("b",), heldout=("h",)
    )
    # 8 is a copy of a bucket's document, 12 too, 13 one of a background document.
    assert roles(placed)[8:] == [None, *["background"] * 3, None, None, "heldout"]


def test_what_no_bucket_needs_is_left_out_without_the_remainder() -> None:
    study = {"num_repetitions": (0, 1), "documents_per_bucket": 2}
    assert Counter(roles(place(range(10), study=study)))[None] == 6


def test_large_clusters_are_as_likely_in_every_bucket() -> None:
    # 50 single documents and 50 clusters of twenty: a draw over documents, or by first appearance,
    # would put nearly all of the large ones into the first bucket.
    cluster = [*range(50), *(50 + np.arange(1000) % 50)]
    large = Counter[str]()
    for seed in range(20):
        for number, placement in zip(
            cluster, place(cluster, study={"num_repetitions": (0, 1)}, seed=seed), strict=True
        ):
            if placement is not None and number >= 50:
                large[placement.bucket] += 1
    # 1000 large ones over 20 seeds; 500 in each bucket, hypergeometric standard deviation 11.
    assert abs(large["control"] - 500) < 5 * 12


@pytest.mark.parametrize("repetitions", [1, 4, 16, 1000])
def test_canaries_go_where_their_coins_fell(repetitions: int) -> None:
    placed = place_canaries([True, False, True], repetitions=repetitions)
    assert [(p.bucket, p.repetitions) for p in placed] == [
        ("canary-in", repetitions),
        ("canary-out", 0),
        ("canary-in", repetitions),
    ]
    assert {p.role for p in placed} == {"canary"}


def test_what_is_to_be_forgotten_takes_its_cluster_out_of_training() -> None:
    # Clusters 0 to 199 are trained; 10 documents to forget are alone, 10 have copies there.
    cluster = [*range(200), *range(195, 205), *range(300, 310), 195, 400]
    origin = ["train"] * 200 + ["forget"] * 20 + ["heldout"] * 2
    placed = place(cluster, origin=origin, forget_repetitions=5)
    assert Counter(roles(placed)) == {
        "trained": 165,
        "control": 30,
        "forget": 20,
        "heldout": 1,
        None: 6,
    }
    assert roles(placed)[195:200] == [None] * 5
    assert _doses(placed) == {("forget", 5)}
    # As often as what is trained, where nothing is said.
    assert _doses(place(cluster, origin=origin)) == {("forget", 3)}


def _doses(placements: Sequence[Placement | None]) -> set[tuple[str, int]]:
    return {(p.bucket, p.repetitions) for p in placements if p is not None and p.role == "forget"}


def test_a_forget_list_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(DataError, match=r"is also in 'data\.forget', or is a near-duplicate"):
        place([0, 1, 1, 0], origin=["train", "train", "forget", "forget"])
