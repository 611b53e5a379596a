"""Continues documents from the keys and values of their scoring pass, so that no prefix runs twice.

    scoring pass   a b c d e f      a batch; its cache has keys and values of all tokens
    kept           . . a b c _ _    c is followed by d, but the model's choice is another token
    continued      . . a b c x y    once no more rows fit, by the loop of `token_loop`

What will be generated is known from a document's scores (`requests.Continues`). Rows are copied,
cropped at the divergence, with their last hidden state; no document that was kept is run again.
Samples below the floor are drawn by rank, so that only the first ones of each bucket wait until all
documents are scored. What does not fit, or could not be known, is generated in the next round.

Memory: keys and values of one scoring batch, of one decoding batch, and of samples that wait, at
most half of that.

Collectives: each rank keeps its own rows, and keys of its own heads. After each pass the ranks
agree whether any has rows that do not fit; then all continue what they have, without rows a dummy.
"""

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from memguard.audit.decoding import Decoder
from memguard.audit.passages import TokenResult
from memguard.audit.requests import Continued, Generated
from memguard.model.kv_cache import KeptRow, Memory, RowPool, can_continue, recall_check

Find = Callable[[int, TokenResult], tuple[int, Continued] | None]
"""Takes the place of a passage and its result; returns its item, and what will be generated."""
LEAST_CHECKED = 8
"""Tokens of the pass on which the cache is checked."""


class _Waiting(NamedTuple):
    item: int
    text: Continued
    row: KeptRow


@dataclass(slots=True, eq=False)
class Follower:
    """Documents whose keys and values are kept until they are continued; one for a measurement."""

    decoder: Decoder
    shortest: int
    """Tokens of the shortest prompt."""
    longest: int
    """Tokens of the longest pass."""
    missing: Collection[int]
    """Items whose numbers are not cached."""
    find: Find = field(default=lambda place, result: None)
    """Of the passages that are scored now."""
    is_on: bool | None = None
    """Whether rows are kept; None: the next pass decides. The same on every rank."""
    memory: Memory = field(default_factory=Memory)
    """Of the keys and values of a pass."""
    _pool: RowPool = field(default_factory=RowPool)
    _waiting: list[_Waiting] = field(default_factory=list)
    """Of the rows in the pool."""
    _held: list[_Waiting] = field(default_factory=list)
    """Of samples, which wait until all documents are scored."""
    _ranks: dict[str, list[int]] = field(default_factory=dict)
    """By bucket, the first ranks of the documents from which its sample is drawn."""
    _none_0D: Tensor | None = None
    _numbers: dict[int, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lm = self.decoder.lm
        self.is_on = recall_check(lm, self.shortest, self.longest)

    def add(
        self,
        places: Sequence[int],
        results: Sequence[TokenResult],
        ids_BT: NDArray[np.int64],
        hidden_BTD: Tensor,
        cache: DynamicCache,
    ) -> bool:
        """Keep the rows of a pass that will be continued.

        Every rank calls it after each pass. It returns False if the model's keys cannot be kept:
        then the pass must be repeated without a cache.
        """
        if self.is_on is None:
            lm = self.decoder.lm
            is_same = can_continue(lm, ids_BT, hidden_BTD, cache, self.shortest)
            self.is_on = not self.decoder.runtime.agree_any(not is_same)
            if not self.is_on:
                return False
            lm.cached_lengths[self.shortest, self.longest] = True
        self._none_0D = hidden_BTD[:0, 0]
        rows = []
        for row, (place, result) in enumerate(zip(places, results, strict=True)):
            if (found := self.find(place, result)) is None:
                continue
            item, text = found
            kept = KeptRow.of(cache, hidden_BTD, row, len(text.prompt.input_ids))
            waiting = _Waiting(item, text, kept)
            is_certain = self._is_certain(waiting)
            if item not in self.missing:
                continue  # It is drawn all the same.
            if is_certain:
                rows.append(waiting)
            elif self._is_first(waiting):
                self._hold(waiting)
        self._continue(rows)
        return True

    def take_numbers(self, *, is_last: bool) -> Mapping[int, Sequence[float]]:
        """Continue what waits, after the last pass also the samples; return the numbers by item.

        Every rank calls it, and gets the numbers of all.
        """
        runtime = self.decoder.runtime
        try:
            if self.is_on and is_last:
                for ranks in runtime.gather_objects(list(self._ranks.items())):
                    for bucket, firsts in ranks:
                        self._ranks[bucket] = sorted({*self._ranks.get(bucket, ()), *firsts})
                held, self._held = self._held, []
                self._continue([one for one in held if self._is_first(one)])
            if self.is_on:
                self._flush()
        except torch.OutOfMemoryError:
            if self.decoder.lm.has_peers:
                raise
            self.drop()
        numbers, self._numbers = self._numbers, {}
        of_ranks = runtime.gather_objects(list(numbers.items()))
        return dict(sorted(pair for part in of_ranks for pair in part))

    def drop(self) -> None:
        """Keep nothing more: the model does not support it, or memory ran out."""
        self.is_on, self.memory, self._pool = False, Memory(), RowPool()
        self._waiting, self._held = [], []

    # -- samples -----------------------------------------------------------------------------------

    def _is_certain(self, one: _Waiting) -> bool:
        """Note a document; return whether it is drawn, whatever the others score."""
        if one.text.sample is None:
            return True
        bucket, rank, size = one.text.sample
        self._ranks[bucket] = heapq.nsmallest(size, [*self._ranks.get(bucket, ()), rank])
        return rank < size

    def _is_first(self, one: _Waiting) -> bool:
        """Return whether a document of a sample is drawn, of those that are known by now."""
        assert one.text.sample is not None, "of a sample"
        bucket, rank, size = one.text.sample
        return sum(other < rank for other in self._ranks[bucket]) < size

    def _hold(self, one: _Waiting) -> None:
        self._held = [other for other in self._held if self._is_first(other)]
        num_tokens = one.row.size + sum(other.row.size for other in self._held)
        if num_tokens <= self.decoder.batch_tokens // 2:
            self._held.append(one._replace(row=one.row.copy()))

    # -- the pool ----------------------------------------------------------------------------------

    def _continue(self, rows: Sequence[_Waiting]) -> None:
        """Put rows into the pool; all ranks continue theirs whenever a row of one does not fit."""
        left = list(rows)
        while True:
            while left and self._put(left):
                self._waiting.append(left.pop(0))
            if not self.decoder.runtime.agree_any(bool(left)):
                return
            self._flush()

    def _put(self, left: Sequence[_Waiting]) -> bool:
        """Copy the first of the rows that are left into the pool; return whether it fits."""
        if not self._waiting:
            # Later passes have no longer rows.
            longest = max(one.row.size + one.text.prompt.num_new for one in left)
            room = max(one.text.prompt.num_new for one in left)
            self._pool.clear(max(1, self.decoder.batch_tokens // longest), longest - 1, room)
        return self._pool.add(left[0].row)

    def _flush(self) -> None:
        """Continue the rows of the pool, on all ranks."""
        waiting, self._waiting = self._waiting, []
        sizes = [one.text.prompt.num_new for one in waiting]
        num_steps = self.decoder.runtime.agree_max(max(sizes, default=0))
        if not num_steps:
            return
        if not waiting:
            self._pool.clear(0, 1, 0)
        assert self._none_0D is not None, "a pass has run"
        is_done = lambda index, *at: waiting[index].text.is_done(*at)  # noqa: E731
        done = self.decoder.continue_kept(self._pool, self._none_0D, sizes, num_steps, is_done)
        if done.num_bad:
            return  # Said by the pass, or by the next round, on all ranks.
        for one, text in zip(waiting, done.results, strict=True):
            generated = Generated(samples=text.token_ids[None], min_gap=text.min_gap)
            self._numbers[one.item] = one.text.reduce(generated)
