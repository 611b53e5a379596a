"""Sizes of a model under the names that families have for them; no torch.

Families have num_key_value_heads, num_kv_heads or multi_query (one head), and intermediate_size,
ffn_dim, ffn_hidden_size or n_inner.
"""

from collections.abc import Callable
from typing import Any

Get = Callable[[str], Any]
"""Returns a field of a configuration; None if it has no such field."""

# Families that have a key head for each query head, whatever fields their configuration has.
_UNGROUPED = frozenset({"falcon", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "persimmon"})
_FFN_WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
# Families whose FFN is four times as wide as the residual stream unless their field is set.
_FOUR_TIMES = {"gpt2": "n_inner", "gpt_bigcode": "n_inner", "falcon": "ffn_hidden_size"}


def read_num_kv_heads(get: Get) -> Any:
    """Return the number of key/value heads; None if it is that of the query heads."""
    if get("new_decoder_architecture"):
        return get("num_kv_heads")
    if get("multi_query"):
        return 1
    return None if get("model_type") in _UNGROUPED else get("num_key_value_heads")


def read_ffn_width(get: Get) -> Any:
    """Return the width of the FFN; None if no field has it."""
    field = _FOUR_TIMES.get(get("model_type"))
    if field is not None:
        return get(field) or 4 * get("hidden_size")
    return next((get(name) for name in _FFN_WIDTHS if get(name) is not None), None)
