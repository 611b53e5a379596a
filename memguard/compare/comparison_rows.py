"""The rows of a comparison's results table: of its runs, paired ones, and over seeds."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memguard.compare.audited import FinishedRun
from memguard.records import Comparison, FrontPoint, PairedCounts, PairedResult, RiskName
from memguard.records.audit_files import RESULTS, check_audit_file
from memguard.records.results import (
    MOST_TRAINED,
    SECRETS,
    ResultRow,
    fill_row,
    load_results,
    write_parameters,
)
from memguard.records.scores import NUM_RISK_QUERIES, Interval


def list_comparison_rows(comparison: Comparison, runs: Sequence[FinishedRun]) -> list[ResultRow]:
    """Return every row of every run with its setting and seed, and those that compare settings.

    Args:
        comparison: the record.
        runs: the runs that it compares.

    Raises:
        RecordError: the results of a run are missing or damaged.
    """
    rows: list[ResultRow] = []
    for run in runs:
        audit = run.folder / "audit"
        check_audit_file(audit, RESULTS)
        rows += [
            replace(row, setting=run.name, seed=run.seed) for row in load_results(audit / RESULTS)
        ]
    for paired in comparison.paired:
        rows += _list_paired(paired)
    for canaries in comparison.paired_canaries:
        row = ResultRow(
            setting=canaries.setting,
            seed=canaries.seed,
            against=f"setting:{canaries.against}",
            probe="canaries",
            metric="verbatim",
            statistic="difference",
            bucket=SECRETS,
            num_documents=canaries.num_canaries,
        )
        rows.append(_fill_paired(row, canaries.verbatim))
        rows.append(
            fill_row(
                replace(row, metric="exposure_bits"),
                canaries.exposure_bits_difference,
                "jackknife",
                why_not="too few references of the same length in one of the runs",
            )
        )
    for point in comparison.front:
        rows += _list_point(point, comparison.front[0].name)
    return rows


def _list_paired(paired: PairedResult) -> Iterator[ResultRow]:
    row = ResultRow(
        setting=paired.setting,
        seed=paired.seed,
        against=f"setting:{paired.against}",
        probe="extraction",
        metric="verbatim",
        statistic="difference",
        bucket=f"(trained {paired.num_repetitions} times)",
        num_documents=paired.num_documents,
    )
    yield _fill_paired(row, paired.verbatim)
    near = replace(row, metric="near_verbatim")
    if paired.near_verbatim is None:
        yield fill_row(near, None, "", why_not="one of the two runs generated no text")
    else:
        yield _fill_paired(near, paired.near_verbatim)
    accuracy = replace(row, metric="token_accuracy")
    yield fill_row(accuracy, paired.token_accuracy_difference, "jackknife")


def _fill_paired(row: ResultRow, counts: PairedCounts) -> ResultRow:
    """Fill the difference of two rates on the same documents."""
    difference = (counts.num_only_setting - counts.num_only_against) / row.num_documents
    return fill_row(row, difference, "")


def _list_point(point: FrontPoint, first: str) -> Iterator[ResultRow]:
    """Yield the risks and the utility of a setting over its seeds."""
    row = ResultRow(
        setting=point.name,
        probe="extraction",
        metric="verbatim",
        statistic="rate",
        bucket=MOST_TRAINED,
        num_documents=point.num_documents,
    )
    places: dict[RiskName, ResultRow] = {
        "verbatim": row,
        "near_verbatim": replace(row, metric="near_verbatim"),
        "attack_cost": replace(
            row,
            probe="sampling",
            metric="within_queries",
            parameters=write_parameters({"queries": NUM_RISK_QUERIES}),
        ),
        "attack": replace(row, probe="attacks", metric="best_any_answer"),
    }
    for risk, share in point.risks.items():
        yield fill_row(places[risk], share, "pooled")
    utility = replace(
        row, probe="heldout", metric="nll", statistic="mean", bucket="(held out)", num_documents=0
    )
    loss = Interval(value=point.utility, ci=point.utility_ci)
    yield fill_row(utility, loss, "t")
    if point.utility_change is not None:
        change = replace(
            utility, metric="nll_change", against=f"setting:{first}", statistic="difference"
        )
        yield fill_row(change, point.utility_change, "t")
