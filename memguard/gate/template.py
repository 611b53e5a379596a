"""`memguard gate --init`: a policy to begin with, from the metrics that an audit has.

On top are rules that suit most audits; below, as comments, is one rule for every metric that has an
interval, on the trained buckets or on its group. Every line is valid once its `#` is removed.
"""

from collections.abc import Iterator

import yaml

from memguard.gate.measured import is_bounded
from memguard.gate.policy import EPSILON, EVERY_TRAINED, FINDINGS, RISK
from memguard.pages import formatting as fmt
from memguard.records import AuditReport, MetricRow, ResultRow
from memguard.records.documents import TRAINED_ROLES
from memguard.records.utility import UTILITY

_LIMIT, _AUC_LIMIT, _ABOVE = 0.1, 0.6, 0.1
"""Limits of the template: of a share, of an AUC, of a share minus that of the control."""
_HEAD = """\
# Policy of 'memguard gate', written from the audit of {name}.
#
# A rule is judged on the 95 % interval of a number, not on the number: all of it within the limit
# passes, all of it beyond the limit fails, and an interval across the limit decides nothing. What a
# rule names and an audit lacks cannot be judged. Exit codes: 0 pass, 10 fail, 12 cannot be judged,
# 11 inconclusive; of several the first of 10, 12, 11, 0.
#
#   on          a bucket; trained: every trained bucket, each judged; (trained): the pooled one
#   limit       one of at_most, at_least, above_control, above_base (largest difference that passes)
#   than        folder of an earlier audit: at_most limits the increase since
#   narrow by   probe, parameters, model, statistic
"""
_TAIL = """
# Levels of the audit's verdict that pass: none-found, inconclusive, extracted, memorized.
verdict: [none-found]

# Findings that a person accepted; outside of run folders, relative to this file.
# triage: triage.yaml

# How the model will be released, for the page to sign: internal, api or open-weights.
# release: internal
"""


def render_policy(report: AuditReport) -> str:
    """Return the text of a policy for an audit and others like it."""
    lines = [_HEAD.format(name=fmt.clean_name(report.subject, 60)), "gate:"]
    has_risk = any(metric.risk_rank is not None for metric in report.tables.metrics)
    is_trained = any(row.role in TRAINED_ROLES for row in report.tables.buckets)
    if has_risk and is_trained:
        lines.append("  # The strongest extraction attack of each trained bucket.")
        lines.append(_write_rule(metric=RISK, on=EVERY_TRAINED, at_most=_LIMIT))
    else:
        # An empty list with a verdict is a policy.
        lines[-1] = "gate: []\n# With rules, in place of []:"
    lines.append("  # Findings that no person has accepted, and the privacy loss.")
    lines.append(_comment(_write_rule(metric=FINDINGS, at_most=0)))
    lines.append(_comment(_write_rule(metric=EPSILON, at_most=8.0)))
    meaning = ""
    for metric in report.tables.metrics:
        rules = list(_list_rules(metric, report))
        if rules and metric.meaning != meaning:
            meaning = metric.meaning
            lines.append(f"  # {fmt.clean_text(meaning, 300)}")
        lines += map(_comment, rules)
    return "\n".join(lines) + "\n" + _TAIL


def _list_rules(metric: MetricRow, report: AuditReport) -> Iterator[str]:
    """Yield one rule for the trained buckets, or one for each other place with a row of a metric.

    Metrics without any interval, such as medians, are left out: they cannot be judged.
    """
    rows = [
        row
        for row in report.tables.select(
            metric.probe, metric.metric, parameters=metric.parameters, model="trained", step=None
        )
        if row.against is None and row.statistic == metric.statistic
    ]
    rows = [row for row in rows if row.ci is not None]
    places = [row.bucket if _is_own_place(row, report) else EVERY_TRAINED for row in rows]
    places = [place for place in places if place == EVERY_TRAINED or EVERY_TRAINED not in places]
    for place in dict.fromkeys(places):
        here = [row for row in rows if place in (row.bucket, EVERY_TRAINED)]
        values = {
            "metric": metric.metric,
            "probe": metric.probe,
            "parameters": metric.parameters or None,
            "on": place,
        }
        yield _write_rule(**values, **_choose_limit(metric, here))
        if metric.statistic == "rate" and any(row.minus_control is not None for row in here):
            yield _write_rule(**values, above_control=_ABOVE)


def _is_own_place(row: ResultRow, report: AuditReport) -> bool:
    """Return whether a rule has to name the bucket of a row, because it is no trained one."""
    bucket = report.tables.find_bucket(row.bucket)
    return bucket is None or bucket.role not in TRAINED_ROLES


def _choose_limit(metric: MetricRow, rows: list[ResultRow]) -> dict[str, float]:
    values = [row.value for row in rows if row.value is not None]
    name = "at_least" if metric.higher_is_better else "at_most"
    if metric.statistic == "auc":
        return {name: _AUC_LIMIT}
    if is_bounded(metric) and metric.probe != UTILITY:
        return {name: 1 - _LIMIT if metric.higher_is_better else _LIMIT}
    # Without bounds, and of a benchmark task, today's number.
    worst = (min if metric.higher_is_better else max)(values, default=0.0)
    return {name: float(f"{worst:.3g}")}


def _comment(rule: str) -> str:
    return rule.replace("  - ", "  # - ", 1)


def _write_rule(**values: object) -> str:
    """Return a rule as a line of YAML; values that are None are left out."""
    parts = [f"{name}: {_quote(value)}" for name, value in values.items() if value is not None]
    return f"  - {{{', '.join(parts)}}}"


def _quote(value: object) -> str:
    """Return a scalar as it is written inside of braces."""
    text: str = yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=False)
    return text.strip().removeprefix("[").removesuffix("]")
