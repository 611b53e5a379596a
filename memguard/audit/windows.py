"""Windows, which are a prefix and its continuation, and metrics of their extraction.

    input_ids [P + S]   a window: P prefix tokens of a document, then the S that follow them
    argmax    [S]       the model's first choice for each of the S, given all true tokens before it

Greedy decoding from the prefix generates the S true tokens if and only if all argmax equal them;
otherwise it diverges at the first token that differs (by induction over the tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from memguard.audit.passages import Passage
from memguard.config.settings import PositiveInt, Settings
from memguard.records import Role

TINY_MARGINS: dict[str, float] = {"fp32": 1e-3, "bf16": 0.25}
"""Margins (logits) whose sign may depend on batch shape or device, by the audit's dtype: fp32
logits vary by about 1e-5; bf16 hidden states have 8 bits, so logits of 16 to 32 have steps of
0.125."""


Part = Literal["whole", "piece", "context"]
"""A whole document; or, of a longer one, a piece that was a training row, or a part that fits into
the model's context."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AuditDocument:
    """One document as the model saw it; a part of a longer document (see `selection.py`)."""

    id: str
    bucket: str
    role: Role
    source: str
    num_repetitions: int | None = None
    input_ids: NDArray[np.int32]
    """Tokens of one context window, with BOS as in training, without trailing EOS and other special
    tokens. The offsets of a grid count from the first of `grid_ids`."""
    supervised: NDArray[np.bool_]
    """Which tokens receive loss; all of a plain text."""
    format: Literal["text", "messages", "prompt_completion"]
    num_tokens: int
    """Number of tokens of the whole document."""
    text_hmac: str | None = None
    """Keyed hash of the whole text; None without a key."""
    has_own_id: bool = False
    """Whether the user's data gave the id; else it is made of file name and row number."""
    first_position: int = 0
    """Tokens of the whole document before `input_ids`."""
    cluster: int | None = None
    """Documents with the same number are near-duplicates; None if not computed."""
    num_copies: int | None = None
    """Trained documents of that cluster, including this one."""
    dose: int = 0
    """Planned repetitions in training, including near-duplicates, which set the goldfish's k; 0 if
    not planned."""
    part: Part = "whole"
    """The part of the document that `input_ids` contain."""
    is_unknown: bool = False
    """Whether more than 40 % of the tokens, or of those with loss, stand for unknown text."""
    is_long_enough: bool = False
    """Whether a document whose part cannot be audited could be audited as a whole."""
    whole_ids: NDArray[np.int32] | None = None
    """All tokens of the text if `input_ids` are only a context of it, for windows elsewhere in the
    text; None otherwise, or if the model was not trained on all of them together."""

    def __post_init__(self) -> None:
        assert self.input_ids.shape == self.supervised.shape, f"{self.id}: one flag for each token"

    @property
    def grid_ids(self) -> NDArray[np.int32]:
        """Tokens in which the grid selects its windows."""
        return self.input_ids if self.whole_ids is None else self.whole_ids


def is_member(document: AuditDocument) -> bool:
    """Return whether the document was trained; repetitions are None if not counted, 0 if never."""
    return document.role == "trained" and document.num_repetitions != 0


def list_clusters(documents: Sequence[AuditDocument]) -> NDArray[np.int64]:
    """Return near-duplicate clusters, ``[N]``; an unknown one is a distinct negative number."""
    clusters = [-1 - i if d.cluster is None else d.cluster for i, d in enumerate(documents)]
    return np.array(clusters, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Window:
    """A prefix of a document and the continuation whose extraction is measured."""

    document: AuditDocument
    start: int
    """Index of the first prefix token in the document's ``input_ids``."""
    prefix_tokens: int
    """P, at least 1."""
    continuation_tokens: int
    """S, at least 1."""

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """[P + S]."""
        end = self.start + self.prefix_tokens + self.continuation_tokens
        return self.document.input_ids[self.start : end]

    @property
    def prefix_ids(self) -> NDArray[np.int32]:
        """The P tokens before the continuation."""
        return self.input_ids[: self.prefix_tokens]

    @property
    def continuation_ids(self) -> NDArray[np.int32]:
        """The S true tokens."""
        return self.input_ids[self.prefix_tokens :]

    def passage(self) -> Passage:
        """Return the passage that scores this window: labels and choices of the continuation."""
        return Passage(
            input_ids=self.input_ids,
            first_label=self.prefix_tokens,
            first_choice=self.prefix_tokens,
        )


class WindowSettings(Settings):
    """Which tokens of a document are its prefix and its continuation."""

    continuation_tokens: PositiveInt = Field(
        50, description="Length of the continuation, the last tokens of a text (tokens)."
    )
    prefix_tokens: PositiveInt | None = Field(
        None, description="Tokens before the continuation (tokens); null uses all."
    )
    min_prefix_tokens: PositiveInt = Field(
        5, description="Documents with fewer tokens before the continuation are too short."
    )

    def adapt(self, **lengths: int | None) -> Self:
        """Return a copy with the values that are not None replaced."""
        changed = {name: value for name, value in lengths.items() if value is not None}
        return type(self)(**{**self.model_dump(), **changed})

    @property
    def needed_prefix_tokens(self) -> int:
        """Minimum number of tokens before the continuation."""
        return max(self.min_prefix_tokens, self.prefix_tokens or 0)

    def describe_weakened(self) -> tuple[str, ...]:
        """Describe the settings that make text harder to extract than the defaults do."""
        weakened = []
        if self.prefix_tokens is not None:
            weakened.append(f"{self.prefix_tokens} tokens of prefix")
        if self.min_prefix_tokens < WindowSettings().min_prefix_tokens:
            weakened.append(f"prefixes from {self.min_prefix_tokens} tokens on")
        if self.continuation_tokens > WindowSettings().continuation_tokens:
            weakened.append(f"continuations of {self.continuation_tokens} tokens")
        return tuple(weakened)

    def window(self, document: AuditDocument) -> Window | None:
        """Return the window of a document, or None if it is too short or its text is unknown.

        Text: the last `continuation_tokens`, given all tokens before them or the last
        `prefix_tokens` of these. Messages and prompt + completion: the whole last supervised span,
        given all tokens before it. If only a part of a document is available and it has too few
        tokens before the span, the first tokens of the span are the prefix.
        """
        ids = document.input_ids
        if document.format == "text":
            end = len(ids)
            start = end - self.continuation_tokens
            context = 0 if self.prefix_tokens is None else start - self.prefix_tokens
        else:
            start, end = _last_span(document.supervised)
            context = 0
            if document.part != "whole" and end:
                start = max(start, self.needed_prefix_tokens)
        if start < self.needed_prefix_tokens or start >= end or document.is_unknown:
            return None
        return Window(
            document=document,
            start=context,
            prefix_tokens=start - context,
            continuation_tokens=end - start,
        )


SECRET = WindowSettings(min_prefix_tokens=1)
"""Defines the window of a canary: its completion, given its prompt."""


SizeT = TypeVar("SizeT", int, NDArray[np.int64])


def count_needed_90(continuation_tokens: SizeT) -> SizeT:
    """Return how many of S tokens must be correct for `teacher_forced_90`: at least 90 %."""
    return -(-9 * continuation_tokens // 10)


def count_edits_allowed(max_edit_share: float, continuation_tokens: int) -> int:
    """Return the maximum number of edits of a near-verbatim text of S tokens, rounded down."""
    return int(Fraction(repr(max_edit_share)) * continuation_tokens)


def find_greedy_margin(
    margin: NDArray[np.floating], correct: NDArray[np.bool_]
) -> NDArray[np.floating]:
    """Return the smallest margin (logits) before the first wrong token, ``[...]``; NaN if none is.

    If it is smaller than differences between devices, greedy decoding may diverge earlier on other
    devices.
    """
    is_before = np.logical_and.accumulate(correct, axis=-1)
    smallest = np.where(is_before, margin, np.inf).min(-1)
    return np.where(is_before.any(-1), smallest, np.nan)


def is_near_tie(margin: NDArray[np.floating], tiny_margin: float) -> NDArray[np.bool_]:
    """Return whether flipping margins below ``tiny_margin`` (logits) could flip a verbatim match.

    ``[...]`` of ``[..., S]``.
    """
    flips: NDArray[np.bool_] = (margin >= tiny_margin).all(-1) != (margin > -tiny_margin).all(-1)
    return flips


def compute_first_divergence(correct: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the index of the first wrong token, ``[...]`` of ``[..., S]``; S if there is none."""
    divergence: NDArray[np.int64] = np.where(correct.all(-1), correct.shape[-1], correct.argmin(-1))
    return divergence


def compute_extraction_strength(correct: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return 1 - k/S, where all tokens from index k on are correct; 0 if the last is wrong.

    Carlini et al. 2021, as in Wang et al. 2025; implementations that search only k below S return
    1/S if nothing matches. ``[...]`` of ``[..., S]``.
    """
    strength: NDArray[np.float64] = compute_first_divergence(correct[..., ::-1]) / correct.shape[-1]
    return strength


def compute_type_token_ratio(ids: ArrayLike) -> NDArray[np.float64]:
    """Return distinct tokens / tokens ``[...]`` of ``[..., S]``; low for templates and loops.

    The mean over segments of 50 tokens, the last one at the end: the ratio of a whole text falls
    with its length.
    """
    ids = np.asarray(ids)
    end, size = ids.shape[-1], min(50, ids.shape[-1])
    starts = [*range(0, end - size, size), end - size]
    ordered = np.sort(ids[..., np.add.outer(starts, np.arange(size))], axis=-1)
    num_distinct = 1 + (ordered[..., 1:] != ordered[..., :-1]).sum(-1)
    ratio: NDArray[np.float64] = num_distinct.mean(-1) / size
    return ratio


def find_min_margin(
    margin: NDArray[np.floating], correct: NDArray[np.bool_]
) -> NDArray[np.floating]:
    """Return the smallest margin (logits) of a correct token, ``[...]``; NaN if there is none."""
    smallest = np.where(correct, margin, np.inf).min(-1)
    return np.where(correct.any(-1), smallest, np.nan)


def _last_span(supervised: NDArray[np.bool_]) -> tuple[int, int]:
    """Return start and end of the last run of supervised tokens; (0, 0) without one."""
    marked = np.flatnonzero(supervised)
    if not len(marked):
        return 0, 0
    end = int(marked[-1]) + 1
    before = np.flatnonzero(~supervised[:end])
    return (int(before[-1]) + 1 if len(before) else 0), end
