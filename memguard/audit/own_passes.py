"""Membership scores that take a pass of their own: lower case, a reference model, ReCaLL.

    lowercase   the text in lower case, encoded anew
    reference   the same tokens, by another model with the same vocabulary
    recall      the same tokens, after control documents that stand before them in the row

Each gives the mean log-probability of a token; documents it cannot be asked of have none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memguard.audit.extraction import Window
from memguard.audit.membership_scores import (
    compute_lowercase,
    compute_recall,
    compute_reference,
)
from memguard.audit.one_pass import Decode
from memguard.audit.passages import Passage
from memguard.seeds import derive_generator

_SHOT_TOKENS = 128
"""Of a control document that is put before a text; the first of it."""
_FEWEST_SHOT_TOKENS = 16

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, as training encodes a plain text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """The tokenizer, as far as an audit needs it."""

    decode: Decode
    encode: Encode


def plan_plain(window: Window, *, max_tokens: int | None) -> Passage | None:
    """Return the window's own tokens, every one scored that has one before it.

    None where the model has not the positions: of fewer tokens another number would come out.
    """
    if max_tokens is not None and len(window.input_ids) > max_tokens + 1:
        return None
    return _score_after(window.input_ids, 1)


def plan_lowercase(window: Window, codec: Codec, *, max_tokens: int | None) -> Passage | None:
    """Return the window's text in lower case; None for conversations, whose marks would break.

    Args:
        window: of the document.
        codec: decodes and encodes.
        max_tokens: positions the model has, which lower case may exceed: the end is then cut off.
    """
    if window.document.format != "text":
        return None
    ids = np.asarray(codec.encode(codec.decode(window.input_ids).lower()), dtype=np.int32)
    return _score_after(ids if max_tokens is None else ids[: max_tokens + 1], 1)


def choose_shots(windows: Sequence[Window], *, count: int, seed: int) -> list[int]:
    """Return which control documents stand before the others in ReCaLL; none is scored by it."""
    controls = [i for i, window in enumerate(windows) if window.document.role == "control"]
    # Half of the control must be left to compare with.
    count = min(count, len(controls) // 2)
    order = derive_generator(seed, "recall shots").permutation(len(controls))
    return [controls[index] for index in order[:count]]


def plan_recall(
    window: Window, shots: Sequence[Window], *, max_tokens: int | None
) -> Passage | None:
    """Return the shots and then the window's tokens, which alone are scored.

    Args:
        window: of the document.
        shots: of control documents.
        max_tokens: positions the model has; None where it states none.
    """
    before = np.concatenate([np.zeros(0, np.int32), *(s.input_ids[:_SHOT_TOKENS] for s in shots)])
    if max_tokens is not None:
        before = before[: max(0, max_tokens + 1 - len(window.input_ids))]
    if len(before) < _FEWEST_SHOT_TOKENS:
        return None
    return _score_after(np.concatenate([before, window.input_ids]), len(before) + 1)


def compare_passes(
    plain_N: NDArray[np.float64], own: Mapping[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.float64]]:
    """Return the scores ``[N]`` from mean log-probabilities ``[N]`` of the plain and own passes."""
    formulas = {
        "lowercase": lambda other, plain: compute_lowercase(-other, -plain),
        "reference": lambda other, plain: compute_reference(-other, -plain),
        "recall": compute_recall,
    }
    return {
        name: np.array(
            [
                formulas[name](float(a), float(b)) if np.isfinite(a) and np.isfinite(b) else np.nan
                for a, b in zip(other_N, plain_N, strict=True)
            ]
        )
        for name, other_N in own.items()
    }


def _score_after(ids: NDArray[np.int32], first_label: int) -> Passage | None:
    if len(ids) <= first_label:
        return None
    return Passage(input_ids=ids, first_label=first_label, first_choice=len(ids))
