"""Continues prompts token by token: greedily, or by numbers that each document owns.

    prompt         prefix and the true tokens up to the first divergence
    continuation   num_new tokens after it

The tokens before the first divergence are known from the teacher-forced pass, so only those after
it are generated, for documents that diverge. Greedy decoding suppresses the end-of-text tokens, as
`generate(min_new_tokens=num_new)` does, so that a text of the full length is compared; sampling
draws them like any other token.

One loop serves one process and meshes: prompts run once, their keys and values are kept (see
`model/kv_cache.py`), each step runs one token a row and the LM head, in fp32, on it. The
weights are gathered over z once for each batch (see `VocabLayer.keep_gathered`).
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.audit.batching import (
    Batching,
    BatchResult,
    Job,
    Progress,
    Result,
    find_longest_run,
)
from memguard.config.sampling import SamplingScheme
from memguard.model.causal_lm import VocabLayer
from memguard.model.kv_cache import GrowingRows, can_cache
from memguard.runtime import Runtime
from memguard.seeds import derive_generator


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choice:
    """The next tokens of R rows."""

    token_R: Tensor
    logprob_R: Tensor
    """Finite where the logits are."""
    gap_R: Tensor | None = None
    """Logit of the chosen token minus that of the next best; None where tokens are drawn."""


Choose = Callable[[Tensor, Sequence[int], int], Choice]
"""Takes last hidden states [R, D/y], which rows these are, and the number of the step, from 0."""
IsDone = Callable[[int, int, int], bool]
"""Takes a request's index, the number of the step from 0 and the token chosen there; returns
whether the tokens after it are not needed. Steps of a request come in order; after a batch did not
fit into memory they begin again at 0."""
RunCached = Callable[[Sequence[int], int, bool], BatchResult[Result]]
"""As `batching.RunBatch`, and takes whether keys and values are kept."""
DECODED_TOKENS = 16_384
"""Tokens of a batch where no setting gives another number: keys and values are held at once."""
# Removing rows copies all keys and values; rows that are done run along until so many are.
_LIVE_SHARE = 0.75

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """A prompt to continue."""

    prompt_ids: NDArray[np.integer]
    """[P], at least one token."""
    num_new: int
    """Tokens to add; 0 is answered without the model."""
    document: str = ""
    """Whose numbers sampling draws."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Continuation:
    """What was generated for one request."""

    token_ids: NDArray[np.int32]
    """[num_new], or fewer where the rest was not needed."""
    min_gap: float
    """Smallest gap between a chosen and the next best token (logits); NaN where tokens are drawn or
    none was generated."""


_NOTHING = Continuation(token_ids=np.zeros(0, dtype=np.int32), min_gap=float("nan"))


class Decoder:
    """Continues prompts with a vocabulary layer; on a mesh every rank calls it and gets all."""

    def __init__(
        self, vocab: VocabLayer, batch_tokens: int, runtime: Runtime | None = None
    ) -> None:
        """Take a model.

        Args:
            vocab: the model as hidden states plus head; put into evaluation mode while decoding.
            batch_tokens: tokens whose keys and values are held at a time, padding included; one
                request always goes.
            runtime: this rank; None for one process.
        """
        self.vocab = vocab
        self._batching = Batching(vocab, batch_tokens, runtime)
        self._runtime = self._batching.runtime

    def run(
        self,
        jobs: Sequence[Job],
        run_batch: RunCached[Result],
        on_progress: Progress | None = None,
    ) -> list[Result]:
        """Return what ``run_batch`` makes of the jobs, in their order; see `Batching.run`."""
        assert all(job.num_new >= 1 for job in jobs), "a continuation has a token"
        # Found out in the first batch: on all ranks, and after the jobs were checked.
        is_cached = cache(lambda: self._agree_on_cache(jobs))
        fits = not self._runtime.agree_any(not self.vocab.fits_gathered())
        with self.vocab.keep_gathered() if fits else nullcontext():
            return self._batching.run(
                jobs,
                lambda batch, num_steps: run_batch(batch, num_steps, is_cached()),
                on_progress,
            )

    def _agree_on_cache(self, jobs: Sequence[Job]) -> bool:
        """Return whether keys and values can be kept; a rank that saw it otherwise would wait."""
        shortest = min(len(job.input_ids) for job in jobs)
        try:
            is_cached = can_cache(self.vocab, shortest, find_longest_run(jobs))
        except torch.OutOfMemoryError:
            if self.vocab.mesh is not None:
                raise
            # The check takes two rows, what follows goes with one.
            is_cached = False
        if not self._runtime.agree_any(not is_cached):
            return True
        if self._runtime.is_main:
            logger.warning(
                "%s is run over the whole text again for each new token, which is slow: it keeps "
                "no keys and values, or none that fit longer texts",
                type(self.vocab.model).__name__,
            )
        return False

    def find_obstacle(self) -> str | None:
        """Return why generating token by token would take unreasonably long; None if nothing does.

        Each new token needs all weights: those offloaded to disk are read again for each, and
        those sharded over z are gathered for each unless all of them fit beside the shards. The
        same on every rank.
        """
        places = set(map(str, getattr(self.vocab.model, "hf_device_map", {}).values()))
        if "disk" in places or ("cpu" in places and self.vocab.device.type == "cuda"):
            return "weights are offloaded, and each new token would load all of them again"
        if self._runtime.agree_any(not self.vocab.fits_gathered()):
            return (
                "the weights, gathered over z, do not fit beside this rank's shard, and each new "
                "token would gather them again; audit with a larger y or x"
            )
        return None

    def continue_greedily(
        self,
        requests: Sequence[Request],
        on_progress: Progress | None = None,
        *,
        is_done: IsDone | None = None,
    ) -> list[Continuation]:
        """Return the most likely ``[num_new]`` tokens of each request, lowest ids where some tie.

        End-of-text tokens are suppressed.

        Args:
            requests: the same on every rank.
            on_progress: called with the requests done and all requests.
            is_done: after it returns True the request's other tokens are not generated; called on
                each rank that runs the request, and must return the same there.

        Raises:
            ModelError: see `Batching.run`.
        """
        end_ids = self.vocab.end_token_ids

        def choose(hidden_RD: Tensor, _rows: Sequence[int], _step: int) -> Choice:
            best = self.vocab.best_tokens(hidden_RD, 2 + len(end_ids))
            ids_RK, logprob_RK = best.ids_NK, best.logprob_NK
            if end_ids:
                is_end_RK = torch.isin(ids_RK, torch.tensor(end_ids, device=ids_RK.device))
                order_RK = is_end_RK.int().argsort(stable=True, dim=1)
                ids_RK = ids_RK.gather(1, order_RK)
                logprob_RK = logprob_RK.gather(1, order_RK)
            return Choice(
                token_R=ids_RK[:, 0],
                logprob_R=logprob_RK[:, 0],
                gap_R=logprob_RK[:, 0] - logprob_RK[:, 1],
            )

        continued = self._decode(requests, 1, lambda _: choose, on_progress, is_done)
        return [samples[0] for samples in continued]

    def sample(
        self,
        requests: Sequence[Request],
        scheme: SamplingScheme,
        num_samples: int,
        seed: int,
        on_progress: Progress | None = None,
    ) -> list[NDArray[np.int32]]:
        """Return ``[num_samples, num_new]`` drawn tokens of each request.

        Seed, document and sample own the numbers, whatever else is in a batch: each token is where
        the distribution function, over ids in their order, passes a uniform number of its own. Of
        more samples the first are the same.

        Raises:
            ModelError: see `Batching.run`.
        """
        assert num_samples >= 1, "at least one sample"

        def prepare(rows: Sequence[tuple[int, int]]) -> Choose:
            uniform = [_draw_uniform(requests[index], sample, seed) for index, sample in rows]

            def choose(hidden_RD: Tensor, rows: Sequence[int], step: int) -> Choice:
                numbers = [uniform[row][step] for row in rows]
                uniform_R = torch.tensor(numbers, dtype=torch.float64, device=hidden_RD.device)
                drawn = self.vocab.draw_tokens(hidden_RD, uniform_R, scheme)
                return Choice(token_R=drawn.ids_N, logprob_R=drawn.logprob_N)

            return choose

        drawn = self._decode(requests, num_samples, prepare, on_progress)
        return [np.stack([one.token_ids for one in samples]) for samples in drawn]

    def _decode(
        self,
        requests: Sequence[Request],
        num_samples: int,
        prepare: Callable[[Sequence[tuple[int, int]]], Choose],
        on_progress: Progress | None,
        is_done: IsDone | None = None,
    ) -> list[list[Continuation]]:
        """Return ``num_samples`` continuations of each request."""
        asked = [
            (index, sample)
            for index, request in enumerate(requests)
            for sample in range(num_samples if request.num_new else 0)
        ]
        jobs = [
            Job(input_ids=requests[index].prompt_ids, num_new=requests[index].num_new)
            for index, _ in asked
        ]

        def run(batch: Sequence[int], num_steps: int, cached: bool) -> BatchResult[Continuation]:
            rows = [asked[index] for index in batch]
            # Samples of one document share its prompt.
            distinct = list(dict.fromkeys(index for index, _ in rows))
            growth = _Growth(
                sizes=[jobs[index].num_new for index in batch],
                num_steps=num_steps,
                choose=prepare(rows),
                is_done=None
                if is_done is None
                else lambda row, step, token: is_done(rows[row][0], step, token),
                runtime=self._runtime,
            )
            return growth.run(
                GrowingRows(self.vocab, is_cached=cached, room=num_steps),
                [requests[index].prompt_ids for index in distinct],
                copies=[distinct.index(index) for index, _ in rows],
            )

        found = self.run(jobs, run, on_progress)
        by_request = dict(zip(asked, found, strict=True))
        return [
            [by_request.get((index, sample), _NOTHING) for sample in range(num_samples)]
            for index in range(len(requests))
        ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Growth:
    """The loop over new tokens of R rows."""

    sizes: Sequence[int]
    """[R] tokens to add to each; at most ``num_steps``."""
    num_steps: int
    """Most steps of any rank."""
    choose: Choose
    is_done: IsDone | None
    """By row; None generates all tokens."""
    runtime: Runtime

    def run(
        self,
        growing: GrowingRows,
        prompts: Sequence[NDArray[np.integer]],
        *,
        copies: Sequence[int],
    ) -> BatchResult[Continuation]:
        """Return the new tokens.

        Args:
            growing: new.
            prompts: of all rows, each once.
            copies: ``[R]`` the prompt of each row.
        """
        rows = list(range(len(self.sizes)))
        first = torch.tensor(copies, dtype=torch.int64)
        choice = growing.start(
            prompts,
            lambda hidden_PD: self.choose(hidden_PD[first.to(hidden_PD.device)], rows, 0),
        )
        growing.take(np.array(copies, dtype=np.int64))
        steps = [(rows, choice)]
        remaining = list(self.sizes)
        for step in range(1, self.num_steps):
            self._finish(rows, choice, step - 1, remaining)
            going = [place for place, row in enumerate(rows) if self.sizes[row] > step]
            live = [place for place in going if remaining[rows[place]] > step]
            if len(live) <= _LIVE_SHARE * len(going):
                going = live
            if self.is_done is not None and not self.runtime.agree_any(bool(live)):
                break
            rows = [rows[place] for place in going]
            growing.take(np.array(going, dtype=np.int64))
            token_R = choice.token_R
            token_R = token_R[torch.tensor(going, dtype=torch.int64, device=token_R.device)]
            choice = growing.append(token_R, _choose_for(self.choose, rows, step))
            steps.append((rows, choice))
        else:
            self._finish(rows, choice, self.num_steps - 1, remaining)
        num_bad = torch.stack([(~choice.logprob_R.isfinite()).sum() for _, choice in steps]).sum()
        return BatchResult(
            results=_collect(steps, remaining),
            num_bad=int(num_bad),
            num_tokens=sum(len(rows) for rows, _ in steps),
        )

    def _finish(self, rows: Sequence[int], choice: Choice, step: int, remaining: list[int]) -> None:
        """Set the tokens that a row needs to those it has, where the rest is not needed."""
        if self.is_done is None:
            return
        for row, token in zip(rows, choice.token_R.tolist(), strict=True):
            if remaining[row] > step and self.is_done(row, step, token):
                remaining[row] = step + 1


def _collect(
    steps: Sequence[tuple[Sequence[int], Choice]], sizes: Sequence[int]
) -> list[Continuation]:
    """Return the first ``sizes`` tokens of each row, and the smallest gap among them."""
    tokens = [np.zeros(size, dtype=np.int32) for size in sizes]
    gaps = [float("nan")] * len(sizes)
    for step, (rows, choice) in enumerate(steps):
        gap_R = [float("nan")] * len(rows) if choice.gap_R is None else choice.gap_R.tolist()
        for row, token, gap in zip(rows, choice.token_R.tolist(), gap_R, strict=True):
            if step < sizes[row]:
                tokens[row][step] = token
                gaps[row] = gap if np.isnan(gaps[row]) else min(gap, gaps[row])
    return [Continuation(token_ids=ids, min_gap=gap) for ids, gap in zip(tokens, gaps, strict=True)]


def _choose_for(choose: Choose, rows: Sequence[int], step: int) -> Callable[[Tensor], Choice]:
    return lambda hidden_RD: choose(hidden_RD, rows, step)


def _draw_uniform(request: Request, sample: int, seed: int) -> NDArray[np.float64]:
    """Return the numbers in [0, 1) that decide one sample's tokens."""
    purpose = f"sampling\0{request.document}"
    return derive_generator(seed, purpose, sample).random(request.num_new)
