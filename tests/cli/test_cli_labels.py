"""Answers of yes and no, which any model gives: they are not audited, and everything else runs."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cli_examples import make_texts, read_json, run_cli, write_jsonl, write_run

from memguard.records import AuditReport, load_record
from memguard.workflows.results import AuditResult


@pytest.fixture
def answered(folder: Path) -> Path:
    """A tiny model, and questions that are answered by yes or no."""
    texts = make_texts(60)
    rows = [
        {"prompt": text, "completion": f" {['yes', 'no'][n % 2]}"} for n, text in enumerate(texts)
    ]
    write_jsonl(folder / "members.jsonl", rows[:40])
    write_jsonl(folder / "nonmembers.jsonl", rows[40:])
    return folder


def test_an_audit_of_labels_says_that_nothing_can_be_said(answered: Path) -> None:
    out = answered / "audit"
    files = [f"--{name}={answered / f'{name}.jsonl'}" for name in ("members", "nonmembers")]
    audited = run_cli("audit", "--model", answered / "model", *files, "--out", out)
    assert audited.code == 0, audited.err
    report = read_json(out / "report.json")
    verdict = report["verdict"]
    assert (verdict["level"], verdict["reason"]) == ("inconclusive", "unaudited")
    assert report["tables"]["buckets"]["num_labels"] == [20, 40]
    assert "60 documents are with a short answer" in (out / "report.html").read_text()
    rows = pq.read_table(out / "records.parquet").to_pylist()
    assert {row["not_audited"] for row in rows} == {"label"}
    result = AuditResult(folder=out, report=load_record(AuditReport, out / "report.json"))
    assert (len(result.to_pandas()), len(result.to_pandas(unaudited=True))) == (0, 60)
    # Findings that nothing looked for are not "none".
    policy = answered / "policy.yaml"
    policy.write_text("gate:\n  - {metric: findings, at_most: 0}\n")
    judged = run_cli("gate", out, "--policy", policy)
    assert judged.code == 12, judged.err
    assert "no trained document was audited" in " ".join(judged.out.split())
    assert run_cli("diff", out, out).code == 0


def test_a_run_on_labels_trains_and_a_budget_of_them_is_refused(answered: Path) -> None:
    data = {"train": str(answered / "members.jsonl"), "seq_len": 128}
    train = {"batch_size": 8, "audit_every_steps": 4}
    run = write_run(answered, data=data, train=train)
    trained = run_cli("train", run)
    assert trained.code == 0, trained.err
    assert "no trained document of its sample can be audited" in trained.err
    strict = write_run(answered, name="strict", data=data, train=train, budget={"limit": 0.1})
    refused = run_cli("train", strict)
    assert (refused.code, "'budget' needs trained documents" in refused.err) == (2, True)
