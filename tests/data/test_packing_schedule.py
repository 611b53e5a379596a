"""Which row is trained when: counts exact, evenly spread, decided by the seed alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from record_examples import make_entry

from memguard.data.packing import Rows, interleave, plan_rows, spread
from memguard.errors import ConfigError
from memguard.records import ManifestEntry, Role


def entry(index: int, role: Role, repetitions: int, num_tokens: int = 20) -> ManifestEntry:
    return make_entry(
        str(index), role=role, planned_repetitions=repetitions, num_tokens=num_tokens, cluster=index
    )


@given(
    repetitions=st.lists(st.integers(1, 20), min_size=1, max_size=40), seed=st.integers(0, 2**40)
)
def test_each_row_comes_exactly_as_often_as_asked(repetitions: list[int], seed: int) -> None:
    order = spread(np.array(repetitions), seed=seed)
    assert np.bincount(order, minlength=len(repetitions)).tolist() == repetitions
    np.testing.assert_array_equal(order, spread(np.array(repetitions), seed=seed))


@given(num_rows=st.integers(1, 50), epochs=st.integers(1, 6), seed=st.integers(0, 99))
def test_with_equal_repetitions_every_epoch_is_a_shuffle_of_all_rows(
    num_rows: int, epochs: int, seed: int
) -> None:
    order = spread(np.full(num_rows, epochs), seed=seed).reshape(epochs, num_rows)
    for epoch in order:
        assert sorted(epoch.tolist()) == list(range(num_rows))


def test_epochs_are_shuffled_differently_and_seeds_differ() -> None:
    first, second = spread(np.full(40, 2), seed=0).reshape(2, 40)
    assert (first != second).any()
    assert (spread(np.full(40, 2), seed=1)[:40] != first).any()


@pytest.mark.parametrize("seed", range(3))
def test_a_row_has_one_occurrence_in_each_nth_of_the_run(seed: int) -> None:
    repetitions = np.repeat([4, 16, 64], 30)
    order = spread(repetitions, seed=seed)
    for quarter in order.reshape(4, -1):
        # 4 divides all three, so quarters are exact for every row.
        np.testing.assert_array_equal(np.bincount(quarter, minlength=90), repetitions // 4)
    for row, count in enumerate(repetitions):
        place = np.flatnonzero(order == row) / len(order) * count
        # Parts are exact on a clock; on it rarer rows fall at random, so that a place in the order
        # is off by their binomial scatter: 0.1 of the shortest part here, five times that allowed.
        assert (np.abs(place - np.arange(count) - 0.5) < 0.5 + 0.5).all()


@given(
    one=st.integers(0, 200), other=st.integers(0, 200), stretch=st.integers(1, 50), data=st.data()
)
def test_every_stretch_holds_both_in_their_overall_proportion(
    one: int, other: int, stretch: int, data: st.DataObject
) -> None:
    merged = interleave(np.zeros(one, dtype=np.int64), np.ones(other, dtype=np.int64))
    assert len(merged) == one + other
    assert merged.sum() == other
    if len(merged) < stretch:
        return
    begin = data.draw(st.integers(0, len(merged) - stretch))
    share = merged[begin : begin + stretch].sum()
    assert abs(share - stretch * other / len(merged)) < 2


@given(
    one=st.lists(st.integers(0, 99), max_size=50),
    other=st.lists(st.integers(100, 199), max_size=50),
)
def test_interleaving_keeps_both_orders(one: list[int], other: list[int]) -> None:
    merged = interleave(np.array(one, dtype=np.int64), np.array(other, dtype=np.int64)).tolist()
    assert [x for x in merged if x < 100] == one
    assert [x for x in merged if x >= 100] == other


def test_a_single_row_stands_in_the_middle_of_the_others() -> None:
    assert interleave(np.arange(8), np.array([100])).tolist().index(100) == 4


def study_manifest() -> list[ManifestEntry]:
    entries = [
        entry(100 * dose + n, "trained" if dose else "control", dose, num_tokens=10 + n % 23)
        for dose in (0, 4, 16, 64)
        for n in range(20)
    ]
    entries += [entry(9000 + n, "background", 0, num_tokens=5 + n % 50) for n in range(70)]
    entries += [entry(9900 + n, "heldout", 0) for n in range(5)]
    return entries


def counts_of_documents(
    rows: Rows, schedule: NDArray[np.int64], manifest: list[ManifestEntry]
) -> list[set[int]]:
    """How often each document's pieces come, one set a document."""
    times = np.bincount(schedule, minlength=len(rows))
    counts: list[set[int]] = [set() for _ in manifest]
    for row in range(len(rows)):
        for piece in range(rows.row_start[row], rows.row_start[row + 1]):
            counts[rows.document[piece]].add(int(times[row]))
    return counts


@pytest.mark.parametrize("share_rows", [True, False])
def test_every_document_comes_as_often_as_planned(share_rows: bool) -> None:
    manifest = study_manifest()
    rows, schedule = plan_rows(
        manifest, seq_len=16, background_ratio=1, seed=3, share_rows=share_rows
    )
    counts = counts_of_documents(rows, schedule, manifest)
    for document, count in zip(manifest, counts, strict=True):
        if document.role == "trained":
            assert count == {document.planned_repetitions}
        elif document.role != "background":
            assert count == set(), "control and held-out documents must not be in any row"
    # Whole passes over the background and one begun: all its rows differ by one at most.
    background = [c for d, c in zip(manifest, counts, strict=True) if d.role == "background"]
    passes = set().union(*background)
    assert max(passes) - min(passes) <= 1


def test_rows_hold_documents_of_one_dose_only() -> None:
    manifest = study_manifest()
    rows, _ = plan_rows(manifest, seq_len=64, background_ratio=1, seed=0)
    for row in range(len(rows)):
        documents = rows.document[rows.row_start[row] : rows.row_start[row + 1]]
        assert len({(manifest[d].role, manifest[d].planned_repetitions) for d in documents}) == 1


def is_background(
    rows: Rows, schedule: NDArray[np.int64], manifest: list[ManifestEntry]
) -> NDArray[np.bool_]:
    first_document = rows.document[rows.row_start[:-1]]
    return np.array([manifest[d].role == "background" for d in first_document])[schedule]


def test_a_step_of_sixteen_rows_has_eight_background_rows() -> None:
    manifest = study_manifest()
    rows, schedule = plan_rows(manifest, seq_len=16, background_ratio=1, seed=3)
    background = is_background(rows, schedule, manifest)
    whole = len(schedule) // 16 * 16
    assert (background[:whole].reshape(-1, 16).sum(1) == 8).all()
    assert background.sum() == len(schedule) / 2


def test_each_pass_over_the_background_has_an_order_of_its_own() -> None:
    manifest = study_manifest()
    rows, schedule = plan_rows(manifest, seq_len=64, background_ratio=1, seed=3)
    beside = schedule[is_background(rows, schedule, manifest)]
    size = len(set(beside.tolist()))
    first, second = beside[: 2 * size].reshape(2, size)
    assert sorted(first) == sorted(second)
    assert (first != second).any()


@pytest.mark.parametrize("ratio", [0.25, 0.5, 3.0])
def test_other_ratios_are_kept_in_every_step(ratio: float) -> None:
    manifest = study_manifest()
    rows, schedule = plan_rows(manifest, seq_len=16, background_ratio=ratio, seed=3)
    background = is_background(rows, schedule, manifest)
    assert background.sum() == round(ratio * (~background).sum())
    whole = len(schedule) // 16 * 16
    share = background[:whole].reshape(-1, 16).sum(1)
    # Sixteen rows cannot always be split exactly.
    assert (np.abs(share - 16 * ratio / (1 + ratio)) < 2).all()


def test_the_plan_is_a_pure_function_of_the_seed() -> None:
    manifest = study_manifest()
    plans = [plan_rows(manifest, seq_len=16, background_ratio=1, seed=seed) for seed in (5, 5, 6)]
    np.testing.assert_array_equal(plans[0][1], plans[1][1])
    np.testing.assert_array_equal(plans[0][0].document, plans[1][0].document)
    assert (plans[0][0].document != plans[2][0].document).any()


def test_without_background_only_trained_documents_are_scheduled() -> None:
    manifest = [entry(n, "trained", 2) for n in range(6)] + [entry(6, "control", 0)]
    rows, schedule = plan_rows(manifest, seq_len=40, background_ratio=1, seed=0)
    assert len(rows) == 3
    assert np.bincount(schedule).tolist() == [2, 2, 2]


def test_a_schedule_that_would_take_all_memory_is_refused() -> None:
    manifest = [entry(n, "trained", 10**6, num_tokens=64) for n in range(51)]
    with pytest.raises(ConfigError, match=r"would feed 51,000,000 rows, .* lower 'train\.epochs'"):
        plan_rows(manifest, seq_len=64, background_ratio=1, seed=0)
    manifest = [entry(0, "trained", 10**6, num_tokens=64), entry(1, "background", 0)]
    with pytest.raises(ConfigError, match=r"would feed 101,000,000 rows"):
        plan_rows(manifest, seq_len=64, background_ratio=100, seed=0)


@pytest.mark.parametrize("share_rows", [True, False])
def test_canaries_come_as_often_as_planned_and_references_never(share_rows: bool) -> None:
    for dose in (4, 5):  # of a bucket, and of their own
        canaries = [
            entry(8000 + n, "canary", dose if n % 3 else 0, num_tokens=9) for n in range(12)
        ]
        manifest = [*study_manifest(), *canaries]
        rows, schedule = plan_rows(
            manifest, seq_len=64, background_ratio=1, seed=3, share_rows=share_rows
        )
        counts = counts_of_documents(rows, schedule, manifest)
        for document, count in zip(manifest, counts, strict=True):
            if document.role in ("canary", "trained"):
                planned = document.planned_repetitions
                assert count == ({planned} if planned else set())
        # Background stands beside them as beside all others.
        assert is_background(rows, schedule, manifest).sum() == len(schedule) / 2


def test_canaries_fill_what_documents_of_their_dose_leave() -> None:
    manifest = [entry(n, "trained", 4, num_tokens=50) for n in range(10)]
    canaries = [entry(100 + n, "canary", 4, num_tokens=12) for n in range(9)]
    alone, together = (
        plan_rows(documents, seq_len=64, background_ratio=1, seed=0)
        for documents in (manifest, [*manifest, *canaries])
    )
    assert len(alone[0]) == len(together[0]) == 10
    assert len(alone[1]) == len(together[1]) == 40
