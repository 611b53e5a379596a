"""One record a document: verdicts, attack cost and the base model's beside the model's."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audit_examples import (
    Held,
    Scripted,
    audit,
    build_documents,
    know,
    list_records,
    say_by_context,
    score_together,
    tabulate,
)
from pyarrow import parquet

from memguard.audit.cache import ScoreMatrix
from memguard.audit.document_scores import SCHEMA_NAME, ModelResults, build_scores, save_scores
from memguard.audit.extraction import AuditDocument, Window
from memguard.audit.near_verbatim import NearVerbatim, NotGenerated
from memguard.audit.probes.extraction import MAIN, ExtractionProbe
from memguard.config.settings import SamplingScheme
from memguard.records import DocumentScore

MakeDocument = Callable[..., AuditDocument]
SCHEMES = (SamplingScheme(), SamplingScheme(top_k=3))
# ln 2 / -ln(1 - e^l) queries give an event of log-probability l a chance of one half.
HALF = np.log(0.5)


def _windows(
    make_document: MakeDocument, probe: ExtractionProbe, count: int = 4, **fields: Any
) -> list[Window]:
    windows = [
        probe.window(make_document(np.arange(20) + number, name=f"d{number}", **fields))
        for number in range(count)
    ]
    return [window for window in windows if window is not None]


def _numbers(rows: Sequence[dict[str, float]], num_schemes: int = 0) -> ScoreMatrix:
    """Rows with only what a test cares about; the rest is 1."""
    names = (*MAIN, *(f"sampled.{index}" for index in range(num_schemes)))
    table = [[row.get(name, 1.0) for name in names] for row in rows]
    return ScoreMatrix(names=names, rows=np.array(table, dtype=np.float64))


def _results(numbers: ScoreMatrix, near: NearVerbatim | None = None) -> ModelResults:
    not_generated = NotGenerated(reason="the weights are offloaded")
    return ModelResults(teacher_forced=numbers, near_verbatim=near or not_generated)


def _score(
    windows: Sequence[Window],
    model: ModelResults,
    base: ModelResults | None = None,
    schemes: Sequence[SamplingScheme] = (),
) -> list[DocumentScore]:
    scores = build_scores(windows, schemes, model, base)
    return scores.build_records(range(len(scores)))


def test_verdicts_go_by_each_documents_own_length(make_document: MakeDocument) -> None:
    supervised = np.zeros(20, dtype=bool)
    supervised[10:] = True
    probe = ExtractionProbe(continuation_tokens=5)
    windows = [
        *_windows(make_document, probe, 2),
        *_windows(make_document, probe, 3, supervised=supervised, format="messages"),
    ]
    assert [window.continuation_tokens for window in windows] == [5, 5, 10, 10, 10]
    numbers = _numbers([{"num_correct": count} for count in (5, 4, 10, 9, 8)])
    scores = _score(windows, _results(numbers))
    assert [score.verbatim for score in scores] == [True, False, True, False, False]
    # 0.9 of 5 is 4.5, so all 5 are needed; of 10 it is 9.
    assert [score.teacher_forced_90 for score in scores] == [True, False, True, True, False]
    assert {score.attack_scheme for score in scores} == {None}


def test_records_say_what_the_numbers_say(make_document: MakeDocument) -> None:
    probe = ExtractionProbe(continuation_tokens=8)
    windows = _windows(make_document, probe, 3, num_copies=2, num_repetitions=7)
    model = score_together([probe], Scripted(say_by_context), windows, tiny_margin=1.0)
    scores = _score(windows, _results(model))
    assert len(scores) == 3
    for window, row, score in zip(windows, model.rows, scores, strict=True):
        numbers = dict(zip(model.names, row, strict=True))
        document = window.document
        assert (score.id, score.bucket, score.role) == (document.id, "trained", "trained")
        assert (score.num_copies, score.num_repetitions, score.num_tokens) == (2, 7, 20)
        assert (score.prefix_tokens, score.continuation_tokens) == (12, 8)
        for name in ("num_correct", "first_divergence", "longest_run", "logprob"):
            assert getattr(score, name) == numbers[name]
        assert score.extraction_strength == numbers["extraction_strength"]
        assert score.argmax_type_token_ratio == numbers["argmax_type_token_ratio"]
        assert score.type_token_ratio == 1
        assert score.verbatim <= score.teacher_forced_90
        assert (score.near_verbatim, score.num_edits, score.greedy_margin) == (None, None, None)
        before = {name: v for name, v in score.model_dump().items() if name.startswith("base_")}
        assert set(before.values()) == {None}
        assert (score.attack_log10_queries, score.attack_scheme) == (None, None)


def _near(num_edits: list[float], matched: list[bool]) -> NearVerbatim:
    return NearVerbatim(
        matched_N=np.array(matched),
        num_edits_N=np.array(num_edits),
        min_gap_N=np.array([np.nan, *[0.5] * (len(matched) - 1)]),
        num_verbatim=0,
        num_generated=len(matched),
        num_below_floor=0,
        num_checked=0,
        num_matched_below_floor=0,
    )


def test_what_was_generated_stands_in_the_records(make_document: MakeDocument) -> None:
    probe = ExtractionProbe(continuation_tokens=8)
    numbers = _numbers([{}, {}, {}])
    near = _near([np.nan, np.inf, 2.0], [False, False, True])
    windows = _windows(make_document, probe, 3)
    scores = _score(windows, _results(numbers, near))
    assert [(s.near_verbatim, s.num_edits, s.greedy_margin) for s in scores] == [
        (False, None, None),
        (False, None, 0.5),
        (True, 2, 0.5),
    ]


def test_a_margin_that_is_missing_is_null(make_document: MakeDocument) -> None:
    probe = ExtractionProbe(continuation_tokens=8)
    numbers = _numbers([{"min_margin": np.nan}, {"min_margin": 0.5}])
    scores = _score(_windows(make_document, probe, 2), _results(numbers))
    assert [score.min_margin for score in scores] == [None, 0.5]


def test_the_base_stands_beside_with_every_number(make_document: MakeDocument) -> None:
    probe = ExtractionProbe(continuation_tokens=10)
    windows = _windows(make_document, probe, 2)
    model = _numbers([{"num_correct": 10, "sampled.0": -1.0}] * 2, 1)
    base = _numbers(
        [
            {
                "num_correct": 9,
                "first_divergence": 3,
                "logprob": -20.0,
                "extraction_strength": 0.25,
                "longest_run": 6,
                "sampled.0": -np.inf,
            },
            {"num_correct": 10, "sampled.0": -1.0},
        ],
        1,
    )
    near = _near([np.nan, 0.0], [False, True])
    one, two = _score(windows, _results(model), _results(base, near), SCHEMES[:1])
    assert (one.base_num_correct, one.base_first_divergence, one.base_longest_run) == (9, 3, 6)
    assert (one.base_verbatim, one.base_teacher_forced_90) == (False, True)
    assert (one.base_logprob, one.base_extraction_strength) == (-20.0, 0.25)
    assert one.base_attack_log10_queries is None, "no way that was asked for can draw it"
    assert (two.base_verbatim, two.base_attack_log10_queries) == (True, 0.0)
    assert (one.base_near_verbatim, two.base_near_verbatim) == (False, True)
    assert set(DocumentScore.model_fields) >= {
        f"base_{name}" for name in ("num_correct", "verbatim", "near_verbatim", "logprob")
    }


def test_attack_cost_is_that_of_the_cheapest_way(make_document: MakeDocument) -> None:
    probe = ExtractionProbe(continuation_tokens=10)
    windows = _windows(make_document, probe, 5)
    numbers = _numbers(
        [
            {"num_correct": 10, "sampled.0": -5.0, "sampled.1": -4.0},
            {"sampled.0": -9.0, "sampled.1": -3.0},
            {"sampled.0": -9.0, "sampled.1": -np.inf},
            {"sampled.0": HALF, "sampled.1": HALF},
            {"sampled.0": -np.inf, "sampled.1": -np.inf},
        ],
        2,
    )
    scores = _score(windows, _results(numbers), schemes=SCHEMES)
    ways = [score.attack_scheme for score in scores]
    assert ways == ["greedy", "T=1, top-k 3", "T=1", "T=1", None]
    costs = [score.attack_log10_queries for score in scores]
    assert (costs[0], costs[4]) == (0.0, None)
    assert costs[1] == pytest.approx(np.log10(HALF / np.log1p(-np.exp(-3.0))))
    assert costs[2] == pytest.approx(np.log10(HALF / np.log1p(-np.exp(-9.0))))
    assert costs[3] == pytest.approx(0.0, abs=1e-12)


def test_records_of_a_few_documents(make_document: MakeDocument) -> None:
    probe = ExtractionProbe(continuation_tokens=8)
    numbers = _numbers([{"num_correct": count} for count in range(4)])
    scores = build_scores(_windows(make_document, probe), (), _results(numbers), None)
    assert len(scores) == 4
    assert scores["num_correct"].tolist() == [0, 1, 2, 3]
    assert [score.id for score in scores.build_records([3, 1])] == ["d3", "d1"]
    assert scores.build_records([]) == []


def test_a_number_that_every_document_has_is_not_lost(make_document: MakeDocument) -> None:
    probe = ExtractionProbe(continuation_tokens=8)
    numbers = _numbers([{}, {"logprob": np.nan}])
    with pytest.raises(AssertionError, match="every document has logprob"):
        _score(_windows(make_document, probe, 2), _results(numbers))


def load_scores(path: Path) -> list[DocumentScore]:
    return [DocumentScore.model_validate(row) for row in parquet.read_table(path).to_pylist()]


def test_scores_file_round_trip(tmp_path: Path, make_score: Callable[..., DocumentScore]) -> None:
    scores = [
        make_score("a", 50, base=3, attack_log10_queries=2.5, attack_scheme="T=1", num_copies=2),
        make_score("b", 0, num_repetitions=None, min_margin=None, source="ü‮"),
    ]
    save_scores(tabulate(scores), tmp_path / "new" / "records.parquet")
    save_scores(tabulate(scores), tmp_path / "again.parquet")
    assert load_scores(tmp_path / "new" / "records.parquet") == scores
    first = (tmp_path / "new" / "records.parquet").read_bytes()
    assert first == (tmp_path / "again.parquet").read_bytes()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["records.parquet"]

    schema = parquet.read_schema(tmp_path / "again.parquet")
    assert schema.names == list(DocumentScore.model_fields)
    assert schema.metadata[b"schema"] == SCHEMA_NAME.encode()
    nullable = {field.name for field in schema if field.nullable}
    may_be_missing = {"num_repetitions", "min_margin", "longest_run", "num_copies"}
    may_be_missing |= {"near_verbatim", "num_edits", "greedy_margin"}
    assert nullable == may_be_missing | {"attack_log10_queries", "attack_scheme"} | {
        name for name in DocumentScore.model_fields if name.startswith("base_")
    }

    save_scores(tabulate([]), tmp_path / "empty.parquet")
    assert load_scores(tmp_path / "empty.parquet") == []


def test_scores_of_an_audit_are_read_back(tmp_path: Path) -> None:
    documents = build_documents(6)
    outcome = audit(documents, Held(know(documents, "x4")), Held(Scripted(say_by_context)))
    save_scores(outcome.scores, tmp_path / "records.parquet")
    assert load_scores(tmp_path / "records.parquet") == list_records(outcome)
