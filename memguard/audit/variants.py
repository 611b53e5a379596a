"""Variants of one model, such as its quantised forms, on the documents of its audit.

    windows, held-out texts  ->  VariantResults of each variant, one model in memory at a time
    VariantResults           ->  rates of each bucket, and paired differences from the first variant

The pass over each document is that of the audit, so that a variant whose weights are those of the
audited model has its cached scores.

Held-out loss of D documents with n_d of T supervised tokens: the mean over tokens is the mean over
documents of D / T times the document's sum of losses. Its difference is therefore paired by
document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memguard.audit.cache import ScoreMatrix, compute_key
from memguard.audit.context import AuditContext, AuditedModel
from memguard.audit.document_scores import DocumentScores, ModelResults, build_scores
from memguard.audit.extraction import Window, list_clusters
from memguard.audit.metrics import METRICS
from memguard.audit.near_verbatim import NotGenerated
from memguard.audit.passages import Passage, TokenResult
from memguard.audit.probe import Inputs, Measured, Model, Probe, Rounds, Score, View
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.runner import Runner
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import (
    compute_mean,
    compute_paired_difference,
    compute_paired_rates,
    compute_rate,
)
from memguard.audit.suite import Suite
from memguard.audit.tables import build_attack_cost
from memguard.records import (
    NUM_RISK_QUERIES,
    Interval,
    RiskName,
    Variant,
    VariantBucket,
    VariantComparison,
    VariantName,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldoutPiece:
    """T tokens of a document that was never trained, in a row of their own."""

    document: int
    """Index of the document; a long one has several pieces."""
    input_ids: NDArray[np.int32]
    """[T], at least two."""
    supervised: NDArray[np.bool_]
    """[T] tokens with loss; the first token of a piece has none."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldoutTexts:
    """The documents on which the loss is measured."""

    bucket: str
    pieces: Sequence[HeldoutPiece]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VariantResults:
    """Measurements of one variant."""

    name: VariantName
    description: str
    scores: DocumentScores
    reason_not_generated: str | None
    heldout: ScoreMatrix | None
    """One row per piece: `nll` and `num_tokens`; None without pieces."""


def measure_variant(
    name: VariantName,
    description: str,
    model: AuditedModel,
    windows: Sequence[Window],
    heldout: HeldoutTexts,
    *,
    suite: Suite,
    tiny_margin: float,
    seed: int,
    context: AuditContext,
) -> VariantResults:
    """Score one variant, which is loaded only if its scores are not cached, and free it.

    Args:
        name: of the variant.
        description: of the variant, for the report.
        model: the variant.
        windows: of the audited documents.
        heldout: documents for the loss.
        suite: of the audit.
        tiny_margin: margin in logits.
        seed: of the audit.
        context: of the audit.
    """
    inputs = Inputs(
        windows=windows,
        max_edit_share=suite.extraction.max_edit_share,
        seed=seed,
        tiny_margin=tiny_margin,
        codec=context.codec,
    )
    probes: list[Probe] = [*suite.probes, _HeldoutProbe(pieces=heldout.pieces)]
    with Runner(audited=model, model="variant", name=name, context=context, seed=seed) as runner:
        measured = runner.measure(probes, inputs)
    results = ModelResults.collect(measured)
    near, sampling = results.near_verbatim, suite.find(SamplingProbe)
    return VariantResults(
        name=name,
        description=description,
        scores=build_scores(windows, () if sampling is None else sampling.schemes, results, None),
        reason_not_generated=near.reason if isinstance(near, NotGenerated) else None,
        heldout=measured["heldout"].columns if "heldout" in measured else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _HeldoutProbe:
    """The loss of each held-out piece; no probe of a suite."""

    name: str = "heldout"
    models: ClassVar[tuple[Model, ...]] = ("variant",)
    after: ClassVar[tuple[str, ...]] = ()
    pieces: Sequence[HeldoutPiece]

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Sum the losses of each piece (nats), and count its tokens with loss."""
        pieces = self.pieces
        if not pieces:
            return None

        def reduce(items: Sequence[int], results: Sequence[TokenResult]) -> list[list[float]]:
            rows = []
            for index, result in zip(items, results, strict=True):
                supervised = pieces[index].supervised[1:]
                logprob = result.logprob[supervised].astype(np.float64)
                rows.append([-float(logprob.sum()), float(supervised.sum())])
            return rows

        (losses,) = yield [
            Score(
                items=pieces,
                passages=[
                    Passage(
                        input_ids=piece.input_ids, first_label=1, first_choice=len(piece.input_ids)
                    )
                    for piece in pieces
                ],
                keys=[compute_key(piece.input_ids, piece.supervised) for piece in pieces],
                names=("nll", "num_tokens"),
                reduce=reduce,
                parameters={"kind": "loss of a text", "version": 1},
                stage=f"{view.name}: held-out loss",
            )
        ]
        return Measured(columns=losses)


def compare_variants(
    results: Sequence[VariantResults],
    windows: Sequence[Window],
    outlines: Sequence[BucketOutline],
    heldout: HeldoutTexts,
) -> VariantComparison:
    """Return the rates of each variant and their differences from the first one.

    Args:
        results: of each variant, on the same documents.
        windows: of the documents.
        outlines: the buckets.
        heldout: documents on which the loss was measured.
    """
    cluster_N = list_clusters([window.document for window in windows])
    first = results[0]
    return VariantComparison(
        heldout_bucket=heldout.bucket if heldout.pieces else None,
        heldout_num_documents=len({piece.document for piece in heldout.pieces}),
        heldout_num_tokens=sum(int(piece.supervised[1:].sum()) for piece in heldout.pieces),
        variants=[
            _build_variant(
                variant, None if variant is first else first, cluster_N, outlines, heldout
            )
            for variant in results
        ],
    )


def _build_variant(
    variant: VariantResults,
    first: VariantResults | None,
    cluster_N: NDArray[np.int64],
    outlines: Sequence[BucketOutline],
    heldout: HeldoutTexts,
) -> Variant:
    """Return the record of a variant; ``first`` is None for the first one."""
    # The loss of a single document would confirm a guess of its text.
    is_known = len({piece.document for piece in heldout.pieces}) > 1
    loss_D = _list_losses(variant, heldout) if is_known else None
    before_D = _list_losses(first, heldout) if is_known and first is not None else None
    mean = None if loss_D is None else compute_mean(loss_D)
    attack_cost = build_attack_cost(variant.scores, outlines, cluster_N)
    costs = {cost.bucket: cost.model for cost in attack_cost}
    buckets = []
    for outline in outlines:
        (where,) = np.nonzero(variant.scores["bucket"] == outline.bucket)
        clusters = cluster_N[where]
        # The value of a single text would confirm a guess of it.
        is_shown = len(np.unique(clusters)) > 1
        matches, logprob_N = _list_matches(variant, where), _mean_logprob(variant.scores, where)
        differences: dict[RiskName, Interval] = {}
        logprob_difference = None
        if first is not None:
            before = _list_matches(first, where)
            paired = {
                risk: compute_paired_rates(matched_N, before[risk], clusters=clusters)
                for risk, matched_N in matches.items()
                if risk in before
            }
            differences = {risk: value for risk, value in paired.items() if value is not None}
            if is_shown:
                logprob_difference = compute_paired_difference(
                    logprob_N, _mean_logprob(first.scores, where), clusters=clusters
                )
        buckets.append(
            VariantBucket(
                bucket=outline.bucket,
                role=outline.role,
                num_documents=len(where),
                risks={
                    risk: compute_rate(matched_N, clusters) for risk, matched_N in matches.items()
                },
                attack_cost=costs.get(outline.bucket),
                mean_logprob=compute_mean(logprob_N, METRICS["logprob"].bounds, clusters)
                if is_shown
                else None,
                differences=differences,
                logprob_difference=logprob_difference,
            )
        )
    return Variant(
        name=variant.name,
        description=variant.description,
        reason_not_generated=variant.reason_not_generated,
        heldout_nll=None if mean is None else mean.value,
        heldout_difference=None
        if loss_D is None or before_D is None
        else compute_paired_difference(loss_D, before_D),
        buckets=buckets,
    )


def _list_matches(
    variant: VariantResults, where: NDArray[np.int64]
) -> dict[RiskName, NDArray[np.float64]]:
    """Return 1 or 0 of each document by each extraction method that was measured."""
    scores = variant.scores
    matches: dict[RiskName, NDArray[np.float64]] = {"verbatim": scores["verbatim"][where]}
    if variant.reason_not_generated is None:
        matches["near_verbatim"] = scores["near_verbatim"][where]
    # Infinite, not NaN, if no scheme can generate the document.
    if not np.isnan(scores["attack_log10_queries"]).all():
        within_N = scores["attack_log10_queries"][where] <= np.log10(NUM_RISK_QUERIES)
        matches["attack_cost"] = within_N.astype(np.float64)
    return matches


def _mean_logprob(scores: DocumentScores, where: NDArray[np.int64]) -> NDArray[np.float64]:
    mean_N: NDArray[np.float64] = (scores["logprob"] / scores["continuation_tokens"])[where]
    return mean_N


def _list_losses(variant: VariantResults, heldout: HeldoutTexts) -> NDArray[np.float64] | None:
    """Return [D] values of the documents, whose mean is the loss (nats a token)."""
    if variant.heldout is None:
        return None
    documents, where = np.unique([p.document for p in heldout.pieces], return_inverse=True)
    sum_D = np.bincount(where, weights=variant.heldout["nll"])
    scaled_D: NDArray[np.float64] = sum_D * len(documents) / variant.heldout["num_tokens"].sum()
    return scaled_D
