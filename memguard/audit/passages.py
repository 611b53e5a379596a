"""The input of a model, and its results for each token.

    input_ids [T]   a passage: some tokens of a document, alone in its row
    logprob   [L]   of its last L tokens, each given all before it          first_label = T - L
    argmax    [C]   the model's first choices for the last C <= L of them   first_choice = T - C
    sampled   [S, C]  log-probability of each under S ways to draw

All windows that start at one token of a document share one passage: a token's results depend on the
tokens before it and on nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.config.sampling import SamplingScheme

Decode = Callable[[NDArray[np.int32]], str]
"""Token ids to text."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Passage:
    """T tokens, of which the last are scored."""

    input_ids: NDArray[np.int32]
    """[T]"""
    first_label: int
    """Index of the first token that is scored, at least 1."""
    first_choice: int
    """From here on the model's first choice is wanted as well; T: nowhere."""

    def __post_init__(self) -> None:
        size = len(self.input_ids)
        assert 1 <= self.first_label <= self.first_choice <= size, "labels come before choices"

    @property
    def num_labels(self) -> int:
        """L."""
        return len(self.input_ids) - self.first_label


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is wanted of each token besides its log-probability."""

    needs: frozenset[str] = frozenset()
    """Of ``entropy`` and ``variance_logprob``, for all that is scored."""
    schemes: tuple[SamplingScheme, ...] = ()
    """Ways to draw, for the tokens whose choice is wanted."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenResult:
    """A model's results for the tokens of a passage, each given all true ones before."""

    logprob: NDArray[np.float32]
    """[L] of the true token (nats)."""
    argmax: NDArray[np.int32]
    """[C] first choice, the lowest id where several tie."""
    correct: NDArray[np.bool_]
    """[C] whether that is the true token."""
    margin: NDArray[np.float32]
    """[C] logit of the true token minus that of the best other one; 0 where they tie."""
    entropy: NDArray[np.float32] | None = None
    """[L] of the model's distribution (nats)."""
    variance_logprob: NDArray[np.float32] | None = None
    """[L] of log p(v) where v is drawn from p (nats squared)."""
    sampled: NDArray[np.float32] | None = None
    """[S, C] log-probability (nats) under each scheme; -inf where it cuts the token off."""

    def cut(self, first: int, last: int) -> "TokenResult":
        """Return the tokens ``first:last`` of the last C, without what has no choices."""
        where = slice(first, last)
        return TokenResult(
            logprob=self.logprob[len(self.logprob) - len(self.argmax) :][where],
            argmax=self.argmax[where],
            correct=self.correct[where],
            margin=self.margin[where],
            sampled=None if self.sampled is None else self.sampled[:, where],
        )

    def keep_labels(self, kept: NDArray[np.bool_]) -> "TokenResult":
        """Return the marked ones of the first labels, ``[at most L]``, without choices."""
        where = np.flatnonzero(kept)
        none = slice(0, 0)
        return TokenResult(
            logprob=self.logprob[where],
            argmax=self.argmax[none],
            correct=self.correct[none],
            margin=self.margin[none],
            entropy=None if self.entropy is None else self.entropy[where],
            variance_logprob=None
            if self.variance_logprob is None
            else self.variance_logprob[where],
        )


def stack(results: Sequence[TokenResult]) -> TokenResult:
    """Return n results of as many tokens as one, a dimension of n before that of the tokens."""
    columns: dict[str, NDArray[Any] | None] = {}
    for field in fields(TokenResult):
        values = [getattr(result, field.name) for result in results]
        is_there = values[0] is not None
        columns[field.name] = np.stack(values, axis=-2) if is_there else None
    return TokenResult(**columns)  # type: ignore[arg-type]
