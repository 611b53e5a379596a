"""What each probe found: of a document, of a bucket, of a canary."""

from typing import Any, Literal

from pydantic import Field

from memguard.records.manifest import Role
from memguard.records.record import Record

RiskName = Literal["verbatim", "near_verbatim", "attack_cost", "attack"]
"""Ways in which documents are extracted: greedy text equal or nearly so, text drawn within
`NUM_RISK_QUERIES`, text recovered verbatim by the best of the attacks that ran."""

NUM_RISK_QUERIES = 1_000_000
"""A document whose attack cost is at most this counts as extracted (queries)."""


class Rate(Record):
    """A share of documents with its counts and 95 % interval (Clopper-Pearson unless stated)."""

    num_documents: int
    num_matched: int
    rate: float | None
    """null where there are no documents."""
    ci: tuple[float, float] | None
    """null below two documents."""


class Interval(Record):
    """An estimate with its 95 % interval."""

    value: float
    ci: tuple[float, float] | None


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
    """Continuation tokens that are the argmax given everything true before them."""
    verbatim: bool
    """Greedy decoding from the prefix gives back the continuation, token by token."""
    near_verbatim: bool | None
    """Greedy decoding from the prefix, end-of-text tokens suppressed, gives back the continuation
    within the stated edits; false where teacher-forced accuracy is too low to generate it, null
    where nothing was generated at all."""
    num_edits: int | None
    """Insertions, deletions and substitutions between greedy and true continuation (tokens); null
    beyond the limit and where it was not generated."""
    greedy_margin: float | None
    """Smallest gap between the chosen and the next best token along the greedy text (logits)."""
    teacher_forced_90: bool
    """At least 90 % of the continuation tokens are the argmax given everything true before them."""
    first_divergence: int
    """Index of the first wrong token; `continuation_tokens` where there is none."""
    extraction_strength: float
    """1 - k/S, k the smallest index from which on every token is right; 0 where none is."""
    logprob: float
    """Sum over the continuation, natural log."""
    min_margin: float | None
    """Smallest gap between true token and best other one where right (logits); null: none is."""
    type_token_ratio: float
    """Distinct tokens / tokens of the true continuation."""
    argmax_type_token_ratio: float
    """The same of the model's argmax tokens: a collapsed model has a low one."""
    base_num_correct: int | None = None
    base_verbatim: bool | None = None
    base_near_verbatim: bool | None = None
    base_teacher_forced_90: bool | None = None
    longest_run: int | None = None
    """Most right tokens in a row, each given everything true before."""
    attack_log10_queries: float | None = None
    """log10 of the queries until one gives the continuation with probability 1/2, by the cheapest
    of the listed ways; null: none of them can, or none was asked."""
    attack_scheme: str | None = None
    """The cheapest way."""
    num_copies: int | None = None
    """Trained documents that share a run of words with this one, itself included."""
    base_first_divergence: int | None = None
    base_logprob: float | None = None
    base_extraction_strength: float | None = None
    base_longest_run: int | None = None
    base_attack_log10_queries: float | None = None


class ModelScores(Record):
    """What one model does on the documents of one bucket."""

    verbatim: Rate
    near_verbatim: Rate | None
    """Greedy text within the stated edits; null where nothing was generated."""
    teacher_forced_90: Rate
    """At least 90 % of the tokens right given the true text before them: not extraction."""
    mean_token_accuracy: Interval | None
    """Mean over documents; interval by a jackknife over near-duplicate clusters, logit scale."""
    median_first_divergence: float | None
    mean_logprob: Interval | None
    """Mean over documents of the mean log-probability of a continuation token (nats)."""


class BucketScores(Record):
    """One row of the report's table."""

    bucket: str
    role: Role
    num_repetitions: int | None
    num_documents: int
    num_too_short: int
    """Documents of this bucket that were trained (or held back) but are too short to audit."""
    num_cut_too_short: int = 0
    """The same, long enough as a whole, but cut into parts of which none is."""
    num_nothing_supervised: int = 0
    """The same, without a token that receives loss, special tokens not counted."""
    num_not_sampled: int = 0
    model: ModelScores
    base: ModelScores | None
    mean_extraction_strength: float | None
    mean_type_token_ratio: float | None
    mean_argmax_type_token_ratio: float | None
    num_tiny_margin: int
    """Documents whose match hangs on a margin below the stated one: other arithmetic could flip
    it."""
    risks: dict[RiskName, Rate]
    """Every way of extraction that was measured; `attack` is the best of the attacks that ran, of
    the documents that were attacked."""
    base_risks: dict[RiskName, Rate]
    """The same of the model before training, which is not attacked."""
    minus_control: dict[RiskName, Interval]
    """Difference of `risks` to the control's, Newcombe's interval; empty for the control and
    without one."""


class GeneratedTexts(Record):
    """How near-verbatim matches of one model were found."""

    reason_not_generated: str | None
    """null where texts were generated; otherwise all counts are 0."""
    num_verbatim: int
    """Documents whose greedy text is known without generating it."""
    num_generated: int
    floor: float
    """Documents below this teacher-forced accuracy are not generated, but for a sample."""
    num_below_floor: int
    num_checked: int
    """Documents below the floor that were generated: a seeded sample, or all of them once one of
    the sample matched."""
    num_matched_below_floor: int


class MeasuredBucket(Record):
    """One number of one probe over the documents of one bucket."""

    bucket: str
    num_documents: int
    num_missing: int
    """Documents without this number: too short, or not in the probe's sample."""
    model: Rate | Interval | None
    base: Rate | Interval | None
    counterfactual: Interval | None
    """Mean over documents of the model's minus the base model's; null without a base."""
    minus_control: Interval | None
    counterfactual_minus_control: Interval | None
    """What training added, minus what it added in the control; null without base or control."""


class Measure(Record):
    """One number of one probe; what it means, and what it is for each bucket."""

    probe: str
    version: int
    parameters: dict[str, Any]
    metric: str
    meaning: str
    unit: str
    higher_is_better: bool
    """False: more of it means more was memorised."""
    buckets: list[MeasuredBucket]


class AttackCostScores(Record):
    """What it takes to draw the continuations of one bucket, log10 of the queries."""

    num_documents: int
    num_never: int
    """Documents whose continuation no listed way can draw."""
    lowest: float | None
    quantile_10: float | None
    median: float | None
    quantile_90: float | None
    """null where so many cannot be drawn at all."""
    within: dict[int, Rate]
    """Documents that cost at most so many queries."""


class AttackCostBucket(Record):
    """Attack cost of one bucket: queries until one gives the continuation with probability 1/2."""

    bucket: str
    model: AttackCostScores
    base: AttackCostScores | None


class AttackedBucket(Record):
    """What one adaptive attack got back from one bucket."""

    bucket: str
    attack: str
    num_queries: int
    """Answers the attacker may submit for `any_verbatim`."""
    best_verbatim: Rate
    """Documents whose first answer was the true continuation."""
    any_verbatim: Rate
    mean_token_accuracy: Interval | None
    """Share of right tokens of the first answer, compared place by place."""
    note: str = ""


class ExtractedCopies(Record):
    """k-eidetic memorisation: documents recited verbatim though at most k trained ones hold them.

    Counted over near-duplicate clusters: documents that share a run of words count as holding the
    same text, so the k of a document is never understated.
    """

    k: int
    num_documents: int
    """Audited trained documents with at most k copies."""
    num_extracted: int


BLIND = "blind"
"""Membership score of the baseline that sees the texts and never the model."""


class MembershipScores(Record):
    """How well a score tells trained documents from control documents."""

    score: str
    num_members: int
    num_nonmembers: int
    auc: Interval | None
    """0.5 is chance; higher means members score higher. Interval by DeLong. null: could not be
    asked, too few of either kind have the score."""
    higher_is_better: bool = False
    definition: str = ""
    tpr_at_fpr: dict[str, Rate | None] = Field(default_factory=dict)
    """Members above a threshold that this share of nonmembers passes; null below 1/FPR of them. The
    interval includes the error of the threshold."""
    num_missing: int = 0
    """Members and nonmembers without this score."""


class CanaryScore(Record):
    """One canary: a random secret that was, or was not, trained."""

    id: str
    was_trained: bool
    nll: float
    """Sum over the secret's tokens (nats)."""
    base_nll: float | None
    num_secret_tokens: int
    num_repetitions: int
    num_loss_tokens: int | None
    """Tokens of it that received loss at least once; null where nobody counted."""
    exposure_bits: float | None
    exposure_extrapolated_bits: float | None
    verbatim: bool


class CanaryScores(Record):
    """What random secrets of a known number show."""

    num_trained: int
    num_references: int
    num_ranked: int
    """Canaries whose secret has as many tokens as most have: these are ranked and guessed at."""
    num_ranked_references: int
    num_repetitions: int | None
    verbatim: Rate
    """Trained secrets that greedy decoding gives back whole."""
    reference_verbatim: Rate
    loss_coverage: float | None
    """Share of the trained secrets' tokens that ever received loss; null where nobody counted."""
    num_without_loss: int | None
    """Trained canaries of which no token ever received loss."""
    median_exposure_bits: float | None
    max_exposure_bits: float | None
    """By rank among the references of one length; at most log2 of `num_ranked_references`."""
    median_exposure_extrapolated_bits: float | None
    max_exposure_extrapolated_bits: float | None
    num_guesses: int
    """Of `num_ranked` coins; follows from their number before any score is looked at."""
    num_right: int
    epsilon_lower_bound: float | None
    """One-run lower bound of the privacy loss at `delta`, 95 % confidence (Steinke et al. 2023). Of
    the training algorithm with these settings; the unit is one canary with all its repetitions."""
    epsilon_ceiling: float | None
    """The largest bound these coins could have shown; null as `epsilon_lower_bound` is."""
    delta: float
    assumptions: list[str]
    canaries: list[CanaryScore]


class MaskChange(Record):
    """What one rewriting of a text does to the mask of the mitigation."""

    rewriting: str
    num_passages: int
    num_changed: int
    """Passages of which a token that training dropped would receive loss in the rewritten copy."""
    mean_leaked_share: float | None
    """Share of a passage's dropped tokens that receive loss in the copy."""


class DoseTrend(Record):
    """Does a rate rise with the number of repetitions?"""

    metric: str
    doses: list[int]
    fitted: list[float]
    """Rates that never fall with the dose, closest to those measured."""
    z: float | None
    p_value: float | None
    """Cochran-Armitage trend test, two-sided; null where it cannot be asked."""
