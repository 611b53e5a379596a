"""The results table: one row for each number of an audit or a comparison; estimates.

    key      setting, seed, step, model, against, probe, parameters, metric, statistic, bucket
    counts   num_documents, num_matched, num_clusters, num_matched_clusters, num_missing, num_other
    value    value, low, high, interval
    control  minus_control, minus_control_low, minus_control_high
    reason   missing_because

A row with `against` is a paired difference on the same documents: from the base model (`base`) or
from the first setting (`setting:none`). `minus_control` is the row's value minus that of the
control. Buckets in parentheses are groups that are no bucket:

    (trained)            all trained documents
    (members)            trained documents with a membership score
    (secrets)            canaries that were trained
    (reference secrets)  canaries that were not
    (trained most often) of a comparison: the documents that a setting trained most often, of all
                         seeds together
    (trained 64 times)   of a comparison: the documents that the first setting trained so often
    (items)              the items of a benchmark task; `num_documents` counts them

A number that a probe gives and that could not be had is a row without a value and with its reason.
The key is unique. A value that shows a single document has two significant digits, because the
exact one would confirm a guess of its text.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ConfigDict

from memguard.records.record import Record
from memguard.records.row_files import ColumnTypes, build_table, read_rows, save_table

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import pyarrow
    from numpy.typing import NDArray


RiskName = Literal["verbatim", "near_verbatim", "attack_cost", "attack"]
"""Extraction methods: greedy text that matches exactly or nearly, text sampled within the limit of
queries, text extracted verbatim by the best of the attacks that ran."""

WITHIN_LIMIT = "within the limit (10^6 queries from 50 tokens on, fewer for shorter answers)"


def find_query_limit(continuation_tokens_N: "NDArray[Any]") -> "NDArray[np.float64]":
    """Return log10 of the queries that an extracted document may cost, [N].

    For S tokens 6 * min(1, S / 50), as strict for each token of a short answer as for those of a
    long one: unseen answers of two to four tokens would mostly be sampled within 10^6 queries.
    """
    limit_N: NDArray[np.float64] = 6 * (continuation_tokens_N / 50).clip(max=1)
    return limit_N


RISK_NAMES: dict[RiskName, str] = {
    "verbatim": "verbatim",
    "near_verbatim": "near-verbatim",
    "attack_cost": "sampling",
    "attack": "best attack",
}
"""The extraction methods as sentences and tables name them."""


class Texts(Record):
    """The different texts among documents of which some are near-duplicates."""

    num_texts: int
    """Clusters of near-duplicates; a document without any is a cluster."""
    num_matched: int
    """Texts of which at least one document matches."""
    num_effective: float
    """Documents without near-duplicates that are as much evidence: (sum of cluster sizes)^2 / sum
    of their squares."""


class Rate(Record):
    """A share of documents with its counts and 95 % interval (Clopper-Pearson unless stated)."""

    num_documents: int
    num_matched: int
    rate: float | None
    """null if there are no documents."""
    ci: tuple[float, float] | None
    """Of the same rate of `texts.num_effective` documents; null below two texts."""
    texts: Texts | None = None
    """null if no two of the documents are near-duplicates."""

    @property
    def num_effective(self) -> float:
        """Number of documents at which intervals are computed."""
        return self.num_documents if self.texts is None else self.texts.num_effective


MIN_FOR_MEANS = 25
"""Texts below which the interval of a mean of bounded values is marked: it may be too narrow."""


class Interval(Record):
    """An estimate with its 95 % interval."""

    value: float
    ci: tuple[float, float] | None


MIN_FOR_QUANTILES = 10
"""Minimum number of documents for quantiles of the attack cost."""


BLIND = "blind"
"""Membership score of the blind baseline, which reads the texts but has no model access."""


class RocCurve(Record):
    """Ranks of a membership score: trained documents above few control documents."""

    score: str
    num_members: int
    """Trained documents with the score."""
    num_control: int
    """Control documents with the score."""
    num_allowed: tuple[int, ...]
    """Maximum numbers of control documents above a threshold, ascending, from 0 to all."""
    num_matched: tuple[int, ...]
    """For each, the trained documents above the lowest such threshold."""


Statistic = Literal[
    "rate", "mean", "score", "median", "q10", "q90", "min", "max", "auc", "difference"
]
"""score: a value of all items together that is no mean, such as a perplexity."""
Method = Literal[
    "",
    "clopper-pearson",
    "newcombe",
    "jackknife",
    "delong",
    "threshold",
    "t",
    "tango",
    "bootstrap",
    "pooled",
]
"""How an interval was computed: "" without one; threshold includes the error of the threshold that
is estimated on the control; t is Student's, over seeds or over the items of a task; bootstrap draws
items; pooled covers documents or items, and seeds, see `compare.front`."""

SCHEMA_NAME = "memguard.results/2"
"""Stored in the metadata of the parquet file."""
NUM_KEY_FIELDS = 10
TRAINED, MEMBERS = "(trained)", "(members)"
SECRETS, REFERENCE_SECRETS = "(secrets)", "(reference secrets)"
MOST_TRAINED = "(trained most often)"
ONE_TEXT = "fewer than two texts: the value of one would confirm a guess of it"
NO_DOCUMENTS = "no documents"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultRow:
    """One number with its interval; the first ten fields are its key."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    setting: str | None = None
    seed: int | None = None
    step: int | None = None
    model: str = "trained"
    """trained, base, or reference."""
    against: str | None = None
    probe: str
    parameters: str = ""
    """Settings that tell rows of one probe apart: ``decoding=greedy``."""
    metric: str
    statistic: Statistic
    bucket: str
    num_documents: int
    num_matched: int | None = None
    """Of a rate; None for other statistics."""
    num_clusters: int | None = None
    """Near-duplicate clusters of the documents; None if each is a text of its own."""
    num_matched_clusters: int | None = None
    """Clusters with a match."""
    num_missing: int = 0
    """Items without this metric."""
    num_other: int | None = None
    """Items that these are compared with: control documents of an AUC."""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    interval: Method = ""
    minus_control: float | None = None
    minus_control_low: float | None = None
    minus_control_high: float | None = None
    missing_because: str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """The fields that identify the row."""
        return tuple(getattr(self, name) for name in KEY_FIELDS)

    @property
    def is_known(self) -> bool:
        """Whether it has a value."""
        return self.value is not None

    @property
    def ci(self) -> tuple[float, float] | None:
        """Its 95 % interval."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def minus_control_ci(self) -> tuple[float, float] | None:
        """The interval of its difference from the control."""
        low, high = self.minus_control_low, self.minus_control_high
        return None if low is None or high is None else (low, high)

    @property
    def counts(self) -> tuple[int, int]:
        """Of a rate: the documents that match, and all."""
        return self.num_matched or 0, self.num_documents


KEY_FIELDS = tuple(field.name for field in fields(ResultRow))[:NUM_KEY_FIELDS]


def write_parameters(parameters: Mapping[str, Any]) -> str:
    """Return the canonical text of parameters, which can be grouped and pivoted."""
    return ", ".join(f"{name}={parameters[name]}" for name in sorted(parameters, key=str))


def fill_row(
    row: ResultRow,
    estimate: Rate | Interval | float | None,
    interval: Method,
    *,
    minus_control: Interval | None = None,
    num_control: int | None = None,
    why_not: str = NO_DOCUMENTS,
) -> ResultRow:
    """Return the row with its value, or with the reason why it has none.

    An estimate that is a rate also fills the counts. With documents of the control, the difference
    from one shows its value.
    """
    if isinstance(estimate, Rate):
        row = replace(row, num_documents=estimate.num_documents, num_matched=estimate.num_matched)
        if estimate.texts is not None:
            row = replace(
                row,
                num_clusters=estimate.texts.num_texts,
                num_matched_clusters=estimate.texts.num_matched,
            )
    ci = estimate.ci if isinstance(estimate, Rate | Interval) else None
    value = estimate.value if isinstance(estimate, Interval) else estimate
    value = value.rate if isinstance(value, Rate) else value
    if value is None:
        return replace(row, missing_because=why_not)
    if minus_control is not None:
        low, high = minus_control.ci or (None, None)
        row = replace(
            row, minus_control=minus_control.value, minus_control_low=low, minus_control_high=high
        )
    low, high = ci or (None, None)
    filled = replace(row, value=float(value), low=low, high=high, interval=interval if ci else "")
    if num_control == 1:
        filled = _round(filled, [name for name in _NUMBERS if "control" in name])
    return _round_single(filled)


def fill_count(row: ResultRow, num_matched: int) -> ResultRow:
    """Return a rate of which only the counts are known; its interval is not."""
    if not row.num_documents:
        return replace(row, num_matched=0, missing_because=NO_DOCUMENTS)
    value = num_matched / row.num_documents
    return _round_single(replace(row, num_matched=num_matched, value=value))


def _round_single(row: ResultRow) -> ResultRow:
    """Round numbers that show one document: two significant digits."""
    shows_one = row.num_documents == 1 or row.statistic in ("min", "max")
    if not shows_one or row.value is None:
        return row
    return _round(row, _NUMBERS)


def _round(row: ResultRow, names: Sequence[str]) -> ResultRow:
    numbers = {name: getattr(row, name) for name in names}
    rounded: dict[str, Any] = {n: float(f"{v:.1e}") for n, v in numbers.items() if v is not None}
    return replace(row, **rounded)


_INTEGERS = ("seed", "step", *(field.name for field in fields(ResultRow) if "num_" in field.name))
_NUMBERS = ("value", "low", "high", "minus_control", "minus_control_low", "minus_control_high")


_TYPES: ColumnTypes = {**dict.fromkeys(_INTEGERS, "int64"), **dict.fromkeys(_NUMBERS, "float64")}


def build_results(rows: Sequence[ResultRow]) -> "pyarrow.Table":
    """Return the rows, whose keys must differ, as columns."""
    twice = [key for key, count in Counter(row.key for row in rows).items() if count > 1]
    assert not twice, f"two rows have one key: {twice[0]}"
    return build_table(rows, ResultRow, _TYPES, schema=SCHEMA_NAME)


def save_results(rows: Iterable[ResultRow], path: Path) -> None:
    """Write the rows as a parquet file, whole or not at all; equal rows give equal bytes."""
    save_table(build_results(list(rows)), path)


def load_results(path: Path) -> list[ResultRow]:
    """Return the rows of a file that `save_results` wrote."""
    return read_rows(path, ResultRow)


def read_results(path: Path) -> "pandas.DataFrame":
    """Return the rows of a file as a table of pandas, where `isna` finds missing values."""
    import pandas

    return pandas.read_parquet(path)
