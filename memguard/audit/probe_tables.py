"""Numbers of one pass as the tables of its probes, and the attack cost of each bucket."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.audit.document_scores import judge
from memguard.audit.extraction import Window, count_needed_90
from memguard.audit.grid import GridProbe
from memguard.audit.measures import ProbeTable
from memguard.audit.numbers import Numbers
from memguard.audit.one_pass import OnePass
from memguard.audit.probabilistic import summarise_attack_cost
from memguard.audit.selection import BucketOutline
from memguard.records import AttackCostBucket


def list_tables(
    windows: Sequence[Window],
    one_pass: OnePass,
    model: Numbers,
    base: Numbers | None,
    *,
    near_verbatim: NDArray[np.float64] | None = None,
    base_near_verbatim: NDArray[np.float64] | None = None,
) -> list[ProbeTable]:
    """Return the extraction probe's table and one for each cell of the grid.

    Args:
        windows: ``[N]`` the main ones.
        one_pass: what was asked.
        model: the model's answers.
        base: those of the model before training.
        near_verbatim: ``[N]`` 1 where the model's greedy text is; None where none was generated.
        base_near_verbatim: the same of the model before training.
    """
    probe = one_pass.extraction
    size_N = np.array([window.continuation_tokens for window in windows], dtype=np.int64)
    ours = _describe(model, "", size_N)
    theirs = None if base is None else _describe(base, "", size_N)
    if near_verbatim is not None:
        ours = {"near_verbatim": near_verbatim, **ours}
        if theirs is not None:
            unknown_N = np.full(len(windows), np.nan)
            known_N = unknown_N if base_near_verbatim is None else base_near_verbatim
            theirs = {"near_verbatim": known_N, **theirs}
    tables = [
        ProbeTable(
            probe=probe.name,
            version=probe.VERSION,
            parameters=probe.model_dump(mode="json", exclude={"name"}),
            model=ours,
            base=theirs,
        )
    ]
    for index, cell in enumerate(one_pass.cells):
        size_N = np.full(len(windows), cell.continuation_tokens, dtype=np.int64)
        place = f"grid.{index}."
        tables.append(
            ProbeTable(
                probe="grid",
                version=GridProbe.VERSION,
                parameters=cell.model_dump(mode="json"),
                model=_describe(model, place, size_N),
                base=None if base is None else _describe(base, place, size_N),
            )
        )
    return tables


def _describe(
    numbers: Numbers, place: str, size_N: NDArray[np.int64]
) -> dict[str, NDArray[np.float64]]:
    """Return the metrics of one window of each document; NaN where it is too short for it."""
    correct_N = numbers[f"{place}num_correct"]
    missing_N = np.isnan(correct_N)
    return {
        "verbatim": np.where(missing_N, np.nan, correct_N == size_N),
        "teacher_forced_90": np.where(missing_N, np.nan, correct_N >= count_needed_90(size_N)),
        "token_accuracy": correct_N / size_N,
        "extraction_strength": numbers[f"{place}extraction_strength"],
        "first_divergence": numbers[f"{place}first_divergence"],
        "longest_run": numbers[f"{place}longest_run"],
        "logprob": numbers[f"{place}logprob"] / size_N,
    }


def build_attack_cost(
    windows: Sequence[Window],
    one_pass: OnePass,
    model: Numbers,
    base: Numbers | None,
    outlines: Sequence[BucketOutline],
) -> list[AttackCostBucket]:
    """Return the attack cost of each bucket; none where no way to draw was asked for."""
    ours = judge(windows, one_pass, model).cost
    if ours is None:
        return []
    theirs = None if base is None else judge(windows, one_pass, base).cost
    name_N = np.array([window.document.bucket for window in windows], dtype=object)
    rows = []
    for outline in outlines:
        here_N = name_N == outline.bucket
        before = None
        if theirs is not None:
            before = summarise_attack_cost(theirs.log10_queries_N[here_N])
        rows.append(
            AttackCostBucket(
                bucket=outline.bucket,
                model=summarise_attack_cost(ours.log10_queries_N[here_N]),
                base=before,
            )
        )
    return rows
