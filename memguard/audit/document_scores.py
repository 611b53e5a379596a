"""Numbers of one pass into one record a document, the base model's beside the model's."""

import io
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import parquet

from memguard.audit.cache import Numbers
from memguard.audit.extraction import Window, compute_type_token_ratio, count_needed_90
from memguard.audit.near_verbatim import NearVerbatim
from memguard.audit.probabilistic import GREEDY, NEVER, AttackCost, attack_cost
from memguard.audit.teacher_forcing import OnePass
from memguard.records import DocumentScore, write_atomically


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Verdicts:
    """What one model does with the main window of N documents."""

    num_correct: NDArray[np.int64]
    verbatim: NDArray[np.bool_]
    teacher_forced_90: NDArray[np.bool_]
    cost: AttackCost | None
    """None where no way to draw was asked for."""


def judge(windows: Sequence[Window], one_pass: OnePass, numbers: Numbers) -> Verdicts:
    """Decide what one pass shows of each document: matches and attack cost.

    Args:
        windows: ``[N]`` the main ones.
        one_pass: what was asked.
        numbers: the answers.
    """
    size_N = np.array([window.continuation_tokens for window in windows], dtype=np.int64)
    num_correct = numbers["num_correct"].astype(np.int64)
    verbatim = num_correct == size_N
    cost = None
    if one_pass.schemes:
        logprob_SN = np.stack([numbers[f"sampled.{i}"] for i in range(len(one_pass.schemes))])
        cost = attack_cost(logprob_SN, verbatim)
    return Verdicts(
        num_correct=num_correct,
        verbatim=verbatim,
        teacher_forced_90=num_correct >= count_needed_90(size_N),
        cost=cost,
    )


class DocumentScores(Sequence[DocumentScore]):
    """One record a document, made when it is looked at: a million of them take gigabytes."""

    def __init__(
        self,
        windows: Sequence[Window],
        one_pass: OnePass,
        model: Numbers,
        base: Numbers | None,
        *,
        near_verbatim: NearVerbatim | None = None,
        base_near_verbatim: NearVerbatim | None = None,
    ) -> None:
        """Take what was asked and answered.

        Args:
            windows: ``[N]`` the main ones.
            one_pass: what was asked.
            model: the model's answers.
            base: those of the model before training; None leaves its fields null.
            near_verbatim: what the model generates; None leaves its fields null.
            base_near_verbatim: what the model before training generates.
        """
        self._near, self._base_near = near_verbatim, base_near_verbatim
        self._windows, self._one_pass = windows, one_pass
        self._model, self._base = model, base
        self._ours = judge(windows, one_pass, model)
        self._theirs = None if base is None else judge(windows, one_pass, base)

    def __len__(self) -> int:
        return len(self._windows)

    @overload
    def __getitem__(self, index: int) -> DocumentScore: ...

    @overload
    def __getitem__(self, index: slice) -> list[DocumentScore]: ...

    def __getitem__(self, index: int | slice) -> DocumentScore | list[DocumentScore]:
        if isinstance(index, slice):
            return [self._build(number) for number in range(*index.indices(len(self)))]
        return self._build(range(len(self))[index])

    def _build(self, index: int) -> DocumentScore:
        window, model, ours = self._windows[index], self._model, self._ours
        document, margin = window.document, model["min_margin"][index]
        return DocumentScore(
            id=document.id,
            bucket=document.bucket,
            role=document.role,
            source=document.source,
            num_repetitions=document.num_repetitions,
            num_copies=document.num_copies,
            num_tokens=document.num_tokens,
            prefix_tokens=window.prefix_tokens,
            continuation_tokens=window.continuation_tokens,
            num_correct=int(ours.num_correct[index]),
            verbatim=bool(ours.verbatim[index]),
            teacher_forced_90=bool(ours.teacher_forced_90[index]),
            near_verbatim=_find_match(self._near, index),
            num_edits=_find_edits(self._near, index),
            greedy_margin=None if self._near is None else _or_none(self._near.min_gap_N[index]),
            first_divergence=int(model["first_divergence"][index]),
            extraction_strength=float(model["extraction_strength"][index]),
            longest_run=int(model["longest_run"][index]),
            logprob=float(model["logprob"][index]),
            min_margin=_or_none(margin),
            type_token_ratio=float(compute_type_token_ratio(window.continuation_ids)),
            argmax_type_token_ratio=float(model["argmax_type_token_ratio"][index]),
            attack_log10_queries=_find_cost(ours.cost, index),
            attack_scheme=_name_scheme(ours.cost, index, self._one_pass),
            **self._build_base(index),
        )

    def _build_base(self, index: int) -> dict[str, Any]:
        base, theirs = self._base, self._theirs
        if base is None or theirs is None:
            return {}
        return {
            "base_num_correct": int(theirs.num_correct[index]),
            "base_verbatim": bool(theirs.verbatim[index]),
            "base_teacher_forced_90": bool(theirs.teacher_forced_90[index]),
            "base_near_verbatim": _find_match(self._base_near, index),
            "base_first_divergence": int(base["first_divergence"][index]),
            "base_logprob": float(base["logprob"][index]),
            "base_extraction_strength": float(base["extraction_strength"][index]),
            "base_longest_run": int(base["longest_run"][index]),
            "base_attack_log10_queries": _find_cost(theirs.cost, index),
        }


def _find_match(near: NearVerbatim | None, index: int) -> bool | None:
    return None if near is None else bool(near.matched_N[index])


def _find_edits(near: NearVerbatim | None, index: int) -> int | None:
    if near is None or not np.isfinite(near.num_edits_N[index]):
        return None
    return int(near.num_edits_N[index])


def _or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _find_cost(cost: AttackCost | None, index: int) -> float | None:
    if cost is None or not np.isfinite(cost.log10_queries_N[index]):
        return None
    return float(cost.log10_queries_N[index])


def _name_scheme(cost: AttackCost | None, index: int, one_pass: OnePass) -> str | None:
    if cost is None or cost.scheme_N[index] == NEVER:
        return None
    number = int(cost.scheme_N[index])
    return "greedy" if number == GREEDY else one_pass.schemes[number].label


# Document scores to records.parquet.

SCHEMA_NAME = "memguard.scores/1"
_ROWS_AT_ONCE = 8192
_TYPES = {
    str: pyarrow.string(),
    int: pyarrow.int64(),
    float: pyarrow.float64(),
    bool: pyarrow.bool_(),
}


def build_schema() -> pyarrow.Schema:
    """Return the columns: the fields of `DocumentScore`, null only where it may be None."""
    fields = []
    for name, info in DocumentScore.model_fields.items():
        options = typing.get_args(info.annotation) or (info.annotation,)
        kinds = [option for option in options if option is not type(None)]
        # A Literal's arguments are its values, all of one type.
        kind = kinds[0] if isinstance(kinds[0], type) else type(kinds[0])
        fields.append(pyarrow.field(name, _TYPES[kind], nullable=type(None) in options))
    return pyarrow.schema(fields, metadata={"schema": SCHEMA_NAME})


def save_scores(scores: Sequence[DocumentScore], path: Path) -> None:
    """Write one row a document, whole or not at all; same scores, same bytes."""
    buffer, schema = io.BytesIO(), build_schema()
    with parquet.ParquetWriter(buffer, schema, compression="zstd") as writer:
        for first in range(0, max(len(scores), 1), _ROWS_AT_ONCE):
            rows = [score.model_dump() for score in scores[first : first + _ROWS_AT_ONCE]]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    write_atomically(path, buffer.getvalue())
