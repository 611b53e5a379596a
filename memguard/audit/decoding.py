"""Continues prompts token by token: greedily, or by sampling with a random stream per document.

    prompt         prefix and the true tokens up to the first divergence
    continuation   num_new tokens after it

The teacher-forced pass determines the tokens before the first divergence, so only tokens after it
are generated, and only for documents that diverge. Greedy decoding suppresses the end-of-text
tokens, like `generate(min_new_tokens=num_new)`, so that a text of the full length is compared;
sampling treats them like any other token.

The same loop (`token_loop`) runs on one process and on meshes: prompts run once and their keys and
values are cached (see `model/kv_cache.py`); each step runs one token per row, with the LM head in
fp32. The weights are gathered over z once for each batch, or, if they do not fit at once, block by
block for each token (see `CausalLM.keep_gathered`). That takes seconds on a fast network and
minutes on a slow one, so the time is measured while it passes, the slowest rank's, and generation
ends at a limit. Scores are measured before, and stay.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.audit.batching import (
    MOST_GPU_TOKENS,
    Batching,
    BatchResult,
    Job,
    Progress,
    Result,
    find_longest_run,
)
from memguard.audit.requests import LimitReached, Prompt
from memguard.audit.token_loop import Choice, Choose, Continuation, IsDone, TokenLoop
from memguard.config.settings import SamplingScheme
from memguard.errors import is_out_of_memory
from memguard.model.causal_lm import CausalLM
from memguard.model.evaluation import evaluating
from memguard.model.kv_cache import GrowingRows, RowPool, can_cache, recall_check, send
from memguard.runtime import Runtime, format_duration
from memguard.seeds import derive_generator

_SAID_AFTER = 3
"""Steps after which the time of a token is said."""


@dataclass(kw_only=True, slots=True)
class GenerationLimit:
    """The longest time that the models of an audit generate together."""

    max_minutes: float | None = None
    """None: no limit."""
    say: Callable[[str], None] = lambda _: None
    """Prints a line."""
    spent_s: float = field(default=0.0, init=False)
    """Time that generation has taken, of all models; the same on every rank (seconds)."""

    def check(self) -> None:
        """Raise LimitReached if the time is spent."""
        most = self.max_minutes
        if most is not None and self.spent_s >= 60 * most:
            raise LimitReached(
                f"the models have generated for {most:g} minutes, which is "
                "'audit.max_generation_minutes', because their weights are gathered for each "
                "token. Raise it, or use a larger x or y; what is cached is not generated again"
            )


@dataclass(kw_only=True, slots=True)
class Clock:
    """Adds the time of one call of a decoder to the limit, on every rank."""

    limit: GenerationLimit
    runtime: Runtime
    _num_done: int = field(default=0, init=False)
    _since_s: float = field(default_factory=time.perf_counter, init=False)

    def begin_batch(self) -> None:
        """Count the time since the last step; every rank calls this before each batch.

        Raises:
            LimitReached: the time is spent.
        """
        self._add()
        self.limit.check()

    def step(self) -> None:
        """Count a step; every rank calls this after each.

        Raises:
            LimitReached: the time is spent.
        """
        step_s = self._add()
        self._num_done += 1
        if self._num_done == _SAID_AFTER:
            most = self.limit.max_minutes
            until = "" if most is None else f"; it ends after {format_duration(60 * most)} in all"
            self.limit.say(
                "audit: generation: the weights do not fit at once, so they are gathered for each "
                f"token: {step_s:.2g} s a token{until}"
            )
        self.limit.check()

    def _add(self) -> float:
        """Add the time since the last call, the slowest rank's, and return it."""
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize(self.runtime.device)
        now_s = time.perf_counter()
        own_s, self._since_s = now_s - self._since_s, now_s
        # One collective: all ranks add up the same times, so that they end together.
        step_s = self.runtime.agree_max(round(1e9 * own_s)) / 1e9
        self.limit.spent_s += step_s
        return step_s


RunCached = Callable[[Sequence[int], int, bool], BatchResult[Result]]
"""Like `batching.RunBatch`, and also takes whether keys and values are cached."""
DECODED_TOKENS = 16_384
"""Default number of tokens of a batch, whose keys and values are in memory at the same time."""
_READ_EVERY = 16
"""Steps whose tokens are read from the device at once, if texts may end early."""

logger = logging.getLogger(__name__)

_NOTHING = Continuation(token_ids=np.zeros(0, dtype=np.int32), min_gap=float("nan"))


class Decoder:
    """Continues prompts with a model; on a mesh every rank calls it and gets all results."""

    def __init__(
        self,
        lm: CausalLM,
        batch_tokens: int | None = None,
        runtime: Runtime | None = None,
        limit: GenerationLimit | None = None,
    ) -> None:
        """Prepare decoding with a model.

        Args:
            lm: the model as hidden states plus head; put into evaluation mode while decoding.
            batch_tokens: tokens whose keys and values are in memory at a time, with padding; a
                single request always runs. None: 16,384; on a GPU, where weights are gathered for
                each token, as many as fit, since one gather serves all rows.
            runtime: this rank; None for one process.
            limit: longest time that this and other models generate, where weights are gathered for
                each token.
        """
        self.lm = lm
        runtime = runtime or Runtime(device=lm.device)
        self.fits = not runtime.agree_any(not lm.fits_gathered())
        """Whether all weights fit at once, so that they are not gathered for each token."""
        takes_most = batch_tokens is None and not self.fits and lm.device.type == "cuda"
        self.batch_tokens = MOST_GPU_TOKENS if takes_most else batch_tokens or DECODED_TOKENS
        self._batching = Batching(lm, self.batch_tokens, runtime, measures_memory=takes_most)
        self.runtime = runtime
        # Where a read waits for nothing, or a step takes longer than a read, every step is read.
        is_alone = runtime.world_size == 1 and lm.device.type == "cpu"
        self._read_every = 1 if is_alone or not self.fits else _READ_EVERY
        self._loop = partial(TokenLoop, read_every=self._read_every, runtime=runtime)
        self._limit = limit or GenerationLimit()
        self._clock: Clock | None = None

    def grow(self, *, is_cached: bool, room: int) -> GrowingRows:
        """Return rows that have not been started, see `GrowingRows`; their steps are timed."""
        on_step = None if self._clock is None else self._clock.step
        return GrowingRows(self.lm, is_cached=is_cached, room=room, on_step=on_step)

    def run(
        self, jobs: Sequence[Job], run_batch: RunCached[Result], on_progress: Progress | None = None
    ) -> list[Result]:
        """Return the results of ``run_batch``, in the order of the jobs; see `Batching.run`.

        Raises:
            LimitReached: where weights are gathered for each token; with the finished results.
        """
        assert all(job.num_new >= 1 for job in jobs), "a continuation has a token"
        # Evaluated in the first batch: on all ranks, and after the jobs were checked.
        is_cached = cache(lambda: self._agree_on_cache(jobs))
        self._clock = None if self.fits else Clock(limit=self._limit, runtime=self.runtime)

        def run_timed(batch: Sequence[int], num_steps: int) -> BatchResult[Result]:
            if self._clock is not None:
                self._clock.begin_batch()
            return run_batch(batch, num_steps, is_cached())

        with self.lm.keep_gathered(fits=self.fits):
            return self._batching.run(jobs, run_timed, on_progress)

    def _agree_on_cache(self, jobs: Sequence[Job]) -> bool:
        """Return whether keys and values can be cached; all ranks must agree or some would wait.

        Texts as short as one token are tried first, so that later calls need no check.
        """
        shortest, longest = min(len(job.input_ids) for job in jobs), find_longest_run(jobs)
        for first in dict.fromkeys((1, shortest)):
            known = recall_check(self.lm, shortest, longest)
            if known is None:
                known = self._check_cache(first, longest)
            if known:
                return True
        if self.runtime.is_main:
            logger.warning(
                "%s runs over the whole text again for each new token, which is slow: its keys and "
                "values cannot be cached, or not for longer texts",
                type(self.lm.model).__name__,
            )
        return False

    def _check_cache(self, shortest: int, longest: int) -> bool:
        try:
            is_cached = can_cache(self.lm, shortest, longest)
        except (RuntimeError, MemoryError) as error:
            if self.lm.has_peers or not is_out_of_memory(error):
                raise
            # The check needs memory for two rows; without a cache one row at a time is enough.
            return False
        is_cached = not self.runtime.agree_any(not is_cached)
        self.lm.cached_lengths[shortest, longest] = is_cached
        return is_cached

    def find_obstacle(self) -> str | None:
        """Return the reason why generating token by token would be too slow; None if there is none.

        Each new token needs all weights, and weights that are offloaded to disk would be read again
        for each. The result is the same on every rank.
        """
        places = set(map(str, getattr(self.lm.model, "hf_device_map", {}).values()))
        if "disk" in places or ("cpu" in places and self.lm.device.type == "cuda"):
            return "weights are offloaded, and each new token would load all of them again"
        return None

    def continue_greedily(
        self,
        requests: Sequence[Prompt],
        on_progress: Progress | None = None,
        *,
        is_done: IsDone | None = None,
        suppress_ends: bool = True,
    ) -> list[Continuation]:
        """Return the most likely ``[num_new]`` tokens of each request; ties go to the lowest id.

        Args:
            requests: the same on every rank.
            on_progress: called with the requests done and all requests.
            is_done: the request's text ends with the token for which it returns True; called on
                each rank that runs the request, where it must return the same.
            suppress_ends: whether no end-of-text token is chosen.

        Raises:
            ModelError: see `Batching.run`.
        """
        choose = self._choose_greedily(suppress_ends=suppress_ends)
        continued = self._decode(requests, 1, lambda _: choose, on_progress, is_done)
        return [samples[0] for samples in continued]

    def continue_kept(
        self, pool: RowPool, sizes: Sequence[int], num_steps: int, is_done: IsDone
    ) -> BatchResult[Continuation]:
        """Return the most likely tokens after rows that have run, see `continue_greedily`.

        Every rank calls it with the same ``num_steps``, also without rows; see `following`.
        """
        choose = self._choose_greedily(suppress_ends=True)
        loop = self._loop(sizes=sizes, num_steps=num_steps, choose=choose, is_done=is_done)
        rows = self.grow(is_cached=True, room=num_steps)
        with evaluating(self.lm.model), self.lm.keep_gathered(fits=True):
            return loop.run(rows, partial(rows.resume, pool), copies=range(len(sizes)))

    def _choose_greedily(self, *, suppress_ends: bool) -> Choose:
        end_ids = self.lm.end_token_ids if suppress_ends else ()
        end_ids_E = send(np.array(end_ids, dtype=np.int64), self.lm.device)

        def choose(hidden_RD: Tensor, _rows: Sequence[int], _step: int) -> Choice:
            best = self.lm.best_tokens(hidden_RD, 2 + len(end_ids))
            ids_RK, logprob_RK = best.ids_NK, best.logprob_NK
            if end_ids:
                is_end_RK = torch.isin(ids_RK, end_ids_E)
                order_RK = is_end_RK.int().argsort(stable=True, dim=1)
                ids_RK = ids_RK.gather(1, order_RK)
                logprob_RK = logprob_RK.gather(1, order_RK)
            return Choice(
                token_R=ids_RK[:, 0],
                logprob_R=logprob_RK[:, 0],
                gap_R=logprob_RK[:, 0] - logprob_RK[:, 1],
            )

        return choose

    def sample(
        self,
        requests: Sequence[Prompt],
        scheme: SamplingScheme,
        num_samples: int,
        seed: int,
        on_progress: Progress | None = None,
    ) -> list[NDArray[np.int32]]:
        """Return ``[num_samples, num_new]`` sampled tokens of each request.

        The random numbers depend only on seed, document and sample, not on the rest of the batch.
        Each token is the first id at which the cumulative distribution exceeds a uniform number.
        With more samples, the first ones stay the same.

        Raises:
            ModelError: see `Batching.run`.
        """
        assert num_samples >= 1, "at least one sample"

        def prepare(rows: Sequence[tuple[int, int]]) -> Choose:
            uniform = [_draw_uniform(requests[index], sample, seed) for index, sample in rows]

            def choose(hidden_RD: Tensor, rows: Sequence[int], step: int) -> Choice:
                numbers = np.array([uniform[row][step] for row in rows], dtype=np.float64)
                uniform_R = send(numbers, hidden_RD.device)
                drawn = self.lm.draw_tokens(hidden_RD, uniform_R, scheme)
                return Choice(token_R=drawn.ids_N, logprob_R=drawn.logprob_N)

            return choose

        drawn = self._decode(requests, num_samples, prepare, on_progress)
        return [np.stack([sample.token_ids for sample in samples]) for samples in drawn]

    def _decode(
        self,
        requests: Sequence[Prompt],
        num_samples: int,
        prepare: Callable[[Sequence[tuple[int, int]]], Choose],
        on_progress: Progress | None,
        is_done: IsDone | None = None,
    ) -> list[list[Continuation]]:
        """Return ``num_samples`` continuations of each request."""
        pairs = [
            (index, sample)
            for index, request in enumerate(requests)
            for sample in range(num_samples if request.num_new else 0)
        ]
        jobs = [
            Job(input_ids=requests[index].input_ids, num_new=requests[index].num_new)
            for index, _ in pairs
        ]

        def run(batch: Sequence[int], num_steps: int, cached: bool) -> BatchResult[Continuation]:
            rows = [pairs[index] for index in batch]
            # Samples of one document share its prompt.
            distinct = list(dict.fromkeys(index for index, _ in rows))
            ends = None
            if is_done is not None:
                ends = lambda row, *at: is_done(rows[row][0], *at)  # noqa: E731
            sizes = [jobs[index].num_new for index in batch]
            loop = self._loop(sizes=sizes, num_steps=num_steps, choose=prepare(rows), is_done=ends)
            growing = self.grow(is_cached=cached, room=num_steps)
            prompts = [requests[index].input_ids for index in distinct]
            copies = [distinct.index(index) for index, _ in rows]
            return loop.run(growing, partial(growing.start, prompts), copies=copies)

        try:
            by_request = dict(zip(pairs, self.run(jobs, run, on_progress), strict=True))
        except LimitReached as reason:
            texts: dict[int, list[Continuation]] = {}
            for job in sorted(reason.finished):
                texts.setdefault(pairs[job][0], []).append(reason.finished[job])
            whole = {index: of for index, of in texts.items() if len(of) == num_samples}
            raise LimitReached(str(reason), whole) from None
        return [
            [by_request.get((index, sample), _NOTHING) for sample in range(num_samples)]
            for index in range(len(requests))
        ]


def _draw_uniform(request: Prompt, sample: int, seed: int) -> NDArray[np.float64]:
    """Return the numbers in [0, 1) that select one sample's tokens."""
    purpose = f"sampling\0{request.document}"
    return derive_generator(seed, purpose, sample).random(request.num_new)
