"""Numbers of one pass as the tables of its probes, and the attack cost of each bucket."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.audit.document_scores import judge
from memguard.audit.extraction import Window
from memguard.audit.grid import GridProbe
from memguard.audit.measures import ProbeTable
from memguard.audit.numbers import Numbers
from memguard.audit.one_pass import OnePass
from memguard.audit.probabilistic import summarise_attack_cost
from memguard.audit.selection import BucketOutline
from memguard.records import AttackCostBucket


def list_tables(
    windows: Sequence[Window], one_pass: OnePass, model: Numbers, base: Numbers | None
) -> list[ProbeTable]:
    """Return the extraction probe's table and one for each cell of the grid."""
    probe = one_pass.extraction
    size_N = np.array([window.continuation_tokens for window in windows], dtype=np.float64)
    tables = [
        ProbeTable(
            probe=probe.name,
            version=probe.VERSION,
            parameters=probe.model_dump(mode="json", exclude={"name"}),
            model=_describe(model, "", size_N, one_pass),
            base=None if base is None else _describe(base, "", size_N, one_pass),
        )
    ]
    for index, cell in enumerate(one_pass.cells):
        size_N = np.full(len(windows), float(cell.continuation_tokens))
        place = f"grid.{index}."
        tables.append(
            ProbeTable(
                probe="grid",
                version=GridProbe.VERSION,
                parameters=cell.model_dump(mode="json"),
                model=_describe(model, place, size_N, one_pass),
                base=None if base is None else _describe(base, place, size_N, one_pass),
            )
        )
    return tables


def _describe(
    numbers: Numbers, place: str, size_N: NDArray[np.float64], one_pass: OnePass
) -> dict[str, NDArray[np.float64]]:
    """Return the metrics of one window of each document; NaN where it is too short for it."""
    correct_N = numbers[f"{place}num_correct"]
    needed = {size: one_pass.extraction.num_needed(int(size)) for size in np.unique(size_N)}
    needed_N = np.array([needed[size] for size in size_N], dtype=np.float64)
    missing_N = np.isnan(correct_N)
    return {
        "verbatim": np.where(missing_N, np.nan, correct_N == size_N),
        "near_verbatim": np.where(missing_N, np.nan, correct_N >= needed_N),
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
