"""A whole audit without a model, the parquet file, and what may not be imported."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from memguard.audit.extraction import AuditDocument, TokenResult, Window
from memguard.audit.procedure import AuditOutcome, run_audit
from memguard.audit.scores_file import SCHEMA_NAME, load_scores, save_scores
from memguard.audit.suite import load_suite
from memguard.errors import DataError, RecordError
from memguard.records import DocumentScore

MakeDocument = Callable[..., AuditDocument]


class _Scorer:
    """Knows by heart the documents of some buckets."""

    def __init__(self, make_result: Callable[..., TokenResult], known: set[str]) -> None:
        self.make_result, self.known = make_result, known
        self.calls: list[str] = []

    def score(self, windows: Sequence[Window], on_progress: Any = None) -> list[TokenResult]:
        self.calls.append("score")
        if on_progress is not None:
            on_progress(len(windows), len(windows))
        return [
            self.make_result(
                np.full(w.continuation_tokens, w.document.bucket in self.known),
                w.continuation_ids,
                each=-0.1 if w.document.bucket in self.known else -3.0,
            )
            for w in windows
        ]


def _documents(make_document: MakeDocument) -> list[AuditDocument]:
    draw = np.random.default_rng(0)
    kinds = [("x0", "control", 0), ("x4", "trained", 4), ("x64", "trained", 64)]
    return [
        make_document(
            draw.integers(0, 500, 80),
            name=f"{bucket}-{index}",
            bucket=bucket,
            role=role,
            num_repetitions=count,
            text_hmac=f"hmac-{bucket}-{index}",
        )
        for bucket, role, count in kinds
        for index in range(20)
    ]


def _run(
    make_document: MakeDocument, make_result: Callable[..., TokenResult], **fields: Any
) -> AuditOutcome:
    return run_audit(
        documents=_documents(make_document),
        scorer=_Scorer(make_result, {"x64"}),
        base_scorer=_Scorer(make_result, set()),
        suite=load_suite("extraction"),
        tally="complete",
        tiny_margin=1e-3,
        seed=0,
        **fields,
    )


def test_whole_audit(make_document: MakeDocument, make_result: Callable[..., TokenResult]) -> None:
    stages: list[tuple[str, int, int]] = []
    outcome = _run(make_document, make_result, on_progress=lambda *step: stages.append(step))
    summary = outcome.summary
    assert stages == [("model", 60, 60), ("base", 60, 60)]
    assert [bucket.bucket for bucket in summary.buckets] == ["x0", "x4", "x64"]
    assert (summary.verdict.level, summary.verdict.bucket) == ("recites", "x64")
    assert summary.num_findings == 20
    assert summary.findings[0].text_hmac == f"hmac-{summary.findings[0].id}"
    loss, change = summary.membership
    # Half of the members are told apart from all nonmembers, the others tie.
    assert loss.auc.value == change.auc.value == 0.75
    assert [score.id for score in outcome.scores] == [d.id for d in _documents(make_document)]
    assert summary.dose_response


def test_same_input_same_outcome(
    make_document: MakeDocument, make_result: Callable[..., TokenResult]
) -> None:
    first = _run(make_document, make_result, max_documents_per_bucket=7)
    assert first == _run(make_document, make_result, max_documents_per_bucket=7)
    assert len(first.scores) == 21
    assert any("39 documents are not in the sample" in b.text for b in first.summary.banners)


def test_documents_are_checked_before_a_model_is_asked(
    make_document: MakeDocument, make_result: Callable[..., TokenResult]
) -> None:
    scorer = _Scorer(make_result, set())
    with pytest.raises(DataError, match="continuation-tokens"):
        run_audit(
            documents=[make_document(range(24), name=str(i)) for i in range(9)],
            scorer=scorer,
            suite=load_suite("extraction"),
            tally="missing",
            tiny_margin=1e-3,
            seed=0,
        )
    assert scorer.calls == []


def test_scores_file_round_trip(tmp_path: Path, make_score: Callable[..., DocumentScore]) -> None:
    scores = [
        make_score("a", 50, base=3),
        make_score("b", 0, num_repetitions=None, min_margin=None, source="ü‮"),
    ]
    save_scores(scores, tmp_path / "new" / "records.parquet")
    save_scores(scores, tmp_path / "again.parquet")
    assert load_scores(tmp_path / "new" / "records.parquet") == scores
    first = (tmp_path / "new" / "records.parquet").read_bytes()
    assert first == (tmp_path / "again.parquet").read_bytes()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["records.parquet"]

    schema = parquet.read_schema(tmp_path / "again.parquet")
    assert schema.names == list(DocumentScore.model_fields)
    assert schema.metadata[b"schema"] == SCHEMA_NAME.encode()
    nullable = {field.name for field in schema if field.nullable}
    assert nullable == {"num_repetitions", "min_margin"} | {
        name for name in DocumentScore.model_fields if name.startswith("base_")
    }

    save_scores([], tmp_path / "empty.parquet")
    assert load_scores(tmp_path / "empty.parquet") == []


def test_scores_file_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        load_scores(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("id,bucket\n")
    with pytest.raises(RecordError, match="not a parquet file"):
        load_scores(tmp_path / "text.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"id": ["a"]}), tmp_path / "other.parquet")
    with pytest.raises(RecordError, match="no document scores this version reads"):
        load_scores(tmp_path / "other.parquet")


def test_only_scoring_needs_torch() -> None:
    modules = "procedure scores_file summary membership statistics suite selection extraction"
    code = (
        "import sys, importlib\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"[importlib.import_module('memguard.audit.' + n) for n in '{modules}'.split()]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
