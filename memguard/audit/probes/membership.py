"""Membership: scores of trained against control documents, from log-probabilities of tokens.

own pass of the audited model    every token of the window that received loss in training
lowercase, recall, plain         mean log-probability over other passages of the same documents
reference                        the plain one under another model

The AUC of each score, and its true-positive rates, stand beside those of a baseline that reads the
texts but has no model access (`blind.py`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from memguard.audit.blind import score_blind_documents
from memguard.audit.membership_passes import (
    MEAN,
    SHOT_TOKENS,
    plan_plain,
    score_means,
    score_own_passes,
    score_tokens,
)
from memguard.audit.membership_scores import MEMBERSHIP_SCORES, compare_passes
from memguard.audit.metrics import Metric
from memguard.audit.probe import Column, ItemSizes, Probe, Summary, Work
from memguard.audit.requests import Inputs, Measured, Model, Rounds, Score, View, join
from memguard.audit.statistics import compute_auc, compute_tpr_at_fpr
from memguard.audit.tables import Evidence
from memguard.config.settings import PositiveInt
from memguard.pages import formatting as fmt
from memguard.pages import tables as cells
from memguard.pages.page import Cell, Notice, Section, Table
from memguard.pages.pivot import ResultColumn, pivot
from memguard.pages.probe_runs import explain_absence
from memguard.records import (
    BLIND,
    MEMBERS,
    AuditReport,
    MetricRow,
    ResultRow,
    Tables,
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
"""Definitions of the scores that no suite asks for."""


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
        return tuple(name for name in self.scores if MEMBERSHIP_SCORES[name].own_pass is None)

    @property
    def own_passes(self) -> tuple[str, ...]:
        """The scores that do: lowercase, reference, recall."""
        return tuple(name for name in self.scores if MEMBERSHIP_SCORES[name].own_pass is not None)

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

    def bound(self, sizes: ItemSizes) -> Work:
        """Count the windows, and their copies in lower case and after other documents.

        No number of tokens bounds those of the same text in lower case, whatever the tokenizer: a
        token of n characters may become n tokens or more. `sizes` has their number, as encoded; a
        model with few positions cuts them off.
        """
        count, tokens = len(sizes.prefix_N), sizes.num_tokens
        work = Work(passages=count, tokens=tokens)
        if "lowercase" in self.own_passes:
            work += Work(passages=count, tokens=sizes.lowercase_tokens)
        if "recall" in self.own_passes:
            shots = count * self.recall_documents * SHOT_TOKENS
            work += Work(passages=count, tokens=tokens + shots)
        return work

    def tabulate(self, evidence: Evidence) -> Summary:
        """Return an AUC and true-positive rates for each score, the blind baseline's last.

        There are no rows with fewer than two members or control documents.
        """
        documents = [window.document for window in evidence.inputs.windows]
        scores = self.list_scores(evidence)
        member_N = evidence.is_trained_N
        control_N = np.array([document.role == "control" for document in documents], dtype=bool)
        columns = {f"{self.name}.{score}": Column(values=n) for score, n in scores.items()}
        num_members, num_control = int(member_N.sum()), int(control_N.sum())
        reason = "none of its scores could be computed"
        if not num_control:
            reason = "no control documents"
        elif min(num_members, num_control) < MIN_OF_EACH:
            reason = (
                f"{num_members} trained and {num_control} control documents; it needs "
                f"{MIN_OF_EACH} of each"
            )
        reason = evidence.why_not.get(self.name, reason)
        if min(num_members, num_control) < MIN_OF_EACH:
            return Summary(columns=columns, reason=reason)
        blind_N = score_blind_documents(documents, member_N, control_N, evidence.inputs.seed)
        everything = scores | ({} if blind_N is None else {BLIND: blind_N})
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
            if base is not None and evidence.against == "base" and "loss" in scores:
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
        known_N = np.isfinite(score_N)
        members, nonmembers = score_N[member_N & known_N], score_N[control_N & known_N]
        is_enough = min(len(members), len(nonmembers)) >= MIN_OF_EACH
        row = self.make_row(
            AUC.name,
            parameters=write_parameters({"score": score}),
            statistic="auc",
            bucket=MEMBERS,
            num_documents=len(members),
            num_other=len(nonmembers),
            num_missing=int(((member_N | control_N) & ~known_N).sum()),
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

    def _describe(self, score: str) -> Iterator[MetricRow]:
        known = MEMBERSHIP_SCORES.get(score)
        definition = _OTHERS[score] if known is None else known.definition
        yield replace(self.describe_metric(AUC, {"score": score}), meaning=definition)
        for rate in self.fpr:
            yield self.describe_metric(TPR, {"score": score, "fpr": f"{rate:g}"})

    @classmethod
    def section(cls, report: AuditReport) -> Section:
        """Return the section "Membership inference"; without scores it gives the reason."""
        rows = list_aucs(report.tables)
        scores = [row for row in rows if read_score(row) != BLIND][:_MOST_SCORES]
        blind = [row for row in rows if read_score(row) == BLIND][:1]
        tables = []
        if scores:
            caption = "Trained against never-trained documents"
            tables.append(_build_table(report.tables, caption, scores))
        if blind:
            caption = "Blind baseline (no model access)"
            tables.append(replace(_build_table(report.tables, caption, blind), notes=_BLIND_NOTES))
        return Section(
            key="membership",
            title="Membership inference",
            short_title="Membership",
            lead=(write_membership_note(report),),
            tables=tuple(tables),
        )


_NAMES = {
    "loss": "Loss",
    "loss_minus_base": "Loss minus base",
    "min_k": f"Min-K{fmt.PERCENT}",
    "min_k_plus_plus": f"Min-K{fmt.PERCENT}++",
    "zlib": "zlib",
    "lowercase": "Lower case",
    "reference": "Reference model",
    "recall": "ReCaLL",
    BLIND: "Blind",
}
_BLIND_NOTES = (
    "Detects distribution shift: a cross-fitted classifier that sees the words only. If its "
    "interval is above 0.5, trained and control documents are different kinds of text, and the "
    "scores above prove nothing about the model.",
)
_RATE_NOTE = (
    "The interval of a TPR includes the error of its threshold, which is estimated on the control "
    f"documents. With fewer than about 3.7 / FPR of them (36 at 10{fmt.PERCENT}, 368 at "
    f"1{fmt.PERCENT}) the interval starts at 0."
)
MIN_TO_JUDGE = 10
"""Minimum number of documents of either kind for a statement about a score."""
_MOST_SCORES, _MOST_RATES = 40, 6
_NOT_COMPUTED = "could not be computed"


def list_aucs(tables: Tables) -> list[ResultRow]:
    """Return the AUC of each score of a report, the blind baseline's last."""
    return tables.select("membership", AUC.name, setting=None, model="trained", bucket=MEMBERS)


def read_score(row: ResultRow) -> str:
    """Return the name of the score that an AUC is of."""
    return row.parameters.removeprefix("score=")


def name_score(score: str) -> str:
    """Return the display name of a membership score."""
    return _NAMES.get(score, fmt.clean_name(score, 40))


def judge_score(row: ResultRow) -> str:
    """Return whether a score tells trained from control documents, in either direction.

    A mitigation that drops labels makes them the least likely tokens of a trained document, so that
    scores of the least likely tokens are lower for trained documents.
    """
    if min(row.num_documents, row.num_other or 0) < MIN_TO_JUDGE:
        return "too few documents to say"
    if row.ci is None:
        return "no interval"
    low, high = row.ci
    if low > 0.5:
        return "told apart"
    return "told apart, with the opposite sign" if high < 0.5 else "not told apart"


def warn_of_blind(report: AuditReport) -> Notice | None:
    """Warn if a baseline without access to the model separates members from nonmembers.

    For models that memguard did not train, the audit already adds a more detailed banner.
    """
    blind = next((row for row in list_aucs(report.tables) if read_score(row) == BLIND), None)
    if report.run is None or blind is None or blind.ci is None or blind.ci[0] <= 0.5:
        return None
    auc = fmt.interval(blind)
    return Notice(
        level="warning",
        label="Membership scores prove nothing here",
        text="A bag-of-words classifier without access to the model separates trained from "
        f"control documents (AUC {auc.value}, {fmt.CI} {auc.interval}): the texts themselves "
        "differ, so no membership score shows what the model remembers.",
    )


def _build_table(tables: Tables, caption: str, scores: list[ResultRow]) -> Table:
    def name(row: ResultRow) -> Cell:
        metric = tables.find_metric("membership", AUC.name, row.parameters)
        return cells.show_name(
            name_score(read_score(row)), "" if metric is None else fmt.clean_text(metric.meaning)
        )

    def find_tpr(row: ResultRow, written: str) -> ResultRow | None:
        parameters = write_parameters({"score": read_score(row), "fpr": written})
        return tables.find("membership", TPR.name, MEMBERS, parameters=parameters)

    def column_of_rate(written: str, rate: float) -> cells.Column[ResultRow]:
        def show(row: ResultRow) -> Cell:
            tpr, needed = find_tpr(row, written), _count_needed(rate)
            is_short = row.is_known and (row.num_other or 0) < needed
            why_not = f"needs ≥ {needed:,} control documents" if is_short else _NOT_COMPUTED
            return cells.show_row(tpr, why_not=why_not)

        return cells.Column((f"TPR at {fmt.threshold(rate)} FPR", f"trained ({fmt.CI})"), show)

    rates = _list_rates(tables, scores)
    # One sentence below the table replaces a column that has no numbers.
    is_shown = {
        rate: any((tpr := find_tpr(row, written)) and tpr.is_known for row in scores)
        for written, rate in rates
    }
    columns: list[ResultColumn | cells.Column[ResultRow]] = [
        ResultColumn(
            ("AUC", f"0.5 is chance ({fmt.CI})"), "membership", AUC.name, why_not=_NOT_COMPUTED
        ),
        cells.Column(("Trained and control", "by this score"), judge_score),
        *(column_of_rate(*pair) for pair in rates if is_shown[pair[1]]),
        cells.Column(("Trained", "documents"), lambda row: row.num_documents),
        cells.Column(("Control", "documents"), lambda row: row.num_other or 0),
    ]
    if any(row.num_missing for row in scores):
        columns.append(cells.Column(("Missing", "documents"), lambda row: row.num_missing))
    needed = "; ".join(
        f"TPR at {fmt.threshold(rate)} FPR needs ≥ {_count_needed(rate):,} control documents"
        for rate, shown in is_shown.items()
        if not shown
    )
    return pivot(
        tables,
        caption,
        cells.Column("Score", name),
        columns,
        scores,
        key=lambda row: {"bucket": MEMBERS, "parameters": row.parameters},
        notes=((_RATE_NOTE,) if any(is_shown.values()) else ())
        + ((f"Not shown: {needed}.",) if needed else ()),
    )


def _list_rates(tables: Tables, scores: list[ResultRow]) -> list[tuple[str, float]]:
    """Return the false-positive rates that occur, as text and as numbers, ascending."""
    shown = {read_score(row) for row in scores}
    rates = set()
    for row in tables.select("membership", TPR.name, setting=None):
        written, _, score = row.parameters.removeprefix("fpr=").partition(", score=")
        rate = _read_rate(written)
        if score in shown and 0 < rate < 1:
            rates.add((written, rate))
    return sorted(rates, key=lambda pair: pair[1])[:_MOST_RATES]


def _read_rate(rate: str) -> float:
    try:
        return float(rate)
    except ValueError:
        return 0.0


def _count_needed(rate: float) -> int:
    # In floating point 1 / rate may be slightly above the integer.
    return math.ceil(1 / rate - 1e-6)


def write_membership_note(report: AuditReport) -> str:
    """Explain what the scores mean, or why there are none."""
    rows = list_aucs(report.tables)
    if not rows:
        reason = explain_absence(report, "membership", "computes no membership scores")
        return (
            f"{reason} Membership scores measure how well trained documents can be distinguished "
            "from documents that were never trained."
        )
    text = (
        "AUC is the probability that a trained document scores higher than a never-trained one: "
        "0.5 is chance, 1 separates all documents, extracted or not, and so does 0, with the "
        "opposite sign: an interval wholly below 0.5 is as much a trace of training as one above "
        "it. An interval that contains 0.5 shows no signal with this number of documents."
    )
    missing = [name_score(read_score(row)) for row in rows if not row.is_known]
    if missing:
        text += f" Could not be computed: {', '.join(missing[:_MOST_SCORES])}."
    if report.training is None:
        return text
    return (
        f"{text} Trained documents of all buckets are taken together; documents that training did "
        "not reach are excluded."
    )
