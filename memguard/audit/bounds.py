"""The most that an audit asks of its models, and how much of it is done. No torch.

    passages    that are scored, and prompts that are continued
    tokens      of both
    decoded     tokens that are generated, beams and samples counted each

The bounds follow from the settings of the probes and the lengths of the items (`Probe.bound`). An
audit asks for less: passages that begin with the same tokens are one pass, texts that diverge end
early, and cached numbers are not measured again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index

import numpy as np
from numpy.typing import NDArray

from memguard.audit.contained import contain
from memguard.audit.extraction import SECRET
from memguard.audit.probe import ItemSizes, Need, Probe, Work
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.requests import Inputs, Model, Request, Score
from memguard.audit.suite import Suite


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeBound:
    """The most that one probe asks of one model."""

    probe: str
    model: Model
    passages: int
    """Passages and prompts."""
    tokens: int
    """Of the passages and prompts."""
    decoded: int
    """Tokens that are generated, beams and samples counted each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditBounds:
    """The most that an audit asks of its models."""

    models: Sequence[Model] = ()
    bounds: Sequence[ProbeBound] = ()
    """Of each model and each probe that measures it."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Reason, by name of a probe of another package, why it is not counted."""

    def sum(self, probe: str | None = None) -> Work:
        """Return the sum over all models, of one probe or of all."""
        chosen = [bound for bound in self.bounds if probe in (None, bound.probe)]
        works = [Work(passages=b.passages, tokens=b.tokens, decoded=b.decoded) for b in chosen]
        return sum(works, Work())

    def describe(self) -> str:
        """Return one line: ``at most 1,234 passages, ... on 2 models``."""
        work, num_models = self.sum(), len(self.models)
        text = (
            f"at most {work.passages:,} passages, {work.tokens:,} tokens and "
            f"{work.decoded:,} generated tokens on {num_models} "
            f"model{'' if num_models == 1 else 's'}"
        )
        left_out = "; ".join(f"{name}: {reason}" for name, reason in self.unknown.items())
        return f"{text}; not counted: {left_out}" if left_out else text


def measure_sizes(suite: Suite, inputs: Inputs) -> ItemSizes:
    """Return the lengths of the windows and canaries of an audit.

    The windows' texts are encoded in lower case only if the suite scores them.
    """
    windows = inputs.windows
    secrets = [SECRET.window(canary.document) for canary in inputs.canaries]
    needs_lower = any(
        isinstance(p, MembershipProbe) and "lowercase" in p.scores for p in suite.probes
    )
    return ItemSizes(
        prefix_N=_to_array([window.prefix_tokens for window in windows]),
        continuation_N=_to_array([window.continuation_tokens for window in windows]),
        bucket_N=np.array([window.document.bucket for window in windows], dtype=object),
        num_canaries=len(secrets),
        canary_tokens=sum(len(window.input_ids) for window in secrets if window is not None),
        lowercase_tokens=_count_lowercase(inputs) if needs_lower else 0,
        has_goldfish=inputs.goldfish is not None,
        has_reference=inputs.has_reference,
    )


def _to_array(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _count_lowercase(inputs: Inputs) -> int:
    codec = inputs.codec
    if codec is None:
        return 0
    return sum(
        len(codec.encode(codec.decode(window.input_ids).lower()))
        for window in inputs.windows
        if window.document.format == "text"
    )


def list_bounds(suite: Suite, inputs: Inputs, models: Sequence[Model]) -> AuditBounds:
    """Return the most that the probes of a suite ask of each model.

    A probe that does not measure a model, or lacks an input, asks nothing of it. A probe of another
    package whose bound fails is named with the reason, and not counted.

    Args:
        suite: the probes, with their final settings.
        inputs: windows, canaries, tokenizer, goldfish.
        models: that are measured: ``trained``, ``base``, ``reference``.
    """
    sizes, has_base = measure_sizes(suite, inputs), "base" in models
    probes = [p for p in suite.probes if not p.find_missing(inputs, has_base=has_base)]
    return _bound(suite, probes, sizes, models)


def list_bounds_of_sizes(suite: Suite, sizes: ItemSizes, models: Sequence[Model]) -> AuditBounds:
    """Return the same bounds where only the lengths of the items are known.

    Tokenizer and control documents are taken as given.

    Args:
        suite: the probes, with their final settings.
        sizes: lengths of the windows and canaries.
        models: that are measured.
    """
    absent: set[Need] = set()
    absent |= set() if sizes.num_canaries else {"canaries"}
    absent |= set() if sizes.has_goldfish else {"goldfish"}
    absent |= set() if sizes.has_reference else {"reference"}
    absent |= set() if "base" in models else {"base"}
    probes = [probe for probe in suite.probes if absent.isdisjoint(probe.needs)]
    return _bound(suite, probes, sizes, models)


def _bound(
    suite: Suite, probes: Sequence[Probe], sizes: ItemSizes, models: Sequence[Model]
) -> AuditBounds:
    bounds: list[ProbeBound] = []
    unknown: dict[str, str] = {}
    for probe in probes:
        measured = [model for model in models if model in probe.models]
        if not measured:
            continue
        compute = partial(_compute, probe, sizes)
        package = suite.packages.get(probe.name)
        work = contain(package, compute, str) if package else compute()
        if isinstance(work, str):
            unknown[probe.name] = work
            continue
        bounds += [
            ProbeBound(
                probe=probe.name,
                model=model,
                passages=work.passages,
                tokens=work.tokens,
                decoded=work.decoded,
            )
            for model in measured
        ]
    return AuditBounds(models=tuple(models), bounds=tuple(bounds), unknown=unknown)


def _compute(probe: Probe, sizes: ItemSizes) -> Work | str:
    work = probe.bound(sizes)
    # Another package may return anything.
    passages, tokens, decoded = index(work.passages), index(work.tokens), index(work.decoded)
    if min(passages, tokens, decoded) < 0:
        raise ValueError("its bound is negative")
    return Work(passages=passages, tokens=tokens, decoded=decoded)


def count_tokens(request: Request) -> int:
    """Return the tokens of a request, with those that it generates at most."""
    if isinstance(request, Score):
        return sum(len(passage.input_ids) for passage in request.passages if passage is not None)
    num_rows = request.samples if request.beams is None else request.beams
    prompts = [prompt for prompt in request.prompts if prompt is not None]
    return sum(len(prompt.input_ids) + num_rows * prompt.num_new for prompt in prompts)


@dataclass(slots=True)
class WorkMeter:
    """How much of the bounds is done: probes that have ended, and what the others have received.

    Work is the number of tokens and generated tokens. A probe that has ended counts with its whole
    bound, another with its finished requests and the finished part of the current ones, at most
    with its bound.
    """

    on_bounds: Callable[[AuditBounds], None] | None = None
    """Called before the first pass."""
    _bounds: dict[tuple[Model, str], int] = field(default_factory=dict)
    """Work by model and probe."""
    _done: dict[tuple[Model, str], int] = field(default_factory=dict)
    _requested: dict[int, tuple[tuple[Model, str], int]] = field(default_factory=dict)
    """Model and probe, and work, of the round's requests, by id."""
    _current: Sequence[Request] = ()
    _part: float = 0.0
    """Finished part of the current requests, 0 to 1."""
    _model: Model = "trained"

    def expect(self, bounds: AuditBounds) -> None:
        """Take the bounds of an audit that is about to begin."""
        self._bounds = {(b.model, b.probe): b.tokens + b.decoded for b in bounds.bounds}
        if self.on_bounds is not None:
            self.on_bounds(bounds)

    def start_round(
        self, model: Model, requests: Mapping[str, Sequence[Request]], waiting: Sequence[str]
    ) -> None:
        """Take the requests of a round.

        Args:
            model: that is measured.
            requests: by name of the probe.
            waiting: probes that have not begun; all others of the model have ended.
        """
        self.end(model, unfinished=[*requests, *waiting])
        self._model = model
        self._requested = {
            id(request): ((model, name), count_tokens(request))
            for name, of_probe in requests.items()
            for request in of_probe
        }

    def begin(self, requests: Sequence[Request]) -> None:
        """Start to measure some requests of the round; those before them are finished."""
        self._finish()
        self._current = requests

    def advance(self, part: float) -> None:
        """Take the finished part of the current requests, 0 to 1."""
        self._part = part

    def end(self, model: Model, unfinished: Sequence[str] = ()) -> None:
        """Count all other probes of a model as finished."""
        self._finish()
        self._done |= {
            key: work
            for key, work in self._bounds.items()
            if key[0] == model and key[1] not in unfinished
        }

    @property
    def share(self) -> float | None:
        """Share of the bounds' work that is done; None if the bounds do not cover this model."""
        total = sum(self._bounds.values())
        if not total or not any(model == self._model for model, _ in self._bounds):
            return None
        done = dict(self._done)
        self._add(done, self._part)
        return sum(done.values()) / total

    def _finish(self) -> None:
        self._add(self._done, 1.0)
        self._current, self._part = (), 0.0

    def _add(self, done: dict[tuple[Model, str], int], part: float) -> None:
        for request in self._current:
            key, work = self._requested[id(request)]
            # A probe whose bound is not known counts as nothing.
            done[key] = min(done.get(key, 0) + round(part * work), self._bounds.get(key, 0))
