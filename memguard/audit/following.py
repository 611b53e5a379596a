"""Continues documents from the keys and values of their scoring pass, so that no prefix runs twice.

    scoring pass   a b c d e f      a batch; its cache has keys and values of all tokens
    kept           . . a b c _ _    c is followed by d, but the model's choice is another token
    continued      . . a b c x y    once no more rows fit, by the loop of `token_loop`

What will be generated is known from a document's scores (`requests.Continues`). Rows are copied,
cropped at the divergence, with their last hidden state; no document that was kept is run again.
What does not fit, or could not be known, is generated in the next round.

Memory: keys and values of one scoring batch and of one decoding batch.

Collectives: each rank keeps its own rows, and keys of its own heads. After each pass the ranks
agree whether any has rows that do not fit; then all continue what they have, without rows a dummy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from memguard.audit.cache import StoredNumbers
from memguard.audit.decoding import Decoder
from memguard.audit.passages import Passage, ScoreSelection, TokenResult
from memguard.audit.requests import Continued, Continues, Generated, Prompt, Score
from memguard.errors import is_out_of_memory
from memguard.model.kv_cache import RowPool, can_continue, recall_check

LEAST_CHECKED = 8
"""Tokens of the pass on which the cache is checked."""


@dataclass(slots=True, eq=False)
class Follower:
    """Documents whose keys and values are kept until they are continued; one for a measurement."""

    decoder: Decoder
    request: Score
    continues: Continues
    store: StoredNumbers
    """Of the generated texts."""
    longest: int
    """Tokens of the longest pass."""
    items: Mapping[int, tuple[int, Passage]] = field(default_factory=dict)
    """By place of a passage that is scored now."""
    computed: ScoreSelection = field(default_factory=ScoreSelection)
    """The results of these passages."""
    is_on: bool | None = field(init=False)
    """Whether rows are kept; None: the next pass decides. The same on every rank."""
    _shortest: int = field(init=False)
    """Tokens of the shortest prompt."""
    _room: int = field(init=False)
    """Tokens of the longest continuation."""
    _pool: RowPool | None = None
    _waiting: list[tuple[int, Continued]] = field(default_factory=list)
    """Items of the rows in the pool."""
    _numbers: dict[int, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        passages = [passage for passage in self.request.passages if passage is not None]
        self._shortest = min((p.first_choice for p in passages), default=self.longest)
        self._room = max((len(p.input_ids) - p.first_choice for p in passages), default=0)
        self.is_on = recall_check(self.decoder.lm, self._shortest, self.longest)

    def add(
        self,
        places: Sequence[int],
        results: Sequence[TokenResult],
        ids_BT: NDArray[np.int64],
        hidden_BTD: Tensor,
        cache: Any,
    ) -> bool:
        """Keep the rows of a pass that will be continued.

        Every rank calls it after each pass. It returns False if the model's keys cannot be kept:
        then the pass must be repeated without a cache.
        """
        lm, runtime = self.decoder.lm, self.decoder.runtime
        if self.is_on is None:
            is_same = can_continue(lm, ids_BT, hidden_BTD, cache, self._shortest)
            self.is_on = not runtime.agree_any(not is_same)
            if not self.is_on:
                return False
            lm.cached_lengths[self._shortest, self.longest] = True
        left = self._find_texts(places, results)
        while True:
            if self._pool is None:
                self._pool = self._build_pool(cache, hidden_BTD, [text.prompt for *_, text in left])
            while left:
                row, item, text = left[0]
                if not self._pool.add(cache, hidden_BTD, row, len(text.prompt.input_ids)):
                    break
                self._waiting.append((item, text))
                left.pop(0)
            if not runtime.agree_any(bool(left)):
                return True
            self._flush()

    def store_numbers(self) -> None:
        """Continue what waits, and store all numbers. Every rank calls it."""
        try:
            if self.is_on:
                self._flush()
        except (RuntimeError, MemoryError) as error:
            if self.decoder.lm.has_peers or not is_out_of_memory(error):
                raise
            self.drop()
        of_ranks = self.decoder.runtime.gather_objects(list(self._numbers.items()))
        numbers = dict(pair for part in of_ranks for pair in part)
        self.store.add(list(numbers), list(numbers.values()))
        self._numbers = {}

    def drop(self) -> None:
        """Keep nothing more: the model does not support it, or memory ran out."""
        self.is_on, self._pool, self._waiting = False, None, []

    def _find_texts(
        self, places: Sequence[int], results: Sequence[TokenResult]
    ) -> list[tuple[int, int, Continued]]:
        """Return the rows of a pass that will be continued, with their items and texts."""
        texts = []
        for row, (place, result) in enumerate(zip(places, results, strict=True)):
            if place not in self.items:
                continue
            item, whole = self.items[place]
            own = self.request.passages[item]
            assert own is not None, "it has been scored"
            part = result.restrict(whole, own, self.request.selection, self.computed)
            # A text whose numbers are cached counts in the sample below the floor.
            text = self.continues.find(item, part)
            if text is not None and item in self.store.missing:
                texts.append((row, item, text))
        return texts

    def _build_pool(self, cache: Any, hidden_BTD: Tensor, prompts: Sequence[Prompt]) -> RowPool:
        """Return memory for the rows of a decoding batch; later passes have no longer rows.

        Without prompts it is as large, so that memory which does not suffice fails a first pass.
        """
        slots = max((len(prompt.input_ids) for prompt in prompts), default=hidden_BTD.shape[1])
        longest = max((len(p.input_ids) + p.num_new for p in prompts), default=slots + 1)
        num_rows = max(1, self.decoder.batch_tokens // longest)
        return RowPool(cache, hidden_BTD, num_rows, slots, self._room)

    def _flush(self) -> None:
        """Continue the rows of the pool, on all ranks."""
        (pool, self._pool), (waiting, self._waiting) = (self._pool, None), (self._waiting, [])
        sizes = [text.prompt.num_new for _, text in waiting]
        num_steps = self.decoder.runtime.agree_max(max(sizes, default=0))
        if not num_steps:
            return
        assert pool is not None, "a pass has run"
        is_done = lambda index, *at: waiting[index][1].is_done(*at)  # noqa: E731
        done = self.decoder.continue_kept(pool, sizes, num_steps, is_done)
        if done.num_bad:
            return  # Said by the pass, or by the next round, on all ranks.
        for (item, text), one in zip(waiting, done.results, strict=True):
            generated = Generated(samples=one.token_ids[None], min_gap=one.min_gap)
            self._numbers[item] = text.reduce(generated)
