"""What a tokenizer does of its own: BOS, a token of unknown text, merges dropped at random."""

import copy
from collections.abc import Sequence
from typing import Any


def find_bos(tokenizer: Any) -> int | None:
    """Return the BOS; None if it is also the EOS, and the tokenizer does not add it."""
    if tokenizer is None or tokenizer.bos_token_id is None:
        return None
    bos: int = tokenizer.bos_token_id
    is_one = bos != tokenizer.eos_token_id or tokenizer("a")["input_ids"][:1] == [bos]
    return bos if is_one else None


def count_more_bos(ids: Sequence[int], bos: int | None) -> int:
    """Return how many of the BOS with which a document begins are one too many."""
    others = (place for place, id_ in enumerate(ids) if id_ != bos)
    return max(next(others, 1) - 1, 0)


def find_unknown(tokenizer: Any) -> int | None:
    """Return the token of unknown text; None if there is none, or it also ends documents."""
    if tokenizer is None or tokenizer.unk_token_id == tokenizer.eos_token_id:
        return None
    unknown: int | None = tokenizer.unk_token_id
    return unknown


def find_dropout(tokenizer: Any) -> float:
    """Return the share of merges that a tokenizer drops at random."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    return getattr(model, "dropout", None) or 0.0


def without_dropout(tokenizer: Any) -> Any:
    """Return the tokenizer, or a copy that keeps all merges: equal texts have equal tokens."""
    if find_dropout(tokenizer):
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.backend_tokenizer.model.dropout = None
    return tokenizer
