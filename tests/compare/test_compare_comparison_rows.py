"""The results table of a comparison: its runs' rows, paired differences, and rows over seeds."""

from pathlib import Path
from unittest import mock

import pytest
from compare_examples import CORRECT, write_run

from memguard.compare import FinishedRun, compare_runs, list_comparison_rows
from memguard.errors import RecordError
from memguard.records.audit_files import load_audit_report
from memguard.records.comparison import check_results, list_shares, load_comparison
from memguard.records.results import build_results, read_results
from memguard.workflows.compare_runs import publish

FEWER = {0: CORRECT[0], 4: [20, 20, 30, 10, 44], 16: [50, 50, 46, 20, 10]}
"""Two documents that CORRECT recites, of those trained 4 and 16 times, are not recited."""


@pytest.fixture
def runs(tmp_path: Path) -> list[FinishedRun]:
    return [
        write_run(tmp_path / f"{name}-{seed}", name=name, seed=seed, correct=correct)
        for name, correct in (("plain", CORRECT), ("goldfish", FEWER))
        for seed in (0, 1)
    ]


def test_every_row_of_every_run_is_there_with_setting_and_seed(runs: list[FinishedRun]) -> None:
    rows = list_comparison_rows(compare_runs(runs, name="c", command=""), runs)
    build_results(rows)  # Keys are unique.
    for run in runs:
        own = load_audit_report(run.folder / "audit").tables.results
        ours = [
            row
            for row in rows
            if (row.setting, row.seed) == (run.name, run.seed)
            and not (row.against or "").startswith("setting:")
        ]
        assert [(row.key[2:], row.value, row.missing_because) for row in ours] == [
            (row.key[2:], row.value, row.missing_because) for row in own
        ]


def test_settings_are_compared_by_seed_and_over_seeds(runs: list[FinishedRun]) -> None:
    comparison = compare_runs(runs, name="c", command="")
    rows = list_comparison_rows(comparison, runs)
    paired = {
        (row.seed, row.bucket): row.value
        for row in rows
        if row.against == "setting:plain" and row.metric == "verbatim" and row.setting == "goldfish"
    }
    assert paired == {
        (seed, f"(trained {count} times)"): pytest.approx(-0.2)
        for seed in (0, 1)
        for count in (4, 16)
    }
    (pooled,) = (
        row
        for row in rows
        if row.seed is None and row.setting == "goldfish" and row.metric == "verbatim"
    )
    point = comparison.front[1]
    assert pooled.bucket == "(trained most often)"
    assert (pooled.num_matched, pooled.num_documents) == (4, 10)
    assert pooled == list_shares(comparison.tables, "goldfish")["verbatim"]
    assert point.risk == list_shares(comparison.tables, "goldfish")[point.risk_by].value
    (loss,) = (
        row for row in rows if row.seed is None and row.setting == "plain" and row.metric == "nll"
    )
    assert loss.value == comparison.front[0].utility


def test_the_table_is_sealed_with_the_record(runs: list[FinishedRun], tmp_path: Path) -> None:
    folder = tmp_path / "comparison"
    page, comparison = publish(compare_runs(runs, name="c", command=""), runs, folder, mock.Mock())
    assert page == folder / "comparison.html"
    assert load_comparison(folder / "comparison.json") == comparison
    table = read_results(check_results(comparison, folder))
    assert set(table["setting"]) == {"plain", "goldfish"}
    path = folder / "comparison.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RecordError, match=r"comparison.parquet' is damaged: it has .* bytes"):
        check_results(comparison, folder)
    # A run whose own table was changed is refused.
    own = runs[0].folder / "audit" / "results.parquet"
    own.write_bytes(own.read_bytes()[:-1])
    with pytest.raises(RecordError, match=r"results.parquet' is damaged"):
        publish(comparison, runs, folder, mock.Mock())
