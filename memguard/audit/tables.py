"""Any probe's numbers as rows of the report: for each bucket the model, its base, the difference.

The counterfactual is there for every number: fine-tuned minus base on the same documents, which is
what this training added (after Zhang et al. 2021, with the base model for one that did not see the
document). Intervals of means take a cluster of near-duplicates as one piece of evidence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit.cache import Numbers
from memguard.audit.document_scores import judge
from memguard.audit.extraction import AuditDocument, Window, count_needed_90, list_clusters
from memguard.audit.probabilistic import summarise_attack_cost
from memguard.audit.probes import GridProbe
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import (
    clopper_pearson,
    compute_difference,
    compute_mean,
    compute_mean_difference,
    compute_paired_difference,
)
from memguard.audit.teacher_forcing import OnePass
from memguard.records import AttackCostBucket, Interval, Measure, MeasuredBucket, Rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """What a number is."""

    meaning: str
    unit: str
    is_rate: bool = False
    """A document has it or not: 1 or 0."""
    bounds: tuple[float, float] | None = None
    higher_is_better: bool = False


_SHARE = (0.0, 1.0)
METRICS: dict[str, Metric] = {
    "verbatim": Metric(meaning="All tokens come out right.", unit="documents", is_rate=True),
    "near_verbatim": Metric(
        meaning="Greedy text within 10 % edits of the true one.", unit="documents", is_rate=True
    ),
    "teacher_forced_90": Metric(
        meaning="At least 90 % of the tokens are the first choice, given the true text before.",
        unit="documents",
        is_rate=True,
    ),
    "token_accuracy": Metric(
        meaning="Tokens that are the first choice, given everything true before.",
        unit="share",
        bounds=_SHARE,
    ),
    "extraction_strength": Metric(
        meaning="Share at the end that comes out without a wrong token.",
        unit="share",
        bounds=_SHARE,
    ),
    "first_divergence": Metric(
        meaning="Tokens that greedy decoding gets right before its first wrong one.",
        unit="tokens",
    ),
    "longest_run": Metric(meaning="Most right tokens in a row.", unit="tokens"),
    "logprob": Metric(meaning="Mean log-probability of a token.", unit="nats"),
    "rouge_l": Metric(
        meaning="Longest common subsequence with what was written (ROUGE-L F1).",
        unit="share",
        bounds=_SHARE,
    ),
    "longest_copied_run": Metric(
        meaning="Longest run of the true text in what was written.", unit="tokens"
    ),
    "edit_distance": Metric(
        meaning="Edits from what was written to the true text, over its length.",
        unit="share",
        bounds=_SHARE,
        higher_is_better=True,
    ),
    "bleu_above_0.75": Metric(
        meaning="BLEU above 0.75 (approximate memorization, Ippolito et al. 2022).",
        unit="documents",
        is_rate=True,
    ),
    "type_token_ratio": Metric(
        meaning="Distinct tokens of what was written; low where it repeats itself.",
        unit="share",
        bounds=_SHARE,
        higher_is_better=True,
    ),
}
"""Every number by its name."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProbeTable:
    """Numbers of one probe with one setting; all arrays are [N] documents, NaN where missing."""

    probe: str
    version: int
    parameters: Mapping[str, Any]
    model: Mapping[str, NDArray[np.float64]]
    """By metric."""
    base: Mapping[str, NDArray[np.float64]] | None
    """The same of the model before training."""


def build_measures(
    tables: Sequence[ProbeTable],
    documents: Sequence[AuditDocument],
    outlines: Sequence[BucketOutline],
) -> list[Measure]:
    """Return a record for each number of each table, buckets in the report's order.

    Args:
        tables: of all probes.
        documents: N, in the tables' order.
        outlines: the buckets.
    """
    name_N = np.array([document.bucket for document in documents], dtype=object)
    cluster_N = list_clusters(documents)
    controls = [outline.bucket for outline in outlines if outline.role == "control"]
    control_N = name_N == controls[0] if controls else None
    measures = []
    for table in tables:
        for metric, value_N in table.model.items():
            base_N = None if table.base is None else table.base[metric]
            kind = METRICS[metric]
            buckets = [
                _measure(
                    kind,
                    outline,
                    value_N,
                    base_N,
                    name_N == outline.bucket,
                    None if outline.role == "control" else control_N,
                    cluster_N,
                )
                for outline in outlines
            ]
            measures.append(
                Measure(
                    probe=table.probe,
                    version=table.version,
                    parameters=dict(table.parameters),
                    metric=metric,
                    meaning=kind.meaning,
                    unit=kind.unit,
                    higher_is_better=kind.higher_is_better,
                    buckets=buckets,
                )
            )
    return measures


def _measure(
    kind: Metric,
    outline: BucketOutline,
    value_N: NDArray[np.float64],
    base_N: NDArray[np.float64] | None,
    here_N: NDArray[np.bool_],
    control_N: NDArray[np.bool_] | None,
    cluster_N: NDArray[np.int64],
) -> MeasuredBucket:
    known_N = here_N & ~np.isnan(value_N)
    both_N = known_N if base_N is None else known_N & ~np.isnan(base_N)
    counterfactual = excess = None
    if base_N is not None and both_N.any():
        counterfactual = compute_paired_difference(
            value_N[both_N], base_N[both_N], clusters=cluster_N[both_N]
        )
        gain_N = value_N - base_N
        # Gains of shares and rates are no rates themselves.
        excess = _subtract_control(gain_N, both_N, control_N, cluster_N)
    return MeasuredBucket(
        bucket=outline.bucket,
        num_documents=int(known_N.sum()),
        num_missing=int(here_N.sum() - known_N.sum()),
        model=_estimate(kind, value_N, known_N, cluster_N),
        base=None if base_N is None else _estimate(kind, base_N, both_N, cluster_N),
        counterfactual=counterfactual,
        minus_control=_compare(kind, value_N, known_N, control_N, cluster_N),
        counterfactual_minus_control=excess,
    )


def _compare(
    kind: Metric,
    value_N: NDArray[np.float64],
    known_N: NDArray[np.bool_],
    control_N: NDArray[np.bool_] | None,
    cluster_N: NDArray[np.int64],
) -> Interval | None:
    if not kind.is_rate:
        return _subtract_control(value_N, known_N, control_N, cluster_N)
    if control_N is None:
        return None
    other_N = control_N & ~np.isnan(value_N)
    if not known_N.any() or not other_N.any():
        return None
    ours, theirs = (_estimate(kind, value_N, where, cluster_N) for where in (known_N, other_N))
    assert isinstance(ours, Rate), "a rate"
    assert isinstance(theirs, Rate), "a rate"
    return compute_difference(ours, theirs)


def _subtract_control(
    value_N: NDArray[np.float64],
    known_N: NDArray[np.bool_],
    control_N: NDArray[np.bool_] | None,
    cluster_N: NDArray[np.int64],
) -> Interval | None:
    """Return the difference of two means; None without a control or documents in both."""
    if control_N is None:
        return None
    other_N = control_N & ~np.isnan(value_N)
    if not known_N.any() or not other_N.any():
        return None
    return compute_mean_difference(
        value_N[known_N],
        value_N[other_N],
        first_clusters=cluster_N[known_N],
        second_clusters=cluster_N[other_N],
    )


def _estimate(
    kind: Metric,
    value_N: NDArray[np.float64],
    where_N: NDArray[np.bool_],
    cluster_N: NDArray[np.int64],
) -> Rate | Interval | None:
    if kind.is_rate:
        return clopper_pearson(int(value_N[where_N].sum()), int(where_N.sum()))
    return compute_mean(value_N[where_N], bounds=kind.bounds, clusters=cluster_N[where_N])


# Numbers of one pass as the tables of its probes, and the attack cost of each bucket.


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
