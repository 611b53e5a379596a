"""Keys and values of growing rows, in memory that is taken once.

    buffer [R, H, room, d]    keys are its first T slots; the next token is written to slot T

transformers' own cache makes all keys and values anew for each token, and beams that change places
copy them once more. Here a token writes its own, and rows of the same prompts copy only what was
added to these.
"""

from functools import partial
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def build_row_cache(room: int) -> DynamicCache:
    """Return an empty cache.

    Args:
        room: tokens that will be added to the prompts; more fit, at the price of a copy.
    """
    cache = DynamicCache()
    cache.layer_class_to_replicate = partial(_Layer, room)
    return cache


class _Layer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer."""

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

    def take_rows(self, rows_R: Tensor, first_slot: int) -> None:
        """Go on with these rows; all slots before ``first_slot`` are the same in both."""
        if self.get_seq_length() == 0:
            return
        self.keys = _take(self.keys, rows_R, first_slot)
        self.values = _take(self.values, rows_R, first_slot)

    def _append(self, name: str, old: Tensor, new: Tensor) -> Tensor:
        if old.numel() == 0:
            return new  # Prompts; their rows may yet be multiplied.
        buffer = self._buffers.get(name)
        rows, heads, num_old, width = old.shape
        num_slots = num_old + new.shape[2]
        is_mine = buffer is not None and buffer.data_ptr() == old.data_ptr()
        if buffer is None or not is_mine or num_slots > buffer.shape[2]:
            buffer = old.new_empty(rows, heads, max(self._num_slots, num_slots), width)
            buffer[:, :, :num_old] = old
            self._buffers[name] = buffer
        buffer[:, :, num_old:num_slots] = new
        return buffer[:, :, :num_slots]


def _take(slots: Tensor, rows_R: Tensor, first_slot: int) -> Tensor:
    if first_slot == 0 or len(rows_R) != len(slots):
        return slots[rows_R]
    changing = slots[:, :, first_slot:]
    changing.copy_(changing[rows_R])
    return slots
