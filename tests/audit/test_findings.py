"""Findings: their order, sentences, number, and the file of all of them."""

import csv
import stat
from pathlib import Path

from made_examples import build_columns, make

from memguard.audit.document_scores import MAX_FINDINGS, collect_findings, save_findings
from memguard.records import Finding


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
    ]
    findings, num_findings = collect_findings(build_columns(made))
    assert [(f.id, f.severity, f.sentence) for f in findings] == [
        ("high", "high", "50 tokens (about 35 words) exactly"),
        ("high-known-partly", "high", "50 tokens (about 35 words) exactly"),
        ("known", "medium", "50 tokens (about 35 words) exactly, also by the base model"),
        ("short", "medium", "20 tokens (about 14 words) exactly"),
        ("near", "low", "50 tokens (about 35 words) with 5 edits"),
        (
            "template",
            "info",
            "50 tokens (about 35 words) exactly; only 40 % of the tokens are distinct: a template?",
        ),
    ]
    assert num_findings == 6
    assert (findings[0].text_hmac, findings[0].base_num_correct) == ("abc", 2)
    # The id of `records.documents`, the same from audit to audit; none without a key.
    assert [finding.finding_id for finding in findings[:2]] == ["abc:extraction", None]


def test_the_file_has_every_finding_for_its_owner_alone(tmp_path: Path) -> None:
    made = [make(f"{i:03}", 50, text_hmac=f"{i:064x}") for i in range(MAX_FINDINGS + 20)]
    scores = build_columns([*made, make("=1+1", 45)])
    path = tmp_path / "findings.csv"
    save_findings(scores, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["finding_id", *Finding.model_fields]
    first, num_findings = collect_findings(scores)
    assert [row["finding_id"] for row in rows[:2]] == [f"{n:064x}:extraction" for n in range(2)]
    assert (rows[-1]["finding_id"], rows[-1]["text_hmac"]) == ("", "")
    assert [finding.id for finding in first[:2]] == ["000", "001"]
    assert [row["id"] for row in rows[:MAX_FINDINGS]] == [finding.id for finding in first]
    assert (len(first), len(rows)) == (MAX_FINDINGS, num_findings)
    assert num_findings == MAX_FINDINGS + 21
    # A spreadsheet program would compute it.
    assert rows[-1]["id"] == "'=1+1"
