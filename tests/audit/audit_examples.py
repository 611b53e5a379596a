"""Made-up models, tiny real ones, and documents for an audit to ask them of."""

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record_examples import make_document, make_outline
from tiny_families import build

from memguard.audit.cache import ScoreMatrix
from memguard.audit.canaries import AuditCanary
from memguard.audit.context import AuditContext
from memguard.audit.decoding import Continuation, IsDone
from memguard.audit.document_scores import DocumentScores, ModelResults
from memguard.audit.extraction import AuditDocument, Window
from memguard.audit.membership_scores import Codec
from memguard.audit.near_verbatim import NearVerbatim, NotGenerated
from memguard.audit.passages import Passage, ScoreSelection, TokenResult
from memguard.audit.probe import Inputs, Measured, Model, Probe, Prompt
from memguard.audit.probes.canaries import CanaryProbe
from memguard.audit.probes.extraction import MAIN, ExtractionProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.run import AuditOutcome, run_audit
from memguard.audit.runner import Runner
from memguard.audit.selection import BucketOutline
from memguard.audit.suite import Suite, load_suite
from memguard.audit.summary import Evidence
from memguard.audit.tables import build_buckets, build_measures, list_tables
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.records import BucketScores, DocumentScore

_FIRST_CHARACTER = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a made-up model says of one token."""

    right: bool
    logprob: float
    margin: float
    entropy: float = 1.0
    variance: float = 1.0
    sampled: tuple[float, ...] = (0.0,) * 4


Say = Callable[[NDArray[np.int32]], Said]
"""Given the tokens of a row up to one, and that one last, says something of it."""


def say_by_context(ids: NDArray[np.int32]) -> Said:
    """Draw from all that stands before the token, itself included, and from nothing else.

    Multiples of 1/64: sums of a few hundred are exact in fp32, in any order.
    """
    draw = np.random.default_rng(zlib.crc32(np.asarray(ids, dtype="<i4").tobytes()))
    right = bool(draw.random() < 0.7)
    steps = draw.integers(1, 400, 8) / 64
    return Said(
        right=right,
        logprob=-float(steps[0]),
        margin=float(steps[1]) if right else -float(steps[1]),
        entropy=float(steps[2]),
        variance=float(steps[3]),
        sampled=tuple(-float(step) for step in steps[4:]),
    )


def say_known(known: Callable[[tuple[int, ...]], bool]) -> Say:
    """Return a model that knows by heart the rows of which ``known`` says so, and no others."""

    def say(ids: NDArray[np.int32]) -> Said:
        if known(tuple(ids.tolist())):
            return Said(right=True, logprob=-0.125, margin=4.0, sampled=(-0.125,) * 4)
        return Said(right=False, logprob=-3.0, margin=-4.0, sampled=(-np.inf,) * 4)

    return say


@dataclass(slots=True)
class Scripted:
    """A scorer without a model; remembers how many passages it was asked at each call."""

    say: Say
    calls: list[int] = field(default_factory=list)

    def score(
        self,
        passages: Sequence[Passage],
        requested: ScoreSelection = ScoreSelection(),  # noqa: B008 - frozen
        on_progress: Any = None,
    ) -> list[TokenResult]:
        self.calls.append(len(passages))
        return [self._score(passage, requested) for passage in passages]

    def _score(self, passage: Passage, requested: ScoreSelection) -> TokenResult:
        ids = passage.input_ids
        said = [self.say(ids[: place + 1]) for place in range(passage.first_label, len(ids))]
        chosen = said[passage.first_choice - passage.first_label :]
        labels = ids[passage.first_choice :]
        right = np.array([each.right for each in chosen], dtype=bool)

        def collect(name: str, of: Sequence[Said]) -> NDArray[np.float32]:
            return np.array([getattr(each, name) for each in of], dtype=np.float32)

        sampled = np.array([each.sampled for each in chosen], dtype=np.float32).reshape(-1, 4)
        return TokenResult(
            logprob=collect("logprob", said),
            argmax=np.where(right, labels, labels + 1).astype(np.int32),
            correct=right,
            margin=collect("margin", chosen),
            entropy=collect("entropy", said) if "entropy" in requested.needs else None,
            variance_logprob=(
                collect("variance", said) if "variance_logprob" in requested.needs else None
            ),
            sampled=sampled.T[: len(requested.schemes)] if requested.schemes else None,
        )


WRONG_TOKEN = 10**6
"""In no text."""


class WrongDecoder:
    """A decoder that never finds back to a text it has left."""

    def find_obstacle(self) -> str | None:
        return None

    def continue_greedily(
        self, requests: Sequence[Prompt], on_progress: Any = None, *, is_done: IsDone
    ) -> list[Continuation]:
        continued = []
        for index, request in enumerate(requests):
            step = 0
            while step < request.num_new and not is_done(index, step, WRONG_TOKEN):
                step += 1
            ids = np.full(min(step + 1, request.num_new), WRONG_TOKEN, dtype=np.int32)
            continued.append(Continuation(token_ids=ids, min_gap=1.0))
        return continued


@dataclass(slots=True)
class Held:
    """An audited model around a scorer; counts how often it was taken up and put down."""

    answers: Any
    writer: Any = None
    """A decoder; None takes one that is always wrong."""
    identity: str | None = None
    max_tokens: int | None = None
    num_asked: int = 0
    num_freed: int = 0

    def scorer(self) -> Any:
        self.num_asked += 1
        return self.answers

    def decoder(self) -> Any:
        return self.writer or WrongDecoder()

    def free(self) -> None:
        self.num_freed += 1


def run_probes(
    probes: Sequence[Probe],
    audited: Any,
    windows: Sequence[Window],
    *,
    model: Model = "trained",
    context: AuditContext | None = None,
    **inputs: Any,
) -> dict[str, Measured]:
    """Return what probes measure on a model: a `Held`, or a scorer that is held here."""
    held = audited if hasattr(audited, "scorer") else Held(audited)
    known = {"max_edit_share": 0.1, "seed": 0, "tiny_margin": 1e-3, **inputs}
    runner = Runner(
        audited=held,
        model=model,
        name="model",
        context=context or AuditContext(),
        seed=known["seed"],
    )
    return runner.measure(probes, Inputs(windows=windows, **known))


def score_together(
    probes: Sequence[Probe], audited: Any, windows: Sequence[Window], **inputs: Any
) -> ScoreMatrix:
    """Return all numbers of one pass, named as in `ModelResults.teacher_forced`."""
    return ModelResults.collect(run_probes(probes, audited, windows, **inputs)).teacher_forced


def build_tiny_llama(vocab_size: int = 61, *, seed: int = 0, **fields: Any) -> Any:
    """Return a random Llama that says something else after each context."""
    return build(
        "llama",
        seed=seed,
        vocab_size=vocab_size,
        **{"num_key_value_heads": 4, "pad_token_id": None, **fields},
    )


def build_tiny_layer(vocab_size: int = 61, *, seed: int = 0, **fields: Any) -> CausalLM:
    """Return the same with its vocabulary layer."""
    return build_causal_lm(build_tiny_llama(vocab_size, seed=seed, **fields))


CHARACTERS = Codec(
    decode=lambda ids: "".join(chr(_FIRST_CHARACTER + int(id)) for id in ids),
    encode=lambda text: [ord(character) - _FIRST_CHARACTER for character in text],
)
"""Token 0 is a blank, 33 an A, 65 an a; 95 tokens."""


def build_suite(*probes: Any) -> Suite:
    """Return a suite of these probes."""
    return Suite(name="mine", version=1, probes=probes)


KINDS = (("x0", "control", 0), ("x4", "trained", 4), ("x64", "trained", 64))


def build_documents(
    per_bucket: int = 20, *, vocab_size: int = 500, size: int = 80, seed: int = 0
) -> list[AuditDocument]:
    """Return random texts: a control bucket and two trained ones."""
    draw = np.random.default_rng(seed)
    return [
        make_document(
            draw.integers(0, vocab_size, size),
            name=f"{bucket}-{index}",
            bucket=bucket,
            role=role,
            num_repetitions=count,
            text_hmac=f"hmac-{bucket}-{index}",
        )
        for bucket, role, count in KINDS
        for index in range(per_bucket)
    ]


def build_canaries(count: int = 12) -> list[AuditCanary]:
    """Return random secrets of ten tokens after prompts of twenty; every other one was trained."""
    draw = np.random.default_rng(1)
    return [
        AuditCanary(
            document=make_document(
                draw.integers(0, 500, 30),
                name=f"canary-{number}",
                bucket="canaries",
                role="canary",
                num_repetitions=4,
                supervised=np.arange(30) >= 20,
                format="prompt_completion",
            ),
            was_trained=number % 2 == 0,
            num_loss_tokens=10,
            num_losses=40,
        )
        for number in range(count)
    ]


def know(documents: Sequence[AuditDocument], bucket: str) -> Scripted:
    """Return a model that knows one bucket's documents by heart, from their first token on."""
    known = [tuple(d.input_ids.tolist()) for d in documents if d.bucket == bucket]
    rows = {row[: len(row) - drop] for row in known for drop in range(len(row))}
    return Scripted(say_known(rows.__contains__))


def audit(
    documents: Sequence[AuditDocument], model: Any, base: Any = None, **fields: Any
) -> AuditOutcome:
    """Audit with the default suite, or with whatever is given."""
    values: dict[str, Any] = {
        "suite": load_suite("extraction"),
        "tally": "complete",
        "tiny_margin": 1e-3,
        "seed": 0,
    }
    return run_audit(documents=documents, model=model, base=base, **{**values, **fields})


def is_same(one: AuditOutcome, other: AuditOutcome) -> bool:
    """Tell whether two audits say the same of everything."""
    return one.summary == other.summary and list_records(one) == list_records(other)


def list_records(outcome: AuditOutcome) -> list[DocumentScore]:
    """Return the records of all documents of an audit."""
    return outcome.scores.build_records(range(len(outcome.scores)))


def tabulate(records: Sequence[DocumentScore]) -> DocumentScores:
    """Return records as the columns of an audit: NaN for a number that is None."""
    texts = ("id", "bucket", "role", "source", "attack_scheme")
    return DocumentScores(
        columns={
            name: np.array(
                [getattr(record, name) for record in records],
                dtype=object if name in texts else np.float64,
            )
            for name in DocumentScore.model_fields
        }
    )


EVERY_PROBE = build_suite(
    ExtractionProbe(),
    GridProbe(offsets=(0, 3), prefix_tokens=(10,), continuation_tokens=(5,)),
    SamplingProbe(),
    MembershipProbe(scores=("loss", "zlib", "min_k_plus_plus", "lowercase", "recall")),
    CanaryProbe(),
)
"""All that needs neither a second model nor generation."""


def build_evidence(
    scores: Sequence[DocumentScore],
    outlines: Sequence[BucketOutline] | None = None,
    hanging: Collection[str] = (),
) -> Evidence:
    """Return what would have been said where these are the scores.

    Args:
        scores: of all documents.
        outlines: the buckets; None takes those of the scores, in their order.
        hanging: ids of documents whose verdict hangs on a tiny margin.
    """
    if outlines is None:
        firsts = {score.bucket: score for score in reversed(scores)}
        outlines = [
            make_outline(name, firsts[name].role, firsts[name].num_repetitions)
            for name in dict.fromkeys(score.bucket for score in scores)
        ]
    rows = [
        [
            score.num_correct,
            score.first_divergence,
            score.extraction_strength,
            score.num_correct,
            score.logprob,
            np.nan if score.min_margin is None else score.min_margin,
            score.id in hanging,
            score.argmax_type_token_ratio,
            np.nan,
        ]
        for score in scores
    ]
    before = [
        [s.base_num_correct, s.base_first_divergence, 0, 0, s.base_logprob, np.nan, 0, 0.8, np.nan]
        for s in scores
    ]
    has_base = any(score.base_num_correct is not None for score in scores)
    generated, base_generated = (
        None if None in matched else _find_generated(matched)
        for matched in (
            [score.near_verbatim for score in scores],
            [score.base_near_verbatim for score in scores],
        )
    )
    not_generated = NotGenerated(reason="the weights are offloaded")
    base = ModelResults(
        teacher_forced=_tabulate(before), near_verbatim=base_generated or not_generated
    )
    return Evidence(
        windows=[_cut(score) for score in scores],
        outlines=outlines,
        model=ModelResults(
            teacher_forced=_tabulate(rows), near_verbatim=generated or not_generated
        ),
        base=base if has_base else None,
        scores=tabulate(scores),
    )


def build_rows(evidence: Evidence) -> list[BucketScores]:
    """Return the rows of the main table."""
    suite = build_suite(ExtractionProbe())
    tables = list_tables(evidence.windows, suite, evidence.model, evidence.base)
    documents = [window.document for window in evidence.windows]
    measures = build_measures(tables, documents, evidence.outlines)
    hangs_N = np.zeros(len(documents), dtype=bool)
    return build_buckets(measures, evidence.scores, evidence.outlines, hangs_N)


def _find_generated(matched: Sequence[bool | None]) -> NearVerbatim:
    matched_N = np.array(matched, dtype=bool)
    return NearVerbatim(
        matched_N=matched_N,
        num_edits_N=np.where(matched_N, 1.0, np.inf),
        min_gap_N=np.ones(len(matched_N)),
        num_verbatim=0,
        num_generated=len(matched_N),
        num_below_floor=0,
        num_checked=0,
        num_matched_below_floor=0,
    )


def _tabulate(rows: Sequence[Sequence[Any]]) -> ScoreMatrix:
    return ScoreMatrix(names=MAIN, rows=np.array(rows, dtype=np.float64).reshape(-1, len(MAIN)))


def _cut(score: DocumentScore) -> Window:
    size = score.prefix_tokens + score.continuation_tokens
    document = make_document(
        np.arange(size),
        name=score.id,
        bucket=score.bucket,
        role=score.role,
        source=score.source,
        num_repetitions=score.num_repetitions,
        num_copies=score.num_copies,
    )
    return Window(
        document=document,
        start=0,
        prefix_tokens=score.prefix_tokens,
        continuation_tokens=score.continuation_tokens,
    )
