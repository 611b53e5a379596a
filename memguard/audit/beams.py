"""Beam search: the most likely continuations of a prompt, W at a time.

    score    sum of log p(token | all before it), natural logarithms
    step     each beam proposes its C most likely tokens; of all these the best W go on

Beams of one prompt branch from its keys and values, which are computed once. All continuations have
the same length: scores need no correction for it, and nothing ends early (EOS is a token like any
other). Of equal scores the more likely token of its beam goes first, then that of the better beam;
of equally likely tokens the lower id.

Who knows which labels training left out gives `is_free`. Of such a token the model has learned
nothing, and what it says is worse than nothing: where texts were trained on 60 times, the right
token was less likely than by chance. So a guess costs nearly the same whatever the token,

    guess_cost (1 - 0.05 log p(token))        in place of        -log p(token)

and beams are told apart by the tokens that were learned, which a wrong guess before them makes less
likely. Were guesses free, the best beams would be those that always come to another guess.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.audit.batching import BatchResult, Job, Progress
from memguard.audit.decoding import Decoder
from memguard.model.kv_cache import GrowingRows

IsFree = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]
"""Takes R rows of tokens [R, T] and C next ones of each [R, C]; tells which of these are free."""

_GUESS_WEIGHT = 0.05


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BeamRequest:
    """A prompt whose most likely continuations are wanted."""

    prompt_ids: NDArray[np.integer]
    """[P], at least one token."""
    num_new: int
    """S, tokens to add, at least 1."""
    is_free: IsFree | None = None
    """Which tokens were never learned; None where none is known."""
    guess_cost: float = 0.0
    """What one of those costs (nats); 0 is nothing at all."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Beams:
    """Continuations of one prompt, best first; fewer than W where no more exist."""

    ids_WS: NDArray[np.int32]
    score_W: NDArray[np.float64]


def search_beams(
    decoder: Decoder,
    requests: Sequence[BeamRequest],
    width: int,
    *,
    candidates: int | None = None,
    on_progress: Progress | None = None,
) -> list[Beams]:
    """Return the best continuations of each request; on a mesh every rank calls and gets all.

    Args:
        decoder: of the model.
        requests: what to continue.
        width: W, beams that go on after each step.
        candidates: C, tokens that each beam proposes; None is W, beyond which nothing changes but
            for guesses.
        on_progress: see `batching.Progress`.

    Raises:
        ModelError: see `Batching.run`.
    """
    assert width >= 1, "at least one beam"
    jobs = [
        Job(input_ids=each.prompt_ids, num_new=each.num_new, num_rows=width) for each in requests
    ]

    def propose(hidden_RD: Tensor) -> "_Proposals":
        best = decoder.vocab.best_tokens(hidden_RD, candidates or width)
        return _Proposals(
            ids_RC=best.ids_NK.cpu().numpy(), logprob_RC=best.logprob_NK.double().cpu().numpy()
        )

    def run(batch: Sequence[int], num_steps: int, is_cached: bool) -> BatchResult[Beams]:
        growing = GrowingRows(decoder.vocab, is_cached=is_cached, room=num_steps)
        states = [_Growth(requests[index]) for index in batch]
        proposed = growing.start([each.request.prompt_ids for each in states], propose)
        going, num_bad, num_tokens = states, proposed.num_bad, len(states)
        for step in range(num_steps):
            first, rows, tokens = 0, [_NONE], [_NONE]
            for state in going:
                mine = slice(first, first + len(state.score_R))
                parents_W = state.branch(proposed.take(mine), width)
                if not state.is_done:
                    rows.append(first + parents_W)
                    tokens.append(state.ids_RT[:, -1])
                first = mine.stop
            if step == num_steps - 1:
                break
            going = [state for state in going if not state.is_done]
            growing.take(np.concatenate(rows))
            proposed = growing.append(torch.from_numpy(np.concatenate(tokens)), propose)
            num_bad += proposed.num_bad
            num_tokens += len(proposed.ids_RC)
        return BatchResult(
            results=[state.beams() for state in states], num_bad=num_bad, num_tokens=num_tokens
        )

    return decoder.run(jobs, run, on_progress)


_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Proposals:
    """The C most likely tokens after each of R rows, best first."""

    ids_RC: NDArray[np.int64]
    logprob_RC: NDArray[np.float64]

    @property
    def num_bad(self) -> int:
        # Other tokens may be ruled out.
        return int((~np.isfinite(self.logprob_RC[:, 0])).sum())

    def take(self, rows: slice) -> "_Proposals":
        return _Proposals(ids_RC=self.ids_RC[rows], logprob_RC=self.logprob_RC[rows])


@dataclass(kw_only=False, slots=True, eq=False)
class _Growth:
    """The R <= W beams of one prompt as they grow, best first."""

    request: BeamRequest
    ids_RT: NDArray[np.int64] = field(init=False)
    """Prompt and all."""
    score_R: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.ids_RT = np.asarray(self.request.prompt_ids, dtype=np.int64)[None]
        self.score_R = np.zeros(1)

    @property
    def is_done(self) -> bool:
        return len(self.ids_RT[0]) == len(self.request.prompt_ids) + self.request.num_new

    def branch(self, proposed: _Proposals, width: int) -> NDArray[np.int64]:
        """Go on with the best; return which of the beams before each of these comes from."""
        gain_RC = proposed.logprob_RC
        if self.request.is_free is not None:
            known_RC = np.maximum(gain_RC, -1e6)  # A token may be ruled out.
            guess_RC = -self.request.guess_cost * (1 - _GUESS_WEIGHT * known_RC)
            is_free_RC = self.request.is_free(self.ids_RT, proposed.ids_RC)
            gain_RC = np.where(is_free_RC, guess_RC, gain_RC)
        score_RC = self.score_R[:, None] + gain_RC
        # All first choices, then all second ones: of equal scores the first in this order is kept.
        order_W = np.argsort(-score_RC.T.reshape(-1), kind="stable")[:width]
        columns_W, parents_W = np.divmod(order_W, len(self.score_R))
        tokens_W1 = proposed.ids_RC[parents_W, columns_W][:, None]
        self.ids_RT = np.concatenate([self.ids_RT[parents_W], tokens_W1], axis=1)
        self.score_R = score_RC[parents_W, columns_W]
        return parents_W

    def beams(self) -> Beams:
        new_RS = self.ids_RT[:, len(self.request.prompt_ids) :]
        return Beams(ids_WS=new_RS.astype(np.int32), score_W=self.score_R)
