"""Membership: scores of trained against control documents, from log-probabilities of tokens.

own pass of the audited model    every token of the window that received loss in training
lowercase, recall, plain         mean log-probability over other passages of the same documents
reference                        the plain one under another model

The AUC of each score, its true-positive rates and its ROC are shown with those of a baseline that
reads the texts but has no model access (`blind.py`). Each score is a column of records.parquet, the
baseline's too, so that every number can be recomputed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from memguard.audit.metrics import Evidence, Metric
from memguard.audit.probe import Column, Probe, Summary
from memguard.audit.probes.membership_scores import (
    MEAN,
    MEMBERSHIP_SCORES,
    compare_passes,
    plan_plain,
    score_means,
    score_own_passes,
    score_tokens,
)
from memguard.audit.requests import Inputs, Measured, Model, Rounds, Score, View, join
from memguard.audit.statistics import compute_auc, compute_tpr_at_fpr, trace_roc
from memguard.audit.statistics.blind import score_blind_documents
from memguard.config.settings import PositiveInt
from memguard.pages.membership import build_membership
from memguard.pages.page import Section
from memguard.pages.roc import ROC
from memguard.records import (
    BLIND,
    MEMBERS,
    AuditReport,
    DetailRow,
    MetricRow,
    ResultRow,
    RocCurve,
    fill_row,
    write_parameters,
)

Share = Annotated[float, Field(gt=0, lt=1)]
MIN_OF_EACH = 2
"""Minimum number of members, and of control documents, for membership scores."""
AUC = Metric(
    name="auc",
    meaning="Probability that a trained document scores higher than a never-trained one.",
    unit="AUC",
    statistic="auc",
    bounds=(0.0, 1.0),
    heading="AUC",
    spoken="AUC",
)
TPR = Metric(
    name="tpr",
    meaning="Share of the trained documents above a threshold that few control documents exceed.",
    unit="documents",
    statistic="rate",
    bounds=(0.0, 1.0),
    heading="TPR",
    spoken="true-positive rate",
)
_OTHERS: Mapping[str, str] = {
    "loss_minus_base": "Loss, minus that of the model before training on the same tokens.",
    BLIND: "Bag of words, cross-fitted, no model access. Detects distribution shift.",
}
"""Definitions of the scores that no suite names."""


class MembershipProbe(Probe):
    """Membership inference: trained against control documents, by token log-probabilities."""

    VERSION: ClassVar[int] = 2
    models: ClassVar[tuple[Model, ...]] = ("trained", "base", "reference")
    metrics: ClassVar[tuple[Metric, ...]] = (AUC, TPR)

    name: Literal["membership"] = Field("membership", description="Which probe.")
    scores: tuple[str, ...] = Field(
        ("loss", "zlib", "min_k", "min_k_plus_plus"),
        description="Scores; lowercase, recall and reference need an additional pass.",
    )
    fpr: tuple[Share, ...] = Field(
        (0.001, 0.01, 0.1), description="False-positive rates for the true-positive rates."
    )
    recall_documents: PositiveInt = Field(
        4, description="Control documents used as prefix for 'recall' (documents)."
    )

    @field_validator("scores")
    @classmethod
    def _check_scores(cls, scores: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [score for score in scores if score not in MEMBERSHIP_SCORES]
        if unknown:
            raise ValueError(f"must be of {', '.join(MEMBERSHIP_SCORES)}; got {unknown[0]!r}")
        return scores

    @property
    def one_pass(self) -> tuple[str, ...]:
        """The scores that need no pass of their own."""
        return tuple(name for name in self.scores if not MEMBERSHIP_SCORES[name].has_own_pass)

    @property
    def own_passes(self) -> tuple[str, ...]:
        """The scores that do: lowercase, reference, recall."""
        return tuple(name for name in self.scores if MEMBERSHIP_SCORES[name].has_own_pass)

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Measure the scores; columns are named by score, own passes by the passage's name."""
        requests: dict[str, Score] = {}
        if view.model == "reference":
            if "reference" in self.own_passes:
                plain = [plan_plain(w, max_tokens=view.max_tokens) for w in inputs.windows]
                requests["reference."] = score_means(plain, plain, "reference model")
        else:
            if self.one_pass:
                requests[""] = score_tokens(inputs, self.one_pass)
            if view.model == "trained":
                requests |= score_own_passes(
                    inputs, self.own_passes, view.max_tokens, num_shots=self.recall_documents
                )
        if not requests:
            return None
        numbers = yield list(requests.values())
        return Measured(columns=join(dict(zip(requests, numbers, strict=True))))

    def tabulate(self, evidence: Evidence) -> Summary:
        """Return AUC, true-positive rates and ROC of each score, the blind baseline's last.

        There are none with fewer than two members or control documents.
        """
        documents = [window.document for window in evidence.inputs.windows]
        scores = self.list_scores(evidence)
        member_N = evidence.is_trained_N
        control_N = np.array([document.role == "control" for document in documents], dtype=bool)
        columns = {f"{self.name}.{score}": Column(values=n) for score, n in scores.items()}
        num_members, num_control = int(member_N.sum()), int(control_N.sum())
        reason = "none of its scores could be computed"
        if min(num_members, num_control) < MIN_OF_EACH:
            counts = f"{num_members} trained and {num_control} control documents"
            few = f"{counts}; it needs {MIN_OF_EACH} of each"
            return Summary(columns=columns, reason=few if num_control else "no control documents")
        blind_N = score_blind_documents(documents, member_N, control_N)
        everything = scores
        if blind_N is not None:
            everything = scores | {BLIND: blind_N}
            columns[f"{self.name}.{BLIND}"] = Column(values=blind_N)
        rows = [
            row
            for name, score_N in everything.items()
            for row in self._compare(name, score_N, member_N, control_N)
        ]
        blind = write_parameters({"score": BLIND})
        sizes = [
            row.num_documents + (row.num_other or 0)
            for row in rows
            if row.metric == AUC.name and row.parameters != blind and row.is_known
        ]
        return Summary(
            rows=rows,
            metrics=[metric for name in everything for metric in self._describe(name)],
            details=self._list_curves(everything, member_N, control_N),
            columns=columns,
            num_items=max(sizes, default=0),
            reason=reason,
        )

    def list_scores(self, evidence: Evidence) -> dict[str, NDArray[np.float64]]:
        """Return every score ``[N]`` by name, NaN where missing; higher: more likely trained."""
        ours, others = (m.get(self.name) for m in (evidence.trained, evidence.reference))
        base = evidence.other.get(self.name) if evidence.other else None
        scores: dict[str, NDArray[np.float64]] = {}
        if ours is not None:
            scores = {name: ours.columns[name] for name in self.one_pass}
            if base is not None and "loss" in scores:
                scores["loss_minus_base"] = scores["loss"] - base.columns["loss"]
        means = {
            name.removesuffix(f".{MEAN}"): measured.columns[name]
            for measured in (ours, others)
            if measured is not None
            for name in measured.columns.names
            if name.endswith(f".{MEAN}")
        }
        plain_N = means.pop("plain", None)
        return scores if plain_N is None else scores | compare_passes(plain_N, means)

    def _compare(
        self,
        score: str,
        score_N: NDArray[np.float64],
        member_N: NDArray[np.bool_],
        control_N: NDArray[np.bool_],
    ) -> Iterator[ResultRow]:
        """Yield the AUC of a score, and its true-positive rate at each false-positive rate."""
        members, nonmembers = _split(score_N, member_N, control_N)
        is_enough = min(len(members), len(nonmembers)) >= MIN_OF_EACH
        row = self.make_row(
            AUC.name,
            parameters=write_parameters({"score": score}),
            statistic="auc",
            bucket=MEMBERS,
            num_documents=len(members),
            num_other=len(nonmembers),
            num_missing=int((~np.isfinite(score_N[member_N | control_N])).sum()),
        )
        auc = compute_auc(members, nonmembers) if is_enough else None
        too_few = "fewer than two trained or control documents have the score"
        yield fill_row(row, auc, "delong", why_not=too_few)
        for rate in self.fpr:
            parameters = write_parameters({"score": score, "fpr": f"{rate:g}"})
            at_rate = replace(row, parameters=parameters, metric=TPR.name, statistic="rate")
            tpr = compute_tpr_at_fpr(members, nonmembers, rate) if is_enough else None
            why_not = f"fewer than 1 / {rate:g} control documents"
            yield fill_row(at_rate, tpr, "threshold", why_not=why_not)

    def _list_curves(
        self,
        scores: Mapping[str, NDArray[np.float64]],
        member_N: NDArray[np.bool_],
        control_N: NDArray[np.bool_],
    ) -> list[DetailRow]:
        """Return the detail with the ROC of each score that enough documents have."""
        curves = []
        for name, score_N in scores.items():
            members, nonmembers = _split(score_N, member_N, control_N)
            if min(len(members), len(nonmembers)) < MIN_OF_EACH:
                continue
            num_allowed, num_matched = trace_roc(members, nonmembers)
            curve = RocCurve(
                score=name,
                num_members=len(members),
                num_control=len(nonmembers),
                num_allowed=num_allowed,
                num_matched=num_matched,
            )
            curves.append(curve.model_dump(mode="json"))
        if not curves:
            return []
        return [DetailRow(probe=self.name, schema=self.VERSION, value={ROC: curves})]

    def _describe(self, score: str) -> Iterator[MetricRow]:
        known = MEMBERSHIP_SCORES.get(score)
        definition = _OTHERS[score] if known is None else known.definition
        yield replace(self.describe_metric(AUC, {"score": score}), meaning=definition)
        for rate in self.fpr:
            yield self.describe_metric(TPR, {"score": score, "fpr": f"{rate:g}"})

    @classmethod
    def section(cls, report: AuditReport) -> Section:
        """Return the section "Membership inference"; without scores it gives the reason."""
        return build_membership(report)


def _split(
    score_N: NDArray[np.float64], *sides: NDArray[np.bool_]
) -> Iterator[NDArray[np.float64]]:
    """Yield the known scores of each side."""
    return (score_N[side_N & np.isfinite(score_N)] for side_N in sides)
