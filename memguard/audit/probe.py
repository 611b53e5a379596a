"""What a probe is: settings, metrics, measurement, rows, section of the page. No torch.

    measure     a generator: yields requests, receives a matrix of numbers for each
    tabulate    the measurements -> rows, metrics, details, columns of records.parquet
    section     a report -> the section of its page that shows the results

A probe is one file of `probes/`, or one of another package (`plugins.py`). With `measure` and
`metrics` alone it has a row for each metric and bucket, with base model, differences and control,
and a table on the page. Randomness: draws use the audit's seed, so that requests are the same on
every rank, in the same order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from memguard.audit.metrics import Evidence, Metric, tabulate_metric
from memguard.audit.requests import Inputs, Measured, Model, Rounds, View
from memguard.config.settings import Settings
from memguard.pages.page import Section
from memguard.records import (
    AuditReport,
    CanaryScore,
    DetailRow,
    MetricRow,
    ResultRow,
    TestRow,
    write_parameters,
)

Need = Literal["codec", "control", "canaries", "goldfish", "base", "reference"]
"""An input without which a probe does not run."""
_MISSING: Mapping[Need, str] = {
    "codec": "the model has no tokenizer",
    "control": "no control documents",
    "canaries": "no canaries were given",
    "goldfish": "training dropped no labels",
    "base": "the base model was not scored",
    "reference": "no reference model was given",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Column:
    """A column of records.parquet."""

    values: NDArray[Any]
    """[N]; NaN or None where missing."""
    kind: Literal["bool", "int", "float", "text"] = "float"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Values:
    """Values of N documents by metric, measured with one group of settings."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, NDArray[np.float64]]
    """[N] by name of the metric, NaN where missing."""
    continuation_tokens: int
    """Largest value of a length (tokens)."""
    note: str = ""
    """A limitation of these values."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Summary:
    """What a probe adds to a report."""

    rows: Sequence[ResultRow] = ()
    metrics: Sequence[MetricRow] = ()
    tests: Sequence[TestRow] = ()
    details: Sequence[DetailRow] = ()
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Columns of records.parquet by full name: ``extraction.verbatim``."""
    num_items: int = 0
    """Items with a result."""
    reason: str = ""
    """Why there are none."""
    matched: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """By ``trained`` and ``base``: [N] 1 if one of the probe's risks extracts a document, 0 if
    none, NaN if it was not tried."""
    windows: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """By ``trained`` and ``base``: [N] 1 if the probe extracts own text of a document in another
    window, 0 if it does not, NaN if none was tried."""
    canaries: Sequence[CanaryScore] = ()


class Probe(Settings):
    """Base class of probes; its fields are the settings in a suite."""

    VERSION: ClassVar[int] = 1
    """Raised when the definition of the results changes; every report contains it."""
    models: ClassVar[tuple[Model, ...]] = ("trained", "base")
    """Models that it measures; () for none."""
    after: ClassVar[tuple[str, ...]] = ()
    """Probes whose results it reads."""
    needs: ClassVar[tuple[Need, ...]] = ()
    """Inputs without which it does not run."""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    counted: ClassVar[Literal["documents", "canaries", "texts"]] = "documents"
    """What its number of items counts."""
    no_result: ClassVar[str] = ""
    """Why it may have no result, if more is known than that."""
    is_attack: ClassVar[bool] = False
    """Whether its risks are tried on a sample, and have the attacks' share of the verdict's level.
    """

    in_variants: ClassVar[tuple[str, ...] | None] = None
    """Not read; probes of other packages may define it."""

    name: str

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Yield requests until the numbers of all items are known; measures nothing by default."""
        yield []
        return None

    def list_values(self, measured: Measured, evidence: Evidence) -> list[Values]:
        """Return the values of documents from what was measured on one model.

        By default the columns are named like the metrics.
        """
        names = [metric.name for metric in self.metrics if metric.name in measured.columns.names]
        size = int(evidence.size_N.max(initial=0))
        columns = {name: measured.columns[name] for name in names}
        return [Values(columns=columns, continuation_tokens=size)] if columns else []

    def tabulate(self, evidence: Evidence) -> Summary:
        """Return the rows of every metric and bucket, and the columns of each document."""
        measured = evidence.trained.get(self.name)
        if measured is None:
            return Summary(reason=self.no_result or "nothing was measured")
        values = self.list_values(measured, evidence)
        base = None if evidence.other is None else evidence.other.get(self.name)
        others = [] if base is None else self.list_values(base, evidence)
        rows = []
        for number, group in enumerate(values):
            of_base = others[number].columns if others else None
            rows += self.tabulate_group(evidence, group, of_base)
        known_N = [~np.isnan(column) for group in values for column in group.columns.values()]
        models = {"trained": values} | ({"base": others} if others else {})
        matched = {model: self._find_matched(groups) for model, groups in models.items()}
        return Summary(
            rows=rows,
            metrics=[row for group in values for row in self.describe_metrics(group)],
            columns=self.list_columns(measured, evidence)
            | ({} if base is None else self.list_columns(base, evidence, "base.")),
            num_items=int(np.any(known_N, axis=0).sum()) if known_N else 0,
            reason=self.no_result or "no document has a result",
            matched={model: n for model, n in matched.items() if n is not None},
            windows={
                model: found_N
                for model, of in (("trained", measured), ("base", base))
                if of is not None
                and (found_N := self.find_windows(of, evidence)) is not None
                and not np.isnan(found_N).all()
            },
        )

    def tabulate_group(
        self, evidence: Evidence, group: Values, base: Mapping[str, NDArray[np.float64]] | None
    ) -> list[ResultRow]:
        """Return the rows of one group of settings, metric by metric."""
        parameters = write_parameters(group.parameters)
        kinds = {metric.name: metric for metric in self.metrics}
        return [
            filled
            for name, value_N in group.columns.items()
            for filled in tabulate_metric(
                evidence,
                self.make_row(name, parameters=parameters),
                kinds[name],
                value_N,
                None if base is None else base[name],
                continuation_tokens=group.continuation_tokens,
            )
        ]

    def make_row(self, metric: str, **key: Any) -> ResultRow:
        """Return a row of this probe without its number."""
        values = {"statistic": "rate", "bucket": "", "num_documents": 0, **key}
        return ResultRow(probe=self.name, metric=metric, **values)

    def describe_metrics(self, group: Values) -> list[MetricRow]:
        """Return what the metrics of one group mean."""
        kinds = {metric.name: metric for metric in self.metrics}
        return [
            self.describe_metric(kinds[name], group.parameters, note=group.note)
            for name in group.columns
        ]

    def describe_metric(
        self, metric: Metric, parameters: Mapping[str, Any] | None = None, *, note: str = ""
    ) -> MetricRow:
        """Return what a metric means, with these parameters."""
        words = metric.name.replace("_", " ")
        bounds = metric.bounds
        if bounds is not None:
            low, high = (float(end) if np.isfinite(end) else None for end in bounds)
            bounds = (low, high)  # type: ignore[assignment]
        return MetricRow(
            probe=self.name,
            metric=metric.name,
            parameters=write_parameters(parameters or {}),
            settings=dict(parameters or {}),
            version=self.VERSION,
            meaning=metric.meaning,
            unit=metric.unit,
            statistic=metric.statistic,
            bounds=bounds,
            higher_is_better=metric.higher_is_better,
            heading=metric.heading or words.capitalize(),
            spoken=metric.spoken or words,
            risk_rank=metric.risk_rank,
            note=note,
        )

    def list_columns(
        self, measured: Measured, evidence: Evidence, model: str = ""
    ) -> dict[str, Column]:
        """Return the columns of records.parquet, by default all that was measured on one model.

        Their names start with ``model``: "" or ``base.``.
        """
        rates = {metric.name for metric in self.metrics if metric.is_rate}
        return {
            f"{model}{self.name}.{name}": Column(
                values=measured.columns[name],
                kind="bool" if name.split(".")[-1] in rates else "float",
            )
            for name in measured.columns.names
        }

    def _find_matched(self, groups: Sequence[Values]) -> NDArray[np.float64] | None:
        """Return [N] whether a risk extracts each document; None if the probe has no risk."""
        risks = {metric.name for metric in self.metrics if metric.risk_rank is not None}
        columns = [c for group in groups for name, c in group.columns.items() if name in risks]
        # fmax ignores NaN where another risk is known.
        return np.fmax.reduce(columns) if columns else None

    def find_windows(self, measured: Measured, evidence: Evidence) -> NDArray[np.float64] | None:
        """Return `Summary.windows` of one model; None if the probe has only main windows."""
        return None

    def find_missing(self, inputs: Inputs, *, has_base: bool) -> str:
        """Return the reason why the probe cannot run on these inputs; "" if it can."""
        present: Mapping[Need, bool] = {
            "codec": inputs.codec is not None,
            "control": any(window.document.role == "control" for window in inputs.windows),
            "canaries": bool(inputs.canaries),
            "goldfish": inputs.goldfish is not None,
            "base": has_base,
            "reference": inputs.has_reference,
        }
        return next((_MISSING[need] for need in self.needs if not present[need]), "")

    @classmethod
    def section(cls, report: AuditReport) -> Section | None:
        """Return the section of the page; None leaves the table of `metrics` to the page."""
        return None
