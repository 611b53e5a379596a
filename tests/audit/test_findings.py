"""Findings: their order, sentences, number, and the file of all of them."""

import csv
import stat
from collections.abc import Callable
from pathlib import Path

from audit_examples import tabulate

from memguard.audit.findings import MAX_FINDINGS, collect_findings, save_findings
from memguard.records import DocumentScore, Finding

MakeScore = Callable[..., DocumentScore]


def _list_scores(make_score: MakeScore) -> list[DocumentScore]:
    return [
        make_score("template", 50, type_token_ratio=0.4),
        make_score("near", 45),
        make_score("short", 20, continuation_tokens=20),
        make_score("known", 50, base=50),
        make_score("high-known-partly", 50, base=40),
        make_score("high", 50, base=2),
        make_score("not", 44),
        make_score("unseen", 50, bucket="x0", role="control", num_repetitions=0),
    ]


def test_findings_by_severity(make_score: MakeScore) -> None:
    scores = _list_scores(make_score)
    hmacs = ["abc" if score.id == "high" else None for score in scores]
    findings, num_findings = collect_findings(tabulate(scores), hmacs)
    assert [(f.id, f.severity) for f in findings] == [
        ("high", "high"),
        ("high-known-partly", "high"),
        ("known", "medium"),
        ("short", "medium"),
        ("near", "low"),
        ("template", "info"),
    ]
    assert num_findings == 6
    worst = findings[0]
    assert (worst.text_hmac, worst.base_num_correct) == ("abc", 2)
    assert {finding.id: finding.sentence for finding in findings} == {
        "high": "50 tokens (about 35 words) exactly",
        "high-known-partly": "50 tokens (about 35 words) exactly",
        "known": "50 tokens (about 35 words) exactly, also by the base model",
        "short": "20 tokens (about 14 words) exactly",
        "near": "50 tokens (about 35 words) with 5 edits",
        "template": "50 tokens (about 35 words) exactly; only 40 % of the tokens are distinct: a "
        "template?",
    }


def test_findings_are_limited_and_counted(make_score: MakeScore) -> None:
    scores = tabulate([make_score(f"{i:03}", 50) for i in range(150)])
    findings, num_findings = collect_findings(scores, [None] * 150)
    assert (len(findings), num_findings) == (MAX_FINDINGS, 150)
    assert [f.id for f in findings[:2]] == ["000", "001"]


def test_the_file_has_every_finding_for_its_owner_alone(
    make_score: MakeScore, tmp_path: Path
) -> None:
    scores = [make_score(f"{i:03}", 50) for i in range(MAX_FINDINGS + 20)]
    scores.append(make_score("=1+1", 45))
    hmacs = [None] * len(scores)
    path = tmp_path / "findings.csv"
    save_findings(tabulate(scores), hmacs, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(Finding.model_fields)
    first, num_findings = collect_findings(tabulate(scores), hmacs)
    assert [row["id"] for row in rows[:MAX_FINDINGS]] == [finding.id for finding in first]
    assert len(rows) == num_findings == MAX_FINDINGS + 21
    # A spreadsheet program would compute it.
    assert rows[-1]["id"] == "'=1+1"
