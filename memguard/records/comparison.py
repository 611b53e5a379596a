"""What a comparison found: settings side by side, and paired."""

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
)
from memguard.records.sealed import SealedRecord, load_sealed


class MatchedShare(Record):
    """A share of a comparison cell's documents."""

    num_matched: int
    rate: float | None
    ci: tuple[float, float] | None


class ComparisonCell(Record):
    """One setting on the documents of one number of repetitions."""

    num_documents: int
    num_matched: int
    rate: float | None
    ci: tuple[float, float] | None
    """Verbatim."""
    near_verbatim: MatchedShare | None
    """Of greedy text; null where nothing was generated."""
    teacher_forced_90: MatchedShare
    """Knowledge token by token, not extraction."""
    mean_token_accuracy: float | None
    gain_minus_control: Interval | None = None
    """Token accuracy, model minus base model, minus the same in the control; null where that is not
    known, where accuracy did not rise for certain, or where the blind baseline tells trained
    documents and control apart."""
    attack_cost: AttackCostScores | None = None
    """null where the suite did not ask."""
    attacks: list[AttackedBucket] = Field(default_factory=list)
    """What adaptive attacks got back; empty where none was tried, and of the base model."""


class Utility(Record):
    """What must not get worse: nats a token on held-out documents."""

    heldout_nll: float
    base_heldout_nll: float
    num_documents: int
    num_tokens: int


class Cost(Record):
    """What a setting took."""

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
    mitigations: list[dict[str, Any]]
    overrides: dict[str, Any]
    utility: Utility
    extraction: dict[str, ComparisonCell]
    """By number of repetitions; "0" is the control."""
    cost: Cost
    membership: list[MembershipScores] = Field(default_factory=list)
    """Trained documents of all buckets against the control."""


class PairedCounts(Record):
    """Documents on which two settings differ, and what chance alone would do."""

    num_only_against: int
    """Matched with the setting compared with, not with this one."""
    num_only_setting: int
    """Matched with this setting, not with the one compared with."""
    p_value: float
    """McNemar's exact test, two-sided."""
    p_holm: float
    """The same after Holm's correction over all tests of the comparison."""


class PairedResult(Record):
    """Two settings with the same seed on the same trained documents."""

    setting: str
    against: str
    """The first setting of the comparison."""
    seed: int
    num_repetitions: int
    """With the setting compared with; this one may have trained the bucket more or less often."""
    num_documents: int
    verbatim: PairedCounts
    near_verbatim: PairedCounts | None
    """null where one of the two was not generated."""
    token_accuracy_difference: Interval | None
    """Mean over documents of setting minus against; jackknife over near-duplicate clusters."""


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
    """One setting over its seeds: what is at risk, and what that costs."""

    name: str
    num_seeds: int
    num_documents: int
    """Those it trained most often, of all seeds together."""
    risk: float | None
    """The worst of the shares in `risks`; null without documents."""
    risk_ci: tuple[float, float] | None
    """Of the worst share; its upper end is the highest of all shares, some being of fewer
    documents."""
    risk_by: RiskName | None
    """Which of them; the first of equals."""
    risks: dict[RiskName, Interval] = Field(default_factory=dict)
    """All that were asked of every run."""
    utility: float
    """Nats a token on held-out documents, mean over seeds; lower is better."""
    utility_ci: tuple[float, float] | None
    """By the t distribution over seeds; null for one seed, or where all seeds are equal. Another
    seed may have other held-out documents, so that this is wider than a comparison needs."""
    utility_by_seed: dict[int, float] = Field(default_factory=dict)
    num_runs_detected: int
    """Seeds whose own report says that memorization is detected."""
    utility_change: Interval | None = None
    """Against the first setting, seed by seed: mean difference over its mean (share), the interval
    by the t distribution over seeds. null for the first."""
    is_dominated: bool = False
    """Another setting is no worse in both and better in one."""
    dominated_by: list[str] = Field(default_factory=list)
    dominated_beyond_ci_by: list[str] = Field(default_factory=list)
    """Those of them from which it differs by more than the intervals, of utility seed by seed."""


class Recommendation(Record):
    """The setting to take, and the rule that chose it."""

    setting: str | None
    """null where none is clearly better than the first one."""
    sentence: str
    rule: str


COMPARISON = "comparison.json"


class Comparison(SealedRecord):
    """`comparison.json`."""

    schema_name: Literal["memguard.comparison/1"] = Field("memguard.comparison/1", alias="schema")
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
    """Every setting against the first one, for each seed and number of repetitions above 0."""
    paired_canaries: list[PairedCanaries] = Field(default_factory=list)
    """The same on random secrets; empty without any."""
    num_removed: int = 0
    """Documents that 'deduplicate' removed in one run or another, seeds added up: `paired` and
    `front` leave them out of all."""
    front: list[FrontPoint]
    """One for each setting."""
    recommendation: Recommendation
    environment: dict[str, str]

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.settings:
            raise ValueError("a comparison needs at least one setting")
        return self


def load_comparison(path: Path) -> Comparison:
    """Read a comparison back.

    Raises:
        RecordError: it cannot be read, or it is damaged.
    """
    try:
        return load_sealed(Comparison, path)
    except RecordError as error:
        raise RecordError(
            f"{error}. Run 'memguard compare' again: it takes the finished runs as they are"
        ) from error
