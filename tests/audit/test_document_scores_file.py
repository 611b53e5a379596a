"""Document scores to parquet."""

from collections.abc import Callable
from pathlib import Path

from audit_examples import (
    Held,
    Scripted,
    audit,
    build_documents,
    know,
    list_records,
    say_by_context,
    tabulate,
)
from pyarrow import parquet

from memguard.audit.document_scores import SCHEMA_NAME, save_scores
from memguard.records import DocumentScore


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
