"""The verdict of an audit: level, sentences and badges, and the counts and the test behind them.

Badges: one of the text, one of membership; a state whose test was not made, or not made with enough
texts, is grey, never green.
"""

from dataclasses import dataclass
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
MembershipLack = Literal[
    "unseen-texts", "trained-texts", "other-kind", "no-base", "no-unseen", "no-score"
]
"""Why membership is not judged: fewer than `MIN_UNSEEN` unseen texts, too few trained ones, a
control of another kind, no sign and no base model to compare with, no unseen text at all, or a
suite without a membership score."""
Colour = Literal["red", "amber", "violet", "green", "grey"]
"""red: memorized; amber: extracted; violet: membership can be told; green: tested, and nothing was
found; grey: not decided by a test."""
MIN_TRAINED = 30
"""Minimum number of trained texts for none-found: with 30 of one document each, of which none is
extracted, the true rate is at most 11.6 %."""
MIN_UNSEEN = 30
"""Minimum number of unseen texts for a membership level other than told-apart."""

LEVEL_NAMES: dict[Level, str] = {
    "memorized": "Memorized",
    "extracted": "Extracted",
    "none-found": "None found",
    "inconclusive": "Inconclusive",
}
"""The word of each level on pages and in the terminal."""
REASON_NAMES: dict[Reason, str] = {
    "control": "the model memorized training text",
    "canaries": "the model memorized random secrets",
    "no-control": "without unseen documents the cause is open",
    "too-few": "there are too few documents to say more",
    "control-too": "unseen documents are extracted too, so chance is not excluded",
    "base-too": "the base model produces the extracted documents too",
    "other-kind": "the control is another kind of text, or has or faces fewer than five texts, so "
    "that only own texts are compared, and only with a base",
    "forgotten": "documents to be forgotten are still extracted",
    "canaries-too": "canaries and references are extracted, so chance is not excluded",
    "not-trained": "no audited document was trained in full",
    "collapsed": "the model seems collapsed",
    "not-generated": "near-verbatim text was not tested",
    "weakened": "settings make text harder to extract than the defaults do",
    "unaudited": "too many documents could not be audited",
}
"""What the level of a verdict rests on, by its reason."""
_COUNTED = ("control", "no-control", "too-few", "control-too", "base-too", "other-kind")
"""Reasons of levels whose badge has a count instead."""


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
    lack: MembershipLack | None
    """null unless the level is cannot-be-judged or not-measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Badge:
    """The state of one of the two questions; its words are fixed, its detail has counts only."""

    title: Literal["Text", "Membership"]
    state: str
    colour: Colour
    detail: str
    """The count or the number behind the state, or what is missing."""

    def describe(self) -> str:
        """Return the badge as one line: ``Membership: not judged (12 of 30 unseen texts)``."""
        return f"{self.title}: {self.state} ({self.detail})"


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
    def colour(self) -> Colour:
        """Colour of the level."""
        return _COLOURS[self.level]

    @property
    def badges(self) -> tuple[Badge, Badge]:
        """The badge of the text, and the badge of membership."""
        name, (state, colour) = LEVEL_NAMES[self.level], _MEMBERSHIP[self.membership.level]
        text, membership = _detail_text(self), _detail_membership(self.membership)
        return (
            Badge(title="Text", state=name, colour=self.colour, detail=text),
            Badge(title="Membership", state=state, colour=colour, detail=membership),
        )

    @property
    def may_be_fixed(self) -> bool:
        """Whether other settings may lower what was extracted: training may be the cause."""
        is_open = self.level == "extracted" and self.reason in _OPEN
        return self.level == "memorized" or is_open

    def describe(self) -> str:
        """Return the name of the level and the sentence."""
        return f"{LEVEL_NAMES[self.level]}. {self.sentence}"


_OPEN: tuple[Reason, ...] = ("no-control", "too-few", "other-kind")
_COLOURS: dict[Level, Colour] = {
    "memorized": "red",
    "extracted": "amber",
    "none-found": "green",
    "inconclusive": "grey",
}
_MEMBERSHIP: dict[MembershipLevel, tuple[str, Colour]] = {
    "told-apart": ("can be told", "violet"),
    "slightly": ("slight sign", "violet"),
    "not-seen": ("no sign", "green"),
    "cannot-be-judged": ("not judged", "grey"),
    "not-measured": ("not judged", "grey"),
}


def _detail_text(verdict: Verdict) -> str:
    """Return what the state of the text rests on: a count, or the reason."""
    trained, reason = verdict.trained, verdict.reason
    if reason == "too-few" and verdict.level == "inconclusive":
        needed = f" of {MIN_TRAINED}" if trained.num_clusters < MIN_TRAINED else ""
        return f"{trained.num_clusters:,}{needed} trained texts"
    if reason is None or reason in _COUNTED:
        return f"{trained.num_matched:,} of {trained.num_documents:,} documents"
    return REASON_NAMES[reason]


def _detail_membership(membership: MembershipVerdict) -> str:
    """Return the AUC, or what is missing for it."""
    if membership.lack is None:
        assert membership.auc is not None, "a level that was judged has an AUC"
        return f"AUC {membership.auc.value:.2f}"
    return {
        "unseen-texts": f"{membership.num_nonmembers:,} of {MIN_UNSEEN} unseen texts",
        "trained-texts": f"{membership.num_members:,} of {MIN_TRAINED} trained texts",
        "other-kind": "unseen texts are of another kind",
        "no-base": "no base model was compared",
        "no-unseen": "no unseen text",
        "no-score": "the suite has no membership score",
    }[membership.lack]
