"""The report's tables: per bucket the model, its base, their difference, and that to the control.

    ProbeTable     results of one probe with one setting, [N] documents each
    Measure        one metric of a `ProbeTable` over the documents of each bucket
    BucketScores   the main table: the measures of the extraction probe, one row per bucket, with
                   every extraction rate

Every metric has a change from the base model: fine-tuned minus base on the same documents.
Near-duplicates are less evidence than different texts, in every interval.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit.cache import ScoreMatrix
from memguard.audit.document_scores import DocumentScores, ModelResults, describe_window
from memguard.audit.extraction import AuditDocument, Window, list_clusters
from memguard.audit.metrics import METRICS, Estimator, Metric
from memguard.audit.near_verbatim import NearVerbatim
from memguard.audit.probabilistic import summarise_attack_cost
from memguard.audit.probes.generation import METRICS as GENERATED
from memguard.audit.probes.generation import GenerationProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import compute_difference
from memguard.audit.suite import Suite
from memguard.records import (
    NUM_RISK_QUERIES,
    AttackCostBucket,
    AttackCostScores,
    AttackedBucket,
    BucketScores,
    Interval,
    Measure,
    MeasuredBucket,
    ModelScores,
    Rate,
    RiskName,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProbeTable:
    """Results of one probe with one setting; all arrays are [N] documents, NaN where missing."""

    probe: str
    version: int
    parameters: Mapping[str, Any]
    continuation_tokens: int
    """Tokens of a continuation, the largest value of a length."""
    model: Mapping[str, NDArray[np.float64]]
    """Values by metric."""
    base: Mapping[str, NDArray[np.float64]] | None
    """Values of the model before training."""

    def find_bounds(self, metric: Metric) -> tuple[float, float] | None:
        """Return the smallest and largest value of a metric; None if there are none."""
        return (0.0, float(self.continuation_tokens)) if metric.is_length else metric.bounds


def list_tables(
    windows: Sequence[Window],
    suite: Suite,
    model: ModelResults,
    base: ModelResults | None,
) -> list[ProbeTable]:
    """Return the tables of the extraction probe, each cell of the grid, and each decoding method.

    Args:
        windows: ``[N]`` main windows.
        suite: the probes.
        model: results of the model.
        base: results of the model before training.
    """
    probe = suite.extraction
    results = [result for result in (model, base) if result is not None]
    size_N = np.array([window.continuation_tokens for window in windows], dtype=np.int64)
    values = [describe_window(result.teacher_forced, size_N) for result in results]
    if isinstance(model.near_verbatim, NearVerbatim):
        values = [
            {"near_verbatim": result.near_verbatim_N, **metrics}
            for result, metrics in zip(results, values, strict=True)
        ]
    main = ProbeTable(
        probe=probe.name,
        version=probe.VERSION,
        parameters=probe.model_dump(mode="json", exclude={"name"}),
        continuation_tokens=probe.continuation_tokens,
        model=values[0],
        base=None if base is None else values[1],
    )
    tables = [main]
    grid, generation = suite.find(GridProbe), suite.find(GenerationProbe)
    for index, cell in enumerate(() if grid is None else grid.cells):
        size_N = np.full(len(windows), cell.continuation_tokens, dtype=np.int64)
        values = [describe_window(r.teacher_forced, size_N, f"grid.{index}.") for r in results]
        tables.append(
            ProbeTable(
                probe="grid",
                version=GridProbe.VERSION,
                parameters=cell.model_dump(mode="json"),
                continuation_tokens=cell.continuation_tokens,
                model=values[0],
                base=None if base is None else values[1],
            )
        )
    if generation is not None and model.written is not None:
        tables += _list_generated(
            generation,
            model.written,
            None if base is None else base.written,
            probe.continuation_tokens,
        )
    return tables


def _list_generated(
    probe: GenerationProbe,
    model: ScoreMatrix,
    base: ScoreMatrix | None,
    continuation_tokens: int,
) -> list[ProbeTable]:
    """Return a table for each decoding method."""

    def pick(numbers: ScoreMatrix, decoding: str) -> dict[str, NDArray[np.float64]]:
        return {name: numbers[f"{decoding}.{name}"] for name in GENERATED}

    return [
        ProbeTable(
            probe=probe.name,
            version=probe.VERSION,
            parameters={"decoding": label},
            continuation_tokens=continuation_tokens,
            model=pick(model, decoding),
            base=None if base is None else pick(base, decoding),
        )
        for decoding, label in probe.decodings.items()
    ]


def build_measures(
    tables: Sequence[ProbeTable],
    documents: Sequence[AuditDocument],
    outlines: Sequence[BucketOutline],
) -> list[Measure]:
    """Return a record for each metric of each table, with the buckets in the report's order.

    Args:
        tables: tables of all probes.
        documents: N documents, in the tables' order.
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
                    Estimator(kind=kind, bounds=table.find_bounds(kind), cluster_N=cluster_N),
                    outline,
                    value_N,
                    base_N,
                    name_N == outline.bucket,
                    None if outline.role == "control" else control_N,
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
    estimator: Estimator,
    outline: BucketOutline,
    value_N: NDArray[np.float64],
    base_N: NDArray[np.float64] | None,
    here_N: NDArray[np.bool_],
    control_N: NDArray[np.bool_] | None,
) -> MeasuredBucket:
    known_N = here_N & ~np.isnan(value_N)
    num_documents, num_missing = int(known_N.sum()), int(here_N.sum() - known_N.sum())
    is_single = len(np.unique(estimator.cluster_N[known_N])) < 2
    if estimator.kind.is_confidential and is_single:
        return MeasuredBucket(
            bucket=outline.bucket,
            num_documents=num_documents,
            num_missing=num_missing,
            model=None,
            base=None,
            change_from_base=None,
            minus_control=None,
            change_from_base_minus_control=None,
        )
    both_N = known_N if base_N is None else known_N & ~np.isnan(base_N)
    minus_control = change_from_base = excess = None
    if control_N is not None:
        other_N = control_N & ~np.isnan(value_N)
        minus_control = estimator.subtract_control(value_N, known_N, other_N)
    if base_N is not None and both_N.any():
        change_from_base = estimator.compute_change(value_N, base_N, both_N)
        if control_N is not None:
            other_N = control_N & ~np.isnan(value_N - base_N)
            excess = estimator.subtract_changes(value_N, base_N, both_N, other_N)
    return MeasuredBucket(
        bucket=outline.bucket,
        num_documents=num_documents,
        num_missing=num_missing,
        model=estimator.estimate(value_N, known_N),
        base=None if base_N is None else estimator.estimate(base_N, both_N),
        change_from_base=change_from_base,
        minus_control=minus_control,
        change_from_base_minus_control=excess,
    )


def build_attack_cost(
    scores: DocumentScores, outlines: Sequence[BucketOutline], cluster_N: NDArray[np.int64]
) -> list[AttackCostBucket]:
    """Return the attack cost of each bucket; empty if the suite has no sampling scheme.

    Args:
        scores: columns of all documents.
        outlines: the buckets.
        cluster_N: near-duplicate clusters of the documents.
    """
    ours, theirs = scores["attack_log10_queries"], scores["base_attack_log10_queries"]
    # Infinite, not NaN, if no scheme can generate the document.
    if np.isnan(ours).all():
        return []
    has_base = not np.isnan(theirs).all()
    here = {outline.bucket: scores["bucket"] == outline.bucket for outline in outlines}
    return [
        AttackCostBucket(
            bucket=bucket,
            model=summarise_attack_cost(ours[here_N], cluster_N[here_N]),
            base=summarise_attack_cost(theirs[here_N], cluster_N[here_N]) if has_base else None,
        )
        for bucket, here_N in here.items()
    ]


def build_buckets(
    measures: Sequence[Measure],
    scores: DocumentScores,
    outlines: Sequence[BucketOutline],
    tiny_margin_N: NDArray[np.bool_],
    *,
    attack_cost: Sequence[AttackCostBucket] = (),
    attacks: Sequence[AttackedBucket] = (),
) -> list[BucketScores]:
    """Return the report's main table, one row per outline, in their order.

    Args:
        measures: measures of all probes, from `build_measures`.
        scores: columns of all documents.
        outlines: the buckets.
        tiny_margin_N: whether a document's result depends on a tiny margin.
        attack_cost: attack cost of each bucket; empty if it was not measured.
        attacks: results of the attacks that ran.
    """
    main = [measure for measure in measures if measure.probe == "extraction"]
    costs = {cost.bucket: cost for cost in attack_cost}
    rows = []
    for index, outline in enumerate(outlines):
        rates = [row.any_verbatim for row in attacks if row.bucket == outline.bucket]
        best = max(rates, key=lambda rate: rate.rate or 0.0, default=None)
        measured = {measure.metric: measure.buckets[index] for measure in main}
        cost = costs.get(outline.bucket)
        rows.append(_build_bucket(outline, measured, scores, tiny_margin_N, cost, best))
    control = next((row for row in rows if row.role == "control"), None)
    if control is None:
        return rows
    return [
        row
        if row is control
        else row.model_copy(update={"minus_control": _subtract(row.risks, control.risks)})
        for row in rows
    ]


def _subtract(
    risks: Mapping[RiskName, Rate], control: Mapping[RiskName, Rate]
) -> dict[RiskName, Interval]:
    differences = {
        name: compute_difference(rate, control[name])
        for name, rate in risks.items()
        if name in control
    }
    return {name: difference for name, difference in differences.items() if difference is not None}


def _build_bucket(
    outline: BucketOutline,
    measured: Mapping[str, MeasuredBucket],
    scores: DocumentScores,
    tiny_margin_N: NDArray[np.bool_],
    cost: AttackCostBucket | None,
    best_attack: Rate | None,
) -> BucketScores:
    here_N = scores["bucket"] == outline.bucket
    num_documents = int(here_N.sum())
    model = _build_model_scores(
        {metric: row.model for metric, row in measured.items()},
        scores["first_divergence"][here_N],
    )
    base = None
    # The base model is comparable only if it scored the same documents as the model.
    if num_documents and not np.isnan(scores["base_verbatim"][here_N]).any():
        base = _build_model_scores(
            {metric: row.base for metric, row in measured.items()},
            scores["base_first_divergence"][here_N],
        )
    base_cost = None if cost is None else cost.base
    strength = measured["extraction_strength"].model
    return BucketScores(
        **asdict(outline),
        num_documents=num_documents,
        model=model,
        base=base,
        mean_extraction_strength=strength.value if isinstance(strength, Interval) else None,
        mean_type_token_ratio=_mean(scores["type_token_ratio"][here_N]),
        mean_argmax_type_token_ratio=_mean(scores["argmax_type_token_ratio"][here_N]),
        num_tiny_margin=int(tiny_margin_N[here_N].sum()),
        risks=_list_risks(model, None if cost is None else cost.model, best_attack),
        base_risks={} if base is None else _list_risks(base, base_cost, None),
        minus_control={},
    )


def _build_model_scores(
    values: Mapping[str, Rate | Interval | None], divergence_N: NDArray[np.float64]
) -> ModelScores:
    near = values.get("near_verbatim")
    if isinstance(near, Rate) and near.num_documents < len(divergence_N):
        near = None  # Only the other model generated all documents.
    median = float(np.median(divergence_N)) if len(divergence_N) else None
    return ModelScores.model_validate(
        {
            "verbatim": values["verbatim"],
            "near_verbatim": near,
            "teacher_forced_90": values["teacher_forced_90"],
            "mean_token_accuracy": values["token_accuracy"],
            "median_first_divergence": median,
            "mean_logprob": values["logprob"],
        }
    )


def _list_risks(
    scores: ModelScores, cost: AttackCostScores | None, best_attack: Rate | None
) -> dict[RiskName, Rate]:
    risks: dict[RiskName, Rate | None] = {
        "verbatim": scores.verbatim,
        "near_verbatim": scores.near_verbatim,
        "attack_cost": None if cost is None else cost.within[NUM_RISK_QUERIES],
        "attack": best_attack,
    }
    return {name: rate for name, rate in risks.items() if rate is not None}


def _mean(values_N: NDArray[np.float64]) -> float | None:
    return math.fsum(values_N) / len(values_N) if len(values_N) else None
