"""Made-up models, tiny real ones, and documents for an audit to ask them of."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record_examples import make_document
from tiny_families import build

from memguard.audit.cache import ScoreMatrix
from memguard.audit.context import AuditContext
from memguard.audit.decoding import Continuation, IsDone
from memguard.audit.passages import Codec, Passage, ScoreSelection, TokenResult
from memguard.audit.plan import AuditPlan
from memguard.audit.probe import Probe
from memguard.audit.probes.canaries import CanaryProbe
from memguard.audit.probes.canary_results import AuditCanary
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.requests import Inputs, Measured, Model, Prompt, join
from memguard.audit.run import AuditOutcome, measure
from memguard.audit.runner import Runner
from memguard.audit.suite import Suite, load_suite
from memguard.audit.windows import AuditDocument, Window, WindowSettings
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm

_FIRST_CHARACTER = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a made-up model says of one token."""

    right: bool
    logprob: float
    margin: float
    entropy: float = 1.0
    variance: float = 1.0
    rank: float = 1.0
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
        rank=1.0 if right else float(1 + steps[1] * 64),
        sampled=tuple(-float(step) for step in steps[4:]),
    )


def say_known(known: Callable[[tuple[int, ...]], bool]) -> Say:
    """Return a model that knows by heart the rows of which ``known`` says so, and no others."""

    def say(ids: NDArray[np.int32]) -> Said:
        if known(tuple(ids.tolist())):
            return Said(right=True, logprob=-0.125, margin=4.0, sampled=(-0.125,) * 4)
        return Said(right=False, logprob=-3.0, margin=-4.0, rank=9.0, sampled=(-np.inf,) * 4)

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
        *,
        follower: Any = None,
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
            is_best=(
                np.array([each.right for each in said], dtype=np.float32)
                if "is_best" in requested.needs
                else None
            ),
            rank=collect("rank", said) if "rank" in requested.needs else None,
            sampled=sampled.T[: len(requested.schemes)] if requested.schemes else None,
        )


@dataclass
class Recorder(Scripted):
    """Remembers the passages of all calls, and what was asked of them last."""

    passages: list[Passage] = field(default_factory=list)
    selection: ScoreSelection | None = None

    def score(
        self, passages: Sequence[Passage], requested: Any = None, *, follower: Any = None
    ) -> list[TokenResult]:
        self.passages += passages
        self.selection = requested or ScoreSelection()
        return Scripted.score(self, passages, self.selection)


def cut(probe: WindowSettings, documents: Iterable[AuditDocument]) -> list[Window]:
    """Return the main window of each document; none of them is too short."""
    windows = [probe.window(document) for document in documents]
    assert None not in windows
    return [window for window in windows if window is not None]


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
    """Return all numbers of one pass, named ``probe.number``."""
    measured = run_probes(probes, audited, windows, **inputs)
    return join({f"{name}.": each.columns for name, each in measured.items()})


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
        **fields,
    }
    models = {"trained": model, "base": base, "reference": values.pop("reference", None)}
    context = values.pop("context", None) or AuditContext()
    also_measure = values.pop("also_measure", None)
    other_kind = values.pop("other_kind", "")
    plan = replace(AuditPlan.of(documents, **values), other_kind=other_kind)
    return measure(
        plan,
        {role: model for role, model in models.items() if model is not None},
        context,
        also_measure=also_measure,
    )


def list_records(outcome: AuditOutcome) -> list[dict[str, Any]]:
    """Return the rows of records.parquet."""
    records: list[dict[str, Any]] = outcome.scores.to_arrow(slice(None)).to_pylist()
    return records


def is_same(one: AuditOutcome, other: AuditOutcome) -> bool:
    """Tell whether two audits say the same of everything."""
    return one.summary == other.summary and list_records(one) == list_records(other)


EVERY_PROBE = build_suite(
    ExtractionProbe(),
    GridProbe(offsets=(0, 3), prefix_tokens=(10,), continuation_tokens=(5,)),
    SamplingProbe(),
    MembershipProbe(scores=("loss", "zlib", "min_k_plus_plus", "lowercase", "recall")),
    CanaryProbe(),
)
"""All that needs neither a second model nor generation."""
