"""Finds the rows of results that a rule is about, and what it measures in them.

    Selected   a place, or the reason why it cannot be judged
    Measured   a value with its interval, and the documents that it is of

A metric is looked for in every bucket that the rule names; a row that is promised there and lacking
is an answer too, "cannot be judged", never nothing. A metric with rows of groups only, such as
``(members)``, is no metric of buckets, and the other way round.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from memguard.audit.statistics import compute_exact_interval
from memguard.config.loading import suggest_near
from memguard.errors import list_first, plural
from memguard.gate.deciding import (
    Unit,
    find_documents_by_width,
    find_documents_for_rate,
    find_effective,
    judge_interval,
    say_undecided,
)
from memguard.gate.policy import EPSILON, EVERY_TRAINED, FINDINGS, RISK, Rule
from memguard.records import AuditReport, MetricRow, ResultRow, Tables
from memguard.records.documents import TRAINED_ROLES
from memguard.records.gate import Outcome

_MOST_NAMES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """One place in the results table that a rule is about."""

    metric: MetricRow | None = None
    """None if the audit has no such metric."""
    bucket: str | None = None
    why_not: str | None = None
    """Why there is no row to look for; None if there should be one."""


class NotJudged(Exception):
    """What a rule names cannot be judged; the message says why."""


def select_places(rule: Rule, report: AuditReport) -> list[Selected]:
    """Return the places that a rule is about, at least one entry."""
    try:
        metrics, buckets = _find_metrics(rule, report), _find_buckets(rule, report.tables)
    except NotJudged as reason:
        return [Selected(why_not=str(reason))]
    selected = [
        Selected(metric=metric, bucket=bucket)
        for metric in metrics
        for bucket in buckets
        if _is_expected(metric, bucket, report.tables)
    ]
    if selected:
        return selected
    places = dict.fromkeys(
        row.bucket for metric in metrics for row in _list_rows(metric, report.tables)
    )
    where = f"it has rows of {_enumerate(places)}" if places else "it has no row at all"
    why_not = f"{rule.metric} has no row of {_enumerate(buckets)}: {where}"
    return [Selected(metric=metrics[0], why_not=why_not)]


def _find_metrics(rule: Rule, report: AuditReport) -> list[MetricRow]:
    """Return the metrics that a rule names."""
    listed = report.tables.metrics
    if rule.metric == RISK:
        risks = [metric for metric in listed if metric.risk_rank is not None]
        if not risks:
            raise NotJudged("the audit has no extraction risk")
        return risks
    _check_probe(rule, report)
    named = [m for m in listed if m.metric == rule.metric and rule.probe in (None, m.probe)]
    if not named:
        of_probe = "" if rule.probe is None else f" of the probe {rule.probe}"
        known = sorted({m.metric for m in listed if rule.probe in (None, m.probe)})
        near = suggest_near(rule.metric, [*known, RISK, EPSILON, FINDINGS])
        not_run = [run.name for run in report.probe_runs if run.num_documents is None]
        and_not = f"; not run: {_enumerate(not_run)}" if not_run and not near else ""
        raise NotJudged(f"the audit has no metric '{rule.metric}'{of_probe}{near}{and_not}")
    if rule.parameters is None:
        return named
    wanted = _split(rule.parameters)
    exact = [metric for metric in named if _split(metric.parameters) == wanted]
    if not exact:
        known = [metric.parameters or "''" for metric in named]
        near = suggest_near(rule.parameters, known) or f"; it has {_enumerate(known)}"
        raise NotJudged(f"{rule.metric} has no parameters '{rule.parameters}' in the audit{near}")
    return exact


def _check_probe(rule: Rule, report: AuditReport) -> None:
    """Check that the probe that a rule names ran."""
    if rule.probe is None:
        return
    run = next((run for run in report.probe_runs if run.name == rule.probe), None)
    if run is not None and run.reason_not_run is not None:
        raise NotJudged(f"the probe {rule.probe} did not run: {run.reason_not_run}")
    known = [*(run.name for run in report.probe_runs), *(m.probe for m in report.tables.metrics)]
    if rule.probe not in known:
        near = suggest_near(rule.probe, known) or f"; it has {_enumerate(known)}"
        raise NotJudged(f"the audit has no probe '{rule.probe}'{near}")


def _find_buckets(rule: Rule, tables: Tables) -> list[str]:
    """Return the names of the buckets that a rule names."""
    if rule.on == EVERY_TRAINED:
        trained = [row.bucket for row in tables.buckets if row.role in TRAINED_ROLES]
        if not trained:
            raise NotJudged("the audit has no trained bucket")
        return trained
    buckets = dict.fromkeys(row.bucket for row in tables.buckets)
    known = [*(buckets | dict.fromkeys(row.bucket for row in tables.results))]
    if rule.on in known:
        return [rule.on]
    if rule.on == "control":
        if tables.control is None:
            raise NotJudged("the audit has no control: no documents that were never trained")
        return [tables.control.bucket]
    near = suggest_near(rule.on, [*known, EVERY_TRAINED]) or f"; it has {_enumerate(known)}"
    raise NotJudged(f"the audit has no bucket '{rule.on}'{near}")


def _is_expected(metric: MetricRow, bucket: str, tables: Tables) -> bool:
    """Return whether the table has to have a row of a metric there.

    A metric without any row was promised: its row is lacking wherever a rule looks.
    """
    places = {row.bucket for row in _list_rows(metric, tables)}
    if not places or bucket in places:
        return True
    if not _is_group(bucket):
        return not all(map(_is_group, places))
    if not any(map(_is_group, places)):
        return False
    # Others of its kind have this group, and so should it.
    return bool(tables.select(metric.probe, metric.metric, bucket=bucket))


def _is_group(bucket: str) -> bool:
    return bucket.startswith("(")


def _list_rows(metric: MetricRow, tables: Tables) -> list[ResultRow]:
    return tables.select(metric.probe, metric.metric, parameters=metric.parameters, step=None)


def find_row(rule: Rule, metric: MetricRow, bucket: str, report: AuditReport) -> ResultRow:
    """Return the row of a place, which has a value; `NotJudged` if it is lacking."""
    tables, against = report.tables, None if rule.above_base is None else "base"
    _check_model(rule, report)
    if rule.above_control is not None and tables.control is None:
        raise NotJudged("the audit has no control: no documents that were never trained")
    statistic = rule.statistic or metric.statistic
    find = partial(
        tables.find,
        metric.probe,
        metric.metric,
        statistic=statistic,
        parameters=metric.parameters,
        model=rule.model,
    )
    row = find(bucket) if against is None else find(bucket, against=against, statistic="difference")
    others: dict[str, ResultRow | None] = {}
    if rule.above_control is not None and tables.control is not None:
        others["control"] = find(tables.control.bucket)
    if against is not None:
        others["base"] = find(bucket, model="base")
    what = f"{metric.probe} {metric.metric} ({statistic})"
    if row is None:
        of_whom = "" if against is None else " against the base model"
        raise NotJudged(f"the results table has no row of {what}{of_whom} on {bucket}")
    if not row.is_known:
        raise NotJudged(f"not measured: {row.missing_because or 'no reason is recorded'}")
    for name, other in others.items():
        if other is None or not other.is_known:
            raise NotJudged(f"the results table has no value of {what} of the {name}")
    return row


def _check_model(rule: Rule, report: AuditReport) -> None:
    """Check that the audit can have rows of the model that a rule names."""
    has_base = report.model.base is not None
    if not has_base and (rule.model == "base" or rule.above_base is not None):
        raise NotJudged("the audit scored no base model")
    known = sorted({row.model for row in report.tables.results})
    if rule.model not in known:
        near = suggest_near(rule.model, known) or f"; it has {_enumerate(known)}"
        raise NotJudged(f"the audit has no rows of the model '{rule.model}'{near}")


def _split(parameters: str) -> Sequence[str]:
    return sorted(part.strip() for part in parameters.split(","))


def _enumerate(names: Iterable[str]) -> str:
    return list_first(list(dict.fromkeys(names)), _MOST_NAMES) or "none"


_ROUNDING = 1e-9
"""Largest difference between an interval of a file and the same one computed again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A value with its interval."""

    value: float
    low: float
    high: float
    unit: Unit
    num_documents: int
    num_matched: int | None = None
    num_effective: float | None = None
    """Of a rate with Clopper and Pearson's interval; None for any other estimate."""
    counted: str = "documents"
    """What the value is of, in words."""
    compared_with: str | None = None
    """None: the value itself; else ``control``, ``base`` or the name of an earlier audit."""
    how: str = ""
    """How it was compared, a clause."""

    def judge(self, limit: float, *, at_least: bool = False) -> tuple[Outcome, str, int | None]:
        """Return the outcome, its sentence and the number of documents that would decide."""
        outcome = judge_interval(self.low, self.high, limit, at_least=at_least)
        write = self.unit.write
        shown = (
            f"{self.counted}: {write(self.value, limit)}, 95 % interval "
            f"{self.unit.write_interval(self.low, self.high, limit)}"
        )
        side = ("above", "below")[at_least]
        bound = write(limit).removeprefix("+")
        if outcome != "inconclusive":
            place = "within" if outcome == "pass" else side
            return outcome, f"{shown}. All of it is {place} the limit of {bound}{self.how}.", None
        needed = self._find_needed(limit, at_least=at_least)
        undecided = say_undecided(
            needed, is_rate=self.num_effective is not None, is_on_limit=self.value == limit
        )
        sentence = f"{shown}. It contains the limit of {bound}{self.how}: {undecided}."
        return outcome, sentence, needed

    def _find_needed(self, limit: float, *, at_least: bool) -> int | None:
        if self.num_effective is not None and self.num_matched is not None:
            return find_documents_for_rate(
                self.num_matched,
                self.num_documents,
                limit,
                effective=self.num_effective,
                at_least=at_least,
            )
        reach = self.high - self.value if self.value < limit else self.value - self.low
        return find_documents_by_width(self.value, reach, self.num_documents, limit)


def is_share(metric: MetricRow) -> bool:
    """Return whether the values of a metric are shares, which are written in percent."""
    return metric.statistic == "rate" or (metric.statistic == "mean" and is_bounded(metric))


def is_bounded(metric: MetricRow) -> bool:
    """Return whether the values of a metric are between 0 and 1."""
    return metric.statistic in ("rate", "auc") or metric.bounds == (0.0, 1.0)


def measure_row(rule: Rule, metric: MetricRow, row: ResultRow) -> Measured:
    """Return what a rule judges in a row; `NotJudged` if it has none or contradicts its counts."""
    unit = Unit(is_share=is_share(metric), is_difference=row.against is not None)
    if rule.above_control is None:
        return _measure_value(row, unit)
    if row.minus_control is None:
        raise NotJudged("the row has no difference from the control")
    if row.minus_control_ci is None:
        raise NotJudged(
            f"its difference from the control, {row.minus_control:.4g}, has no interval, and the "
            "interval is what is judged"
        )
    low, high = row.minus_control_ci
    _check_order(low, row.minus_control, high)
    return Measured(
        value=row.minus_control,
        low=low,
        high=high,
        unit=replace(unit, is_difference=True),
        num_documents=row.num_documents,
        counted=f"{count_row(row)}, minus the control",
        compared_with="control",
    )


def _measure_value(row: ResultRow, unit: Unit) -> Measured:
    assert row.value is not None, "the row has a value"
    if row.ci is None or not row.interval:
        raise NotJudged(
            f"its value, {unit.write(row.value)} of {count_row(row)}, has no interval, and the "
            "interval is what is judged"
        )
    low, high = row.ci
    _check_order(low, row.value, high)
    is_rate = row.statistic == "rate"
    if is_rate:
        _check_counts(row)
    return Measured(
        value=row.value,
        low=low,
        high=high,
        unit=unit,
        num_documents=row.num_documents,
        num_matched=row.num_matched,
        num_effective=find_effective(row) if row.interval == "clopper-pearson" else None,
        counted=count_row(row) + (", minus the base model" if row.against else ""),
        compared_with=row.against,
    )


def _check_order(low: float, value: float, high: float) -> None:
    if not low <= value <= high:
        raise NotJudged(f"its interval, {low:.4g} to {high:.4g}, does not contain {value:.4g}")


def _check_counts(row: ResultRow) -> None:
    """Check that a rate and its interval are those of its counts."""
    if row.num_matched is None or not 0 <= row.num_matched <= row.num_documents:
        raise NotJudged("it is a rate without its counts")
    assert row.value is not None, "checked"
    assert row.ci is not None, "checked"
    if abs(row.value - row.num_matched / row.num_documents) > _ROUNDING:
        raise NotJudged(f"its value, {row.value:.4g}, is not that of its counts")
    if row.interval != "clopper-pearson" or row.num_clusters is not None:
        return
    ends = compute_exact_interval(row.num_matched, row.num_documents, row.num_documents)
    if ends is None or max(abs(a - b) for a, b in zip(ends, row.ci, strict=True)) > _ROUNDING:
        raise NotJudged("its interval is not that of its counts")


def count_row(row: ResultRow) -> str:
    """Return the counts of a row: ``26 of 39 documents (20 of 33 texts)``; ``39 documents``."""
    of = "" if row.num_matched is None else f"{row.num_matched:,} of "
    counts = f"{of}{plural(row.num_documents, 'document')}"
    if row.num_clusters is None:
        return counts
    matched = "" if row.num_matched_clusters is None else f"{row.num_matched_clusters:,} of "
    return f"{counts} ({matched}{row.num_clusters:,} texts)"
