"""The same documents on page, CSV, excerpts, verdict, --fix, gate, diff, frame and card."""

from pathlib import Path
from typing import Any

import pytest
from check_findings import check_audit

from memguard.records import documents

SEEDS = {1: "extracted", 4: "none-found", 1175: "extracted"}
"""Drawn audits with their levels: most probes, copies and forms; nothing; only documents to be
forgotten."""


@pytest.mark.parametrize(("seed", "level"), SEEDS.items())
def test_every_reader_names_the_documents_of_the_verdict(
    seed: int, level: str, tmp_path: Path
) -> None:
    drawn, differences = check_audit(seed, tmp_path)
    assert differences == []
    assert drawn.results.verdict.level == level


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_every_reader_of_many_audits(first: int, tmp_path: Path) -> None:
    differences = {
        seed: found
        for seed in range(first, first + 10)
        if (found := check_audit(seed, tmp_path)[1])
    }
    assert differences == {}


@pytest.mark.slow
def test_a_reader_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = documents.find_trained

    def leave_out_forgotten(role_N: Any, *others: Any) -> Any:
        return find(role_N, *others) & (role_N != "forget")

    # Of the readers of records.parquet alone.
    monkeypatch.setattr(documents, "find_trained", leave_out_forgotten)
    _, differences = check_audit(1175, tmp_path)
    readers = {difference.partition(": ")[0] for difference in differences}
    assert readers >= {"records", "--fix", "gate", "gate, outcome", "diff"}
