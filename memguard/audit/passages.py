"""The input of a model, and its results for each token.

    input_ids [T]   a passage: tokens of a document in a row of its own
    logprob   [L]   log-probability of the last L tokens, given all before  first_label = T - L
    argmax    [C]   most likely token at the last C <= L of them            first_choice = T - C
    sampled   [S, C]  log-probability of each under S sampling schemes

All windows that start at the same token of a document share one passage, because a token's results
depend only on the tokens before it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.config.settings import SamplingScheme

EXTRAS = ("entropy", "is_best", "rank", "variance_logprob")
"""Results of a token that are computed only if a request needs them."""
Decode = Callable[[NDArray[np.int32]], str]
"""Token ids to text."""
Encode = Callable[[str], Sequence[int]]
"""Text to token ids, as training encodes a plain text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """The functions of a tokenizer that an audit needs."""

    decode: Decode
    encode: Encode


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Passage:
    """T tokens, of which the last L are scored."""

    input_ids: NDArray[np.int32]
    """[T] token ids."""
    first_label: int
    """Index of the first token that is scored, at least 1."""
    first_choice: int
    """Index of the first token for which the most likely token is computed too; T for none."""

    def __post_init__(self) -> None:
        size = len(self.input_ids)
        assert 1 <= self.first_label <= self.first_choice <= size, "labels come before choices"

    @property
    def num_labels(self) -> int:
        """Number of scored tokens, L."""
        return len(self.input_ids) - self.first_label


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSelection:
    """Results to compute for each token in addition to its log-probability."""

    needs: frozenset[str] = frozenset()
    """Any of `EXTRAS`, for all scored tokens."""
    schemes: tuple[SamplingScheme, ...] = ()
    """Sampling schemes, for the tokens with choices."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenResult:
    """A model's results for the tokens of a passage, each given all true ones before it."""

    logprob: NDArray[np.float32]
    """[L] log-probability of the true token (nats)."""
    argmax: NDArray[np.int32]
    """[C] most likely token, the lowest id in a tie."""
    correct: NDArray[np.bool_]
    """[C] whether the most likely token is the true one."""
    margin: NDArray[np.float32]
    """[C] logit of the true token minus that of the best other one; 0 in a tie."""
    entropy: NDArray[np.float32] | None = None
    """[L] entropy of the model's distribution (nats)."""
    variance_logprob: NDArray[np.float32] | None = None
    """[L] variance of log p(v) where v is drawn from p (nats squared)."""
    is_best: NDArray[np.float32] | None = None
    """[L] 1 if no token is more likely than the true one, also in a tie; else 0."""
    rank: NDArray[np.float32] | None = None
    """[L] 1 + number of tokens whose logit is above that of the true one by more than the audit's
    tiny margin, without end-of-text tokens."""
    sampled: NDArray[np.float32] | None = None
    """[S, C] log-probability (nats) under each scheme; -inf if the scheme excludes the token."""

    def restrict(
        self, whole: Passage, part: Passage, wanted: ScoreSelection, measured: ScoreSelection
    ) -> "TokenResult":
        """Return the wanted results of a part: the first tokens of the whole, which was scored."""
        size = len(part.input_ids)
        labels = slice(part.first_label - whole.first_label, size - whole.first_label)
        choices = slice(part.first_choice - whole.first_choice, size - whole.first_choice)
        sampled = None
        if wanted.schemes:
            assert self.sampled is not None, "schemes were requested"
            rows = [measured.schemes.index(scheme) for scheme in wanted.schemes]
            sampled = self.sampled[rows, choices]
        kept = {name: getattr(self, name) for name in wanted.needs}
        return TokenResult(
            logprob=self.logprob[labels],
            argmax=self.argmax[choices],
            correct=self.correct[choices],
            margin=self.margin[choices],
            sampled=sampled,
            **{name: None if values is None else values[labels] for name, values in kept.items()},
        )

    def keep_labels(self, kept: NDArray[np.bool_]) -> "TokenResult":
        """Return the first labels where ``kept`` ``[at most L]`` is true, without choices."""
        where = np.flatnonzero(kept)
        extras = {name: getattr(self, name) for name in EXTRAS}
        none = slice(0, 0)
        return TokenResult(
            logprob=self.logprob[where],
            argmax=self.argmax[none],
            correct=self.correct[none],
            margin=self.margin[none],
            **{name: None if values is None else values[where] for name, values in extras.items()},
        )


def stack(results: Sequence[TokenResult]) -> TokenResult:
    """Stack n results with equal numbers of tokens; the new dimension is before the tokens'."""
    columns: dict[str, NDArray[Any] | None] = {}
    for field in fields(TokenResult):
        values = [getattr(result, field.name) for result in results]
        has_values = values[0] is not None
        columns[field.name] = np.stack(values, axis=-2) if has_values else None
    return TokenResult(**columns)  # type: ignore[arg-type]


def stack_by_size(results: Sequence[TokenResult | None]) -> Iterator[tuple[list[int], TokenResult]]:
    """Yield the indices of results with equal numbers of tokens, and these stacked ``[n, ...]``."""
    by_size: dict[int, list[int]] = {}
    for index, result in enumerate(results):
        if result is not None:
            by_size.setdefault(len(result.logprob), []).append(index)
    for where in by_size.values():
        yield where, stack([result for index in where if (result := results[index]) is not None])
