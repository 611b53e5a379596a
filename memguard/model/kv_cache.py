"""Rows of tokens to which tokens are appended; keys and values of each token are computed once.

    prompts, right-padded           cache of a layer [R, H, T, d]      after two more tokens
    a b c d e                       a b c d e                          a b c d e f g
    a b c . .                       . . a b c    rolled to the right   . . a b c d e    . is masked

The prompts run like any other text: without a mask, with padding after the tokens that are read,
and with the same results as a scoring pass. Then every row of the cache is rolled so that its last
token is in the last slot. The keys already contain their positions, a mask hides the padding slots,
and two tokens of a row are as many slots apart as positions, which sliding windows need. New tokens
are appended at the end.

A model that does not support this (recurrent state, rotary frequencies that depend on the length of
a text) runs over the whole rows again for each token; `can_cache` checks this by running the model.

Lengths, positions and masks are made on the CPU and sent, so that no token waits for the device.

Collectives: those of a forward. On a mesh every rank calls `start` once and `append` equally often,
even without rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from memguard.model.causal_lm import CausalLM
from memguard.seeds import derive_generator

Result = TypeVar("Result")
Read = Callable[[Tensor], Result]
"""Takes the hidden states [R, D/y] of the rows' last tokens; runs while weights are gathered."""

_CHECKED_STEPS = 3
# Errors of models that do not support a cache, or not this one.
NO_CACHE = (AttributeError, TypeError, ValueError, LookupError, NotImplementedError)


def build_row_cache(room: int) -> DynamicCache:
    """Return an empty cache; adding more than ``room`` tokens to the prompts costs a copy."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = partial(_Layer, room)
    return cache


class _Layer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, in memory that is allocated once.

        buffer [R, H, room, d]    keys are its first T slots; the next token is written to slot T

    transformers' own cache concatenates all keys and values for each token and copies them again
    when beams are reordered. Here a token writes only its own keys and values, and reordering rows
    of the same prompts copies only the slots after the prompts.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, room: int) -> None:
        super().__init__()
        self._num_slots = room
        self._buffers: dict[str, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens ``[R, H, t, d]``; return all ``[R, H, T, d]``."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._num_slots += key_states.shape[2]
        self.keys = self._append("keys", self.keys, key_states)
        self.values = self._append("values", self.values, value_states)
        return self.keys, self.values

    @classmethod
    def like(cls, layer: Any, num_rows: int, num_slots: int, room: int) -> "_Layer":
        """Return a layer of these rows and slots, with ``room`` for more."""
        mine = cls(num_slots + room)
        mine.lazy_initialization(layer.keys, layer.values)
        for name in ("keys", "values"):
            _, heads, _, width = (old := getattr(layer, name)).shape
            # What is masked must be finite.
            mine._buffers[name] = old.new_zeros(num_rows, heads, num_slots + room, width)
            setattr(mine, name, mine._buffers[name][:, :, :num_slots])
        return mine

    def take_rows(self, rows_R: Tensor, first_slot: int) -> None:
        """Select these rows; slots before ``first_slot`` are equal in old and new rows."""
        if self.get_seq_length() == 0:
            return
        self.keys = _take(self.keys, rows_R, first_slot)
        self.values = _take(self.values, rows_R, first_slot)

    def _append(self, name: str, old: Tensor, new: Tensor) -> Tensor:
        if old.numel() == 0:
            return new  # Prompts, whose rows may still be repeated.
        buffer = self._buffers.get(name)
        rows, heads, num_old, width = old.shape
        num_slots = num_old + new.shape[2]
        is_mine = buffer is not None and buffer.data_ptr() == old.data_ptr()
        if buffer is None or not is_mine or num_slots > buffer.shape[2]:
            buffer = old.new_empty(rows, heads, max(self._num_slots, num_slots), width)
            buffer[:, :, :num_old] = old
            self._buffers[name] = buffer
        buffer[:rows, :, num_old:num_slots] = new
        return buffer[:rows, :, :num_slots]


def _take(slots: Tensor, rows_R: Tensor, first_slot: int) -> Tensor:
    num_rows = len(rows_R)
    if num_rows > len(slots):
        return slots[rows_R]
    # In the memory of the old rows, or all layers would be in memory twice.
    first = first_slot if num_rows == len(slots) else 0
    slots[:num_rows, :, first:] = slots[:, :, first:][rows_R]
    return slots[:num_rows]


class RowPool:
    """The first tokens of rows that have run, right-aligned, until they are continued.

    keys [R, H, L + room, d]    a row of n tokens is in the slots L - n .. L - 1
    """

    def __init__(
        self, cache: Any, hidden_BTD: Tensor, num_rows: int, num_slots: int, room: int
    ) -> None:
        """Make place for rows of passes like this one; more than ``room`` tokens cost a copy."""
        self.sizes: list[int] = []
        """Tokens of each row."""
        self.hidden_RD = hidden_BTD.new_empty(num_rows, hidden_BTD.shape[2])
        """Last hidden states."""
        self.cache, self._num_slots = DynamicCache(), num_slots
        self.cache.layers = [_Layer.like(one, num_rows, num_slots, room) for one in cache.layers]

    def add(self, cache: Any, hidden_BTD: Tensor, row: int, size: int) -> bool:
        """Copy the first tokens of a row of a pass; return False if they do not fit."""
        place, first = len(self.sizes), self._num_slots - size
        if place == len(self.hidden_RD) or first < 0:
            return False
        for mine, layer in zip(self.cache.layers, cache.layers, strict=True):
            mine.keys[place, :, first:] = layer.keys[row, :, :size]
            mine.values[place, :, first:] = layer.values[row, :, :size]
        self.hidden_RD[place] = hidden_BTD[row, size - 1]
        self.sizes.append(size)
        return True


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array on a device, without waiting for the device's earlier work.

    CUDA copies memory of this kind aside before the call returns, so the array may change after it.
    """
    return torch.from_numpy(array).to(device, non_blocking=True)


class GrowingRows:
    """R rows of a batch, run with the model in evaluation mode.

    Without rows the model runs on a dummy token to take part in the collectives of the other ranks;
    the result is discarded.
    """

    def __init__(
        self, lm: CausalLM, *, is_cached: bool, room: int, on_step: Callable[[], None] | None = None
    ) -> None:
        """Prepare for one batch, to each row of which ``room`` tokens will be added.

        Not ``is_cached`` runs the whole rows again for each token, see `can_cache`; ``on_step`` is
        called after each token that is added.
        """
        self._lm, self._on_step = lm, on_step
        self._cache = build_row_cache(room) if is_cached else None
        self._ids_RT = torch.zeros(0, 1, dtype=torch.int64)
        # Stored on the CPU, so that no step waits for the device.
        self._lengths_R = np.zeros(0, dtype=np.int64)
        self._prompt_of_R = np.zeros(0, dtype=np.int64)
        self._num_prompt_slots = 0

    @torch.no_grad()
    def start(self, prompts: Sequence[NDArray[np.integer]], read: Read[Result]) -> Result:
        """Run prompts of at least one token each; return ``read`` of their last hidden states."""
        self._lengths_R = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        longest = self._lengths_R.max(initial=1)
        padded = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        self._ids_RT = self._put(padded)
        self._prompt_of_R, self._num_prompt_slots = np.arange(len(prompts)), int(longest)
        result = self._run_whole(read)
        if self._cache is not None and (self._lengths_R < longest).any():
            _roll(self._cache, self._put(longest - self._lengths_R))
        return result

    @torch.no_grad()
    def resume(self, pool: RowPool, read: Read[Result]) -> Result:
        """Start from rows that have run, in the pool's memory; see `start`."""
        num_rows, self._cache = len(pool.sizes), pool.cache
        for layer in pool.cache.layers:
            layer.keys, layer.values = layer.keys[:num_rows], layer.values[:num_rows]
        self._lengths_R, self._prompt_of_R = np.array(pool.sizes, int), np.arange(num_rows)
        self._ids_RT = self._put(np.zeros((num_rows, 1), dtype=np.int64))
        return self._lm(lambda: read(pool.hidden_RD[:num_rows]))

    def take(self, rows: NDArray[np.integer]) -> None:
        """Select rows by index, in this order; a row may be dropped or repeated."""
        if np.array_equal(rows, np.arange(len(self._lengths_R))):
            return
        rows_R = self._put(rows.astype(np.int64))
        self._ids_RT, self._lengths_R = self._ids_RT[rows_R], self._lengths_R[rows]
        before_R, self._prompt_of_R = self._prompt_of_R, self._prompt_of_R[rows]
        if self._cache is not None:
            # If only beams of the same prompt are reordered, the prompts' keys and values stay.
            is_same = np.array_equal(before_R, self._prompt_of_R)
            for layer in self._cache.layers:
                layer.take_rows(rows_R, self._num_prompt_slots if is_same else 0)

    @torch.no_grad()
    def append(self, tokens_R: Tensor, read: Read[Result]) -> Result:
        """Append a token to each row and return ``read`` of their last hidden states."""
        result = self._append(tokens_R, read)
        if self._on_step is not None:
            self._on_step()
        return result

    def _append(self, tokens_R: Tensor, read: Read[Result]) -> Result:
        tokens_R1 = tokens_R.to(self._ids_RT, non_blocking=True)[:, None]
        positions_R1 = self._put(self._lengths_R[:, None])
        self._lengths_R = self._lengths_R + 1
        if self._cache is None:
            # Written after the row's last token, where the padding begins.
            wider_RT = functional.pad(self._ids_RT, (0, 1)).scatter(1, positions_R1, tokens_R1)
            # Columns that only finished rows needed are dropped.
            self._ids_RT = wider_RT[:, : self._lengths_R.max(initial=1)]
        if self._cache is None or not len(tokens_R):
            return self._run_whole(read)
        num_slots = self._cache.get_seq_length() + 1
        num_hidden_R1 = num_slots - self._lengths_R[:, None]
        mask_RT = None
        if num_hidden_R1.any():  # Otherwise a mask would only prevent the fastest kernels.
            mask_RT = self._put(np.arange(num_slots) >= num_hidden_R1)
        for layer in self._cache.layers:
            # transformers reads a mask from the device to learn whether it hides anything, except
            # with a cache that can be compiled.
            layer.is_compileable = mask_RT is not None
        return self._run(tokens_R1, read, position_ids_BT=positions_R1, mask_BT=mask_RT)

    def _run_whole(self, read: Read[Result]) -> Result:
        if not len(self._lengths_R):
            dummy_11 = self._put(np.zeros((1, 1), dtype=np.int64))
            # Without a cache transformers would read from the device whether the row is packed.
            cache = None if self._cache is None else build_row_cache(0)
            return self._lm(lambda: read(self._lm.hidden_states(dummy_11, cache=cache)[:0, 0]))
        return self._run(self._ids_RT, read, last=self._lengths_R - 1)

    def _run(
        self,
        ids_RT: Tensor,
        read: Read[Result],
        last: NDArray[np.int64] | None = None,
        **inputs: Any,
    ) -> Result:
        def work() -> Result:
            hidden_RTD = self._lm.hidden_states(ids_RT, cache=self._cache, **inputs)
            if last is None:
                return read(hidden_RTD[:, -1])
            return read(hidden_RTD[self._put(np.arange(len(last))), self._put(last)])

        return self._lm(work)

    def _put(self, array: NDArray[Any]) -> Tensor:
        return send(array, self._lm.device)


def _roll(cache: Any, shift_R: Tensor) -> None:
    """Roll each row of all keys and values ``[R, H, T, d]`` to the right, layer by layer."""
    for layer in cache.layers:
        slots_T = torch.arange(layer.keys.shape[-2], device=shift_R.device)
        from_R1T1 = ((slots_T - shift_R[:, None]) % len(slots_T))[:, None, :, None]
        layer.keys = torch.take_along_dim(layer.keys, from_R1T1, -2)
        layer.values = torch.take_along_dim(layer.values, from_R1T1, -2)


def recall_check(lm: CausalLM, shortest: int, longest: int) -> bool | None:
    """Return whether texts of these lengths can be cached, as far as earlier checks tell."""
    for (first, last), is_cached in lm.cached_lengths.items():
        if is_cached and first <= shortest and longest <= last:
            return True
        if not is_cached and shortest <= first and last <= longest:
            return False
    return None


@torch.no_grad()
def can_cache(lm: CausalLM, shortest: int, longest: int) -> bool:
    """Return whether cached rows have the same hidden states as rows that are run whole and alone.

    The model, in evaluation mode, runs on random tokens: a row as short as the shortest prompt and
    one as long as the longest that will be run grow together. Lengths matter, because sliding
    windows and length-dependent rotary frequencies take effect only in long texts.
    """
    num_steps = min(_CHECKED_STEPS, longest - 1)
    if num_steps < 1:
        return True
    draw = derive_generator(0, "probe tokens")
    sizes = (min(shortest, longest - num_steps), longest - num_steps)
    texts = [draw.integers(0, lm.vocab_size, size + num_steps) for size in sizes]
    rows = GrowingRows(lm, is_cached=True, room=num_steps)
    prompts = [text[:size] for text, size in zip(texts, sizes, strict=True)]
    try:
        rows.start(prompts, lambda hidden_RD: None)
        cached = _append_all(rows, texts, sizes)
    except NO_CACHE:
        return False
    # One pass has the hidden states of every step.
    alone = [_run_alone(lm, text)[size:] for text, size in zip(texts, sizes, strict=True)]
    return _are_same(lm, cached, alone)


@torch.no_grad()
def can_continue(
    lm: CausalLM, ids_BT: NDArray[np.int64], hidden_BTD: Tensor, cache: Any, shortest: int
) -> bool:
    """Return whether rows can be continued from a pass that stored their keys and values.

    Their true tokens are appended to the first row, cropped near its end, and to the last, cropped
    half-way: the hidden states are those of the pass. So are those of the first tokens of a row
    that are run alone without a cache: few of them, because rotary frequencies may depend on the
    length, but those behind a sliding window. Every rank calls it, with at least 8 tokens.
    """
    (num_rows, length), num_steps = ids_BT.shape, _CHECKED_STEPS
    places = ((0, length - num_steps), (num_rows - 1, length // 2 - 1))
    rows = GrowingRows(lm, is_cached=True, room=num_steps)
    try:
        pool = RowPool(cache, hidden_BTD, len(places), length, num_steps)
        for row, size in places:
            pool.add(cache, hidden_BTD, row, size)
        rows.resume(pool, lambda hidden_RD: None)
        cached = _append_all(rows, [ids_BT[row] for row, _ in places], pool.sizes)
    except NO_CACHE:
        return False
    of_pass = [hidden_BTD[row, size : size + num_steps] for row, size in places]
    first, end = 0, min(64, length // 2, max(4, shortest))
    window = lm.attention.windows[-1]
    if window is not None and window < length:
        first, end = window, min(length, window + end)
    alone_TD = _run_alone(lm, ids_BT[-1, :end])
    return _are_same(lm, [*cached, hidden_BTD[-1, first:end]], [*of_pass, alone_TD[first:]])


def _append_all(
    rows: GrowingRows, texts: Sequence[NDArray[np.integer]], sizes: Sequence[int]
) -> list[Tensor]:
    """Append the next tokens of each text; return the hidden states [S, D/y] of each."""
    steps = range(min(_CHECKED_STEPS, len(texts[0]) - sizes[0]))
    tokens_SR = np.array(
        [[t[n + step] for t, n in zip(texts, sizes, strict=True)] for step in steps]
    )
    steps_SRD = [rows.append(torch.from_numpy(tokens_R), Tensor.float) for tokens_R in tokens_SR]
    return list(torch.stack(steps_SRD, dim=1))


def _are_same(lm: CausalLM, cached: Sequence[Tensor], alone: Sequence[Tensor]) -> bool:
    """Return whether hidden states [S, D/y] are those that they should be."""
    differences = []
    for cached_SD, alone_SD in zip(cached, alone, strict=True):
        if cached_SD.shape != alone_SD.shape:
            return False
        change_S = lm.largest((cached_SD.float() - alone_SD.float()).abs().amax(-1))
        # The median: a near-tied choice of an expert may change single tokens, a leak changes all.
        scale = alone_SD.float().abs().nan_to_num(0).max()
        differences.append(torch.stack([change_S.median(), scale]))
    change_R, scale_R = lm.largest(torch.stack(differences)).unbind(1)
    # A leak changes hidden states by tenths; another order of summation the dtype's last bits.
    is_wide = lm.compute_dtype in (torch.float32, torch.float64)
    return bool((change_R <= scale_R * (1e-4 if is_wide else 3e-2)).all())


def _run_alone(lm: CausalLM, text: NDArray[np.integer]) -> Tensor:
    """Return the hidden states [T, D/y] of a text in a row of its own."""
    ids_1T = send(text[None], lm.device)
    return lm(lambda: lm.hidden_states(ids_1T))[0]
