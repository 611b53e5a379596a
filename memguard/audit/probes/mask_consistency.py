"""Whether copies of a text with other formatting have the same mask; no model is measured.

The section "Copies that escape the mask" shows which rewritten copies of a text have loss on tokens
that the mitigation drops in the text itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from memguard.audit.metrics import Evidence, Metric, rate_metric, share_metric
from memguard.audit.probe import Probe, Summary
from memguard.audit.requests import Inputs, Model
from memguard.audit.windows import AuditDocument
from memguard.config.settings import PositiveInt
from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, count_columns
from memguard.pages.facts import explain_absence
from memguard.pages.page import Section, Table
from memguard.pages.pivot import ResultColumn, pivot
from memguard.records import (
    TRAINED,
    AuditReport,
    ResultRow,
    Tables,
    fill_count,
    fill_row,
    write_parameters,
)

if TYPE_CHECKING:
    from memguard.audit.probes.masks import MaskChange

CHANGED = rate_metric(
    "mask_changed",
    "Passages of which a dropped token receives loss in the copy.",
    "passages",
    heading="Masks changed",
)
LEAKED = share_metric(
    "leaked_share",
    "Mean share of a passage's dropped tokens that receive loss in the copy.",
    heading="Leaked",
)
_NO_PASSAGE = "no passage differs"
_MOST_CHANGES = 60


class MaskConsistencyProbe(Probe):
    """Whether copies of a text with other formatting have the same mask."""

    VERSION: ClassVar[int] = 1
    models: ClassVar[tuple[Model, ...]] = ()
    metrics: ClassVar[tuple[Metric, ...]] = (CHANGED, LEAKED)
    counted: ClassVar[Literal["texts"]] = "texts"

    name: Literal["mask_consistency"] = Field("mask_consistency", description="Which probe.")
    max_passages: PositiveInt = Field(200, description="Trained documents that are rewritten.")

    def tabulate(self, evidence: Evidence) -> Summary:
        """Compare the masks of trained plain texts with those of their copies."""
        inputs = evidence.inputs
        texts, pairs = self._list_texts(inputs)
        if inputs.compare_masks is None or not texts:
            return Summary(reason="no trained document is plain text")
        changes = inputs.compare_masks(texts, pairs)
        return Summary(
            rows=[row for change in changes for row in self._list_rows(change)],
            metrics=[
                self.describe_metric(metric, {"rewriting": change.rewriting})
                for change in changes
                for metric in self.metrics
            ],
            num_items=len(texts),
        )

    def _list_texts(self, inputs: Inputs) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the texts of trained documents, and pairs of near-duplicates of these."""
        if inputs.codec is None:
            return [], []
        decode = inputs.codec.decode
        documents = [window.document for window in inputs.windows]
        trained = [d for d in documents if d.role == "trained" and d.format == "text"]
        clusters: dict[int, list[AuditDocument]] = {}
        for document in trained:
            if document.cluster is not None:
                clusters.setdefault(document.cluster, []).append(document)
        pairs = [copies[:2] for copies in clusters.values() if len(copies) > 1]
        return [decode(document.input_ids) for document in trained[: self.max_passages]], [
            (decode(one.input_ids), decode(other.input_ids))
            for one, other in pairs[: self.max_passages]
        ]

    def _list_rows(self, change: "MaskChange") -> Iterator[ResultRow]:
        row = self.make_row(
            CHANGED.name,
            parameters=write_parameters({"rewriting": change.rewriting}),
            bucket=TRAINED,
            num_documents=change.num_passages,
        )
        yield fill_count(row, change.num_changed)
        leaked = replace(row, metric=LEAKED.name, statistic="mean")
        yield fill_row(leaked, change.mean_leaked_share, "", why_not=_NO_PASSAGE)

    @classmethod
    def section(cls, report: AuditReport) -> Section | None:
        """Return the section; None if no mitigation drops labels."""
        changes = report.tables.select("mask_consistency", CHANGED.name, setting=None)
        changes = changes[:_MOST_CHANGES]
        if changes:
            lead = _write_lead(report.tables, changes)
        elif report.training is not None and report.training.dropped_fraction:
            lead = explain_absence(
                report, "mask_consistency", "does not test whether copies of a text escape the mask"
            )
        else:
            return None
        return Section(
            key="masks",
            title="Copies that escape the mask",
            lead=(lead,),
            tables=(_build_table(report.tables, changes),) if changes else (),
        )


def _name_copy(row: ResultRow) -> str:
    return fmt.clean_words(row.parameters.removeprefix("rewriting="))


def _write_lead(tables: Tables, changes: Sequence[ResultRow]) -> str:
    """Name the rewriting that leaks most, and explain what that means."""

    def find_leaked(row: ResultRow) -> float | None:
        leaked = tables.find(row.probe, LEAKED.name, row.bucket, parameters=row.parameters)
        return None if leaked is None else leaked.value

    measured = [row for row in changes if row.num_documents]
    if not measured:
        return "No passage differs from its rewritings, so copies could not be tested."
    worst = max(measured, key=lambda row: (find_leaked(row) or 0.0, row.num_matched or 0))
    if not worst.num_matched:
        tried = ", ".join(f"'{_name_copy(row)}'" for row in measured)
        return (
            f"No copy has loss on a token that training dropped. Tried were {tried}; copies that "
            "differ in another way were not."
        )
    share = find_leaked(worst)
    leaked = "some" if share is None else fmt.percent(share)
    return (
        "A token that is dropped in one copy can receive loss in another one. The worst rewriting "
        f"is '{_name_copy(worst)}': {fmt.counts(worst)} passages have a token that training "
        f"dropped and the copy does not, on average {leaked} of a passage's dropped tokens."
    )


def _build_table(tables: Tables, changes: Sequence[ResultRow]) -> Table:
    columns: tuple[Column[ResultRow] | ResultColumn, ...] = (
        *count_columns(
            ("Masks changed", "passages"),
            ("Share", "of the passages"),
            lambda row: row.counts,
            _NO_PASSAGE,
        ),
        ResultColumn(
            ("Leaked", "mean share of a passage's dropped tokens"),
            "mask_consistency",
            LEAKED.name,
            how="plain",
        ),
    )
    return pivot(
        tables,
        "Tokens dropped in the text that receive loss in a copy of it",
        Column(("Copy", "how it differs"), _name_copy),
        columns,
        changes,
        key=lambda row: {"bucket": row.bucket, "parameters": row.parameters},
        compact=True,
    )
