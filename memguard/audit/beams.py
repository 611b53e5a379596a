"""Beam search: the most likely continuations of a prompt, W at a time.

    score    sum of log p(token | all before it), natural logarithms
    step     each beam proposes its C most likely tokens; the best W of all proposals are kept

Beams of one prompt share its keys and values, which are computed once. All continuations have the
same length: scores need no length correction, and no beam ends early (EOS is treated like any other
token). Equal scores are ordered by the rank of the token in its beam, then by the rank of the beam;
equally likely tokens by id, lowest first.

A caller that knows which labels training dropped passes `is_free`. The model has not learned these
tokens, and its probabilities for them are misleading: in texts trained 60 times, the right token
was less likely than by chance. A guess therefore costs nearly the same for every token,

    guess_cost (1 - 0.05 log p(token))        instead of         -log p(token)

and beams are ranked by the learned tokens, which a wrong guess before them makes less likely. If
guesses were free, the best beams would be those with the most guesses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.audit.batching import BatchResult, Job, Progress
from memguard.audit.decoding import Decoder
from memguard.audit.requests import IsFree

_GUESS_WEIGHT = 0.05


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BeamRequest:
    """A prompt to continue with its most likely continuations."""

    prompt_ids: NDArray[np.integer]
    """[P], at least one token."""
    num_new: int
    """S, tokens to add, at least 1."""
    is_free: IsFree | None = None
    """Which tokens were never learned; None if not known."""
    guess_cost: float = 0.0
    """Cost of a token that was never learned (nats); 0 makes it free."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Beams:
    """Continuations of one prompt, best first; fewer than W if no more exist."""

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
    """Return the best continuations of each request; on a mesh every rank calls this and gets all.

    Raises:
        LimitReached: see `Decoder.run`.
        ModelError: see `Batching.run`.
    """
    assert width >= 1, "at least one beam"
    jobs = [
        Job(input_ids=request.prompt_ids, num_new=request.num_new, num_rows=width)
        for request in requests
    ]

    def propose(hidden_RD: Tensor) -> "_Proposals":
        best = decoder.lm.best_tokens(hidden_RD, candidates or width)
        # Read at once; float64 holds every id exactly.
        ids_RC, logprob_RC = torch.stack([best.ids_NK.double(), best.logprob_NK.double()]).cpu()
        return _Proposals(ids_RC=ids_RC.long().numpy(), logprob_RC=logprob_RC.numpy())

    def run(batch: Sequence[int], num_steps: int, is_cached: bool) -> BatchResult[Beams]:
        growing = decoder.grow(is_cached=is_cached, room=num_steps)
        states = [_Growth(requests[index]) for index in batch]
        proposed = growing.start([state.request.prompt_ids for state in states], propose)
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
        # Only the best token is checked, because the logits of other tokens may be -inf.
        return int((~np.isfinite(self.logprob_RC[:, 0])).sum())

    def take(self, rows: slice) -> "_Proposals":
        return _Proposals(ids_RC=self.ids_RC[rows], logprob_RC=self.logprob_RC[rows])


class _Growth:
    """The R <= W beams of one prompt as they grow, best first."""

    def __init__(self, request: BeamRequest) -> None:
        self.request = request
        self.ids_RT = np.asarray(request.prompt_ids, dtype=np.int64)[None]
        """Tokens of the beams, with the prompt."""
        self.score_R = np.zeros(1)

    @property
    def is_done(self) -> bool:
        return len(self.ids_RT[0]) == len(self.request.prompt_ids) + self.request.num_new

    def branch(self, proposed: _Proposals, width: int) -> NDArray[np.int64]:
        """Keep the best continuations; return the index of each one's parent beam."""
        gain_RC = proposed.logprob_RC
        if self.request.is_free is not None:
            finite_RC = np.maximum(gain_RC, -1e6)  # A token's log-probability may be -inf.
            guess_RC = -self.request.guess_cost * (1 - _GUESS_WEIGHT * finite_RC)
            is_free_RC = self.request.is_free(self.ids_RT, proposed.ids_RC)
            gain_RC = np.where(is_free_RC, guess_RC, gain_RC)
        score_RC = self.score_R[:, None] + gain_RC
        # Order: all first choices, then all second ones; a stable sort keeps it for equal scores.
        order_W = np.argsort(-score_RC.T.reshape(-1), kind="stable")[:width]
        columns_W, parents_W = np.divmod(order_W, len(self.score_R))
        tokens_W1 = proposed.ids_RC[parents_W, columns_W][:, None]
        self.ids_RT = np.concatenate([self.ids_RT[parents_W], tokens_W1], axis=1)
        self.score_R = score_RC[parents_W, columns_W]
        return parents_W

    def beams(self) -> Beams:
        new_RS = self.ids_RT[:, len(self.request.prompt_ids) :]
        return Beams(ids_WS=new_RS.astype(np.int32), score_W=self.score_R)
