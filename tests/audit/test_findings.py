"""Findings: the documents that came out, their order, evidence and number, and their file."""

import csv
import stat
from itertools import islice
from pathlib import Path

import numpy as np
from made_examples import build_columns, build_evidence, make

from memguard.audit.document_scores import DocumentScores, build_scores, save_scores
from memguard.audit.findings import FINDING_COLUMNS, MAX_FINDINGS, FindingList, save_findings
from memguard.audit.probe import Column, Summary
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.records.documents import DocumentTable


def test_findings_by_severity() -> None:
    made = [
        make("template", 50, ratio=0.4, base=0),
        make("near", 45),
        make("short", 20, size=20),
        make("known", 50, base=50),
        make("high-known-partly", 50, base=40),
        make("high", 50, base=2, text_hmac="abc"),
        make("not", 44),
        make("unseen", 50, bucket="x0", role="control", num_repetitions=0),
        make("never-reached", 50, num_repetitions=0),
        make("to-forget", 50, base=0, role="forget", num_repetitions=0),
    ]
    findings = FindingList(build_columns(made))
    assert [(f.id, f.severity, f.sentence) for f in findings] == [
        ("to-forget", "high", "50 tokens exactly"),
        ("high", "high", "50 tokens exactly"),
        ("high-known-partly", "high", "50 tokens exactly"),
        ("known", "medium", "50 tokens exactly, also by the base model"),
        ("short", "medium", "20 tokens exactly"),
        ("near", "low", "50 tokens with 5 edits"),
        (
            "template",
            "info",
            "50 tokens exactly; only 40 % of the tokens are distinct: a template?",
        ),
    ]
    assert (len(findings), findings.num_by_method) == (7, 7)
    first = next(finding for finding in findings if finding.id == "high")
    assert (first.text_hmac, first.base_num_correct) == ("abc", 2)


def score_every_method() -> DocumentScores:
    """Return five documents: greedy and sampling; another window; attacks; a foreign probe; none.

    The sixth is a control document that everything extracts.
    """
    made = [make("greedy", 50), *(make(name, 3) for name in ("window", "attack", "foreign", "no"))]
    made.append(make("unseen", 50, bucket="x0", role="control", num_repetitions=0))
    evidence = build_evidence(made)

    def flag(*indices: int) -> np.ndarray:
        return np.isin(np.arange(6), indices).astype(np.float64)

    sampled = {"sampling.log10_queries": Column(values=np.full(6, 2.0))}
    attacked = {"attacks.case.any": Column(values=flag(2, 5), kind="bool")}
    missing = np.full(6, np.nan)
    summaries = {
        "extraction": ExtractionProbe().tabulate(evidence),
        "sampling": Summary(columns=sampled, matched={"trained": flag(0, 5)}),
        "grid": Summary(windows={"trained": flag(1, 5), "base": flag(1)}),
        "attacks": Summary(columns=attacked, matched={"trained": flag(2, 5)}),
        "foreign": Summary(matched={"trained": np.where(flag(3, 5) == 1, 1, missing)}),
    }
    return build_scores(evidence.inputs.windows, summaries)


def test_a_document_of_several_methods_is_one_finding_with_the_evidence_of_each() -> None:
    findings = FindingList(score_every_method())
    assert {finding.id: finding.found_by for finding in findings} == {
        "greedy": {
            "greedy": "50 tokens exactly",
            "sampling": "about 100 queries",
        },
        "window": {"another window": "a cell of the grid"},
        "attack": {"attacks": "case"},
        "foreign": {"foreign": "extracted"},
    }
    assert (len(findings), findings.num_by_method) == (4, 5)


def test_the_records_have_the_documents_of_the_findings(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    scores = score_every_method()
    save_scores(scores, tmp_path / "records.parquet")
    monkeypatch.setattr("memguard.records.documents.check_audit_file", lambda folder, name: None)
    table = DocumentTable.read(tmp_path)
    assert {*table.id_N[table.came_out_N]} == {finding.id for finding in FindingList(scores)}
    np.testing.assert_array_equal(table.numbers("base.grid.other_window"), [0, 1, 0, 0, 0, 0])


def test_the_file_has_every_finding_for_its_owner_alone(tmp_path: Path) -> None:
    made = [make(f"{i:03}", 50, text_hmac=f"{i:064x}") for i in range(MAX_FINDINGS + 20)]
    findings = FindingList(build_columns([*made, make("=1+1", 45)]))
    path = tmp_path / "findings.csv"
    save_findings(findings, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == FINDING_COLUMNS
    assert [row["text_hmac"] for row in rows[:2]] == [f"{n:064x}" for n in range(2)]
    assert rows[-1]["text_hmac"] == ""
    ids = [finding.id for finding in islice(findings, MAX_FINDINGS)]
    assert (ids[:2], [row["id"] for row in rows[:MAX_FINDINGS]]) == (["000", "001"], ids)
    assert len(rows) == len(findings) == MAX_FINDINGS + 21
    assert (rows[0]["greedy"], rows[-1]["near_verbatim"]) == (
        "50 tokens exactly",
        "50 tokens with 5 edits",
    )
    # A spreadsheet program would compute it.
    assert rows[-1]["id"] == "'=1+1"
