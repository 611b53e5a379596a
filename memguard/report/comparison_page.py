"""Convert a comparison of settings into the texts, tables and figures of its page."""

import math
from dataclasses import replace
from typing import Any

from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, show_minus_control, show_name
from memguard.pages.extraction_cost import list_attacks
from memguard.pages.page import ComparisonPage, Fact, Table
from memguard.pages.pivot import ResultColumn, pivot
from memguard.records import ComparedRun, Comparison, MetricRow, ResultRow, Tables
from memguard.report import seed_means as means
from memguard.report.comparison_front import build_front, build_trends, describe_recommendation
from memguard.report.comparison_paired import build_paired, build_paired_canaries
from memguard.report.comparison_tables import (
    build_extraction,
    build_gains,
    build_headline,
    build_settings,
)
from memguard.report.comparison_utility import build_tasks, describe_setting_utility, name_utility
from memguard.report.seed_means import Setting
from memguard.report.texts import (
    COMPARISON_CONFIDENTIALITY,
    READING_GUIDE,
    describe_environment,
    write_glossary,
)

_MOST_SUMMARISED = 12


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
        recommendation=describe_recommendation(comparison),
        in_short_lead=_write_in_short_lead(comparison),
        in_short=(
            *(
                Fact(fmt.clean_name(setting.name), _summarise(setting))
                for setting in means.list_settings(comparison)[:_MOST_SUMMARISED]
            ),
            *_summarise_control(comparison),
        ),
        guide=(*READING_GUIDE, *_describe_learned(comparison)),
        headline=build_headline(comparison),
        gains=gains,
        paired=(
            *filter(None, (build_paired(comparison), build_paired_canaries(comparison))),
            *build_tasks(comparison),
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
        Fact("Continuation", f"{comparison.continuation_tokens:,} tokens"),
        Fact(
            "Held-out NLL on",
            f"{fmt.count(loss.num_documents if loss else 0)} documents",
            detail=f"{fmt.count(comparison.heldout_num_tokens)} tokens",
        ),
        Fact(
            "Created",
            fmt.time(comparison.created) if comparison.created else "not recorded",
            detail=f"memguard {fmt.clean_name(comparison.tool_version, 40)}",
        ),
    )


def _write_in_short_lead(comparison: Comparison) -> str:
    dose = means.pick_highest(comparison)
    if dose is None:
        return "No trained bucket was measured; only the loss on held-out documents is known."
    tokens = f"continuation of {comparison.continuation_tokens:,} tokens"
    return f"Documents {means.name_dose(dose)}, {tokens}:"


def _summarise(setting: Setting) -> str:
    value, change, _ = describe_setting_utility(setting)
    loss = f"{name_utility(setting.comparison.utility)} {value}"
    if setting.name != setting.comparison.runs[0].setting and change != fmt.MISSING:
        loss += f" ({change} from '{means.name_first(setting.comparison)}')"
    verbatim, near, accuracy = (
        setting.find("extraction", metric)
        for metric in ("verbatim", "near_verbatim", "token_accuracy")
    )
    num_documents = means.count_documents(verbatim)
    if not num_documents:
        return f"no document in this bucket; {loss}."
    other = means.describe_other_dose(setting)
    text = f"{other}: " if other else ""
    text += f"{fmt.of(means.count_matched(verbatim), num_documents)} verbatim"
    if all(map(means.is_measured, near)):
        text += f", {fmt.of(means.count_matched(near), num_documents)} near-verbatim"
    else:
        text += ", near-verbatim not generated"
    if not means.count_matched([*verbatim, *near]) and len(verbatim) == 1:
        text += f" ({fmt.percent_ci(verbatim[0].ci)})"
    if accuracies := means.list_values(accuracy):
        text += f", teacher-forced accuracy {fmt.percent(means.average(accuracies))}"
    return f"{_describe_verdict(setting)}{text}{_describe_attacks(setting)}; {loss}."


def _describe_verdict(setting: Setting) -> str:
    """Return the verdict of a setting's only run; of several runs, the table has the levels."""
    if len(setting.runs) != 1:
        return ""
    verdict = setting.runs[0].verdict
    told = f" {verdict.membership.sentence}" if verdict.membership.level == "told-apart" else ""
    return f"{fmt.clean_text(verdict.describe() + told)} "


def _describe_attacks(setting: Setting) -> str:
    """Report the attack cost and the best attack, over seeds; "" if neither was measured."""
    text = ""
    medians = setting.find("sampling", "log10_queries", statistic="median")
    if costs := means.list_costs(setting):
        mean = means.average(costs)
        cost = replace(medians[0], value=None if mean == math.inf else mean)
        text += f"; median attack cost {fmt.cost_in_queries(cost)}"
    attacked = [setting.find_attacked(attack) for attack in list_attacks(setting.tables)]
    if any(attacked):
        best = max(filter(None, attacked), key=means.count_matched)
        counts = fmt.of(means.count_matched(best), means.count_documents(best))
        text += f"; the best attack extracts {counts}"
    return text


def _summarise_control(comparison: Comparison) -> tuple[Fact, ...]:
    settings = means.list_settings(comparison)
    greedy = [row for setting in settings for row in _list_greedy(setting)]
    if not means.count_documents(greedy):
        return ()
    most = max(greedy, key=lambda row: row.num_matched or 0)
    how = "verbatim" if most.metric == "verbatim" else "near-verbatim"
    text = f"{fmt.of(most.num_matched or 0, most.num_documents)} {how}"
    if most.num_matched:
        text = f"at most {text}"
    shares = means.list_values(
        row for setting in settings for row in setting.find("extraction", "token_accuracy", 0)
    )
    if shares:
        low, high = fmt.percent(min(shares)), fmt.percent(max(shares))
        text += f", teacher-forced accuracy {low if low == high else f'{low} to {high}'}"
    return (Fact("Control, never trained", f"{text}, over all settings."),)


def _list_greedy(setting: Setting) -> list[ResultRow]:
    """Return the near-verbatim rate of each run's control; if not generated, the verbatim rate."""
    verbatim, near = (
        setting.find("extraction", metric, 0) for metric in ("verbatim", "near_verbatim")
    )
    return [two if means.is_measured(two) else one for one, two in zip(verbatim, near, strict=True)]


def _describe_learned(comparison: Comparison) -> tuple[str, ...]:
    """Report the largest gain in token accuracy of a bucket without extracted documents."""
    tables = comparison.tables
    runs = {(run.setting, run.seed): run for run in comparison.runs}
    changes = {
        (row.setting, row.seed, row.bucket): row
        for row in tables.select("extraction", "token_accuracy", against="base")
    }
    gains = [row for row in changes.values() if _is_gain(row, tables)]
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


def _is_gain(row: ResultRow, tables: Tables) -> bool:
    """Return whether training raised a token accuracy beyond the control, with none extracted."""
    rates = tables.risks(row.bucket, setting=row.setting, seed=row.seed).values()
    is_beyond = (row.minus_control_low or 0.0) > 0
    return tables.is_gain(row) and is_beyond and not any(rate.num_matched for rate in rates)


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
