"""Records are written whole, read back equal, and never hold NaN."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from record_examples import make_entry
from result_examples import rate_row, value_row

from memguard.errors import RecordError, VersionError
from memguard.records import (
    Comparison,
    Interval,
    Rate,
    Record,
    Tables,
    WatchedLine,
    load_manifest,
    load_record,
    save_manifest,
    save_record,
    write_atomically,
)
from memguard.records.texts import format_percent


def test_a_record_reads_back_equal(tmp_path: Path) -> None:
    rate = Rate(num_documents=3, num_matched=1, rate=1 / 3, ci=(0.1, 0.9))
    save_record(rate, tmp_path / "made" / "on the way" / "rate.json")
    assert load_record(Rate, tmp_path / "made" / "on the way" / "rate.json") == rate


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_survive_json(value: float) -> None:
    interval = Interval(value=value, ci=(value, value))
    assert Interval.model_validate_json(interval.model_dump_json()) == interval


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_record_holds_nan(value: float) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        Interval(value=value, ci=None)


def test_records_are_frozen_and_closed() -> None:
    interval = Interval(value=1, ci=None)
    with pytest.raises(ValidationError, match="frozen"):
        interval.value = 2
    with pytest.raises(ValidationError, match="Extra inputs"):
        Interval.model_validate({"value": 1, "ci": None, "more": 1})


def test_the_schema_name_is_written_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    recommendation = {"setting": None, "rule": "r", "sentence": "s", "ruled_out": []}
    values = {
        "schema": "memguard.comparison/6",
        "name": "x",
        "tool_version": "0",
        "command": "",
        "documents_sha256": "",
        "continuation_tokens": 50,
        "runs": [],
        "heldout_num_tokens": 0,
        "front": [],
        "recommendation": recommendation,
        "environment": {},
        "tables": json.loads(Tables().model_dump_json()),
    }
    path.write_text(json.dumps(values))
    with pytest.raises(RecordError, match="a comparison needs at least one setting"):
        load_record(Comparison, path)
    path.write_text(json.dumps(values | {"schema": "memguard.comparison/9"}))
    with pytest.raises(
        RecordError, match=r"by another version of memguard \(memguard\.comparison/9\)"
    ):
        load_record(Comparison, path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"value": "x", "ci": null}', "\ud800"])
def test_what_is_no_record_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(RecordError, match=r"broken\.json' is not a Interval this version reads"):
        load_record(Interval, path)


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"none\.json' cannot be read: No such file"):
        load_record(Interval, tmp_path / "none.json")
    with pytest.raises(RecordError, match="cannot be read: Is a directory"):
        load_record(Interval, tmp_path)


def test_a_manifest_is_one_line_a_document(tmp_path: Path) -> None:
    # Line separators that are not newlines must not split an entry.
    entries = [make_entry("a"), make_entry("b\u2028\x0b\x85c\n", num_repetitions=4)]
    path = tmp_path / "manifest.jsonl"
    save_manifest(entries, path)
    assert path.read_text(encoding="utf-8").count("\n") == 2
    assert load_manifest(path) == entries
    save_manifest([], path)
    assert load_manifest(path) == []


def test_a_broken_manifest_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    save_manifest([make_entry()], path)
    with path.open("a") as file:
        file.write('{"id": "b"}\n')
    with pytest.raises(RecordError, match=r"manifest\.jsonl' line 2 is not a manifest entry"):
        load_manifest(path)
    with pytest.raises(RecordError, match="cannot be read: No such file"):
        load_manifest(tmp_path / "none.jsonl")
    path.write_bytes(b"\xff\n")
    with pytest.raises(RecordError, match="line 1 is not a manifest entry"):
        load_manifest(path)


def test_a_manifest_of_another_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    entry = json.loads(make_entry().model_dump_json())
    path.write_text(json.dumps({**entry, "dropped": 1}) + "\n")
    with pytest.raises(VersionError) as refused:
        load_manifest(path)
    assert str(refused.value) == (
        f"'{path}' was written by another version of memguard (it has the field 'dropped'): delete "
        f"'{tmp_path}', or choose another 'name', and run memguard train again"
    )
    # A byte of one line that changed is damage, which training mends.
    path.write_text(json.dumps(entry) + "\n" + json.dumps({**entry, "dropped": 1}) + "\n")
    with pytest.raises(RecordError, match="line 2 is not a manifest entry"):
        load_manifest(path)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("decimals", "texts"),
    [
        (0, ["0 %", "<1 %", "<1 %", "50 %", "99 %", "99 %", "100 %"]),
        (1, ["0.0 %", "<0.1 %", "0.1 %", "50.0 %", "99.9 %", "99.9 %", "100.0 %"]),
        (2, ["0.00 %", "0.01 %", "0.05 %", "50.00 %", "99.94 %", "99.99 %", "100.00 %"]),
    ],
)
def test_percentages_never_round_to_certainty(decimals: int, texts: list[str]) -> None:
    shares = [0, 0.0001, 0.0005, 0.5, 0.9994, 0.9999, 1]
    assert [format_percent(share, decimals) for share in shares] == texts


def test_every_record_class_is_closed() -> None:
    kinds = Record.__subclasses__()
    assert len(kinds) > 20
    for kind in kinds:
        assert kind.model_config["extra"] == "forbid", kind
        assert kind.model_config["frozen"], kind
        assert kind.model_config["allow_inf_nan"] is False, kind
        assert kind.__doc__, kind


@pytest.mark.parametrize(
    ("learnt", "accuracy", "shown"),
    [
        ((1, 0), (0.2, 0.9), "1 of 12 documents of x4 extracted, teacher-forced accuracy 20 %"),
        ((0, 0), (0.5, 0.6), "0 of 12 documents of x24 extracted, teacher-forced accuracy 60 %"),
    ],
    ids=["most learnt", "none learnt: the nearest to it"],
)
def test_the_line_of_an_audit_during_training(
    learnt: tuple[int, int], accuracy: tuple[float, float], shown: str
) -> None:
    rows = [
        row
        for name, num_learned, right in zip(("x4", "x24"), learnt, accuracy, strict=True)
        for row in (
            rate_row("extraction", "learned", name, num_learned, 12, step=10),
            value_row("extraction", "token_accuracy", name, right, 12, step=10),
        )
    ]
    line = WatchedLine(
        step=10,
        audit_s=0.1,
        num_tightened={"x4": 2, "x24": 0, "x0": 5},
        results=rows,
        trained=["x4", "x24"],
    )
    assert line.describe() == f"audit after step 10: {shown}; 2 trained more strictly"
    assert WatchedLine.model_validate_json(line.model_dump_json()) == line
    step = line.to_step()
    assert (step.step, step.num_tightened, hasattr(step, "results")) == (
        10,
        line.num_tightened,
        False,
    )
