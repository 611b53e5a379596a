"""Document scores into the report's table: a row a bucket, every rate of extraction."""

import statistics
from array import array
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import clopper_pearson, compute_difference, compute_mean
from memguard.records import (
    NUM_RISK_QUERIES,
    AttackCostBucket,
    AttackedBucket,
    BucketScores,
    DocumentScore,
    Interval,
    ModelScores,
    Rate,
    RiskName,
)


def build_buckets(
    scores: Sequence[DocumentScore],
    outlines: Sequence[BucketOutline],
    tiny_margin_ids: frozenset[str],
    cluster_N: NDArray[np.int64],
    *,
    attack_cost: Sequence[AttackCostBucket] = (),
    attacks: Sequence[AttackedBucket] = (),
) -> list[BucketScores]:
    """Return the report's table, one row an outline, in their order.

    Args:
        scores: [N] documents.
        outlines: the buckets.
        tiny_margin_ids: documents whose verdict hangs on a tiny margin.
        cluster_N: [N] near-duplicate clusters.
        attack_cost: of each bucket; empty where it was not measured.
        attacks: those that ran.
    """
    groups = {outline.bucket: _Group() for outline in outlines}
    for score, cluster in zip(scores, cluster_N.tolist(), strict=True):
        assert score.bucket in groups, "a score belongs to no outlined bucket"
        groups[score.bucket].add(score, score.id in tiny_margin_ids, cluster)
    costs = {cost.bucket: cost for cost in attack_cost}
    # A bucket without documents cannot tell.
    generated, base_generated = (
        any(one.accuracy and one.is_generated for one in verdicts)
        for verdicts in (
            [group.model for group in groups.values()],
            [group.base for group in groups.values()],
        )
    )
    rows = []
    for outline in outlines:
        cost = costs.get(outline.bucket)
        best = [one.any_verbatim for one in attacks if one.bucket == outline.bucket]
        rows.append(
            _build_bucket(
                outline,
                groups[outline.bucket],
                None if cost is None else cost.model.within[NUM_RISK_QUERIES],
                None if cost is None or cost.base is None else cost.base.within[NUM_RISK_QUERIES],
                max(best, key=lambda rate: rate.rate or 0.0, default=None),
                generated=generated,
                base_generated=base_generated,
            )
        )
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
    return {name: one for name, one in differences.items() if one is not None}


class _Verdicts:
    """What one model did with the documents of a bucket, a few bytes each."""

    def __init__(self) -> None:
        self.num_verbatim = self.num_near_verbatim = self.num_teacher_forced_90 = 0
        self.is_generated = True
        self.accuracy, self.logprob = array("d"), array("d")
        self.divergence = array("q")

    def add(
        self,
        *,
        correct: int,
        verbatim: bool,
        near: bool | None,
        teacher_forced_90: bool,
        divergence: int,
        logprob: float,
        size: int,
    ) -> None:
        self.num_verbatim += verbatim
        self.num_near_verbatim += bool(near)
        self.is_generated &= near is not None
        self.num_teacher_forced_90 += teacher_forced_90
        self.accuracy.append(correct / size)
        self.logprob.append(logprob / size)
        self.divergence.append(divergence)


class _Group:
    """The documents of one bucket."""

    def __init__(self) -> None:
        self.model, self.base = _Verdicts(), _Verdicts()
        self.strength, self.ratio, self.argmax_ratio = array("d"), array("d"), array("d")
        self.cluster = array("q")
        self.num_documents = self.num_tiny_margin = 0

    def add(self, score: DocumentScore, is_tiny: bool, cluster: int) -> None:
        """Take one document."""
        self.num_documents += 1
        self.num_tiny_margin += is_tiny
        self.cluster.append(cluster)
        self.strength.append(score.extraction_strength)
        self.ratio.append(score.type_token_ratio)
        self.argmax_ratio.append(score.argmax_type_token_ratio)
        size = score.continuation_tokens
        self.model.add(
            correct=score.num_correct,
            verbatim=score.verbatim,
            near=score.near_verbatim,
            teacher_forced_90=score.teacher_forced_90,
            divergence=score.first_divergence,
            logprob=score.logprob,
            size=size,
        )
        if score.base_num_correct is None:
            return
        assert score.base_first_divergence is not None, "the base scored it or did not"
        assert score.base_logprob is not None, "the base scored it or did not"
        self.base.add(
            correct=score.base_num_correct,
            verbatim=bool(score.base_verbatim),
            near=score.base_near_verbatim,
            teacher_forced_90=bool(score.base_teacher_forced_90),
            divergence=score.base_first_divergence,
            logprob=score.base_logprob,
            size=size,
        )


def _build_bucket(
    outline: BucketOutline,
    group: _Group,
    within: Rate | None,
    base_within: Rate | None,
    best_attack: Rate | None,
    *,
    generated: bool,
    base_generated: bool,
) -> BucketScores:
    model = _build_model_scores(group.model, group.cluster, generated)
    # Of a base that did not score all of them, the numbers would not stand beside the model's.
    has_base = 0 < len(group.base.accuracy) == group.num_documents
    base = _build_model_scores(group.base, group.cluster, base_generated) if has_base else None
    return BucketScores(
        bucket=outline.bucket,
        role=outline.role,
        num_repetitions=outline.num_repetitions,
        num_documents=group.num_documents,
        num_too_short=outline.num_too_short,
        num_cut_too_short=outline.num_cut_too_short,
        num_nothing_supervised=outline.num_nothing_supervised,
        num_not_sampled=outline.num_not_sampled,
        model=model,
        base=base,
        mean_extraction_strength=_mean(group.strength),
        mean_type_token_ratio=_mean(group.ratio),
        mean_argmax_type_token_ratio=_mean(group.argmax_ratio),
        num_tiny_margin=group.num_tiny_margin,
        risks=_list_risks(model, within, best_attack),
        base_risks={} if base is None else _list_risks(base, base_within, None),
        minus_control={},
    )


def _list_risks(
    scores: ModelScores, within: Rate | None, best_attack: Rate | None
) -> dict[RiskName, Rate]:
    risks: dict[RiskName, Rate | None] = {
        "verbatim": scores.verbatim,
        "near_verbatim": scores.near_verbatim,
        "attack_cost": within,
        "attack": best_attack,
    }
    return {name: rate for name, rate in risks.items() if rate is not None}


def _build_model_scores(
    verdicts: _Verdicts, clusters: Sequence[int], generated: bool
) -> ModelScores:
    count = len(verdicts.accuracy)
    near = clopper_pearson(verdicts.num_near_verbatim, count) if generated else None
    return ModelScores(
        verbatim=clopper_pearson(verdicts.num_verbatim, count),
        near_verbatim=near,
        teacher_forced_90=clopper_pearson(verdicts.num_teacher_forced_90, count),
        mean_token_accuracy=compute_mean(verdicts.accuracy, bounds=(0, 1), clusters=clusters),
        median_first_divergence=_median(verdicts.divergence),
        mean_logprob=compute_mean(verdicts.logprob, clusters=clusters),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Sequence[int]) -> float | None:
    return float(statistics.median(values)) if values else None
