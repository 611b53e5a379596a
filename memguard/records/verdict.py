"""The verdict of an audit: its level, its sentences, and the counts and the test behind them."""

from typing import Literal

from memguard.records.record import Record
from memguard.records.results import Interval

Level = Literal["memorized", "extracted", "none-found", "inconclusive"]
"""memorized: trained documents are extracted more often than chance and control explain; extracted:
trained documents are extracted, and the cause is not shown; none-found: no trained document was
extracted, and the audit was large and complete enough to say so; inconclusive: all other audits."""
Reason = Literal[
    "control",
    "canaries",
    "no-control",
    "too-few",
    "control-too",
    "base-too",
    "other-kind",
    "forgotten",
    "canaries-too",
    "not-trained",
    "collapsed",
    "not-generated",
    "weakened",
    "unaudited",
]
"""memorized: exceeds the control, or trained canaries and no reference were extracted. extracted:
there is no control, too few documents, control documents are extracted too, the base model produces
the same documents, the control is another kind of text or too small, so that only own texts are
compared, and only with a base; or only documents to be forgotten, or canaries and references.
inconclusive: no audited document was trained, the model is collapsed, not all text was generated,
settings are weaker than the defaults, too many documents were not audited, or too few were."""
OtherMethod = Literal["attacked", "generated", "windows"]
"""Methods that are tested apart: attacks, generation, and other windows of the document."""
ComparedTexts = Literal["all", "own", "others"]
"""Texts that a test compares; see `VerdictTest`."""
MembershipLevel = Literal["told-apart", "slightly", "not-seen", "cannot-be-judged", "not-measured"]

LEVEL_NAMES: dict[Level, str] = {
    "memorized": "Memorized",
    "extracted": "Extracted",
    "none-found": "No extraction found",
    "inconclusive": "Inconclusive",
}
"""The word of each level on pages and in the terminal."""


class VerdictCounts(Record):
    """Extracted documents of one group; near-duplicates together are one cluster."""

    num_documents: int
    num_matched: int
    num_clusters: int
    num_matched_clusters: int
    """Clusters with at least one extracted document."""
    rate: float | None
    """Share of the documents; null without documents."""
    ci: tuple[float, float] | None
    """95 % interval (Clopper-Pearson) of this rate of the effective number of documents, (sum of
    cluster sizes)^2 / sum of their squares; null below two clusters."""


class VerdictTest(Record):
    """One-sided test of trained documents against the control; it counts clusters.

    A document counts if it is extracted in a way in which the base model, where it ran, does not
    produce it.
    """

    documents: Literal["all", "bucket"] | OtherMethod
    """Trained documents that are tested: all, those of one bucket, or those that attacks,
    generation or other windows were tried on, which then are the only method that counts."""
    texts: ComparedTexts
    """own: documents that end in own text (see `audit.verdict`); others: the rest; all: both."""
    bucket: str | None
    """null unless one bucket is tested."""
    trained: VerdictCounts
    control: VerdictCounts
    p_value: float
    level: float
    """The test is significant if `p_value` is at most this. All levels of an audit sum to 5 %."""


class MembershipVerdict(Record):
    """Whether one membership score, fixed in advance, separates trained from control documents."""

    level: MembershipLevel
    sentence: str
    score: str | None
    """`loss_minus_base` if the base model ran, else `loss`; null if not measured."""
    auc: Interval | None
    """Of one document a cluster."""
    num_members: int
    num_nonmembers: int


class Verdict(Record):
    """The verdict at the top of the page."""

    level: Level
    reason: Reason | None
    """Why it is not another level; null for none-found."""
    true_share: float | None
    """Upper limit of the share of extracted documents (95 %), if every document that was not
    audited is extracted; null unless the level is none-found."""
    sentence: str
    """At most 20 words; stands alone after the level's name."""
    scope: str
    """What was audited, what else was extracted, and what was not run."""
    membership: MembershipVerdict
    trained: VerdictCounts
    """The trained documents that the sentence counts, extracted by any method that it covers."""
    control: VerdictCounts
    """The control documents, by the same methods; if these extracted none and no test decided, by
    any method."""
    base: VerdictCounts | None
    """The same trained documents under the base model; null if it did not run."""
    test: VerdictTest | None
    """The test that decided; if none is significant, the one closest to it; null without control
    or without audited trained documents."""
    bucket: str
    """Trained bucket with the highest extraction rate (of the test's bucket, if it has one)."""
    metric: str
    """Method with that rate: a name of `Tables.risks`."""

    @property
    def colour(self) -> Literal["red", "amber", "green", "grey"]:
        """Colour of the level."""
        return _COLOURS[self.level]

    @property
    def page_colour(self) -> Literal["red", "amber", "green", "grey"]:
        """The worse colour of the two lines; membership that can be told is amber."""
        if self.membership.level == "told-apart" and self.colour != "red":
            return "amber"
        return self.colour

    @property
    def may_be_fixed(self) -> bool:
        """Whether other settings may lower what was extracted: training may be the cause."""
        is_open = self.level == "extracted" and self.reason in _OPEN
        return self.level == "memorized" or is_open

    def describe(self) -> str:
        """Return the name of the level and the sentence."""
        return f"{LEVEL_NAMES[self.level]}. {self.sentence}"


_OPEN: tuple[Reason, ...] = ("no-control", "too-few", "other-kind")
_COLOURS: dict[Level, Literal["red", "amber", "green", "grey"]] = {
    "memorized": "red",
    "extracted": "amber",
    "none-found": "green",
    "inconclusive": "grey",
}
