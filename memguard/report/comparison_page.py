"""Convert a comparison of settings into the texts, tables and figures of its page."""

from typing import Any

from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, show_minus_control, show_name
from memguard.pages.page import ComparisonPage, Fact, Table
from memguard.pages.pivot import ResultColumn, pivot
from memguard.records import ComparedRun, Comparison, MetricRow
from memguard.report import seed_means as means
from memguard.report.comparison_front import build_front, build_trends, list_sentences
from memguard.report.comparison_paired import build_paired, build_paired_canaries
from memguard.report.comparison_tables import (
    build_extraction,
    build_gains,
    build_headline,
    build_settings,
)
from memguard.report.comparison_utility import build_task
from memguard.report.texts import (
    COMPARISON_CONFIDENTIALITY,
    READING_GUIDE,
    describe_environment,
    name_continuation,
    write_glossary,
)


def digest_comparison(comparison: Comparison) -> ComparisonPage:
    """Convert a comparison into the contents of its page."""
    heading = f"Comparison '{fmt.clean_name(comparison.name)}'"
    gains = build_gains(comparison)
    return ComparisonPage(
        title=heading,
        heading=heading,
        front=build_front(comparison),
        tool_version=fmt.clean_name(comparison.tool_version, 40),
        confidentiality=COMPARISON_CONFIDENTIALITY,
        identity=_describe_identity(comparison),
        sentences=list_sentences(comparison),
        guide=(
            fmt.clean_text(comparison.recommendation.rule, 3 * fmt.SENTENCE_LIMIT),
            *READING_GUIDE,
            *_describe_learned(comparison),
        ),
        headline=build_headline(comparison),
        gains=gains,
        paired=(
            *filter(None, (build_paired(comparison), build_paired_canaries(comparison))),
            *(build_task(comparison, task) for task in comparison.tasks),
        ),
        figures=build_trends(comparison),
        extraction=build_extraction(comparison),
        settings=build_settings(comparison),
        others=tuple(
            _build_table(comparison, metric)
            for metric in comparison.tables.metrics
            if metric.is_foreign
        ),
        command=fmt.clean_text(comparison.command, fmt.COMMAND_LIMIT),
        environment=describe_environment(comparison.environment),
        glossary=write_glossary(None, attacked=gains is not None),
    )


def _describe_identity(comparison: Comparison) -> tuple[Fact, ...]:
    runs, num_settings = comparison.runs, len(means.list_settings(comparison))
    seeds, loss = sorted({run.seed for run in runs}), comparison.find_loss(runs[0])
    return (
        Fact("Compared", f"{num_settings:,} settings", detail=f"{len(runs):,} runs"),
        Fact("Seeds", ", ".join(map(str, seeds))),
        Fact("Documents", fmt.hash(comparison.documents_sha256), code=True),
        Fact("Continuation", name_continuation(comparison)),
        Fact(
            "Held-out loss on",
            f"{fmt.count(loss.num_documents if loss else 0)} documents",
            detail=f"{fmt.count(comparison.heldout_num_tokens)} tokens",
        ),
        Fact(
            "Created",
            fmt.time(comparison.created) if comparison.created else "not recorded",
            detail=f"memguard {fmt.clean_name(comparison.tool_version, 40)}",
        ),
    )


def _describe_learned(comparison: Comparison) -> tuple[str, ...]:
    """Report the largest gain in token accuracy of a bucket without extracted documents."""
    tables = comparison.tables
    runs = {(run.setting, run.seed): run for run in comparison.runs}
    changes = {
        (row.setting, row.seed, row.bucket): row
        for row in tables.select("extraction", "token_accuracy", against="base")
    }
    gains = [row for row in changes.values() if tables.is_gain(row)]
    if not gains:
        return ()
    gain = max(gains, key=lambda row: row.minus_control or 0.0)
    run = runs[gain.setting or "", gain.seed or 0]
    control = changes.get((run.setting, run.seed, means.find_bucket(run, 0) or ""))
    metric = tables.find_metric("extraction", "token_accuracy")
    shown = show_minus_control(gain, control, metric)
    interval = ", ".join(filter(None, (shown.detail, shown.note)))
    return (
        f"With '{means.label_run(run, comparison)}' no document "
        f"{means.name_dose(run.doses[gain.bucket])} is extracted, yet training raised their "
        f"teacher-forced token accuracy by {shown.text} more than that of the control "
        f"({interval}): 0{fmt.PERCENT} extracted does not mean that nothing was learned from them.",
    )


_SHOWN = 12


def _build_table(comparison: Comparison, metric: MetricRow) -> Table:
    """Build the table of a metric that memguard does not define."""
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
        Column("Setting", lambda run: show_name(means.label_run(run, comparison))),
        [
            ResultColumn(
                (fmt.clean_name(bucket, 40), statistic),
                metric.probe,
                metric.metric,
                key={"bucket": bucket, "statistic": statistic},
                base="note",
            )
            for statistic, bucket in places
        ],
        comparison.runs,
        key=find_key,
        shown=_SHOWN,
        notes=(fmt.clean_text(metric.meaning),),
        compact=True,
    )
