"""Audits of drawn counts, summarised as real ones are: what a page then says must follow."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import report_examples as examples
from hypothesis import strategies as st

from memguard import records as r
from memguard.audit.cache import ScoreMatrix
from memguard.audit.document_scores import ModelResults, build_scores
from memguard.audit.extraction import AuditDocument, ExtractionProbe, Window
from memguard.audit.near_verbatim import NearVerbatim, NotGenerated
from memguard.audit.probes import MembershipProbe, SamplingProbe
from memguard.audit.selection import BucketOutline
from memguard.audit.suite import Suite
from memguard.audit.summary import Evidence, summarise
from memguard.audit.teacher_forcing import TeacherForcedScores
from memguard.config.sampling import SamplingScheme

TINY_MARGIN = 0.001
REASON = "the cache of one document does not fit"
DRAWN, NOT_DRAWN = -5.0, -60.0
"""Log-probabilities of texts that are drawn within a million queries, and of others."""
_PREFIX = 10
_SIZES = st.sampled_from([12, 31, 10, 9, 5, 2, 1, 0])
_OFTEN = st.sampled_from([12, 31, 10, 2, 1])


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
    attacks: dict[str, dict[str, int]]
    """Documents that each attack extracts, by bucket; `num_attacked` were attacked."""
    num_attacked: dict[str, int]
    tally: str
    collapsed: bool
    below_floor: tuple[int, int, int]
    """Documents below the floor, those of them generated, and near-verbatim."""
    report: r.AuditReport = field(repr=False)

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        # Without the report, which hypothesis would print over pages.
        printer.text(repr(self))

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
        if bucket in self.attacks:
            found["attack"] = max(self.attacks[bucket].values()), self.num_attacked[bucket]
        return found


@st.composite
def draw_audits(draw: st.DrawFn) -> Audit:
    """Draw an audit: with or without control, base model, generated text, sampling, attacks."""
    # Zeros have sentences of their own, as have texts that are learned but not extracted, and a
    # control that is extracted where trained documents are not.
    kind = draw(st.sampled_from(["free", "free", "free", "learned", "quiet", "control"]))
    quiet, learned = kind != "free", kind == "learned"
    has_control = quiet or draw(st.integers(0, 4)) > 0
    base = "other" if learned else draw(st.sampled_from(["none", "same", "other"]))
    base_accuracy = draw(st.sampled_from([0.1, 0.6]))
    generated = draw(st.integers(0, 3)) > 0
    base_generated = generated and base != "none" and draw(st.integers(0, 4)) > 0
    sampled = draw(st.booleans())
    collapsed = draw(st.integers(0, 5)) == 0
    lengths = (50,) if learned else draw(st.sampled_from([(50,), (1, 3), (8, 50, 21)]))
    kinds: list[tuple[str, r.Role]] = [("trained a", "trained"), ("r16", "trained")]
    kinds = kinds[: draw(st.integers(1, 2))]
    if has_control:
        kinds.insert(0, ("control", "control"))
    if draw(st.integers(0, 3)) == 0:
        kinds.append(("forget", "forget"))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    documents: list[Document] = []
    outlines = []
    for name, role in kinds:
        first = role == "trained" and not any(one.role == "trained" for one in outlines)
        sizes = st.sampled_from([12, 31]) if learned else _OFTEN if first or quiet else _SIZES
        num_documents = draw(sizes)
        least = 1 if num_documents == 0 else 0
        doses = {"control": st.just([0]), "forget": st.just([None])}.get(
            role, st.sampled_from([[16], [1], [4, 9], [0], [16, 0], [None], [3, None]])
        )
        doses = draw(doses)
        limit = num_documents if kind in ("free", role) else 0
        recited = [limit] if kind == "control" else [limit // 4, limit, 0, limit // 2]
        num_verbatim = draw(st.sampled_from(recited))
        num_near = draw(st.integers(0, limit - num_verbatim))
        num_drawn = draw(st.sampled_from([limit, 0, limit // 2]))
        accuracy = draw(st.sampled_from([0.0, 0.1] if role == "control" else [0.5, 0.9, 0.1, 0.0]))
        for number in range(num_documents):
            size = lengths[number % len(lengths)]
            model = _answer(rng, size, number, num_verbatim, num_near, accuracy)
            before = None
            if base == "same":
                before = model
            elif base == "other":
                before = _answer(rng, size, number, num_verbatim // 2, 0, base_accuracy)
            documents.append(
                Document(
                    bucket=name,
                    role=role,
                    count=doses[number % len(doses)],
                    size=size,
                    model=model,
                    base=before,
                    is_drawn=number < num_drawn,
                    hangs=draw(st.integers(0, 20)) == 0,
                )
            )
        planned = {one.count for one in documents if one.bucket == name}
        outlines.append(
            BucketOutline(
                bucket=name,
                role=role,
                num_repetitions=planned.pop() if len(planned) == 1 else None,
                num_too_short=draw(st.integers(least, 2)),
                num_not_sampled=draw(st.sampled_from([0, 0, 7])),
            )
        )
    attacked = draw(st.booleans())
    num_attacked, attacks = {}, {}
    for name, _ in kinds if attacked else ():
        number = min(10, sum(one.bucket == name for one in documents))
        if number:
            num_attacked[name] = number
            extracted = st.sampled_from([0] if quiet else [number, 0, number // 2])
            attacks[name] = {"beam_search": draw(extracted), "sampling": draw(extracted)}
    below = draw(st.integers(0, 12))
    checked = draw(st.integers(min(1, below), below))
    floor = below, checked, draw(st.integers(0, checked)) if checked == below else 0
    parts = {
        "documents": documents,
        "outlines": outlines,
        "generated": generated,
        "base_generated": base_generated,
        "has_base": base != "none",
        "base_is_model": base == "same",
        "sampled": sampled,
        "attacks": attacks,
        "num_attacked": num_attacked,
        "tally": draw(st.sampled_from(["complete", "complete", "missing", "contradicting"])),
        "collapsed": collapsed,
        "below_floor": floor if generated else (0, 0, 0),
    }
    asks = learned or draw(st.integers(0, 4)) > 0
    apart = draw(st.booleans())
    report = _report(Audit(**parts, report=examples.make_report()), asks, apart, rng)
    return Audit(**parts, report=report)


def _answer(
    rng: np.random.Generator, size: int, number: int, num_verbatim: int, num_near: int, share: float
) -> Answer:
    """Return what is done with a bucket's document of this number: the first are verbatim."""
    verbatim = number < num_verbatim
    right = size if verbatim else min(size - 1, int(rng.binomial(size, share)))
    near = verbatim or number < num_verbatim + num_near
    return Answer(num_correct=right, verbatim=verbatim, near=near)


def _report(audit: Audit, asks: bool, apart: bool, rng: np.random.Generator) -> r.AuditReport:
    """Return the report of an audit, as `summarise` makes it.

    Args:
        audit: all but its report.
        asks: whether membership was asked for.
        apart: whether the control's texts are of other words than the trained ones.
        rng: draws the texts.
    """
    windows = [
        _window(audit, one, number, apart, rng) for number, one in enumerate(audit.documents)
    ]
    probes = [ExtractionProbe(), *([SamplingProbe()] if audit.sampled else [])]
    probes += [MembershipProbe(scores=("loss",))] if asks else []
    suite = Suite(name="mine", version=1, probes=tuple(probes))
    teacher_forced = TeacherForcedScores(
        extraction=suite.extraction,
        tiny_margin=TINY_MARGIN,
        schemes=(SamplingScheme(),) if audit.sampled else (),
        membership=("loss",) if asks else (),
    )
    model = _measure(audit, teacher_forced, of_base=False, generated=audit.generated)
    base = None
    if audit.has_base:
        base = _measure(audit, teacher_forced, of_base=True, generated=audit.base_generated)
    evidence = Evidence(
        windows=windows,
        outlines=audit.outlines,
        teacher_forced=teacher_forced,
        model=model,
        base=base,
        scores=build_scores(windows, teacher_forced, model, base),
        attacks=[
            r.AttackedBucket(
                bucket=bucket,
                attack=attack,
                num_queries=16,
                best_verbatim=examples.make_rate(0, audit.num_attacked[bucket]),
                any_verbatim=examples.make_rate(matched, audit.num_attacked[bucket]),
                mean_token_accuracy=None,
            )
            for bucket, tried in audit.attacks.items()
            for attack, matched in tried.items()
        ],
    )
    summary = summarise(evidence, suite=suite, tiny_margin=TINY_MARGIN, tally=audit.tally, seed=0)
    names = [name for name in r.AuditReport.model_fields if hasattr(summary, name)]
    return examples.make_report().model_copy(
        update={name: getattr(summary, name) for name in names}
    )


def _window(
    audit: Audit, one: Document, number: int, apart: bool, rng: np.random.Generator
) -> Window:
    first = 200 if apart and one.role == "control" else 0
    ids = rng.integers(first, first + 200, _PREFIX + one.size).astype(np.int32)
    document = AuditDocument(
        id=f"d{number}",
        bucket=one.bucket,
        role=one.role,
        source="a",
        num_repetitions=one.count,
        input_ids=ids,
        supervised=np.ones(len(ids), dtype=np.bool_),
        format="text",
        num_tokens=len(ids),
        text_hmac=None,
    )
    return Window(document=document, start=0, prefix_tokens=_PREFIX, continuation_tokens=one.size)


def _measure(
    audit: Audit, teacher_forced: TeacherForcedScores, *, of_base: bool, generated: bool
) -> ModelResults:
    return ModelResults(
        teacher_forced=_tabulate(audit, teacher_forced, of_base=of_base),
        near_verbatim=_generate(audit, of_base=of_base)
        if generated
        else NotGenerated(reason=REASON),
    )


def _tabulate(audit: Audit, teacher_forced: TeacherForcedScores, *, of_base: bool) -> ScoreMatrix:
    rows = []
    for one in audit.documents:
        answer = one.base if of_base else one.model
        assert answer is not None, "a base model scores all documents"
        numbers = dict.fromkeys(teacher_forced.names, 0.0)
        numbers |= {
            "num_correct": answer.num_correct,
            "first_divergence": answer.num_correct,
            "logprob": -float(one.size - answer.num_correct),
            "min_margin": 1.0,
            "greedy_margin": 1.0,
            "hangs_on_margin": float(one.hangs),
            "argmax_type_token_ratio": 1 / one.size if audit.collapsed else 1.0,
        }
        if audit.sampled:
            numbers["sampled.0"] = DRAWN if one.is_drawn and not of_base else NOT_DRAWN
        rows.append([numbers[name] for name in teacher_forced.names])
    shape = len(audit.documents), len(teacher_forced.names)
    return ScoreMatrix(
        names=teacher_forced.names, rows=np.array(rows, dtype=np.float64).reshape(shape)
    )


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
