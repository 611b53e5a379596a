"""Numbers kept between audits: asked once each, found again, and damage counts as absence."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow
import pytest
from audit_examples import Held, Said, Scripted, run_probes
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from ranks import RankPool

from memguard.audit import runner
from memguard.audit.cache import (
    KEY_BYTES,
    RecordCache,
    ScoreMatrix,
    compute_fingerprint,
    compute_key,
)
from memguard.audit.context import AuditContext
from memguard.audit.passages import Passage, ScoreSelection, TokenResult
from memguard.audit.requests import Inputs, Measured, Model, Rounds, Score, View
from memguard.runtime import start_runtime

NAMES = ("one", "membership.zlib", "grid.0.num_correct")


def _keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(KEY_BYTES, "big") for number in numbers]


def _store(folder: Path, *numbers: int, fingerprint: str = "f") -> Path:
    """Store a part whose numbers follow from the keys; return its file."""
    cache = RecordCache(folder)
    before = set(folder.rglob("*"))
    rows = np.array([[number, number / 3, np.nan] for number in numbers]).reshape(-1, 3)
    cache.store(fingerprint, NAMES, _keys(*numbers), rows)
    (path,) = {file for file in folder.rglob("*.parquet") if file not in before}
    return path


def _known(folder: Path, fingerprint: str = "f") -> list[int]:
    found = RecordCache(folder).load(fingerprint, NAMES)
    for key, row in found.items():
        number = int.from_bytes(key, "big")
        np.testing.assert_array_equal(row, [number, number / 3, np.nan])
    return sorted(int.from_bytes(key, "big") for key in found)


def test_what_was_stored_is_found_to_the_last_bit(tmp_path: Path) -> None:
    assert _known(tmp_path / "none") == []
    _store(tmp_path, 1, 2, 3)
    _store(tmp_path, 7)
    _store(tmp_path, 9, fingerprint="other")
    assert _known(tmp_path) == [1, 2, 3, 7]
    assert _known(tmp_path, "other") == [9]
    # A probe whose numbers have other names asks again.
    assert RecordCache(tmp_path).load("f", ("one", "two")) == {}


def test_only_this_user_can_read_it_and_no_token_is_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "scores"
    folder.mkdir()
    path = _store(folder, 5)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert parquet.read_schema(path).names == ["key", *NAMES]
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing half-written"


@pytest.mark.parametrize("damage", ["empty", "text", "other columns", "another's name", "folder"])
def test_a_part_that_is_none_counts_as_absent(tmp_path: Path, damage: str) -> None:
    path = _store(tmp_path, 1, 2)
    other = _store(tmp_path, 3, 4)
    if damage == "empty":
        other.write_bytes(b"")
    elif damage == "text":
        other.write_text("key,one\n")
    elif damage == "other columns":
        table = pyarrow.table({"key": pyarrow.array(_keys(3), pyarrow.binary(KEY_BYTES))})
        parquet.write_table(table, other)
    elif damage == "another's name":
        other.write_bytes(path.read_bytes())
    else:
        other.unlink()
        other.mkdir()
    assert _known(tmp_path) == [1, 2]


@settings(max_examples=200)
@given(data=st.data())
def test_no_damage_gives_wrong_numbers(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cut anywhere, or one bit turned: parquet alone would read a quarter of these as numbers."""
    folder = tmp_path_factory.mktemp("cut")
    path = _store(folder, *range(20))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    assert _known(folder) == []


def test_a_writer_that_dies_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", die)
    with pytest.warns(UserWarning, match="scores cannot be cached"):
        RecordCache(tmp_path).store("f", NAMES, _keys(1), np.zeros((1, 3)))
    assert list((tmp_path / "f").iterdir()) == []


def test_key_is_of_all_arrays_their_kinds_and_their_borders() -> None:
    ids, flags = np.arange(6, dtype=np.int32), np.ones(6, dtype=bool)
    changed = ids.copy()
    changed[3] += 1
    keys = [
        compute_key(ids, flags),
        compute_key(changed, flags),
        compute_key(ids, ~flags),
        compute_key(ids.astype(np.int64), flags),
        compute_key(ids[:5], flags),
        compute_key(ids[:3], ids[3:]),
        compute_key(ids[:2], ids[2:]),
        compute_key(ids),
    ]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {KEY_BYTES}
    # A view of every other token is those tokens.
    assert compute_key(np.arange(12, dtype=np.int32)[::2]) == compute_key(
        np.arange(0, 12, 2, dtype=np.int32)
    )


def test_fingerprint_is_of_values_not_of_their_order() -> None:
    one = compute_fingerprint({"model": "m", "cells": [1, 2], "version": 1})
    assert one == compute_fingerprint({"version": 1, "cells": [1, 2], "model": "m"})
    assert one != compute_fingerprint({"version": 1, "cells": [2, 1], "model": "m"})
    assert one != compute_fingerprint({"version": 2, "cells": [1, 2], "model": "m"})
    assert len(one) == 32


COLUMNS = ("square", "missing")


class Squarer:
    """A model that says a number's square; may fail at one of its calls."""

    def __init__(self, fails_at_call: int | None = None) -> None:
        self.fails_at_call = fails_at_call
        self.requested: list[list[int]] = []
        self._model = Scripted(lambda ids: Said(right=True, logprob=float(ids[0]) ** 2, margin=1))

    def score(
        self, passages: Sequence[Passage], requested: ScoreSelection, *, follower: Any = None
    ) -> list[TokenResult]:
        if len(self.requested) + 1 == self.fails_at_call:
            raise KeyboardInterrupt
        self.requested.append([int(passage.input_ids[0]) for passage in passages])
        return self._model.score(passages, requested)


@dataclass(frozen=True, kw_only=True, slots=True)
class Squares:
    """A probe of texts that repeat a number as often as it says, and twice more."""

    models: ClassVar[tuple[Model, ...]] = ("trained",)
    after: ClassVar[tuple[str, ...]] = ()
    values: Sequence[int]
    name: str = "squares"

    def find_missing(self, inputs: Inputs, *, has_base: bool) -> str:
        return ""

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        (numbers,) = yield [
            Score(
                items=self.values,
                passages=[
                    Passage(
                        input_ids=np.full(value + 2, value, dtype=np.int32),
                        first_label=value + 1,
                        first_choice=value + 2,
                    )
                    for value in self.values
                ],
                keys=[compute_key(np.array([value])) for value in self.values],
                names=COLUMNS,
                reduce=lambda _, results: [[float(one.logprob[0]), np.nan] for one in results],
                parameters={"probe": self.name},
                stage=self.name,
            )
        ]
        return Measured(columns=numbers)


def collect(
    values: Sequence[int],
    squarer: Squarer,
    folder: Path | None,
    *,
    identity: str | None = "m",
    **context: Any,
) -> ScoreMatrix:
    """Measure the squares as an audit would."""
    probe, held = Squares(values=values), Held(squarer, identity=identity)
    cache = None if folder is None else RecordCache(folder)
    measured = run_probes([probe], held, [], context=AuditContext(cache=cache, **context))
    return measured[probe.name].columns


def check(found: ScoreMatrix, values: Sequence[int]) -> None:
    assert found["square"].tolist() == [value**2 for value in values]
    assert np.isnan(found["missing"]).all()
    assert "square" in found
    assert "cube" not in found


def test_longest_first_and_each_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_SHARD_ITEMS", 3)
    values = [5, 2, 9, 2, 7, 5, 1]
    squarer = Squarer()
    steps: list[tuple[int, int]] = []
    found = collect(values, squarer, None, on_progress=lambda _, *step: steps.append(step))
    check(found, values)
    assert squarer.requested == [[9, 7, 5], [2, 1]]
    # Two are copies of others: known before anything is asked.
    assert steps == [(2, 7), (5, 7), (7, 7)]


def test_nothing_is_asked_twice(tmp_path: Path) -> None:
    values = list(range(20))
    check(collect(values, Squarer(), tmp_path), values)
    again = Squarer()
    steps: list[tuple[int, int]] = []
    found = collect(values, again, tmp_path, on_progress=lambda _, *step: steps.append(step))
    check(found, values)
    assert again.requested == []
    assert steps == [(20, 20)]
    more = [*range(15, 25)]
    rest = Squarer()
    check(collect(more, rest, tmp_path), more)
    assert rest.requested == [[24, 23, 22, 21, 20]]


def test_without_a_name_or_a_place_nothing_is_kept(tmp_path: Path) -> None:
    for folder, identity in ((tmp_path, None), (None, "m")):
        for _ in range(2):
            squarer = Squarer()
            check(collect([3, 1], squarer, folder, identity=identity), [3, 1])
            assert squarer.requested == [[3, 1]]
    assert list(tmp_path.iterdir()) == []


def test_no_documents(tmp_path: Path) -> None:
    squarer = Squarer()
    assert collect([], squarer, tmp_path).rows.shape == (0, 2)
    assert squarer.requested == []


def test_an_interrupted_one_goes_on_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_SHARD_ITEMS", 4)
    values = list(range(18))
    with pytest.raises(KeyboardInterrupt):
        collect(values, Squarer(fails_at_call=3), tmp_path)
    rest = Squarer()
    check(collect(values, rest, tmp_path), values)
    assert [value for shard in rest.requested for value in shard] == list(range(9, -1, -1))


def test_a_damaged_part_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_SHARD_ITEMS", 4)
    values = list(range(8))
    check(collect(values, Squarer(), tmp_path), values)
    parts = sorted(tmp_path.rglob("*.parquet"))
    assert len(parts) == 2
    parts[0].write_bytes(parts[0].read_bytes()[:-9])
    rest = Squarer()
    check(collect(values, rest, tmp_path), values)
    assert sum(map(len, rest.requested)) == 4
    # It is whole again.
    again = Squarer()
    check(collect(values, again, tmp_path), values)
    assert again.requested == []


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_SHARD_ITEMS", 4)
    # The superuser writes into any folder, but nobody into a file.
    folder = tmp_path / "file"
    folder.write_text("")
    values = list(range(12))
    squarer = Squarer()
    with pytest.warns(UserWarning, match="scores cannot be cached in '.*file'") as told:
        check(collect(values, squarer, folder), values)
    assert len(told) == 1
    assert sum(map(len, squarer.requested)) == 12


def collect_on_ranks(folder: Path, values: list[int]) -> tuple[list[float], list[list[int]]]:
    with start_runtime() as runtime:
        squarer = Squarer()
        # Only the first rank may look: the others might see another state of the folder.
        mine = folder if runtime.is_main else folder / "elsewhere"
        found = collect(values, squarer, mine, peers=runtime)
        return found["square"].tolist(), squarer.requested


def test_two_ranks_agree(tmp_path: Path, ranks: RankPool) -> None:
    values = list(range(6))
    check(collect(values[:3], Squarer(), tmp_path), values[:3])
    for requested in ([[5, 4, 3]], []):  # three were known; then all are
        for squares, found in ranks(collect_on_ranks, 2, tmp_path, values):
            assert squares == [value**2 for value in values]
            assert found == requested
    assert not (tmp_path / "elsewhere").exists()
