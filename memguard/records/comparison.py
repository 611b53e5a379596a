"""Record of a comparison: each setting's results, and paired tests between settings."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from memguard.errors import RecordError
from memguard.records.record import Record
from memguard.records.scores import (
    AttackCostScores,
    AttackedBucket,
    Interval,
    MembershipScores,
    RiskName,
    Texts,
)
from memguard.records.sealed import FileSum, SealedRecord, find_damage, load_sealed
from memguard.records.verdict import Level, Verdict


class MatchedShare(Record):
    """A share of a comparison cell's documents."""

    num_matched: int
    rate: float | None
    ci: tuple[float, float] | None
    texts: Texts | None = None
    """As in `Rate`."""


class ComparisonCell(Record):
    """One setting on the documents of one number of repetitions."""

    num_documents: int
    num_matched: int
    rate: float | None
    ci: tuple[float, float] | None
    """Verbatim."""
    texts: Texts | None = None
    """Different texts by verbatim matches; null if no two documents are near-duplicates."""
    near_verbatim: MatchedShare | None
    """Share for greedy text; null if no text was generated."""
    teacher_forced_90: MatchedShare
    """Token-level knowledge, not extraction."""
    mean_token_accuracy: float | None
    gain_minus_control: Interval | None = None
    """Token accuracy, model minus base model, minus the same difference in the control; null if not
    known, if accuracy did not rise significantly, or if the blind baseline separates trained
    documents from the control."""
    attack_cost: AttackCostScores | None = None
    """null if the suite does not measure it."""
    attacks: list[AttackedBucket] = Field(default_factory=list)
    """Results of adaptive attacks; empty if none ran, and for the base model."""

    @property
    def verbatim(self) -> MatchedShare:
        """Share for greedy text that matches exactly."""
        return MatchedShare(
            num_matched=self.num_matched, rate=self.rate, ci=self.ci, texts=self.texts
        )

    @property
    def greedy(self) -> MatchedShare:
        """Near-verbatim share; if no text was generated, verbatim share."""
        return self.near_verbatim or self.verbatim


class Utility(Record):
    """Utility: loss on held-out documents (nats a token); lower is better."""

    heldout_nll: float
    base_heldout_nll: float
    num_documents: int
    num_tokens: int


class Cost(Record):
    """Training time and amount of training of one setting."""

    train_s: float
    num_steps: int
    num_supervised_tokens: int
    """Labels that received loss."""
    dropped_fraction: float | None


class SettingResult(Record):
    """One setting with one seed."""

    name: str
    seed: int
    run: str
    verdict: Verdict
    """Of the run's own report."""
    mitigations: list[dict[str, Any]]
    overrides: dict[str, Any]
    utility: Utility
    extraction: dict[str, ComparisonCell]
    """Results by number of repetitions; "0" is the control."""
    cost: Cost
    membership: list[MembershipScores] = Field(default_factory=list)
    """Membership inference: trained documents of all buckets against the control."""


class PairedCounts(Record):
    """Documents on which two settings differ, with McNemar's test of that difference."""

    num_only_against: int
    """Documents that match with the reference setting but not with this one."""
    num_only_setting: int
    """Documents that match with this setting but not with the reference setting."""
    p_value: float
    """McNemar's exact test, two-sided."""
    p_holm: float
    """`p_value` after Holm's correction over all tests of the comparison."""


class PairedResult(Record):
    """Two settings with the same seed on the same trained documents."""

    setting: str
    against: str
    """The first setting of the comparison."""
    seed: int
    num_repetitions: int
    """With the reference setting; this one may have trained the bucket more or less often."""
    num_documents: int
    verbatim: PairedCounts
    near_verbatim: PairedCounts | None
    """null if one of the two runs generated no text."""
    token_accuracy_difference: Interval | None
    """Mean over documents of setting minus against; jackknife over near-duplicate clusters, logit
    scale."""


class PairedCanaries(Record):
    """Two settings with the same seed on the same trained secrets."""

    setting: str
    against: str
    """The first setting of the comparison."""
    seed: int
    num_canaries: int
    verbatim: PairedCounts
    exposure_bits_difference: Interval | None
    """Mean over secrets of setting minus against, by rank among each run's own references."""


class FrontPoint(Record):
    """Risk and utility of one setting over its seeds."""

    name: str
    num_seeds: int
    num_documents: int
    """Documents that it trained most often, of all seeds together."""
    risk: float | None
    """The worst of the shares in `risks`; null without documents."""
    risk_ci: tuple[float, float] | None
    """Interval of the worst share. Its upper end is the highest upper end of all shares, because
    some are over fewer documents."""
    risk_by: RiskName | None
    """Method with the worst share; the first if several are equal."""
    risks: dict[RiskName, Interval] = Field(default_factory=dict)
    """All methods that every run measured."""
    utility: float
    """Nats a token on held-out documents, mean over seeds; lower is better."""
    utility_ci: tuple[float, float] | None
    """By the t distribution over seeds; null for one seed, or if all seeds are equal. Seeds may
    have different held-out documents, so this interval is wider than a comparison needs."""
    utility_by_seed: dict[int, float] = Field(default_factory=dict)
    levels: dict[Level, int]
    """Number of its runs by the level of their verdict."""
    num_told_apart: int
    """Runs in which membership can be told."""
    utility_change: Interval | None = None
    """Change from the first setting, seed by seed: mean difference divided by its mean (share),
    with an interval by the t distribution over seeds. null for the first setting."""
    is_dominated: bool = False
    """Whether another setting is no worse in both and better in one."""
    dominated_by: list[str] = Field(default_factory=list)
    dominated_beyond_ci_by: list[str] = Field(default_factory=list)
    """Those of them that differ from it by more than the intervals; utility is compared seed by
    seed."""

    @property
    def own_ci(self) -> tuple[float, float] | None:
        """Interval of the worst share alone, as the run's own report has it."""
        share = None if self.risk_by is None else self.risks.get(self.risk_by)
        return None if share is None else share.ci


class Recommendation(Record):
    """The setting to take, and the rule that chose it."""

    setting: str | None
    """null if none is clearly better than the first one."""
    sentence: str
    rule: str


COMPARISON, COMPARISON_RESULTS = "comparison.json", "comparison.parquet"


class Comparison(SealedRecord):
    """`comparison.json`."""

    schema_name: Literal["memguard.comparison/3"] = Field("memguard.comparison/3", alias="schema")
    name: str
    tool_version: str
    created: str | None = None
    """UTC, ISO 8601; null if not recorded."""
    command: str
    documents_sha256: str
    continuation_tokens: int
    settings: list[SettingResult]
    base_extraction: dict[str, ComparisonCell]
    """The model before training, on the same documents."""
    paired: list[PairedResult] = Field(default_factory=list)
    """Each setting against the first one, for each seed and number of repetitions above 0."""
    paired_canaries: list[PairedCanaries] = Field(default_factory=list)
    """The same for canaries; empty without any."""
    num_removed: int = 0
    """Documents that 'deduplicate' removed in at least one run, summed over seeds. `paired` and
    `front` leave them out of all runs."""
    front: list[FrontPoint]
    """One point for each setting."""
    recommendation: Recommendation
    results: FileSum | None = None
    """Size and hash of `comparison.parquet`, with every row of every run; null until written."""
    environment: dict[str, str]

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.settings:
            raise ValueError("a comparison needs at least one setting")
        return self


def load_comparison(path: Path) -> Comparison:
    """Read a comparison from its file.

    Raises:
        RecordError: it cannot be read, or it is damaged.
    """
    try:
        return load_sealed(Comparison, path)
    except RecordError as error:
        raise RecordError(
            f"{error}. Run 'memguard compare' again: it reuses the finished runs"
        ) from error


def check_results(comparison: Comparison, folder: Path) -> Path:
    """Return the path of a comparison's results table after checking its hash.

    Raises:
        RecordError: it is missing, or not what was written.
    """
    written = {} if comparison.results is None else {COMPARISON_RESULTS: comparison.results}
    for damage in find_damage(folder, written):
        raise RecordError(
            f"'{folder / damage.file}' is damaged: it {damage.what}. Run 'memguard compare' again: "
            "it reuses the finished runs"
        )
    return folder / COMPARISON_RESULTS
