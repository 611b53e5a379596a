"""Variants of one model, such as its quantised forms, on the documents of its audit.

    windows, held-out texts  ->  VariantResults of each variant, one model in memory at a time
    VariantResults           ->  rates of each bucket, paired differences from the first variant;
                                 columns of records.parquet (``variant:nf4.extraction.verbatim``)

The pass over each document is that of the audit, so that a variant whose weights are those of the
audited model has its cached scores.

Held-out loss of D documents with n_d of T supervised tokens: the mean over tokens is the mean over
documents of D / T times the document's sum of losses. Its difference is therefore paired by
document.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from memguard.audit.cache import ScoreMatrix, compute_key
from memguard.audit.context import AuditContext, AuditedModel
from memguard.audit.near_verbatim import NotGenerated
from memguard.audit.passages import Passage, TokenResult
from memguard.audit.probe import Column, Probe
from memguard.audit.requests import Inputs, Measured, Model, Rounds, Score, View
from memguard.audit.runner import Runner
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import compute_mean, compute_paired_difference
from memguard.audit.suite import Suite
from memguard.audit.summary import tabulate
from memguard.audit.tables import Evidence
from memguard.audit.training import HELDOUT_NLL, make_heldout_row
from memguard.records import (
    ONE_TEXT,
    DetailRow,
    ResultRow,
    Tables,
    Variant,
    VariantName,
    fill_row,
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
    measured: Mapping[str, Measured]
    """By probe; `heldout` has one row per piece: `nll` and `num_tokens`."""

    @property
    def heldout(self) -> ScoreMatrix | None:
        """Losses of the held-out pieces; None without pieces."""
        return self.measured["heldout"].columns if "heldout" in self.measured else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ComparedVariants:
    """The variants of an audit: what its report and its records have of them."""

    variants: Sequence[Variant] = ()
    tables: Tables = field(default_factory=Tables)
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Of the audited documents, by full name."""


def measure_variant(
    name: VariantName,
    description: str,
    model: AuditedModel,
    inputs: Inputs,
    heldout: HeldoutTexts,
    *,
    suite: Suite,
    context: AuditContext,
) -> VariantResults:
    """Score one variant, which is loaded only if its scores are not cached, and free it.

    Args:
        name: of the variant.
        description: of the variant, for the report.
        model: the variant.
        inputs: of the audit.
        heldout: documents for the loss.
        suite: of the audit.
        context: of the audit.
    """
    probes = [*suite.probes, _HeldoutProbe(pieces=tuple(heldout.pieces))]
    runner = Runner(
        audited=model,
        model="variant",
        name=name,
        context=context,
        seed=inputs.seed,
        packages=suite.packages,
    )
    with runner:
        return VariantResults(
            name=name, description=description, measured=runner.measure(probes, inputs)
        )


class _HeldoutProbe(Probe):
    """The loss of each held-out piece; no probe of a suite."""

    models: ClassVar[tuple[Model, ...]] = ("variant",)

    name: Literal["heldout"] = "heldout"
    pieces: tuple[Any, ...]
    """`HeldoutPiece`s."""

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
    inputs: Inputs,
    outlines: Sequence[BucketOutline],
    heldout: HeldoutTexts,
    *,
    suite: Suite,
) -> ComparedVariants:
    """Return the variants, and the rows of each with its differences from the first one.

    Args:
        results: of each variant, on the same documents.
        inputs: of the audit.
        outlines: the buckets.
        heldout: documents on which the loss was measured.
        suite: of the audit.
    """
    first = results[0]
    variants, rows = [], []
    columns: dict[str, Column] = {}
    for variant in results:
        is_first = variant is first
        evidence = Evidence(
            inputs=inputs,
            outlines=outlines,
            trained=variant.measured,
            other=None if is_first else first.measured,
            against=f"variant:{first.name}",
        )
        summaries = tabulate(evidence, suite)
        probes = [probe for probe in suite.probes if probe.name in variant.measured]
        # What belongs to the first variant has been listed with it.
        listed = [
            row
            for probe in probes
            for row in summaries[probe.name].rows
            if row.model == "trained" and _is_shown(probe, row)
        ]
        columns |= {
            f"variant:{variant.name}.{name}": column
            for probe in probes
            for name, column in summaries[probe.name].columns.items()
            if not name.startswith("base.")
        }
        listed += _list_heldout_rows(variant, None if is_first else first, heldout)
        rows += [replace(row, variant=variant.name) for row in listed]
        near = variant.measured["extraction"].detail
        variants.append(
            Variant(
                name=variant.name,
                description=variant.description,
                reason_not_generated=near.reason if isinstance(near, NotGenerated) else None,
            )
        )
    num_tokens = sum(int(piece.supervised[1:].sum()) for piece in heldout.pieces)
    detail = DetailRow(probe="heldout", schema=1, value={"num_tokens": num_tokens})
    tables = Tables(
        results=tuple(rows),
        metrics=(HELDOUT_NLL,) if num_tokens else (),
        details=(detail,) if num_tokens else (),
    )
    return ComparedVariants(variants=variants, tables=tables, columns=columns)


def _is_shown(probe: Probe, row: ResultRow) -> bool:
    is_bucket = not row.bucket.startswith("(")
    return is_bucket and (probe.in_variants is None or row.metric in probe.in_variants)


def _list_heldout_rows(
    variant: VariantResults, first: VariantResults | None, heldout: HeldoutTexts
) -> list[ResultRow]:
    """Return the held-out loss, and its difference from the first variant's."""
    num_documents = len({piece.document for piece in heldout.pieces})
    if not num_documents:
        return []
    row = make_heldout_row(heldout.bucket, num_documents)
    # The loss of a single document would confirm a guess of its text.
    is_known = num_documents > 1
    loss_D = _list_losses(variant, heldout) if is_known else None
    mean = None if loss_D is None else compute_mean(loss_D)
    rows = [fill_row(row, None if mean is None else mean.value, "", why_not=ONE_TEXT)]
    if first is not None:
        before_D = _list_losses(first, heldout) if is_known else None
        difference = None
        if loss_D is not None and before_D is not None:
            difference = compute_paired_difference(loss_D, before_D)
        paired = replace(row, against=f"variant:{first.name}", statistic="difference")
        rows.append(fill_row(paired, difference, "jackknife", why_not=ONE_TEXT))
    return rows


def _list_losses(variant: VariantResults, heldout: HeldoutTexts) -> NDArray[np.float64] | None:
    """Return [D] values of the documents, whose mean is the loss (nats a token)."""
    if variant.heldout is None:
        return None
    documents, where = np.unique([p.document for p in heldout.pieces], return_inverse=True)
    sum_D = np.bincount(where, weights=variant.heldout["nll"])
    scaled_D: NDArray[np.float64] = sum_D * len(documents) / variant.heldout["num_tokens"].sum()
    return scaled_D
