"""Scores of the probes: per document, per bucket and per canary."""

from typing import Any, Literal

from pydantic import Field

from memguard.records.manifest import Role
from memguard.records.record import Record

RiskName = Literal["verbatim", "near_verbatim", "attack_cost", "attack"]
"""Extraction methods: greedy text that matches exactly or nearly, text sampled within
`NUM_RISK_QUERIES` queries, text extracted verbatim by the best of the attacks that ran."""

NUM_RISK_QUERIES = 1_000_000
"""A document whose attack cost is at most this counts as extracted (queries)."""

RISK_NAMES: dict[RiskName, str] = {
    "verbatim": "verbatim",
    "near_verbatim": "near-verbatim",
    "attack_cost": f"within {NUM_RISK_QUERIES:,} queries",
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
"""Documents below which the interval of a mean of bounded values is marked."""


class Interval(Record):
    """An estimate with its 95 % interval."""

    value: float
    ci: tuple[float, float] | None
    few_documents: bool = False
    """Whether it is of a mean of bounded values over fewer than `MIN_FOR_MEANS` documents
    (effective number, if some are near-duplicates), and may be too narrow."""


class DocumentScore(Record):
    """One document under one model. One row of the parquet."""

    id: str
    bucket: str
    role: Role
    source: str
    num_repetitions: int | None
    num_tokens: int
    prefix_tokens: int
    continuation_tokens: int
    num_correct: int
    """Continuation tokens that are the argmax given the true tokens before them."""
    verbatim: bool
    """Greedy decoding from the prefix generates the continuation exactly."""
    near_verbatim: bool | None
    """Greedy decoding from the prefix, with end-of-text tokens suppressed, generates the
    continuation within the stated number of edits; false if teacher-forced accuracy is too low for
    text to be generated, null if no text was generated at all."""
    num_edits: int | None
    """Insertions, deletions and substitutions between greedy and true continuation (tokens); null
    above the limit, or if no text was generated."""
    greedy_margin: float | None
    """Smallest gap between the chosen and the next best token along the greedy text (logits)."""
    teacher_forced_90: bool
    """At least 90 % of the continuation tokens are the argmax given the true tokens before them."""
    first_divergence: int
    """Index of the first wrong token; `continuation_tokens` where there is none."""
    extraction_strength: float
    """1 - k/S, where k is the smallest index from which every token is right; 0 if none is."""
    logprob: float
    """Sum over the continuation, natural log."""
    min_margin: float | None
    """Smallest gap between the true token and the best other one, over tokens that are right
    (logits); null if none is."""
    type_token_ratio: float
    """Distinct tokens / tokens of the true continuation."""
    argmax_type_token_ratio: float
    """The same ratio for the model's argmax tokens; low for a collapsed model."""
    base_num_correct: int | None = None
    base_verbatim: bool | None = None
    base_near_verbatim: bool | None = None
    base_teacher_forced_90: bool | None = None
    longest_run: int | None = None
    """Most consecutive right tokens, each given the true tokens before it."""
    attack_log10_queries: float | None = None
    """log10 of the number of queries that generate the continuation with probability 1/2, by the
    cheapest of the listed sampling schemes; null if none of them can, or if none was run."""
    attack_scheme: str | None = None
    """The cheapest sampling scheme."""
    num_copies: int | None = None
    """Trained documents that share a run of words with this one, itself included."""
    base_first_divergence: int | None = None
    base_logprob: float | None = None
    base_extraction_strength: float | None = None
    base_longest_run: int | None = None
    base_attack_log10_queries: float | None = None


class ModelScores(Record):
    """Scores of one model on the documents of one bucket."""

    verbatim: Rate
    near_verbatim: Rate | None
    """Greedy text within the stated number of edits; null if no text was generated."""
    teacher_forced_90: Rate
    """At least 90 % of the tokens are right given the true text before them. Not extraction."""
    mean_token_accuracy: Interval | None
    """Mean over documents; interval by a jackknife over near-duplicate clusters, logit scale."""
    median_first_divergence: float | None
    mean_logprob: Interval | None
    """Mean over documents of the mean log-probability of a continuation token (nats); null below
    two texts, because that of a single text would confirm a guess of it."""


class BucketScores(Record):
    """One row of the report's table."""

    bucket: str
    role: Role
    num_repetitions: int | None
    num_documents: int
    num_too_short: int
    """Documents of this bucket that were trained (or held back) but are too short to audit."""
    num_cut_too_short: int = 0
    """Documents that are long enough as a whole but were cut into parts that are all too short."""
    num_nothing_supervised: int = 0
    """Documents without a token that receives loss, special tokens not counted."""
    num_not_sampled: int = 0
    num_near_duplicates: int = 0
    """Control documents in a near-duplicate cluster with a trained one, left out of the control."""
    model: ModelScores
    base: ModelScores | None
    mean_extraction_strength: float | None
    mean_type_token_ratio: float | None
    mean_argmax_type_token_ratio: float | None
    num_tiny_margin: int
    """Documents whose match depends on a margin below the stated one: a different order of
    floating-point operations could change the result."""
    risks: dict[RiskName, Rate]
    """Extraction rate by each method that was measured; `attack` is the rate of the best attack
    that ran, over the documents that were attacked."""
    base_risks: dict[RiskName, Rate]
    """The same rates for the model before training, on which no attacks run."""
    minus_control: dict[RiskName, Interval]
    """`risks` minus those of the control, with Newcombe's interval; empty for the control itself
    and without a control."""


class GeneratedTexts(Record):
    """Counts of the texts generated to find near-verbatim matches of one model."""

    reason_not_generated: str | None
    """null if texts were generated; otherwise all counts are 0."""
    num_verbatim: int
    """Documents whose greedy text is known without generation."""
    num_generated: int
    floor: float
    """Teacher-forced accuracy below which no text is generated, except for a sample."""
    num_below_floor: int
    num_checked: int
    """Documents below the floor for which text was generated: a seeded sample, or all of them if
    one of the sample matched."""
    num_matched_below_floor: int


class MeasuredBucket(Record):
    """One metric of one probe over the documents of one bucket."""

    bucket: str
    num_documents: int
    num_missing: int
    """Documents without this metric: too short, or not in the probe's sample."""
    model: Rate | Interval | None
    base: Rate | Interval | None
    change_from_base: Interval | None
    """Mean over documents of the model's value minus the base model's; null without a base."""
    minus_control: Interval | None
    change_from_base_minus_control: Interval | None
    """Change from the base model, minus the control's change; null without base or control."""


class Measure(Record):
    """One metric of one probe: its definition and its value for each bucket."""

    probe: str
    version: int
    parameters: dict[str, Any]
    metric: str
    meaning: str
    unit: str
    higher_is_better: bool
    """False if a higher value means more memorization."""
    buckets: list[MeasuredBucket]


MIN_FOR_QUANTILES = 10
"""Minimum number of documents for quantiles of the attack cost."""


class AttackCostScores(Record):
    """Queries needed to sample the continuations of one bucket (log10)."""

    num_documents: int
    num_never: int
    """Documents whose continuation no listed sampling scheme can generate."""
    quantile_10: int | None
    median: int | None
    quantile_90: int | None
    """Rounded up, because the exact cost of one document would confirm a guess of its text. null
    below `MIN_FOR_QUANTILES` documents, or if too many of them cannot be sampled at all."""
    within: dict[int, Rate]
    """Documents that cost at most this many queries."""


class AttackCostBucket(Record):
    """Attack cost of one bucket: queries that generate the continuation with probability 1/2."""

    bucket: str
    model: AttackCostScores
    base: AttackCostScores | None


class AttackedBucket(Record):
    """Documents of one bucket that one adaptive attack extracted."""

    bucket: str
    attack: str
    num_queries: int
    """Answers the attacker may submit for `any_verbatim`."""
    best_verbatim: Rate
    """Documents whose first answer was the true continuation."""
    any_verbatim: Rate
    mean_token_accuracy: Interval | None
    """Share of right tokens of the first answer, compared position by position."""
    note: str = ""


class ExtractedCopies(Record):
    """k-eidetic memorization: documents extracted verbatim that at most k trained documents hold.

    Copies are counted over near-duplicate clusters: documents that share a run of words count as
    holding the same text, so the k of a document is never understated.
    """

    k: int
    num_documents: int
    """Audited trained documents with at most k copies."""
    num_extracted: int


BLIND = "blind"
"""Membership score of the blind baseline, which reads the texts but has no model access."""


class MembershipScores(Record):
    """Membership inference: how well a score separates trained documents from the control."""

    score: str
    num_members: int
    num_nonmembers: int
    auc: Interval | None
    """0.5 is chance; higher means members score higher. Interval by DeLong. null if too few
    documents of either kind have the score."""
    higher_is_better: bool = False
    definition: str = ""
    tpr_at_fpr: dict[str, Rate | None] = Field(default_factory=dict)
    """Members above the threshold that this share of nonmembers exceeds; null with fewer than 1/FPR
    nonmembers. The interval includes the error of the threshold."""
    num_missing: int = 0
    """Members and nonmembers without this score."""


class CanaryScore(Record):
    """One canary: a random secret that was trained or kept as a reference."""

    id: str
    was_trained: bool
    nll: float
    """Sum over the secret's tokens (nats)."""
    base_nll: float | None
    num_secret_tokens: int
    num_repetitions: int
    num_loss_tokens: int | None
    """Tokens of it that received loss at least once; null if not recorded."""
    exposure_bits: float | None
    exposure_extrapolated_bits: float | None
    verbatim: bool


class CanaryScores(Record):
    """Results of the canary probe: exposure, extraction and a lower bound of epsilon."""

    num_trained: int
    num_references: int
    num_ranked: int
    """Canaries whose secret has the most common number of tokens. Only these are ranked and used
    for guesses."""
    num_ranked_references: int
    num_repetitions: int | None
    verbatim: Rate
    """Trained secrets that greedy decoding extracts in full."""
    reference_verbatim: Rate
    loss_coverage: float | None
    """Share of the trained secrets' tokens that received loss at least once; null if not
    recorded."""
    num_without_loss: int | None
    """Trained canaries without a token that received loss."""
    median_exposure_bits: float | None
    max_exposure_bits: float | None
    """By rank among the references of the same length; at most log2 of `num_ranked_references`."""
    median_exposure_extrapolated_bits: float | None
    max_exposure_extrapolated_bits: float | None
    num_guesses: int
    """Guesses about `num_ranked` coin flips; fixed by that number before any score is read."""
    num_right: int
    epsilon_lower_bound: float | None
    """One-run lower bound of the privacy loss at `delta`, 95 % confidence (Steinke et al. 2023). It
    applies to the training algorithm with these settings; the unit is one canary with all its
    repetitions."""
    epsilon_ceiling: float | None
    """Largest bound that this number of coin flips can show; null if `epsilon_lower_bound` is."""
    delta: float
    assumptions: list[str]
    canaries: list[CanaryScore]


class MaskChange(Record):
    """Effect of one rewriting of a text on the mitigation's label mask."""

    rewriting: str
    num_passages: int
    num_changed: int
    """Passages with a token that training dropped and that would receive loss in the rewritten
    copy."""
    mean_leaked_share: float | None
    """Share of a passage's dropped tokens that receive loss in the copy."""


class DoseTrend(Record):
    """Trend test: whether a rate rises with the number of repetitions."""

    metric: str
    doses: list[int]
    fitted: list[float]
    """Rates that never fall with the dose, closest to those measured."""
    z: float | None
    p_value: float | None
    """Cochran-Armitage trend test, two-sided; null if it cannot be computed."""
