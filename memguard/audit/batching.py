"""Which continuations run together, on which rank, and how many at once.

    works, longest first       0 1 2 | 3 4 | 5 6 7 | 8         batches of at most batch_tokens
    2 ranks split the batch    rank 0: 0 1 2     rank 1: 3 4   round 1
                               rank 0: 5 6 7     rank 1: 8     round 2

Every rank knows the sizes of all works, so all take the same rounds, and as many steps in each as
its longest continuation needs; a rank without a batch of its own runs a dummy along.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from memguard.errors import ModelError
from memguard.model.causal_lm import VocabLayer
from memguard.model.kv_cache import can_cache
from memguard.runtime import Runtime

Result = TypeVar("Result")
Progress = Callable[[int, int], None]
"""Called with the number of works done and of all works."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Work:
    """A prompt, and what it grows to."""

    prompt_ids: NDArray[np.integer]
    """[P], at least one token."""
    num_new: int
    """Tokens that are added, at least 1."""
    num_rows: int = 1
    """Rows it takes in the end."""

    def __post_init__(self) -> None:
        assert len(self.prompt_ids) >= 1, "a prompt needs a token"
        assert self.num_new >= 1, "nothing to do"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Generic[Result]):
    """What a batch came to."""

    results: Sequence[Result]
    """One for each work, picklable."""
    is_finite: bool
    """Whether all logits were numbers."""


Run = Callable[[Sequence[int], int, bool], Outcome[Result]]
"""Runs the works of a batch, given by their indices (maybe none), for so many steps, whether cached
or not: it calls the model as often on every rank."""


def run_rounds(
    vocab: VocabLayer,
    runtime: Runtime,
    batch_tokens: int,
    works: Sequence[Work],
    run: Run[Result],
    on_progress: Progress | None = None,
) -> list[Result]:
    """Return the result of each work, in their order, on every rank.

    On one process a batch that does not fit into GPU memory is halved, and so are all that follow.

    Args:
        vocab: the model; in evaluation mode meanwhile.
        runtime: this rank.
        batch_tokens: of all rows of a batch in the end, padding included; one work always goes.
        works: the same on every rank.
        run: see `Run`.
        on_progress: see `Progress`.

    Raises:
        ModelError: a token outside the vocabulary, a row longer than the model has positions for,
            a work that does not fit into memory alone, or logits that are not finite.
    """
    assert batch_tokens >= 1, "a batch needs a token"
    _check(vocab, works)
    mine: dict[int, Result] = {}
    # Longest first: what does not fit into memory shows at once, not after an hour.
    waiting = sorted(range(len(works)), key=lambda i: -_count_tokens([works[i]]))
    model: Any = vocab.model
    training = model.training
    model.eval()
    try:
        is_cached = _agree_on_cache(vocab, runtime, works)
        while waiting:
            taken = _take_round(vocab.num_batch_ways, waiting, works, batch_tokens)
            num_steps = max(works[index].num_new for batch in taken for index in batch)
            batch = vocab.deal(taken)[0] or []
            try:
                outcome = run(batch, num_steps, is_cached)
            except torch.OutOfMemoryError:
                if vocab.mesh is not None:
                    # The others wait in a collective, and nobody could tell them.
                    raise
                batch_tokens = _halve([works[index] for index in batch])
                continue
            # On all ranks at once, or some would wait for the others.
            if runtime.agree_any(not outcome.is_finite):
                raise ModelError(
                    "the model's logits are not finite: its weights are damaged or its dtype is "
                    "too narrow. Try 'audit.dtype' fp32."
                )
            mine.update(zip(batch, outcome.results, strict=True))
            waiting = waiting[sum(map(len, taken)) :]
            if on_progress is not None:
                on_progress(len(works) - len(waiting), len(works))
    finally:
        model.train(training)
    everyone: dict[int, Result] = {}
    for part in runtime.gather_objects(mine):
        everyone.update(part)
    return [everyone[index] for index in range(len(works))]


def _take_round(
    num_ways: int, waiting: Sequence[int], works: Sequence[Work], batch_tokens: int
) -> list[list[int]]:
    """Return the next batches, at most one for each rank that splits the batch."""
    taken: list[list[int]] = []
    rest = list(waiting)
    while rest and len(taken) < num_ways:
        size = 1
        while size < len(rest):
            batch = [works[index] for index in rest[: size + 1]]
            if _count_tokens(batch) > batch_tokens:
                break
            size += 1
        taken.append(rest[:size])
        rest = rest[size:]
    return taken


def _count_tokens(batch: Sequence[Work]) -> int:
    """Return the tokens of all rows in the end: as long as the longest prompt and continuation."""
    longest = max(len(work.prompt_ids) for work in batch) + max(work.num_new for work in batch)
    return longest * sum(work.num_rows for work in batch)


def _agree_on_cache(vocab: VocabLayer, runtime: Runtime, works: Sequence[Work]) -> bool:
    """Return whether keys and values can be kept; a rank that saw it otherwise would wait."""
    if not works:
        return True
    shortest = min(len(work.prompt_ids) for work in works)
    try:
        is_cached = can_cache(vocab, shortest, _longest_run(works))
    except torch.OutOfMemoryError:
        if vocab.mesh is not None:
            raise
        # The check takes two rows, what follows goes with one.
        is_cached = False
    if not runtime.agree_any(not is_cached):
        return True
    if runtime.is_main:
        logger.warning(
            "%s is run over the whole text again for each new token, which is slow: it keeps no "
            "keys and values, or none that fit longer texts",
            type(vocab.model).__name__,
        )
    return False


def _longest_run(works: Sequence[Work]) -> int:
    """Return the tokens of the longest row that is run; the last token never is."""
    return max(len(work.prompt_ids) + work.num_new for work in works) - 1


def _halve(batch: Sequence[Work]) -> int:
    """Return a smaller budget (tokens) after a batch did not fit."""
    if len(batch) == 1:
        longest = len(batch[0].prompt_ids) + batch[0].num_new
        raise ModelError(
            f"{batch[0].num_rows} continuation(s) of one document, of {longest} tokens each, do "
            "not fit into GPU memory beside the model. Set 'audit.prefix_tokens' to shorten it, or "
            "'audit.dtype' to bf16."
        )
    torch.cuda.empty_cache()
    budget = _count_tokens(batch) // 2
    logger.warning("out of GPU memory: going on with %d tokens a batch", budget)
    return budget


def _check(vocab: VocabLayer, works: Sequence[Work]) -> None:
    if not works:
        return
    ids = [int(work.prompt_ids.max()) for work in works]
    ids += [int(work.prompt_ids.min()) for work in works]
    size = vocab.vocab_size
    if max(ids) >= size or min(ids) < 0:
        raise ModelError(
            f"the prompts hold token {max(ids) if max(ids) >= size else min(ids)}, but the model "
            f"has {size} (0 to {size - 1}): a tokenizer that does not fit the model. Use the one "
            "the model was trained with."
        )
    limit = getattr(vocab.model.config.get_text_config(), "max_position_embeddings", None)
    longest = _longest_run(works)
    if isinstance(limit, int) and 0 < limit < longest:
        raise ModelError(
            f"a document has {longest + 1} tokens with its continuation, but the model's "
            f"'max_position_embeddings' is {limit}. Set 'audit.prefix_tokens' to shorten it."
        )
