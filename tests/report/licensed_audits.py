"""Audits of drawn counts, summarised as real ones are: what a page then says must follow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import report_examples as examples
from record_examples import make_document
from result_examples import rate_row

from memguard import records as r
from memguard.audit.cache import ScoreMatrix
from memguard.audit.document_scores import build_scores
from memguard.audit.extraction import Window
from memguard.audit.near_verbatim import NearVerbatim, NotGenerated
from memguard.audit.probe import Summary
from memguard.audit.probes.attacks import AttackProbe
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.requests import Inputs, Measured
from memguard.audit.selection import BucketOutline
from memguard.audit.suite import Suite
from memguard.audit.summary import Circumstances, summarise, tabulate
from memguard.audit.tables import Evidence
from memguard.audit.window_scores import MAIN
from memguard.config.settings import SamplingScheme

ChoiceT = TypeVar("ChoiceT")

TINY_MARGIN = 0.001
REASON = "the cache of one document does not fit"
DRAWN, NOT_DRAWN = -5.0, -60.0
"""Log-probabilities of texts that are drawn within a million queries, and of others."""
ATTACKS = ("beam_search", "sampling")
_PREFIX = 10
_SIZES = (12, 31, 10, 9, 5, 2, 1, 0)
_OFTEN = (12, 31, 10, 2, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one model does with a document."""

    num_correct: int
    verbatim: bool
    near: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document of an audit."""

    bucket: str
    role: r.Role
    count: int | None
    """Repetitions; None where they are not known."""
    size: int
    """Tokens of the continuation."""
    model: Answer
    base: Answer | None
    is_drawn: bool
    hangs: bool
    cluster: int | None
    """Near-duplicates have the same; None where it is not known."""
    attacks: dict[str, bool] | None
    """Whether each attack extracts it; None if it was not attacked."""
    loss: float
    base_loss: float
    """Membership scores; higher for documents that were trained."""

    @property
    def is_trained(self) -> bool:
        """Whether it was fed to the model, and not to be forgotten."""
        return self.role == "trained" and self.count != 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Secrets:
    """Canaries, and how many of them are extracted."""

    num_trained: int
    num_trained_extracted: int
    num_references: int
    num_references_extracted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """Drawn numbers, and the report of them."""

    documents: Sequence[Document]
    outlines: Sequence[BucketOutline]
    generated: bool
    base_generated: bool
    has_base: bool
    base_is_model: bool
    sampled: bool
    asks: bool
    """Whether membership is measured."""
    secrets: Secrets | None
    is_other_kind: bool
    """Whether the control was given and is another kind of text."""
    tally: str
    collapsed: bool
    below_floor: tuple[int, int, int]
    """Documents below the floor, those of them generated, and near-verbatim."""
    report: r.AuditReport = field(repr=False)

    def of(self, bucket: str) -> list[Document]:
        """Return the documents of a bucket."""
        return [one for one in self.documents if one.bucket == bucket]

    def outline(self, role: r.Role) -> list[BucketOutline]:
        """Return the buckets of a role."""
        return [one for one in self.outlines if one.role == role]

    @property
    def control(self) -> str | None:
        """The bucket of the control; None without one."""
        return next((one.bucket for one in self.outline("control")), None)

    def risks(self, bucket: str) -> dict[str, tuple[int, int]]:
        """Return documents extracted and all, by each way that was measured."""
        documents = self.of(bucket)
        found = {"verbatim": (sum(one.model.verbatim for one in documents), len(documents))}
        if self.generated:
            near = sum(one.model.near for one in documents)
            found["near_verbatim"] = near, len(documents)
        if self.sampled:
            drawn = sum(one.is_drawn or one.model.verbatim for one in documents)
            found["attack_cost"] = drawn, len(documents)
        tried = self.attacks(bucket)
        if tried:
            number = sum(one.attacks is not None for one in documents)
            found["attack"] = max(tried.values()), number
        return found

    def attacks(self, bucket: str) -> dict[str, int]:
        """Return how many documents of a bucket each attack extracts; empty without attacks."""
        attacked = [one.attacks for one in self.of(bucket) if one.attacks is not None]
        return {name: sum(each[name] for each in attacked) for name in ATTACKS if attacked}


def draw_audit(seed: int) -> Audit:
    """Draw an audit: with or without control, base model, generated text, sampling, attacks."""
    rng = np.random.default_rng(seed)

    def draw(choices: Sequence[ChoiceT]) -> ChoiceT:
        return choices[int(rng.integers(len(choices)))]

    # Zeros have sentences of their own, as have texts that are learned but not extracted, a control
    # that is extracted where trained documents are not, or the reverse, or by attacks alone.
    kinds_drawn = ["free", "free", "trained", "trained", "attacks", "learned", "quiet", "control"]
    kind = draw(kinds_drawn)
    quiet, learned = kind not in ("free", "trained"), kind == "learned"
    has_control = learned or draw(range(5)) > 0
    base = "other" if learned else draw(["none", "same", "other"])
    base_accuracy = draw([0.1, 0.6])
    generated = learned or draw(range(4)) > 0
    base_generated = generated and base != "none" and draw(range(5)) > 0
    sampled = draw((False, True))
    collapsed = not learned and draw(range(6)) == 0
    has_attacks = kind == "attacks" or draw((False, True))
    shift = draw([0.0, 0.0, 0.5, 0.6, 3.0, -3.0])
    lengths = (50,) if learned else draw([(50,), (1, 3), (8, 50, 21)])
    kinds: list[tuple[str, r.Role]] = [("trained a", "trained"), ("r16", "trained")]
    kinds = kinds[: draw(range(1, 3))]
    if has_control:
        kinds.insert(0, ("control", "control"))
    if draw(range(4)) == 0:
        kinds.append(("forget", "forget"))
    documents: list[Document] = []
    outlines = []
    for name, role in kinds:
        first = role == "trained" and not any(one.role == "trained" for one in outlines)
        sizes = _OFTEN if first or quiet else _SIZES
        if learned or kind in ("attacks", "trained"):
            sizes = [31, 31, 12]
        num_documents = draw(sizes)
        least = 1 if num_documents == 0 else 0
        doses = {"control": [[0]], "forget": [[None]]}.get(
            role, [[16], [1], [4, 9], [0], [16, 0], [None], [3, None]]
        )
        doses = draw(doses)
        limit = num_documents if kind in ("free", role) else 0
        recited = [limit] if kind == "control" else [limit // 4, limit, 0, limit // 2]
        num_verbatim = draw(recited)
        num_near = draw(range(limit - num_verbatim + 1))
        num_drawn = draw([limit, 0, limit // 2])
        accuracy = draw([0.0, 0.1] if role == "control" else [0.5, 0.9, 0.1, 0.0])
        num_known = draw([0, 4, 31]) if kind == "attacks" else num_verbatim // 2
        copies = 1 if learned else draw([1, 1, 1, 2, 6])
        num_attacked = min(10, num_documents) if has_attacks else 0
        recited = [num_attacked, 0, 0, num_attacked // 2]
        is_quiet = quiet if kind != "attacks" else role == "control" and draw((False, True))
        num_attacks = [0 if is_quiet else draw(recited) for _ in ATTACKS]
        for number in range(num_documents):
            size = lengths[number % len(lengths)]
            model = _answer(rng, size, number, num_verbatim, num_near, accuracy)
            before = None
            if base == "same":
                before = model
            elif base == "other":
                before = _answer(rng, size, number, num_known, 0, base_accuracy)
            documents.append(
                Document(
                    bucket=name,
                    role=role,
                    count=doses[number % len(doses)],
                    size=size,
                    model=model,
                    base=before,
                    is_drawn=number < num_drawn,
                    hangs=draw(range(21)) == 0,
                    cluster=1000 * len(outlines) + number // copies if copies > 1 else None,
                    attacks=None
                    if number >= num_attacked
                    else {
                        # The last is extracted by one attack alone.
                        name: number < most if place else number >= num_attacked - most
                        for place, (name, most) in enumerate(zip(ATTACKS, num_attacks, strict=True))
                    },
                    loss=float(rng.normal(shift * (role == "trained"))),
                    base_loss=float(rng.normal()) / 10,
                )
            )
        planned = {one.count for one in documents if one.bucket == name}
        outlines.append(
            BucketOutline(
                bucket=name,
                role=role,
                num_repetitions=planned.pop() if len(planned) == 1 else None,
                num_too_short=draw([least, 2, 1] if learned else [least, 2, 80]),
                num_not_sampled=draw([0, 0, 7]),
                num_near_duplicates=2 * (role == "control" and draw(range(6)) == 0),
            )
        )
    below = draw(range(13))
    checked = draw(range(min(1, below), below + 1))
    floor = below, checked, draw(range(checked + 1)) if checked == below else 0
    parts = {
        "asks": learned or draw(range(5)) > 0,
        "documents": documents,
        "outlines": outlines,
        "generated": generated,
        "base_generated": base_generated,
        "has_base": base != "none",
        "base_is_model": base == "same",
        "sampled": sampled,
        "secrets": _draw_secrets(draw),
        "is_other_kind": has_control and draw(range(5)) == 0,
        "tally": draw(["complete", "complete", "missing", "contradicting"]),
        "collapsed": collapsed,
        "below_floor": floor if generated else (0, 0, 0),
    }
    apart = draw((False, True))
    report = _report(Audit(**parts, report=examples.make_report()), apart, rng)
    return Audit(**parts, report=report)


def _draw_secrets(draw: Callable[[Sequence[int]], int]) -> Secrets | None:
    if draw(range(3)):
        return None
    num_trained, num_references = draw(range(1, 10)), draw(range(1, 10))
    return Secrets(
        num_trained=num_trained,
        num_trained_extracted=draw([0, 0, 1, num_trained]),
        num_references=num_references,
        num_references_extracted=draw([0, 0, 1]),
    )


def _answer(
    rng: np.random.Generator, size: int, number: int, num_verbatim: int, num_near: int, share: float
) -> Answer:
    """Return what is done with a bucket's document of this number: the first are verbatim."""
    verbatim = number < num_verbatim
    right = size if verbatim else min(size - 1, int(rng.binomial(size, share)))
    near = verbatim or number < num_verbatim + num_near
    return Answer(num_correct=right, verbatim=verbatim, near=near)


def _report(audit: Audit, apart: bool, rng: np.random.Generator) -> r.AuditReport:
    """Return the report of an audit, as `summarise` makes it.

    Args:
        audit: all but its report.
        apart: whether the control's texts are of other words than the trained ones.
        rng: draws the texts.
    """
    windows = [
        _window(audit, one, number, apart, rng) for number, one in enumerate(audit.documents)
    ]
    has_attacks = any(one.attacks is not None for one in audit.documents)
    sampling = SamplingProbe(schemes=(SamplingScheme(),))
    suite = Suite(
        name="mine",
        version=1,
        probes=(
            ExtractionProbe(),
            *([sampling] if audit.sampled else []),
            *([MembershipProbe(scores=("loss",))] if audit.asks else []),
            *([AttackProbe()] if has_attacks else []),
        ),
    )
    evidence = Evidence(
        inputs=Inputs(windows=windows, max_edit_share=0.1, seed=0, tiny_margin=TINY_MARGIN),
        outlines=audit.outlines,
        trained=_measure(audit, of_base=False),
        other=_measure(audit, of_base=True) if audit.has_base else None,
        dose_response=audit.tally == "complete",
    )
    summaries = tabulate(evidence, suite)
    if audit.secrets is not None:
        summaries["canaries"] = _tabulate_canaries(audit.secrets)
    summary = summarise(
        evidence,
        summaries,
        build_scores(windows, summaries),
        suite=suite,
        circumstances=Circumstances(tally=audit.tally, cut=None, is_other_kind=audit.is_other_kind),
    )
    names = [name for name in r.AuditReport.model_fields if hasattr(summary, name)]
    return examples.make_report().model_copy(
        update={name: getattr(summary, name) for name in names}
    )


def _tabulate_canaries(secrets: Secrets) -> Summary:
    counts = {
        r.SECRETS: (secrets.num_trained_extracted, secrets.num_trained),
        r.REFERENCE_SECRETS: (secrets.num_references_extracted, secrets.num_references),
    }
    rows = [rate_row("canaries", "verbatim", bucket, *pair) for bucket, pair in counts.items()]
    return Summary(rows=rows, num_items=secrets.num_trained + secrets.num_references)


def _window(
    audit: Audit, one: Document, number: int, apart: bool, rng: np.random.Generator
) -> Window:
    first = 200 if apart and one.role == "control" else 0
    ids = rng.integers(first, first + 200, _PREFIX + one.size).astype(np.int32)
    document = make_document(
        ids,
        name=f"d{number}",
        bucket=one.bucket,
        role=one.role,
        num_repetitions=one.count,
        cluster=one.cluster,
    )
    return Window(document=document, start=0, prefix_tokens=_PREFIX, continuation_tokens=one.size)


def _measure(audit: Audit, *, of_base: bool) -> dict[str, Measured]:
    """Return the results of each probe on one model."""
    answers = [one.base if of_base else one.model for one in audit.documents]
    extraction = [_describe(audit, *pair) for pair in zip(audit.documents, answers, strict=True)]
    near: NearVerbatim | NotGenerated = NotGenerated(reason=REASON)
    if audit.base_generated if of_base else audit.generated:
        near = _generate(audit, of_base=of_base)
    measured = {"extraction": Measured(columns=_to_matrix(extraction, MAIN), detail=near)}
    if audit.sampled:
        drawn = [one.is_drawn and not of_base for one in audit.documents]
        rows = [{"0": DRAWN if is_drawn else NOT_DRAWN} for is_drawn in drawn]
        measured["sampling"] = Measured(columns=_to_matrix(rows, ("0",)))
    if audit.asks:
        rows = [{"loss": one.base_loss if of_base else one.loss} for one in audit.documents]
        measured["membership"] = Measured(columns=_to_matrix(rows, ("loss",)))
    if not of_base and any(one.attacks is not None for one in audit.documents):
        names = tuple(f"{name}.{number}" for name in ATTACKS for number in ("best", "any", "right"))
        rows = [
            {
                name: np.nan
                if one.attacks is None
                else float(name.endswith(".any") and one.attacks[name.removesuffix(".any")])
                for name in names
            }
            for one in audit.documents
        ]
        measured["attacks"] = Measured(columns=_to_matrix(rows, names))
    return measured


def _describe(audit: Audit, one: Document, answer: Answer | None) -> dict[str, float]:
    assert answer is not None, "a base model scores all documents"
    return dict.fromkeys(MAIN, 0.0) | {
        "num_correct": answer.num_correct,
        "first_divergence": answer.num_correct,
        "logprob": -float(one.size - answer.num_correct),
        "min_margin": 1.0,
        "greedy_margin": 1.0,
        "is_near_tie": float(one.hangs),
        "argmax_type_token_ratio": 1 / one.size if audit.collapsed else 1.0,
    }


def _to_matrix(rows: Sequence[dict[str, float]], names: tuple[str, ...]) -> ScoreMatrix:
    numbers = np.array([[row[name] for name in names] for row in rows], dtype=np.float64)
    return ScoreMatrix(names=names, rows=numbers.reshape(len(rows), len(names)))


def _generate(audit: Audit, *, of_base: bool) -> NearVerbatim:
    answers = [one.base if of_base else one.model for one in audit.documents]
    matched_N = np.array([answer is not None and answer.near for answer in answers], dtype=np.bool_)
    num_below, num_checked, num_matched = audit.below_floor
    return NearVerbatim(
        matched_N=matched_N,
        num_edits_N=np.where(matched_N, 0.0, np.inf),
        min_gap_N=np.ones(len(answers)),
        num_verbatim=sum(answer is not None and answer.verbatim for answer in answers),
        num_generated=len(answers),
        num_below_floor=num_below,
        num_checked=num_checked,
        num_matched_below_floor=num_matched,
    )
