"""Finds the rows of results that a rule of a policy is about, or the reason why there are none.

A metric is looked for in every bucket that the rule names; a row that is promised there and lacking
is an answer too, "cannot be judged", never nothing. A metric with rows of groups only, such as
``(members)``, is no metric of buckets, and the other way round.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memguard.config.loading import suggest_near
from memguard.gate.policy import EPSILON, EVERY_TRAINED, FINDINGS, RISK, Rule
from memguard.records import AuditReport, MetricRow, ResultRow, Tables
from memguard.records.documents import TRAINED_ROLES

_MOST_NAMES = 6
"""Names that a reason lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """One place in the results table that a rule is about."""

    metric: MetricRow | None
    """None if the audit has no such metric."""
    bucket: str | None
    row: ResultRow | None
    """The row with a value; None if it cannot be judged."""
    why_not: str | None
    """Why it cannot be judged; None if there is a row."""


class NotThere(Exception):
    """The audit lacks what a rule names; the message says what."""


def select_rows(rule: Rule, report: AuditReport) -> list[Selected]:
    """Return the rows that a rule is about, at least one entry.

    Args:
        rule: about metrics of the results table, or about the risk.
        report: of the audit.
    """
    try:
        metrics = _find_metrics(rule, report)
        buckets = _find_buckets(rule, report.tables)
    except NotThere as reason:
        return [Selected(metric=None, bucket=None, row=None, why_not=str(reason))]
    selected = [
        _find_row(rule, metric, bucket, report)
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
    return [Selected(metric=metrics[0], bucket=None, row=None, why_not=why_not)]


def _find_metrics(rule: Rule, report: AuditReport) -> list[MetricRow]:
    """Return the metrics that a rule names.

    Raises:
        NotThere: the audit has none.
    """
    listed = report.tables.metrics
    if rule.metric == RISK:
        risks = [metric for metric in listed if metric.risk_rank is not None]
        if not risks:
            raise NotThere("the audit has no extraction risk")
        return risks
    _check_probe(rule, report)
    named = [m for m in listed if m.metric == rule.metric and rule.probe in (None, m.probe)]
    if not named:
        of_probe = "" if rule.probe is None else f" of the probe {rule.probe}"
        known = sorted({m.metric for m in listed if rule.probe in (None, m.probe)})
        near = suggest_near(rule.metric, [*known, RISK, EPSILON, FINDINGS])
        not_run = [run.name for run in report.probe_runs if run.num_documents is None]
        and_not = f"; not run: {_enumerate(not_run)}" if not_run and not near else ""
        raise NotThere(f"the audit has no metric '{rule.metric}'{of_probe}{near}{and_not}")
    if rule.parameters is None:
        return named
    wanted = _split(rule.parameters)
    exact = [metric for metric in named if _split(metric.parameters) == wanted]
    if not exact:
        known = [metric.parameters or "''" for metric in named]
        near = suggest_near(rule.parameters, known)
        listed_ones = near or f"; it has {_enumerate(known)}"
        raise NotThere(
            f"{rule.metric} has no parameters '{rule.parameters}' in the audit{listed_ones}"
        )
    return exact


def _check_probe(rule: Rule, report: AuditReport) -> None:
    """Check that the probe that a rule names ran.

    Raises:
        NotThere: it did not, or the audit has no such probe.
    """
    if rule.probe is None:
        return
    run = next((run for run in report.probe_runs if run.name == rule.probe), None)
    if run is not None and run.reason_not_run is not None:
        raise NotThere(f"the probe {rule.probe} did not run: {run.reason_not_run}")
    known = dict.fromkeys(
        [*(run.name for run in report.probe_runs), *(m.probe for m in report.tables.metrics)]
    )
    if rule.probe not in known:
        near = suggest_near(rule.probe, [*known]) or f"; it has {_enumerate(known)}"
        raise NotThere(f"the audit has no probe '{rule.probe}'{near}")


def _find_buckets(rule: Rule, tables: Tables) -> list[str]:
    """Return the names of the buckets that a rule names.

    Raises:
        NotThere: the audit has none.
    """
    if rule.on == EVERY_TRAINED:
        trained = [row.bucket for row in tables.buckets if row.role in TRAINED_ROLES]
        if not trained:
            raise NotThere("the audit has no trained bucket")
        return trained
    known = list(
        dict.fromkeys(
            [*(row.bucket for row in tables.buckets), *(row.bucket for row in tables.results)]
        )
    )
    if rule.on in known:
        return [rule.on]
    if rule.on == "control":
        if tables.control is None:
            raise NotThere("the audit has no control: no documents that were never trained")
        return [tables.control.bucket]
    near = suggest_near(rule.on, [*known, EVERY_TRAINED]) or f"; it has {_enumerate(known)}"
    raise NotThere(f"the audit has no bucket '{rule.on}'{near}")


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


def _find_row(rule: Rule, metric: MetricRow, bucket: str, report: AuditReport) -> Selected:
    tables, against = report.tables, None if rule.above_base is None else "base"

    def answer(row: ResultRow | None, why_not: str | None) -> Selected:
        return Selected(metric=metric, bucket=bucket, row=row, why_not=why_not)

    if (reason := _explain_model(rule, report)) is not None:
        return answer(None, reason)
    if rule.above_control is not None and tables.control is None:
        return answer(None, "the audit has no control: no documents that were never trained")
    statistic = rule.statistic or metric.statistic

    def find(
        bucket: str = bucket,
        statistic: str = statistic,
        model: str = rule.model,
        against: str | None = None,
    ) -> ResultRow | None:
        return tables.find(
            *(metric.probe, metric.metric, bucket),
            statistic=statistic,
            parameters=metric.parameters,
            model=model,
            against=against,
        )

    row = find() if against is None else find(against=against, statistic="difference")
    others: dict[str, ResultRow | None] = {}
    if rule.above_control is not None and tables.control is not None:
        others["control"] = find(tables.control.bucket)
    if against is not None:
        others["base"] = find(model="base")
    what = f"{metric.probe} {metric.metric} ({statistic})"
    if row is None:
        of_whom = "" if against is None else " against the base model"
        return answer(None, f"the results table has no row of {what}{of_whom} on {bucket}")
    if not row.is_known:
        return answer(None, f"not measured: {row.missing_because or 'no reason is recorded'}")
    for name, wanted in (("control", rule.above_control), ("base", rule.above_base)):
        other = others.get(name)
        if wanted is not None and (other is None or not other.is_known):
            return answer(None, f"the results table has no value of {what} of the {name}")
    return answer(row, None)


def _explain_model(rule: Rule, report: AuditReport) -> str | None:
    """Return why the audit cannot have rows of the model that a rule names."""
    has_base = report.model.base is not None
    if not has_base and (rule.model == "base" or rule.above_base is not None):
        return "the audit scored no base model"
    known = sorted({row.model for row in report.tables.results})
    if rule.model not in known:
        near = suggest_near(rule.model, known) or f"; it has {_enumerate(known)}"
        return f"the audit has no rows of the model '{rule.model}'{near}"
    return None


def _split(parameters: str) -> Sequence[str]:
    return sorted(part.strip() for part in parameters.split(","))


def _enumerate(names: Iterable[str]) -> str:
    listed = list(dict.fromkeys(names))
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return ", ".join(listed[:_MOST_NAMES]) + more if listed else "none"
