"""Record of a comparison: its runs, the recommendation, and the five tables."""

import statistics
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from memguard.errors import RecordError
from memguard.records.record import Record
from memguard.records.results import MOST_TRAINED, ResultRow, RiskName, Statistic
from memguard.records.sealed import FileSum, SealedRecord, find_damage, load_sealed, refuse_damage
from memguard.records.tables import RISK_PLACES, Tables
from memguard.records.utility import ITEMS, UTILITY, TaskDetail, UtilityModel, name_task
from memguard.records.verdict import Badge, Verdict

MOST_SENTENCES: Final = 8
"""Settings of which a page says in a sentence whether they are recommended; the table has all."""
HELDOUT_LOSS: Final = "heldout_nll"
"""Name of the utility that every comparison has."""
_HELD_OUT: Final = "(held out)"
"""Bucket of the losses over seeds."""


class Cost(Record):
    """Training time and amount of training of one setting."""

    train_s: float
    num_steps: int
    num_supervised_tokens: int
    """Labels that received loss."""
    dropped_fraction: float | None


class ComparedRun(Record):
    """One setting with one seed; its numbers are rows with both."""

    setting: str
    seed: int
    run: str
    """Name of the run's folder."""
    doses: dict[str, int]
    """Number of repetitions by bucket, ascending; 0 is the control. Settings may differ in it."""
    verdict: Verdict
    """Of the run's own report."""
    mitigations: list[dict[str, Any]]
    overrides: dict[str, Any]
    cost: Cost


class Utility(Record):
    """What a comparison took as utility: the held-out loss, or a metric of a benchmark task."""

    name: str = HELDOUT_LOSS
    """``heldout_nll``, or the name of a task."""
    probe: Literal["heldout", "utility"] = "heldout"
    metric: str = "nll"
    unit: str = "nats"
    """nats a token; share (of items); bits; number."""
    higher_is_better: bool = False
    chance: float | None = None
    """Value of a random choice; null without options."""
    num_items: int | None = None
    """Of a task."""

    @property
    def is_task(self) -> bool:
        """Whether it is a benchmark task."""
        return self.probe == UTILITY

    @property
    def is_share(self) -> bool:
        """Whether it is a share of items."""
        return self.unit == "share"

    @property
    def heading(self) -> str:
        """Of a column."""
        return f"{self.name}: {self.metric}" if self.is_task else "Held-out loss"

    @property
    def spoken(self) -> str:
        """In a sentence."""
        return f"{self.metric} of task '{self.name}'" if self.is_task else "held-out loss"

    def start_row(self, setting: str, statistic: Statistic) -> ResultRow:
        """Return the row of a setting over its seeds, without its number."""
        return ResultRow(
            setting=setting,
            probe=self.probe,
            parameters=name_task(self.name) if self.is_task else "",
            metric=self.metric,
            statistic=statistic,
            bucket=ITEMS if self.is_task else _HELD_OUT,
            num_documents=self.num_items or 0,
        )

    def worsening(self, value: float) -> float:
        """Return a value, or a difference of two, with its sign such that lower is better."""
        return -value if self.higher_is_better else value


HELDOUT: Final = Utility()


class ComparedTask(Record):
    """A benchmark task that all runs answered, item by item."""

    detail: TaskDetail
    """Of the first run's report."""
    unit: str
    higher_is_better: bool

    @property
    def utility(self) -> Utility:
        """The task as the utility of a comparison."""
        return Utility(
            name=self.detail.task,
            probe="utility",
            metric=self.detail.headline,
            unit=self.unit,
            higher_is_better=self.higher_is_better,
            chance=self.detail.chance,
            num_items=self.detail.num_items,
        )


class FrontPoint(Record):
    """Risk and utility of one setting over its seeds; shares and losses are rows without seed."""

    name: str
    num_seeds: int
    num_documents: int
    """Documents that it trained most often, of all seeds together."""
    badges: tuple[Badge, Badge]
    """The worst of its runs; with several seeds the detail says how many have it."""
    num_findings: int
    """Documents that came out, of all its runs together."""
    risk: float | None
    """The highest of the shares that every run measured; null without documents. See
    `choose_risk`."""
    risk_low: float | None
    """Lower end of its interval."""
    risk_high: float | None
    """The highest upper end of all shares, because some are over fewer documents."""
    risk_by: RiskName | None
    """Method with this share; of equal shares, the one with the highest upper end."""
    utility: float
    """Mean over seeds of `Comparison.utility`, which gives its unit and whether higher is better:
    nats a token on held-out documents, or the value of a benchmark task."""
    utility_low: float | None = None
    """Of a held-out loss over seeds; of a task over items and seeds."""
    utility_high: float | None = None
    is_at_chance: bool = False
    """Whether a task does not show that this setting differs from a random choice."""
    dominated_by: list[str] = Field(default_factory=list)
    """Settings that are no worse in both and better in one."""
    dominated_beyond_ci_by: list[str] = Field(default_factory=list)
    """Those of them that differ from it by more than the intervals; utility is compared seed by
    seed."""

    @property
    def risk_ci(self) -> tuple[float, float] | None:
        """The interval of the risk."""
        if self.risk_low is None or self.risk_high is None:
            return None
        return self.risk_low, self.risk_high

    @property
    def is_dominated(self) -> bool:
        """Whether another setting is no worse in both and better in one."""
        return bool(self.dominated_by)


class RuledOut(Record):
    """Why a setting is not recommended."""

    setting: str
    sentence: str
    """Its figures and the reason, to follow its name."""


class Recommendation(Record):
    """The setting to take, why others are not, and the rule that chose it."""

    setting: str | None
    """null if none is clearly better than the first one."""
    sentence: str
    """Its figures and its own verdict, to follow its name; if it is null, why there is none."""
    ruled_out: list[RuledOut]
    """Every other setting besides the first, in the order of the record."""
    rule: str

    def list_sentences(self) -> list[tuple[str, str]]:
        """Return what pages, cards and the terminal say first: heads, and what follows each.

        Only so many as can be read; the last one counts the others.
        """
        head = "No setting" if self.setting is None else self.setting
        others = self.ruled_out[: MOST_SENTENCES - 1]
        sentences = [(f"{head} is recommended", self.sentence)]
        sentences += [(other.setting, other.sentence) for other in others]
        if more := len(self.ruled_out) - len(others):
            settings = "more setting is" if more == 1 else "more settings are"
            sentences.append((f"{more:,} {settings} ruled out", "see the table."))
        return sentences

    def describe(self) -> str:
        """Return the first of the sentences."""
        return ": ".join(self.list_sentences()[0])


def list_shares(tables: Tables, setting: str) -> dict[RiskName, ResultRow]:
    """Return the shares over seeds of a setting that every run measured; the worst is its risk."""
    rows = {
        name: tables.find(probe, metric, MOST_TRAINED, parameters=parameters, setting=setting)
        for name, (probe, metric, parameters) in RISK_PLACES.items()
    }
    return {name: row for name, row in rows.items() if row is not None and row.is_known}


def find_change(tables: Tables, setting: str, utility: Utility = HELDOUT) -> ResultRow | None:
    """Return the change of a setting's utility from the first setting, seed by seed.

    Of the held-out loss it is the mean difference divided by the first one's mean (share), with an
    interval by the t distribution over seeds. Of a task it is the mean difference in the unit of
    the metric, paired by item. None for the first setting.
    """
    key = {"setting": setting, "seed": None, "statistic": "difference"}
    if utility.is_task:
        rows = tables.select(UTILITY, utility.metric, **key, parameters=name_task(utility.name))
    else:
        rows = tables.select("heldout", "nll_change", **key)
    return next(iter(rows), None)


COMPARISON, COMPARISON_RESULTS = "comparison.json", "comparison.parquet"
_AGAIN = "Run 'memguard compare' again: it reuses the finished runs"


class Comparison(SealedRecord):
    """`comparison.json`."""

    schema_name: Literal["memguard.comparison/6"] = Field("memguard.comparison/6", alias="schema")
    name: str
    tool_version: str
    created: str | None = None
    """UTC, ISO 8601; null if not recorded."""
    command: str
    documents_sha256: str
    continuation_tokens: int
    answers: Literal["none", "some", "all"] = "none"
    """See `Method`."""
    runs: list[ComparedRun]
    """In the order of settings and seeds; the first one's setting is the reference."""
    heldout_num_tokens: int
    """Tokens with loss of the first run's held-out documents."""
    num_removed: int = 0
    """Documents that 'deduplicate' removed in at least one run, summed over seeds. Paired rows, and
    those over seeds, leave them out of all runs."""
    utility: Utility = HELDOUT
    """What front and recommendation take as utility."""
    tasks: list[ComparedTask] = Field(default_factory=list)
    """Benchmark tasks that every run answered."""
    tasks_left_out: list[str] = Field(default_factory=list)
    """A sentence for each task that runs do not share."""
    front: list[FrontPoint]
    recommendation: Recommendation
    results: FileSum | None = None
    """Size and hash of `comparison.parquet`, with every row of every run; null until written."""
    environment: dict[str, str]
    tables: Tables
    """What the page shows: rows of the runs, paired differences from the first setting with the
    same seed, and shares and losses over seeds. Every row of every run is in the parquet file."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.runs:
            raise ValueError("a comparison needs at least one setting")
        return self

    def list_compared(self, setting: str) -> list[ComparedRun]:
        """Return the runs of a setting whose seed every setting has; all if there is no such seed.

        Risk and utility are over these.
        """
        seeds: dict[str, set[int]] = {}
        for run in self.runs:
            seeds.setdefault(run.setting, set()).add(run.seed)
        shared = set.intersection(*seeds.values())
        own = [run for run in self.runs if run.setting == setting]
        return [run for run in own if not shared or run.seed in shared]

    def find_mean(
        self, utility: Utility, setting: str, model: UtilityModel = "trained"
    ) -> float | None:
        """Return the mean utility of a setting, or of its base model, over `list_compared`."""
        rows = [self.find_loss(run, model) for run in self.list_compared(setting)]
        if utility.is_task:
            key = {"parameters": name_task(utility.name), "setting": setting, "model": model}
            rows = [
                self.tables.find(UTILITY, utility.metric, ITEMS, seed=run.seed, **key)
                for run in self.list_compared(setting)
            ]
        values = [row.value for row in rows if row is not None and row.value is not None]
        return statistics.fmean(values) if values else None

    def find_loss(self, run: ComparedRun, model: str = "trained") -> ResultRow | None:
        """Return the loss on held-out documents of a run (nats a token), or of its base model."""
        key = {"setting": run.setting, "seed": run.seed, "model": model, "statistic": "mean"}
        return next(iter(self.tables.select("heldout", "nll", **key)), None)


def load_comparison(path: Path) -> Comparison:
    """Read a comparison from its file; RecordError if it cannot be read or is damaged."""
    try:
        return load_sealed(Comparison, path)
    except RecordError as error:
        raise RecordError(f"{error}. {_AGAIN}") from error


def check_results(comparison: Comparison, folder: Path) -> Path:
    """Return the path of a comparison's results table after checking its hash."""
    written = {} if comparison.results is None else {COMPARISON_RESULTS: comparison.results}
    refuse_damage(folder, find_damage(folder, written), _AGAIN, said="is damaged: it ")
    return folder / COMPARISON_RESULTS
