"""Batches of texts, and the ranks that run them, for scoring and for decoding.

    jobs, longest first        0 1 2 | 3 4 | 5 6 7 | 8         batches of at most batch_tokens
    2 ranks split the batch    rank 0: 0 1 2     rank 1: 3 4   round 1
                               rank 0: 5 6 7     rank 1: 8     round 2

Every rank has the sizes of all jobs, so all ranks run the same rounds. Each round has as many steps
as its longest continuation needs; a rank without a batch runs on a dummy token.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from memguard.audit.requests import LimitReached
from memguard.errors import ModelError, is_out_of_memory
from memguard.model.causal_lm import CausalLM
from memguard.model.evaluation import evaluating
from memguard.runtime import Runtime

Result = TypeVar("Result")
Progress = Callable[[int, int], None]
"""Called with the number of jobs done and of all jobs."""

# More on a CPU would cost page faults: 12 % of the time at rows of 2,048 and 16,384 tokens.
_MOST_CPU_TOKENS, MOST_GPU_TOKENS = 8192, 1 << 20
_LARGEST_BLOCK = 31 << 20
# Share of the memory that is free after a first job; the rest is for fragmentation.
_MEMORY_SHARE = 0.8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """A model input, and the size to which it grows."""

    input_ids: NDArray[np.integer]
    """[P], at least one token."""
    num_new: int = 0
    """Tokens that are added to each row; 0 if the text is only scored."""
    num_rows: int = 1
    """Number of rows at the end."""

    def __post_init__(self) -> None:
        assert len(self.input_ids) >= 1, "a model input needs a token"

    @property
    def num_tokens(self) -> int:
        """Number of tokens of one row at the end."""
        return len(self.input_ids) + self.num_new


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchResult(Generic[Result]):
    """The results of one batch."""

    results: Sequence[Result]
    """One picklable result for each job."""
    num_bad: int
    """Number of tokens whose logits are not finite."""
    num_tokens: int
    """Number of tokens whose logits were computed."""


RunBatch = Callable[[Sequence[int], int], BatchResult[Result]]
"""Runs the jobs of a batch, given by their indices (possibly none), for a number of steps; calls
the model equally often on every rank."""


class Batching:
    """Runs jobs in batches of limited size; of several ranks, each calls it with the same jobs."""

    def __init__(
        self,
        lm: CausalLM,
        batch_tokens: int,
        runtime: Runtime | None = None,
        *,
        measures_memory: bool = False,
    ) -> None:
        """Prepare batches for a model.

        Args:
            lm: the model; put into evaluation mode during a run.
            batch_tokens: maximum tokens of all rows of a batch at the end, with padding; a single
                job always runs.
            runtime: this rank; None for one process.
            measures_memory: whether one job runs first on each rank to measure memory, which then
                limits the batches. Measured once: later runs must not have longer jobs.
        """
        assert batch_tokens >= 1, "a batch needs a token"
        if lm.device.type == "cpu":
            # glibc keeps freed memory for the next pass up to twice the largest block ever freed
            # (up to 64 MiB), instead of returning it and paying page faults for it again.
            torch.empty(_LARGEST_BLOCK, dtype=torch.uint8)
        self.runtime = runtime or Runtime(device=lm.device)
        self._lm = lm
        self._batch_tokens = batch_tokens
        self._measures_memory = measures_memory

    @classmethod
    def of_forwards(
        cls, lm: CausalLM, batch_tokens: int | None, runtime: Runtime | None
    ) -> "Batching":
        """Prepare batches of forwards, without keys and values in memory.

        Without ``batch_tokens`` a batch has 8,192 tokens, on a GPU as many as fit.
        """
        is_gpu = lm.device.type == "cuda"
        most = MOST_GPU_TOKENS if is_gpu else _MOST_CPU_TOKENS
        return cls(
            lm,
            most if batch_tokens is None else batch_tokens,
            runtime,
            # Several ranks cannot recover from running out of memory, whatever the setting is.
            measures_memory=is_gpu and (batch_tokens is None or lm.has_peers),
        )

    def run(
        self, jobs: Sequence[Job], run_batch: RunBatch[Result], on_progress: Progress | None = None
    ) -> list[Result]:
        """Return the result of each job, in their order, on every rank.

        On one process, a batch that does not fit into GPU memory is halved, as are all later
        batches. With several, a rank that runs out of memory raises the error, because the other
        ranks are waiting in a collective.

        Raises:
            LimitReached: generation has taken too long, see `GenerationLimit`; with the results of
                the batches before.
            ModelError: a token is outside the vocabulary, a row is longer than the model's maximum
                length, a single job does not fit into memory, or logits are not finite.
        """
        self._check(jobs)
        mine: dict[int, Result] = {}
        # Longest first: a batch that does not fit into memory fails immediately, not after an hour.
        waiting = sorted(range(len(jobs)), key=lambda index: -_count_tokens([jobs[index]]))
        with evaluating(self._lm.model):
            while waiting:
                batches = self._take_round(waiting, jobs)
                num_steps = max(jobs[index].num_new for batch in batches for index in batch)
                batch = self._lm.deal(batches)[0] or []
                before = 0
                if self._measures_memory:
                    torch.cuda.reset_peak_memory_stats(self._lm.device)
                    before = torch.cuda.memory_allocated(self._lm.device)
                try:
                    done = self._try_batch(run_batch, batch, num_steps)
                except LimitReached as reason:
                    # On every rank, in the same step.
                    raise LimitReached(str(reason), self._gather(mine)) from None
                if done is None:
                    self._halve([jobs[index] for index in batch])
                    continue
                if self._measures_memory:
                    self._batch_tokens = self._agree_on_budget(
                        _count_tokens([jobs[waiting[0]]]), before
                    )
                    self._measures_memory = False
                self._check_finite(done)
                mine.update(zip(batch, done.results, strict=True))
                waiting = waiting[sum(map(len, batches)) :]
                if on_progress is not None:
                    on_progress(len(jobs) - len(waiting), len(jobs))
        gathered = self._gather(mine)
        return [gathered[index] for index in range(len(jobs))]

    def _gather(self, mine: dict[int, Result]) -> dict[int, Result]:
        """Return the results of all ranks."""
        gathered: dict[int, Result] = {}
        for part in self.runtime.gather_objects(mine):
            gathered.update(part)
        return gathered

    def _take_round(self, waiting: Sequence[int], jobs: Sequence[Job]) -> list[list[int]]:
        """Return the next batches, at most one for each rank that splits the batch."""
        budget = 1 if self._measures_memory else self._batch_tokens
        batches: list[list[int]] = []
        first = 0
        while first < len(waiting) and len(batches) < self._lm.num_batch_ways:
            num_old = num_new = num_rows = 0
            batch: list[int] = []
            for place in range(first, len(waiting)):
                job = jobs[waiting[place]]
                num_old, num_new = max(num_old, len(job.input_ids)), max(num_new, job.num_new)
                num_rows += job.num_rows
                if batch and (num_old + num_new) * num_rows > budget:
                    break
                batch.append(waiting[place])
            batches.append(batch)
            first += len(batch)
        return batches

    def _try_batch(
        self, run_batch: RunBatch[Result], batch: Sequence[int], num_steps: int
    ) -> BatchResult[Result] | None:
        """Run a batch; return None if memory ran out. The exception's tensors are then freed."""
        try:
            return run_batch(batch, num_steps)
        except (RuntimeError, MemoryError) as error:
            if self._lm.has_peers or not is_out_of_memory(error):
                raise
            return None

    def _halve(self, batch: Sequence[Job]) -> None:
        """Halve the budget (tokens) after a batch did not fit."""
        if len(batch) == 1:
            raise ModelError(
                f"one document, {batch[0].num_rows} row(s) of {batch[0].num_tokens} tokens, does "
                "not fit into memory beside the model. Set 'audit.dtype' to bf16, or, for "
                "texts, a smaller 'audit.prefix_tokens'."
            )
        torch.cuda.empty_cache()
        self._batch_tokens = _count_tokens(batch) // 2
        logger.warning("out of memory: continuing with %d tokens per batch", self._batch_tokens)

    def _agree_on_budget(self, num_tokens: int, before: int) -> int:
        """Return the number of tokens that fit on every rank, after a job of ``num_tokens`` fit.

        ``before`` it so many bytes were allocated: what it keeps, such as rows to be continued, is
        part of what it used.
        """
        device = self._lm.device
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        used = torch.cuda.max_memory_allocated(device) - before
        fits = int(_MEMORY_SHARE * (free + cached) / max(used, 1) * num_tokens)
        smallest = -self.runtime.agree_max(-max(fits, num_tokens))
        return min(self._batch_tokens, smallest)

    def _check_finite(self, done: BatchResult[Any]) -> None:
        """Raise for logits that are not finite, on all ranks at once so that none waits."""
        copies = self.runtime.world_size // self._lm.num_batch_ways
        counts = self.runtime.agree_sum([done.num_bad, done.num_tokens])
        num_bad, num_tokens = (int(count) // copies for count in counts)
        if num_bad:
            is_widest = self._lm.compute_dtype.itemsize >= torch.float32.itemsize
            cause = (
                "its weights are damaged. Restore or download them again."
                if is_widest
                else "its weights are damaged or its dtype is too narrow. Try 'audit.dtype' fp32."
            )
            raise ModelError(
                f"the model's logits are not finite for {num_bad} of {num_tokens} tokens: {cause}"
            )

    def _check(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        largest = max(int(job.input_ids.max()) for job in jobs)
        smallest = min(int(job.input_ids.min()) for job in jobs)
        size = self._lm.vocab_size
        if largest >= size or smallest < 0:
            raise ModelError(
                f"the documents contain token {largest if largest >= size else smallest}, but the "
                f"model has {size} (0 to {size - 1}): a tokenizer that does not fit the model. "
                "Use the tokenizer that the model was trained with."
            )
        longest = find_longest_run(jobs)
        config = self._lm.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        if isinstance(limit, int) and 0 < limit < longest:
            raise ModelError(
                f"a document has {longest + 1} tokens with its continuation, but the model's "
                f"'max_position_embeddings' is {limit}. Set 'audit.prefix_tokens' to shorten texts."
            )


def find_longest_run(jobs: Sequence[Job]) -> int:
    """Return the length of the longest model input; a row's last token is no input."""
    return max(job.num_tokens for job in jobs) - 1


def _count_tokens(batch: Sequence[Job]) -> int:
    """Return the tokens of all rows at the end, padded to the longest prompt and continuation."""
    longest = max(len(job.input_ids) for job in batch) + max(job.num_new for job in batch)
    return longest * sum(job.num_rows for job in batch)
