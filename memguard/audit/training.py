"""Rows of a training: its held-out losses, and the audits during it."""

from collections.abc import Sequence
from dataclasses import replace

from memguard.records import (
    ONE_TEXT,
    LoadAs,
    MetricRow,
    ResultRow,
    Tables,
    TrainingSummary,
    WatchedLine,
    fill_row,
)

HELDOUT_NLL = MetricRow(
    probe="heldout",
    metric="nll",
    version=1,
    meaning="Loss on documents that were never trained.",
    unit="nats",
    statistic="mean",
    bounds=(0.0, None),
    higher_is_better=False,
    heading="Held-out NLL",
    spoken="held-out loss",
)
_LEARNED = MetricRow(
    probe="extraction",
    metric="learned",
    version=1,
    meaning="Extracted now, and not before training.",
    unit="documents",
    statistic="rate",
    heading="Learned",
    spoken="newly",
)


NOT_OF_THIS_FORM = "not measured: training measured it of the stored model"
"""Why a model that was loaded in another form has no held-out loss."""


def tabulate_training(
    training: TrainingSummary | None,
    watched: Sequence[WatchedLine],
    load_as: LoadAs = "stored",
) -> Tables:
    """Return the rows of the losses before and after training, and of the audits during it.

    Args:
        training: of the run; None for a model that memguard did not train.
        watched: audits during training.
        load_as: form of the audited model; the loss is that of the stored one.
    """
    rows: list[ResultRow] = []
    metrics = []
    if training is not None and training.heldout_bucket is not None:
        row = ResultRow(
            probe="heldout",
            metric="nll",
            statistic="mean",
            bucket=training.heldout_bucket,
            num_documents=training.heldout_num_documents,
        )
        of_trained = ONE_TEXT if load_as == "stored" else NOT_OF_THIS_FORM
        for model, nll, why_not in (
            ("trained", training.heldout_nll, of_trained),
            ("base", training.base_heldout_nll, ONE_TEXT),
        ):
            rows.append(fill_row(replace(row, model=model), nll, "", why_not=why_not))
        metrics.append(HELDOUT_NLL)
    rows += [row for line in watched for row in line.results]
    return Tables(results=tuple(rows), metrics=(*metrics, *([_LEARNED] if watched else [])))
