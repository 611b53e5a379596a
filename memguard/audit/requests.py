"""What probes ask of a model, in rounds, and what they receive. No torch.

The runner merges the requests of all probes of a round into the fewest passages, and reads and
fills the cache.

    round 1   extraction  Score          -> one pass over each document for all probes,
              grid        Score ...         whose token results are reduced to numbers
              membership  Score             shard by shard
    round 2   extraction  Generate       -> continues the documents that may be near-verbatim

Requests are the same on every rank, in the same order: draws use the audit's seed.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memguard.audit.cache import ScoreMatrix, compute_key
from memguard.audit.passages import Codec, Passage, ScoreSelection, TokenResult
from memguard.audit.windows import Window, count_edits_allowed
from memguard.config.settings import SamplingScheme

if TYPE_CHECKING:
    from memguard.audit.probes.canary_results import AuditCanary
    from memguard.audit.probes.masks import MaskChange
    from memguard.mitigation import Goldfish

NOT_NEEDED = "not needed"
"""Start of the reason why a probe did not run, if nothing is missing without it."""
CompareMasks = Callable[[Sequence[str], Sequence[tuple[str, str]]], "list[MaskChange]"]
Model = Literal["trained", "base", "reference"]
"""The audited model, the model before training, or another model with the same vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inputs:
    """What the probes of an audit measure, and what they know about it."""

    windows: Sequence[Window]
    """[N] main windows of the documents."""
    max_edit_share: float
    """Most edits of a near-verbatim text, as a share of its tokens."""
    seed: int
    """Of all random choices."""
    tiny_margin: float
    """Margin (logits) below which a result may change, see `TINY_MARGINS`."""
    canaries: Sequence["AuditCanary"] = ()
    codec: Codec | None = None
    """The tokenizer; without it, scores that need text are missing."""
    goldfish: "Goldfish | None" = None
    """The goldfish used in training; None if no labels were dropped."""
    has_reference: bool = False
    """Whether a reference model is measured too."""
    in_training: bool = False
    """Whether the model is being trained: only the main windows are measured, which costs less."""
    compare_masks: "CompareMasks | None" = None
    """Returns, for texts and pairs of near-duplicates, how a copy changes the mitigation's mask;
    None if no mask is known."""

    def num_edits_allowed(self, continuation_tokens: int) -> int:
        """Return the maximum number of edits of a near-verbatim text of S tokens."""
        return count_edits_allowed(self.max_edit_share, continuation_tokens)


class CannotGenerate(Exception):
    """Reason why the model generates no text; the same on every rank."""


class LimitReached(CannotGenerate):
    """The models of an audit have generated for as long as they may; the same on every rank."""

    def __init__(self, reason: str, finished: Mapping[int, Any] | None = None) -> None:
        super().__init__(reason)
        self.finished = finished or {}
        """Results by index, of those that are complete."""


class NotAllGenerated(LimitReached):
    """Some texts of a request were not generated, because the limit was reached."""

    def __init__(self, reason: str, numbers: ScoreMatrix) -> None:
        super().__init__(reason)
        self.numbers = numbers
        """Of the request; NaN where nothing was generated."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Continued:
    """A greedy text that a later round may request; see `Generate`."""

    prompt: "Prompt"
    """The first tokens of the item's passage."""
    is_done: Callable[[int, int], bool]
    """Takes a step and its token."""
    reduce: Callable[["Generated"], Sequence[float]]
    """Returns its numbers."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Continues:
    """The greedy texts of N items that a later `Generate` may request, known from their scores."""

    find: Callable[[int, TokenResult], Continued | None]
    """Takes an item and the result of its passage."""
    keys: Sequence[bytes]
    names: tuple[str, ...]
    parameters: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Score:
    """Teacher-forced scores of the tokens of N passages, reduced to numbers.

    Passages of the same items that begin with the same tokens are one passage for the model.
    """

    items: Sequence[Any]
    """[N] what the passages belong to; requests with the same object share passages."""
    passages: Sequence[Passage | None]
    """[N]; None where the item has none, whose numbers are NaN."""
    keys: Sequence[bytes]
    """[N] cache keys: what the numbers depend on besides parameters and model."""
    names: tuple[str, ...]
    """Names of the numbers."""
    reduce: Callable[[Sequence[int], Sequence[TokenResult]], ArrayLike]
    """Takes indices of items, and the results of their passages; returns the rows of numbers."""
    parameters: Mapping[str, Any]
    """What else the numbers depend on; JSON."""
    selection: ScoreSelection = field(default_factory=ScoreSelection)
    """Results to compute for each token."""
    stage: str = ""
    """Name of the measurement in progress lines; "" shows none."""
    continues: Continues | None = None
    """What is generated from the passages' keys and values, if possible; it changes no number."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """A prompt to continue."""

    input_ids: NDArray[np.integer]
    """[P], at least one token."""
    num_new: int
    """Tokens to add; for 0 the model does not run."""
    document: str = ""
    """Document id, which seeds sampling."""

    @classmethod
    def of(cls, window: Window, kept: int = 0) -> "Prompt":
        """Return the prompt to continue a window after ``kept`` tokens of its continuation."""
        return cls(
            input_ids=window.input_ids[: window.prefix_tokens + kept],
            num_new=window.continuation_tokens - kept,
            document=window.document.id,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Generated:
    """What a model generated for one prompt."""

    samples: NDArray[np.int32]
    """[samples, num_new] tokens; greedy text, one row, may be shorter if the rest was not needed;
    beams, best first."""
    min_gap: float = float("nan")
    """Smallest gap between a chosen and the next best token of greedy text (logits)."""


IsFree = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]
"""Takes R rows of tokens [R, T] and C next tokens of each [R, C]; returns which of these were never
learned."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Generate:
    """Text generated from N prompts: greedily, by sampling, or by beam search."""

    prompts: Sequence[Prompt | None]
    """[N]; None where nothing is generated, whose numbers are NaN."""
    keys: Sequence[bytes]
    names: tuple[str, ...]
    reduce: Callable[[Sequence[int], Sequence[Generated]], ArrayLike]
    parameters: Mapping[str, Any]
    scheme: SamplingScheme | None = None
    """Sampling scheme; None decodes greedily, with end-of-text tokens suppressed."""
    samples: int = 1
    is_done: Callable[[int, int, int], bool] | None = None
    """Of greedy text: takes an item, a step and its token; True ends the text there."""
    beams: int | None = None
    """Width of a beam search in place of decoding."""
    candidates: int | None = None
    """Tokens that each beam proposes; None: as many as beams."""
    is_free: Callable[[int], IsFree] | None = None
    """Returns for an item which tokens an attacker guesses."""
    guess_costs: Sequence[float] = ()
    """[N] cost of a guess (nats); with `is_free`."""
    stage: str = ""


Request = Score | Generate


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """What a probe measured on one model."""

    columns: ScoreMatrix
    """[N] by name; NaN where missing."""
    detail: Any = None
    """What only the probe itself reads."""


Rounds = Generator[Sequence[Request], Sequence[ScoreMatrix], Measured | None]
"""Yields the requests of a round, receives the numbers of each; returns None if there is nothing to
measure."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class View:
    """One model as a probe sees it, and what it has been measured to do."""

    model: Model
    name: str
    """Of the model in progress lines: ``model``, ``base model``."""
    max_tokens: int | None
    """Number of positions; None if the model does not limit it."""
    before: Mapping[str, Measured]
    """Results of probes that have ended."""


def key_of_window(window: Window, *more: int) -> bytes:
    """Return the cache key of what is measured on a window."""
    document = window.document
    form = np.frombuffer(document.format.encode(), dtype=np.uint8)
    span = np.array([window.start, window.prefix_tokens, document.first_position, *more])
    whole: list[NDArray[Any]] = []
    if document.whole_ids is not None:
        whole = [document.whole_ids, np.array([document.first_position])]
    return compute_key(document.input_ids, document.supervised, form, span, *whole)


def key_of_passage(passage: Passage) -> bytes:
    """Return the cache key of what is measured on a passage."""
    return compute_key(passage.input_ids, np.array([passage.first_label]))


def join(columns: Mapping[str, ScoreMatrix]) -> ScoreMatrix:
    """Return the columns of several matrices side by side, named ``prefix.name``."""
    names = tuple(f"{prefix}{name}" for prefix, matrix in columns.items() for name in matrix.names)
    rows: NDArray[np.float64] = np.concatenate([m.rows for m in columns.values()], axis=1)
    return ScoreMatrix(names=names, rows=rows)
