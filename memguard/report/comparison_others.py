"""Tables of the probes of other packages: a row for each run, a column for each bucket."""

from typing import Any

from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, show_name
from memguard.pages.page import Table
from memguard.pages.pivot import ResultColumn, pivot
from memguard.records import ComparedRun, Comparison, MetricRow
from memguard.report.seed_means import label_run

_MOST_METRICS, _MOST_BUCKETS, _SHOWN = 20, 8, 12


def build_other_probes(comparison: Comparison) -> tuple[Table, ...]:
    """Build a table of each metric that memguard does not define; empty without any."""
    metrics = [metric for metric in comparison.tables.metrics if metric.is_foreign]
    return tuple(_build_table(comparison, metric) for metric in metrics[:_MOST_METRICS])


def _build_table(comparison: Comparison, metric: MetricRow) -> Table:
    tables = comparison.tables
    rows = tables.select(
        metric.probe, metric.metric, parameters=metric.parameters, model="trained", against=None
    )
    places = dict.fromkeys((row.statistic, row.bucket) for row in rows)

    def find_key(run: ComparedRun) -> dict[str, Any]:
        return {"setting": run.setting, "seed": run.seed, "parameters": metric.parameters}

    return pivot(
        tables,
        f"{fmt.clean_text(metric.heading, 60)} ({fmt.CI}), by probe "
        f"'{fmt.clean_name(metric.probe, 40)}' of {fmt.clean_text(metric.package, 60)}",
        Column("Setting", lambda run: show_name(label_run(run, comparison))),
        [
            ResultColumn(
                (fmt.clean_name(bucket, 40), statistic),
                metric.probe,
                metric.metric,
                key={"bucket": bucket, "statistic": statistic},
                base="note",
            )
            for statistic, bucket in list(places)[:_MOST_BUCKETS]
        ],
        comparison.runs,
        key=find_key,
        shown=_SHOWN,
        notes=(fmt.clean_text(metric.meaning),),
        compact=True,
    )
