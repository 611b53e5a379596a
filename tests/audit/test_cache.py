"""Numbers kept between audits: what is found again, and that damage counts as absence."""

import os
import stat
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from memguard.audit.cache import KEY_BYTES, RecordCache, compute_fingerprint, compute_key

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
    with pytest.raises(OSError, match="the disk is full"):
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
