"""Columns of records.parquet: what each probe measured of a document, the base model's beside."""

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audit_examples import (
    Held,
    Scripted,
    audit,
    build_documents,
    cut,
    know,
    list_records,
    run_probes,
    say_by_context,
)
from made_examples import build_columns, make
from probe_examples import make_evidence, make_measured
from pyarrow import parquet
from record_examples import make_document

from memguard.audit.document_scores import SCHEMA_NAME, DocumentScores, build_scores, save_scores
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.near_verbatim import NearVerbatim, NotGenerated
from memguard.audit.probes.window_scores import MAIN
from memguard.audit.requests import Measured
from memguard.audit.windows import Window
from memguard.records.documents import DocumentTable

DESCRIPTION = [
    "id", "text_hmac", "bucket", "role", "source", "has_own_id", "num_repetitions", "num_tokens",
    "prefix_tokens", "continuation_tokens", "num_copies", "cluster", "not_audited",
    "type_token_ratio",
]  # fmt: skip


def _cut(probe: ExtractionProbe, count: int, **fields: Any) -> list[Window]:
    numbers = range(count)
    return cut(probe, [make_document(np.arange(20) + n, name=f"d{n}", **fields) for n in numbers])


def _measure(detail: Any = None, **columns: list[float]) -> Measured:
    """Return numbers with only what a test cares about; the rest is 1."""
    size = len(next(iter(columns.values())))
    numbers = make_measured({name: columns.get(name, [1.0] * size) for name in MAIN})
    not_generated = NotGenerated(reason="the weights are offloaded")
    return Measured(columns=numbers.columns, detail=detail or not_generated)


def _generate(num_edits: list[float], matched: list[bool], gaps: list[float]) -> NearVerbatim:
    names = ("num_verbatim", "num_generated", "num_below_floor", "num_checked")
    return NearVerbatim(
        matched_N=np.array(matched),
        num_edits_N=np.array(num_edits),
        min_gap_N=np.array(gaps),
        num_matched_below_floor=0,
        **dict.fromkeys(names, 0),
    )


def _list_rows(
    windows: list[Window], model: Measured, base: Measured | None = None
) -> list[dict[str, Any]]:
    other = None if base is None else {"extraction": base}
    evidence = make_evidence(windows, {"extraction": model}, other)
    scores = build_scores(windows, {"extraction": ExtractionProbe().tabulate(evidence)})
    rows: list[dict[str, Any]] = scores.to_arrow(slice(None)).to_pylist()
    return rows


def test_matches_depend_on_each_documents_own_length() -> None:
    probe = ExtractionProbe(continuation_tokens=5)
    answers = {"supervised": np.arange(20) >= 10, "format": "messages"}
    windows = [*_cut(probe, 2), *_cut(probe, 3, **answers)]
    assert [window.continuation_tokens for window in windows] == [5, 5, 10, 10, 10]
    rows = _list_rows(windows, _measure(num_correct=[5, 4, 10, 9, 8]))
    assert [r["extraction.verbatim"] for r in rows] == [True, False, True, False, False]
    # Without generated texts the probe's answer is that of the verbatim matches.
    assert [r["extraction.extracted"] for r in rows] == [True, False, True, False, False]
    # 0.9 of 5 is 4.5, so all 5 are needed; of 10 it is 9.
    assert [r["extraction.teacher_forced_90"] for r in rows] == [True, False, True, True, False]


def test_columns_have_the_numbers_that_were_measured() -> None:
    probe = ExtractionProbe(continuation_tokens=8)
    windows = _cut(probe, 3, num_copies=2, num_repetitions=7, text_hmac="ab", has_own_id=True)
    found = run_probes([probe], Scripted(say_by_context), windows, tiny_margin=1.0)
    measured = Measured(
        columns=found["extraction"].columns, detail=NotGenerated(reason="it is not tested here")
    )
    for index, row in enumerate(_list_rows(windows, measured)):
        described = list(row.values())[: len(DESCRIPTION)]
        named = [f"d{index}", "ab", "trained", "trained", "a.jsonl", True]
        expected = [*named, 7, 20, 12, 8, 2, None, None, 1]
        assert dict(zip(DESCRIPTION, described, strict=True)) == dict(
            zip(DESCRIPTION, expected, strict=True)
        )
        for name in set(MAIN) - {"is_near_tie", "greedy_margin"}:
            value = float(measured.columns[name][index])
            assert row[f"extraction.{name}"] == (None if np.isnan(value) else value), name
        assert row["extraction.verbatim"] <= row["extraction.teacher_forced_90"]
        assert {
            row[f"extraction.{n}"] for n in ("near_verbatim", "num_edits", "greedy_margin")
        } == {None}
        assert not any(name.startswith("base.") for name in row)


def test_missing_numbers_are_null() -> None:
    generated = _generate([np.nan, np.inf, 2.0], [False, False, True], [np.nan, 0.5, 0.5])
    measured = _measure(generated, min_margin=[np.nan, 0.5, 1.0])
    rows = _list_rows(_cut(ExtractionProbe(continuation_tokens=8), 3), measured)
    names = ("near_verbatim", "num_edits", "greedy_margin", "min_margin")
    assert [tuple(row[f"extraction.{name}"] for name in names) for row in rows] == [
        (False, None, None, None),
        (False, None, 0.5, 0.5),
        (True, 2, 0.5, 1.0),
    ]
    assert [row["extraction.extracted"] for row in rows] == [False, False, True]


def test_the_base_model_has_the_same_columns() -> None:
    windows = _cut(ExtractionProbe(continuation_tokens=10), 2)
    expected = {
        "num_correct": 9,
        "first_divergence": 3,
        "logprob": -20.0,
        "extraction_strength": 0.25,
        "longest_run": 6,
    }
    generated = _generate([np.nan, 0.0], [False, True], [0.5, 0.5])
    seconds = {"num_correct": 10, "first_divergence": 10}
    base = _measure(
        generated, **{name: [value, seconds.get(name, 1)] for name, value in expected.items()}
    )
    one, two = _list_rows(windows, _measure(num_correct=[10, 10]), base)
    assert {name: one[f"base.extraction.{name}"] for name in expected} == expected
    matches = ("verbatim", "teacher_forced_90", "near_verbatim")
    assert [one[f"base.extraction.{name}"] for name in matches] == [False, True, False]
    assert [two[f"base.extraction.{name}"] for name in matches] == [True, True, True]
    assert [name for name in one if name.startswith("base.")] == [
        f"base.{name}" for name in one if name.startswith("extraction.")
    ]


def test_columns_that_were_not_measured_are_missing_numbers() -> None:
    scores = build_columns([make("a"), make("b")])
    assert len(scores) == 2
    assert scores["extraction.num_correct"].tolist() == [0, 0]
    assert np.isnan(scores["base.extraction.verbatim"]).all()


@pytest.mark.parametrize("count", [0, 2, 9000])
def test_the_file_is_written_whole_for_its_owner(tmp_path: Path, count: int) -> None:
    made = [make(f"{n}", 50, num_repetitions=None if n else 3) for n in range(count)]
    scores = build_columns(made)
    columns = {**scores.columns}
    if count:
        columns["source"].values[0] = "ü‮"
    scores = DocumentScores(columns=columns)
    path = tmp_path / "new" / "records.parquet"
    for each in (path, tmp_path / "again.parquet"):
        save_scores(scores, each)
    assert path.read_bytes() == (tmp_path / "again.parquet").read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["records.parquet"]
    table = parquet.read_table(path)
    assert table.schema.metadata[b"schema"] == SCHEMA_NAME.encode()
    assert table.schema.names[: len(DESCRIPTION)] == DESCRIPTION
    assert table.to_pylist() == scores.to_arrow(slice(None)).to_pylist()


def test_scores_of_an_audit_are_read_back(tmp_path: Path) -> None:
    documents = build_documents(6)
    outcome = audit(documents, Held(know(documents, "x4")), Held(Scripted(say_by_context)))
    path = tmp_path / "records.parquet"
    save_scores(outcome.scores, path)
    assert parquet.read_table(path).to_pylist() == list_records(outcome)
    assert {"sampling.scheme", "base.sampling.log10_queries", "membership.loss"} <= set(
        outcome.scores.columns
    )


def test_documents_that_were_not_audited_are_rows_with_a_reason_which_readers_leave_out(
    tmp_path: Path,
) -> None:
    windows = _cut(ExtractionProbe(continuation_tokens=5), 2)
    lost = make_document(np.arange(3), name="lost", role="control", text_hmac="b", num_tokens=3)
    scores = build_scores(windows, {}, [(lost, "too short"), (replace(lost, id="yes"), "label")])
    save_scores(scores, tmp_path / "records.parquet")
    rows = parquet.read_table(tmp_path / "records.parquet").to_pylist()
    assert [row["not_audited"] for row in rows] == [None, None, "too short", "label"]
    assert {n: v for n, v in rows[2].items() if v is not None} == {
        "id": "lost", "text_hmac": "b", "bucket": "trained", "role": "control", "source": "a.jsonl",
        "has_own_id": False, "num_repetitions": 1, "num_tokens": 3, "not_audited": "too short",
    }  # fmt: skip
    table = DocumentTable(file=parquet.ParquetFile(tmp_path / "records.parquet"))
    assert (len(table), table.id_N.tolist()) == (2, ["d0", "d1"])
    assert table.numbers("continuation_tokens").tolist() == [5, 5]
