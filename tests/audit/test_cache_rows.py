"""Numbers of documents: asked once each, kept shard by shard, the same on all ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import RankPool

from memguard.audit import cache as cache_module
from memguard.audit.cache import CacheSlot, RecordCache, ScoreMatrix, collect_scores, compute_key
from memguard.runtime import Runtime, start_runtime

NAMES = ("square", "missing")


class Measure:
    """Squares of the documents' numbers; may fail after so many calls."""

    def __init__(self, values: Sequence[int], fails_at_call: int | None = None) -> None:
        self.values, self.fails_at_call = values, fails_at_call
        self.requested: list[list[int]] = []

    def __call__(self, indices: Sequence[int]) -> list[list[float]]:
        if len(self.requested) + 1 == self.fails_at_call:
            raise KeyboardInterrupt
        self.requested.append([self.values[index] for index in indices])
        return [[self.values[index] ** 2, np.nan] for index in indices]


def collect(
    values: Sequence[int], measure: Measure, folder: Path | None, **fields: Any
) -> ScoreMatrix:
    cache = None if folder is None else RecordCache(folder)
    return collect_scores(
        NAMES,
        [compute_key(np.array([value])) for value in values],
        values,
        measure,
        **{"slot": CacheSlot(cache=cache, fingerprint="f"), "peers": Runtime(), **fields},
    )


def check(found: ScoreMatrix, values: Sequence[int]) -> None:
    assert found["square"].tolist() == [value**2 for value in values]
    assert np.isnan(found["missing"]).all()
    assert "square" in found
    assert "cube" not in found


def test_longest_first_and_each_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_SHARD_DOCUMENTS", 3)
    values = [5, 2, 9, 2, 7, 5, 1]
    measure = Measure(values)
    steps: list[tuple[int, int]] = []
    found = collect(values, measure, None, on_progress=lambda *step: steps.append(step))
    check(found, values)
    assert measure.requested == [[9, 7, 5], [2, 1]]
    # Two are copies of others: known before anything is asked.
    assert steps == [(2, 7), (5, 7), (7, 7)]


def test_nothing_is_asked_twice(tmp_path: Path) -> None:
    values = list(range(20))
    check(collect(values, Measure(values), tmp_path), values)
    again = Measure(values)
    steps: list[tuple[int, int]] = []
    found = collect(values, again, tmp_path, on_progress=lambda *step: steps.append(step))
    check(found, values)
    assert again.requested == []
    assert steps == [(20, 20)]
    more = [*range(15, 25)]
    rest = Measure(more)
    check(collect(more, rest, tmp_path), more)
    assert rest.requested == [[24, 23, 22, 21, 20]]


def test_without_a_name_or_a_place_nothing_is_kept(tmp_path: Path) -> None:
    unknown = CacheSlot(cache=RecordCache(tmp_path), fingerprint=None)
    nowhere = CacheSlot(cache=None, fingerprint="f")
    for slot in (unknown, nowhere):
        for _ in range(2):
            measure = Measure([3, 1])
            check(collect([3, 1], measure, None, slot=slot), [3, 1])
            assert measure.requested == [[3, 1]]
    assert list(tmp_path.iterdir()) == []


def test_no_documents(tmp_path: Path) -> None:
    measure = Measure([])
    assert collect([], measure, tmp_path).rows.shape == (0, 2)
    assert measure.requested == []


def test_an_interrupted_one_goes_on_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_SHARD_DOCUMENTS", 4)
    values = list(range(18))
    with pytest.raises(KeyboardInterrupt):
        collect(values, Measure(values, fails_at_call=3), tmp_path)
    rest = Measure(values)
    check(collect(values, rest, tmp_path), values)
    assert [value for shard in rest.requested for value in shard] == list(range(9, -1, -1))


def test_a_damaged_part_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_SHARD_DOCUMENTS", 4)
    values = list(range(8))
    check(collect(values, Measure(values), tmp_path), values)
    parts = sorted((tmp_path / "f").iterdir())
    assert len(parts) == 2
    parts[0].write_bytes(parts[0].read_bytes()[:-9])
    rest = Measure(values)
    check(collect(values, rest, tmp_path), values)
    assert sum(map(len, rest.requested)) == 4
    # It is whole again.
    again = Measure(values)
    check(collect(values, again, tmp_path), values)
    assert again.requested == []


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_SHARD_DOCUMENTS", 4)
    # The superuser writes into any folder, but nobody into a file.
    folder = tmp_path / "file"
    folder.write_text("")
    values = list(range(12))
    measure = Measure(values)
    with pytest.warns(UserWarning, match="scores cannot be cached in '.*file'") as told:
        check(collect(values, measure, folder), values)
    assert len(told) == 1
    assert sum(map(len, measure.requested)) == 12


def collect_on_ranks(folder: Path, values: list[int]) -> tuple[list[float], list[list[int]]]:
    with start_runtime() as runtime:
        measure = Measure(values)
        # Only the first rank may look: the others might see another state of the folder.
        mine = folder if runtime.is_main else folder / "elsewhere"
        found = collect(values, measure, mine, peers=runtime)
        return found["square"].tolist(), measure.requested


def test_two_ranks_agree(tmp_path: Path, ranks: RankPool) -> None:
    values = list(range(6))
    check(collect(values[:3], Measure(values), tmp_path), values[:3])
    for requested in ([[5, 4, 3]], []):  # three were known; then all are
        for squares, found in ranks(collect_on_ranks, 2, tmp_path, values):
            assert squares == [value**2 for value in values]
            assert found == requested
    assert not (tmp_path / "elsewhere").exists()
