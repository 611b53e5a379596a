"""What a rule measures in a row of results: a value, its interval, the documents that it is of."""

from dataclasses import dataclass, replace

from memguard.audit.statistics import compute_exact_interval
from memguard.gate.deciding import (
    find_documents_by_width,
    find_documents_for_rate,
    find_effective,
    judge_interval,
)
from memguard.gate.policy import Rule
from memguard.gate.words import Unit, count_documents, say_undecided
from memguard.records import MetricRow, ResultRow
from memguard.records.gate import Outcome

_ROUNDING = 1e-9
"""Largest difference between an interval of a file and the same one computed again."""


class NoInterval(Exception):
    """A row cannot be judged; the message says why."""


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
        if outcome == "pass":
            return outcome, f"{shown}. All of it is within the limit of {bound}{self.how}.", None
        if outcome == "fail":
            return outcome, f"{shown}. All of it is {side} the limit of {bound}{self.how}.", None
        needed = self._find_needed(limit, at_least=at_least)
        undecided = say_undecided(
            needed,
            is_rate=self.num_effective is not None,
            is_on_limit=self.value == limit,
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
    """Return what a rule judges in a row.

    Args:
        rule: of a policy.
        metric: of the row.
        row: with a value.

    Raises:
        NoInterval: it has none, or one that contradicts its counts.
    """
    unit = Unit(is_share=is_share(metric), is_difference=row.against is not None)
    if rule.above_control is None:
        return _measure_value(row, unit)
    if row.minus_control is None:
        raise NoInterval("the row has no difference from the control")
    if row.minus_control_ci is None:
        raise NoInterval(
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
        raise NoInterval(
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
        raise NoInterval(f"its interval, {low:.4g} to {high:.4g}, does not contain {value:.4g}")


def _check_counts(row: ResultRow) -> None:
    """Check that a rate and its interval are those of its counts.

    Raises:
        NoInterval: they are not, or there are no counts.
    """
    if row.num_matched is None or not 0 <= row.num_matched <= row.num_documents:
        raise NoInterval("it is a rate without its counts")
    assert row.value is not None, "checked"
    assert row.ci is not None, "checked"
    if abs(row.value - row.num_matched / row.num_documents) > _ROUNDING:
        raise NoInterval(f"its value, {row.value:.4g}, is not that of its counts")
    if row.interval != "clopper-pearson" or row.num_clusters is not None:
        return
    ends = compute_exact_interval(row.num_matched, row.num_documents, row.num_documents)
    if ends is None or max(abs(a - b) for a, b in zip(ends, row.ci, strict=True)) > _ROUNDING:
        raise NoInterval("its interval is not that of its counts")


def count_row(row: ResultRow) -> str:
    """Return the counts of a row: ``26 of 39 documents (20 of 33 texts)``."""
    counts = count_documents(row.num_matched, row.num_documents)
    if row.num_clusters is None:
        return counts
    matched = "" if row.num_matched_clusters is None else f"{row.num_matched_clusters:,} of "
    return f"{counts} ({matched}{row.num_clusters:,} texts)"
