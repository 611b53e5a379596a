"""The five tables of a report or a comparison, stored by column.

results   one row for each number, see `results.py`
metrics   what each metric means, and its words: a page is drawn from the file alone
buckets   the groups of documents, and how many of them the rates leave out, by reason
tests     paired and trend tests: counts, statistic, p values
details   what only its probe reads

{"results": {"probe": [...], "metric": [...], ...}, "metrics": {...}, ...}

In JSON, a column of results whose values are all the default, such as `setting` in a report, is
left out.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, PlainSerializer, TypeAdapter

from memguard.records.record import Record
from memguard.records.results import (
    BLIND,
    MEMBERS,
    ResultRow,
    RiskName,
    write_parameters,
)
from memguard.records.run_files import Role

OWN_PACKAGE = "memguard"
MOSTLY_UNKNOWN = 0.4
"""Share of unknown tokens above which a text is lost: half of them may be spaces between others."""
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricRow:
    """What the rows of one metric of one probe mean; its key is probe, metric and parameters."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    probe: str
    metric: str
    parameters: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """`parameters` as a dictionary."""
    version: int
    """Of the probe."""
    package: str = OWN_PACKAGE
    """Package that defines the probe; another one with its version, as in ``mine 1.2``."""
    meaning: str
    unit: str
    """documents, share, tokens, nats, bits, log10 queries, ..."""
    statistic: str
    """rate if the value of an item is 1 or 0, else mean, auc or median."""
    bounds: tuple[float | None, float | None] | None = None
    """Smallest and largest value of an item; null: none."""
    higher_is_better: bool = False
    """False if a higher value means more memorization."""
    heading: str
    """Of a column: ``Near-verbatim``."""
    spoken: str
    """In a sentence, after "extracted": ``near-verbatim``."""
    risk_rank: int | None = None
    """Place among the extraction risks, the strongest evidence first; null if it is no risk."""
    note: str = ""
    """A limitation of this measurement."""

    @property
    def is_foreign(self) -> bool:
        """Whether another package defines the probe."""
        return self.package != OWN_PACKAGE

    @property
    def risk(self) -> str:
        """Name of the risk: a `RiskName`, or of another package's probe ``probe.metric``."""
        place = (self.probe, self.metric, self.parameters)
        known = next((name for name, known in RISK_PLACES.items() if known == place), None)
        return known or f"{self.probe}.{self.metric}"


RISK_PLACES: Mapping[RiskName, tuple[str, str, str]] = {
    "verbatim": ("extraction", "verbatim", ""),
    "near_verbatim": ("extraction", "near_verbatim", ""),
    "attack_cost": ("sampling", "within_limit", ""),
    "attack": ("attacks", "best_any_answer", ""),
}
"""Probe, metric and parameters of each risk that comparisons use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketRow:
    """A group of documents."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    bucket: str
    role: Role
    num_repetitions: int | None = None
    """null if it is unknown or differs between the documents."""
    num_documents: int = 0
    """Audited documents."""
    num_too_short: int = 0
    """Documents with too few tokens for a prefix and a continuation."""
    num_cut_too_short: int = 0
    """Documents that are long enough, but of whose parts none is."""
    num_nothing_supervised: int = 0
    """Documents without a token that receives loss, special tokens not counted."""
    num_labels: int = 0
    """Documents with a short answer that many documents share: a label, which is not audited."""
    num_unknown: int = 0
    """Documents of which more than 40 % is the tokenizer's token of unknown text."""
    num_not_sampled: int = 0
    num_near_duplicates: int = 0
    """Control documents in a near-duplicate cluster with a trained one, left out of the control."""
    num_tokens: int | None = None
    """Tokens with loss of documents that are held out; null for other buckets."""

    @property
    def was_trained(self) -> bool:
        """Whether its documents were trained; a bucket that training never reached was not."""
        return self.role == "trained" and self.num_repetitions != 0

    @property
    def num_not_auditable(self) -> int:
        """Documents that cannot be audited, for any reason."""
        others = self.num_nothing_supervised + self.num_labels + self.num_unknown
        return self.num_too_short + self.num_cut_too_short + others


@dataclass(frozen=True, kw_only=True, slots=True)
class TestRow:
    """A test of one metric."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    __test__: ClassVar[bool] = False
    """No test of pytest."""

    setting: str | None = None
    seed: int | None = None
    against: str | None = None
    probe: str
    metric: str
    parameters: str = ""
    bucket: str
    test: Literal["mcnemar", "cochran-armitage", "paired-t", "paired-bootstrap"]
    """The paired tests besides McNemar's are of benchmark tasks whose items are no matches."""
    num_documents: int
    num_only_here: int | None = None
    """Documents that match here and not in `against`; of McNemar's test."""
    num_only_against: int | None = None
    statistic: float | None = None
    """z of a trend test, t of a paired t test."""
    p_value: float | None = None
    """Two-sided; null if it cannot be computed."""
    p_holm: float | None = None
    """`p_value` after Holm's correction over all tests of the comparison."""
    doses: tuple[int, ...] | None = None
    """Of a trend test: numbers of repetitions."""
    fitted: tuple[float, ...] | None = None
    """Rates at these doses that never fall, closest to those measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DetailRow:
    """What only its probe reads; no value of a single item."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    probe: str
    model: str = "trained"
    schema: int
    """Version of the probe."""
    value: Mapping[str, Any]


def to_columns(rows: Sequence[Any], kind: type[Any]) -> dict[str, list[Any]]:
    """Return rows of one kind as columns; one of results that is all default is left out."""
    columns = {field.name: [getattr(row, field.name) for row in rows] for field in fields(kind)}
    defaults = {field.name: field.default for field in fields(kind)}
    return {
        name: values
        for name, values in columns.items()
        if kind is not ResultRow or not rows or any(value != defaults[name] for value in values)
    }


def _from_columns(columns: Any, kind: type[Any]) -> Any:
    """Return the rows of an object of columns, or ``columns`` itself if it is none."""
    if not isinstance(columns, Mapping):
        return columns
    needed = {
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    }
    wrong = (needed - set(columns)) | (set(columns) - {field.name for field in fields(kind)})
    if wrong:
        raise ValueError(f"the columns {', '.join(sorted(wrong))} are missing or unknown")
    lists = [columns[name] for name in columns]
    if len({len(values) for values in lists}) > 1:
        raise ValueError("the columns have different lengths")
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True)]
    return TypeAdapter(list[kind]).validate_python(rows)  # type: ignore[valid-type]


def _columns_of(kind: type[Any]) -> tuple[Any, Any]:
    """Return what reads and writes a field of rows as columns."""
    return (
        BeforeValidator(lambda value: _from_columns(value, kind)),
        PlainSerializer(lambda rows: to_columns(rows, kind), return_type=dict[str, list[Any]]),
    )


Results = Annotated[tuple[ResultRow, ...], *_columns_of(ResultRow)]
"""Rows of results, stored by column."""


class Tables(Record):
    """The five tables, and functions that find their rows."""

    results: Results = ()
    metrics: Annotated[tuple[MetricRow, ...], *_columns_of(MetricRow)] = ()
    buckets: Annotated[tuple[BucketRow, ...], *_columns_of(BucketRow)] = ()
    """In the order of the page: control first, then trained buckets by repetitions, then others."""
    tests: Annotated[tuple[TestRow, ...], *_columns_of(TestRow)] = ()
    details: Annotated[tuple[DetailRow, ...], *_columns_of(DetailRow)] = ()

    @cached_property
    def _by_key(self) -> dict[tuple[Any, ...], ResultRow]:
        return {row.key: row for row in self.results}

    @cached_property
    def _by_metric(self) -> dict[tuple[str, str], list[ResultRow]]:
        rows: dict[tuple[str, str], list[ResultRow]] = defaultdict(list)
        for row in self.results:
            rows[row.probe, row.metric].append(row)
        return rows

    def find(
        self, probe: str, metric: str, bucket: str, *, statistic: str | None = None, **key: Any
    ) -> ResultRow | None:
        """Return the row with this key; None if there is none.

        ``statistic`` None takes rate, mean, auc, score or difference. The keys `parameters`,
        `model`, `against`, `step`, `setting` and `seed`, left out, are those of the audited model:
        "", trained and None.
        """
        start = tuple(key.get(name) for name in ("setting", "seed", "step"))
        start += (key.get("model", "trained"), key.get("against"))
        start += (probe, key.get("parameters", ""), metric)
        usual = ("difference",) if key.get("against") else ("rate", "mean", "auc", "score")
        for name in usual if statistic is None else (statistic,):
            row = self._by_key.get((*start, name, bucket))
            if row is not None:
                return row
        return None

    def select(self, probe: str, metric: str, **values: Any) -> list[ResultRow]:
        """Return the rows of a metric whose other fields have these values, in their order."""
        return [
            row
            for row in self._by_metric.get((probe, metric), [])
            if all(getattr(row, name) == value for name, value in values.items())
        ]

    def find_metric(self, probe: str, metric: str, parameters: str = "") -> MetricRow | None:
        """Return what a metric means; None if it was not promised."""
        place = (probe, metric, parameters)
        return next((m for m in self.metrics if (m.probe, m.metric, m.parameters) == place), None)

    def list_metrics(self, probe: str) -> list[MetricRow]:
        """Return the metrics of a probe, in their order."""
        return [metric for metric in self.metrics if metric.probe == probe]

    def find_bucket(self, bucket: str | None) -> BucketRow | None:
        """Return a bucket by name; None if there is none."""
        return next((row for row in self.buckets if row.bucket == bucket), None)

    def find_detail(self, probe: str, model: str = "trained") -> Mapping[str, Any] | None:
        """Return the detail of a probe; None if it has none."""
        place = (probe, model)
        return next((row.value for row in self.details if (row.probe, row.model) == place), None)

    def is_gain(self, change: ResultRow) -> bool:
        """Return whether training taught a bucket token accuracy, with none of it extracted.

        The change from the base model must be above 0, and above that of the control, by more than
        its interval. The blind baseline must not separate trained documents from the control,
        because the control then does not show what other training would have added.
        """
        if change.ci is None or change.ci[0] <= 0 or (change.minus_control_low or 0.0) <= 0:
            return False
        rates = self.risks(change.bucket, setting=change.setting, seed=change.seed).values()
        if any(rate.num_matched for rate in rates):
            return False
        blind = self.find(
            "membership",
            "auc",
            MEMBERS,
            parameters=write_parameters({"score": BLIND}),
            setting=change.setting,
            seed=change.seed,
        )
        return blind is not None and blind.ci is not None and blind.ci[0] <= 0.5 <= blind.ci[1]

    @property
    def control(self) -> BucketRow | None:
        """The bucket of documents that were never trained."""
        return next((row for row in self.buckets if row.role == "control"), None)

    def risks(self, bucket: str, **key: Any) -> dict[str, ResultRow]:
        """Return the known rates of a bucket by name of the risk, strongest evidence first."""
        ranked = sorted(
            (metric for metric in self.metrics if metric.risk_rank is not None),
            key=lambda metric: metric.risk_rank or 0,
        )
        rows = {
            metric.risk: self.find(
                metric.probe, metric.metric, bucket, parameters=metric.parameters, **key
            )
            for metric in ranked
        }
        return {name: row for name, row in rows.items() if row is not None and row.is_known}

    def find_risk(self, bucket: str, **key: Any) -> tuple[str, ResultRow] | None:
        """Return the method and the rate that are the risk of a bucket; see `choose_risk`."""
        return choose_risk(self.risks(bucket, **key))


NameT = TypeVar("NameT", bound=str)


def choose_risk(rates: Mapping[NameT, ResultRow]) -> tuple[NameT, ResultRow] | None:
    """Return the strongest method and its rate; None without rates.

    It has the highest rate and, of equal ones, the highest upper end: what fewer documents were
    tried with is known less well. The interval ends at the highest upper end of all methods, since
    a lower rate over fewer documents may in truth be the higher one. Without an interval, nothing
    is excluded.
    """
    if not rates:
        return None
    ends = {name: 1.0 if row.high is None else row.high for name, row in rates.items()}
    name = max(rates, key=lambda name: (rates[name].value or 0.0, ends[name]))
    row = rates[name]
    return name, replace(row, low=row.low or 0.0, high=max(ends.values()))


def merge_tables(parts: Iterable[Tables]) -> Tables:
    """Return the rows of several tables, in their order."""
    listed = list(parts)
    names = ("results", "metrics", "buckets", "tests", "details")
    return Tables.model_validate(
        {name: tuple(row for part in listed for row in getattr(part, name)) for name in names}
    )
