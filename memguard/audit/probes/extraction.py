"""The extraction probe: which documents the model continues, verbatim or near-verbatim.

    Score      correct tokens, divergence, margins and log-probability of the continuation; runs of
               right first choices anywhere in its passage
    Generate   the text after the first divergence, where it may be near-verbatim

The page shows its results in the summary and by number of repetitions, see `memguard.report`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from memguard.audit.metrics import Evidence, Metric, rate_metric, share_metric
from memguard.audit.probe import Column, Probe, Summary, Values
from memguard.audit.probes.near_verbatim import (
    NearVerbatim,
    NotGenerated,
    find_near_verbatim,
    follow,
)
from memguard.audit.probes.window_scores import (
    MIN_RUN_TOKENS,
    NEAR_VERBATIM,
    RUNS,
    WINDOW_METRICS,
    describe_window,
    score_passages,
    score_windows,
)
from memguard.audit.requests import CannotGenerate, Inputs, Measured, Rounds, View, join
from memguard.audit.statistics import compute_trend, fit_dose_response
from memguard.audit.windows import WindowSettings, compute_type_token_ratio
from memguard.config.settings import PositiveInt
from memguard.records import (
    TRAINED,
    DetailRow,
    ResultRow,
    TestRow,
    fill_count,
    fill_row,
    write_parameters,
)

_COPIES = (1, 2, 5, 10)
"""Values of k for which k-eidetic memorization is counted."""
_WRITTEN = ("extraction_strength", "logprob", "min_margin", "argmax_type_token_ratio")
"""Numbers that are columns of records.parquet as they are."""
_LONGEST = "passage.longest_run"
_NOT_GENERATED = "no text was generated"


class ExtractionProbe(WindowSettings, Probe):
    """Continue each document from its own prefix and count the correct tokens."""

    VERSION: ClassVar[int] = 3
    no_result: ClassVar[str] = "no document is long enough"
    metrics: ClassVar[tuple[Metric, ...]] = (
        NEAR_VERBATIM,
        *WINDOW_METRICS,
        share_metric(
            "type_token_ratio",
            "Distinct of 50 tokens of the true text, over their number; low for templates.",
            heading="Type-token ratio",
            higher_is_better=True,
        ),
        share_metric(
            "argmax_type_token_ratio",
            "Distinct of 50 most likely tokens, over their number.",
            heading="Type-token ratio of choices",
            higher_is_better=True,
        ),
        rate_metric(
            "other_window",
            "Own text that is extracted anywhere in the document: 50 right first choices in a row, "
            "each given the true text before it.",
            heading="In another window",
            spoken="in another window",
        ),
        rate_metric(
            "tiny_margin", "The match depends on a near-tie: other hardware could change it."
        ),
    )

    name: Literal["extraction"] = Field("extraction", description="Which probe.")
    max_edit_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1,
        description="Near-verbatim: maximum edits between greedy and true text, as a share of its "
        "tokens.",
    )
    generation_floor: Annotated[float, Field(ge=0, le=1)] = Field(
        0.5,
        description="Documents with a lower teacher-forced accuracy are not generated, except for "
        "a sample; 0 generates all.",
    )
    num_generated_below_floor: PositiveInt = Field(
        10,
        description="Documents of each bucket in that sample; if one matches, all are generated.",
    )

    def list_values(self, measured: Measured, evidence: Evidence) -> list[Values]:
        """Return the values of every window metric, and near-verbatim matches if known."""
        columns = describe_window(measured.columns, evidence.size_N)
        if isinstance(evidence.trained[self.name].detail, NearVerbatim):
            columns = {"near_verbatim": _find_matched_near(measured), **columns}
        elif isinstance(measured.detail, NearVerbatim):
            columns["near_verbatim"] = _find_matched_near(measured)
        if (found_N := self.find_windows(measured, evidence)) is not None:
            columns["other_window"] = found_N
        # An answer of a conversation is audited whole, however long it is.
        return [Values(columns=columns, continuation_tokens=int(evidence.size_N.max(initial=0)))]

    def tabulate(self, evidence: Evidence) -> Summary:
        """Add what is no metric of a document: medians, ratios, near-ties, copies, trends."""
        summary = super().tabulate(evidence)
        measured = evidence.trained[self.name]
        matched = dict(summary.matched)
        models = {"trained": measured}
        if evidence.other is not None and self.name in evidence.other:
            models["base"] = evidence.other[self.name]
        for model, of_model in models.items():
            # What was found before the limit of time counts, though there is no rate of it.
            matched[model] = np.fmax(matched[model], _find_known_near(of_model))
            is_left_N = getattr(of_model.detail, "is_left_N", None)
            if is_left_N is not None:
                matched[model][is_left_N] = np.nan
        is_own_N = evidence.own_text.is_own_N.astype(np.float64)
        copies = list(self._count_copies(evidence))
        rows = [*summary.rows, *self._list_by_bucket(evidence, models), *copies]
        kinds = {metric.name: metric for metric in self.metrics}
        described = {metric.metric for metric in summary.metrics}
        metrics = [
            *summary.metrics,
            *(self.describe_metric(kind) for name, kind in kinds.items() if name not in described),
            *(
                self.describe_metric(
                    replace(kinds["verbatim"], risk_rank=None), {"copies_at_most": k}
                )
                for k in (_COPIES if copies else ())
            ),
        ]
        return replace(
            summary,
            matched=matched,
            columns={**summary.columns, "own_text": Column(values=is_own_N, kind="bool")},
            rows=rows,
            metrics=metrics,
            tests=self._list_trends(evidence, rows) if evidence.dose_response else [],
            details=[
                DetailRow(
                    probe=self.name,
                    model=model,
                    schema=self.VERSION,
                    value=self._describe_generated(measured.detail),
                )
                for model, measured in models.items()
            ],
        )

    def _list_by_bucket(
        self, evidence: Evidence, models: Mapping[str, Measured]
    ) -> Iterator[ResultRow]:
        measured = models["trained"]
        near = measured.detail
        is_tie_N = _find_near_ties(measured, evidence)
        texts = [window.continuation_ids for window in evidence.inputs.windows]
        ratios = {
            "type_token_ratio": np.array([compute_type_token_ratio(ids) for ids in texts]),
            "argmax_type_token_ratio": measured.columns["argmax_type_token_ratio"],
        }
        for outline in evidence.buckets:
            here_N = evidence.bucket_N == outline.bucket
            row = self.make_row(
                "first_divergence", bucket=outline.bucket, num_documents=int(here_N.sum())
            )
            for model, of_model in models.items():
                values = of_model.columns["first_divergence"][here_N]
                median = float(np.median(values)) if len(values) else None
                yield fill_row(replace(row, model=model, statistic="median"), median, "")
                if isinstance(of_model.detail, NotGenerated) and isinstance(near, NotGenerated):
                    missing = replace(row, model=model, metric="near_verbatim")
                    why_not = near.reason if model == "trained" else _NOT_GENERATED
                    yield fill_row(missing, None, "", why_not=why_not)
            for metric, ratio_N in ratios.items():
                values = ratio_N[here_N]
                mean = math.fsum(values) / len(values) if len(values) else None
                yield fill_row(replace(row, metric=metric, statistic="mean"), mean, "")
            yield fill_count(replace(row, metric="tiny_margin"), int(is_tie_N[here_N].sum()))

    def _count_copies(self, evidence: Evidence) -> Iterator[ResultRow]:
        """Count the documents extracted verbatim of those with at most k trained copies.

        k-eidetic memorization, Carlini et al. 2021; the copies of a text are the members of its
        near-duplicate cluster in the manifest. Nothing is counted if clusters are not known.
        """
        documents = [window.document for window in evidence.inputs.windows]
        is_trained_N = evidence.is_trained_N
        copies = np.array([document.num_copies or 0 for document in documents])[is_trained_N]
        if not len(copies) or not (copies >= 1).all():
            return
        correct_N = evidence.trained[self.name].columns["num_correct"]
        verbatim = (correct_N == evidence.size_N)[is_trained_N]
        for k in _COPIES:
            row = self.make_row(
                "verbatim",
                parameters=write_parameters({"copies_at_most": k}),
                bucket=TRAINED,
                num_documents=int((copies <= k).sum()),
            )
            yield fill_count(row, int(verbatim[copies <= k].sum()))

    def _list_trends(self, evidence: Evidence, rows: Sequence[ResultRow]) -> list[TestRow]:
        """Test whether rates rise with the dose, over control and buckets of a single dose."""
        places = {
            (row.metric, row.bucket): row
            for row in rows
            if row.statistic == "rate" and row.model == "trained" and not row.parameters
        }
        doses = {
            outline.bucket: 0 if outline.role == "control" else outline.num_repetitions or 0
            for outline in evidence.buckets
            if outline.role == "control" or (outline.role == "trained" and outline.num_repetitions)
        }
        tests = []
        for metric in ("verbatim", "near_verbatim"):
            dosed = sorted(
                (
                    (dose, row)
                    for bucket, dose in doses.items()
                    if (row := places.get((metric, bucket))) is not None and row.num_documents
                ),
                key=lambda pair: pair[0],
            )
            if len(dosed) < 2 or not all(row.is_known for _, row in dosed):
                continue
            matched = [row.num_matched or 0 for _, row in dosed]
            documents = [row.num_documents for _, row in dosed]
            listed = [dose for dose, _ in dosed]
            trend = compute_trend(matched, documents, listed)
            fitted = fit_dose_response(matched, documents)
            tests.append(
                TestRow(
                    probe=self.name,
                    metric=metric,
                    bucket=TRAINED,
                    test="cochran-armitage",
                    num_documents=sum(documents),
                    statistic=None if trend is None else trend.z,
                    p_value=None if trend is None else trend.p_value,
                    doses=tuple(listed),
                    fitted=tuple(rate for rate in fitted if rate is not None),
                )
            )
        return tests

    def _describe_generated(self, near: NearVerbatim | NotGenerated) -> dict[str, Any]:
        """Return the counts of the texts generated to find near-verbatim matches of one model."""
        counts = ("verbatim", "generated", "below_floor", "checked", "matched_below_floor")
        found = near.found if isinstance(near, NotGenerated) else near
        is_left_N = getattr(near, "is_left_N", None)
        return {
            "reason_not_generated": getattr(near, "reason", None),
            "floor": self.generation_floor,
            **{f"num_{count}": getattr(found, f"num_{count}", 0) for count in counts},
            **({} if is_left_N is None else {"num_not_generated": int(is_left_N.sum())}),
        }

    def list_columns(
        self, measured: Measured, evidence: Evidence, model: str = ""
    ) -> dict[str, Column]:
        """Return numbers, matches and margins of each document; margins of the greedy text."""
        numbers = measured.columns
        missing_N = np.full(len(numbers.rows), np.nan)
        near = _find_generated(measured)
        matches = describe_window(numbers, evidence.size_N)
        columns = {
            "num_correct": Column(values=numbers["num_correct"], kind="int"),
            "verbatim": Column(values=matches["verbatim"], kind="bool"),
            "near_verbatim": Column(values=_find_known_near(measured), kind="bool"),
            "num_edits": Column(values=near.num_edits_N if near else missing_N, kind="int"),
            "greedy_margin": Column(values=near.min_gap_N if near else missing_N),
            "tiny_margin": Column(values=_find_near_ties(measured, evidence), kind="bool"),
            "teacher_forced_90": Column(values=matches["teacher_forced_90"], kind="bool"),
            "first_divergence": Column(values=numbers["first_divergence"], kind="int"),
            "longest_run": Column(values=numbers["longest_run"], kind="int"),
            **{name: Column(values=numbers[name]) for name in _WRITTEN},
        }
        if (found_N := self.find_windows(measured, evidence)) is not None:
            columns["longest_run_anywhere"] = Column(values=numbers[_LONGEST], kind="int")
            columns["other_window"] = Column(values=found_N, kind="bool")
        return {f"{model}{self.name}.{name}": column for name, column in columns.items()}

    def find_windows(self, measured: Measured, evidence: Evidence) -> NDArray[np.float64] | None:
        """Return whether a run of 50 right first choices has own text; NaN if a text is shorter."""
        numbers = measured.columns
        if _LONGEST not in numbers:
            return None
        found_N = np.where(np.isnan(numbers[_LONGEST]), np.nan, 0.0)
        limits_N = np.stack([numbers[f"passage.{name}"] for name in RUNS], 1)
        for index in np.flatnonzero(numbers[_LONGEST] >= MIN_RUN_TOKENS).tolist():
            window, limits = evidence.inputs.windows[index], limits_N[index]
            runs = limits[~np.isnan(limits)].astype(int).reshape(-1, 2) + window.start
            found_N[index] = any(
                evidence.own_text.is_own_span(window.document.input_ids, begin, end)
                for begin, end in runs.tolist()
            )
        return found_N

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Score every document, and generate where greedy text may be near-verbatim.

        The detail is `NearVerbatim`, or `NotGenerated` with the reason.
        """
        floor, num_below_floor = self.generation_floor, self.num_generated_below_floor
        main = score_windows(inputs.windows, inputs.tiny_margin, stage=view.name)
        requests = [replace(main, continues=follow(inputs, floor, num_below_floor))]
        if not inputs.in_training:
            requests.append(score_passages(inputs.windows))
        numbers, *more = yield requests
        try:
            near: NearVerbatim | NotGenerated = yield from find_near_verbatim(
                inputs, view, numbers, floor, num_below_floor
            )
        except CannotGenerate as reason:
            near = NotGenerated(reason=str(reason))
        columns = join({"": numbers, **dict(zip(("passage.",), more, strict=False))})
        return Measured(columns=columns, detail=near)


def _find_matched_near(measured: Measured) -> NDArray[np.float64]:
    """Return [N] 1 if a document is extracted near-verbatim; all NaN unless all were generated."""
    if isinstance(measured.detail, NearVerbatim):
        return _find_known_near(measured)
    return np.full(len(measured.columns.rows), np.nan)


def _find_known_near(measured: Measured) -> NDArray[np.float64]:
    """Return [N] 1 if a document is extracted near-verbatim; NaN if it was not generated."""
    near, detail = _find_generated(measured), measured.detail
    if near is None:
        return np.full(len(measured.columns.rows), np.nan)
    matched_N = near.matched_N.astype(np.float64)
    if isinstance(detail, NotGenerated) and detail.is_left_N is not None:
        matched_N[detail.is_left_N] = np.nan
    return matched_N


def _find_generated(measured: Measured) -> NearVerbatim | None:
    """Return what the generated texts show, of all documents or of some; None if there is none."""
    detail = measured.detail
    return detail.found if isinstance(detail, NotGenerated) else detail


def _find_near_ties(measured: Measured, evidence: Evidence) -> NDArray[np.bool_]:
    """Return [N] whether the match of a document depends on a near-tie."""
    is_tie_N: NDArray[np.bool_] = measured.columns["is_near_tie"] > 0
    if isinstance(measured.detail, NearVerbatim):
        is_tie_N = is_tie_N | (measured.detail.min_gap_N < evidence.inputs.tiny_margin)
    return is_tie_N
