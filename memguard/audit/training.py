"""Rows of a training: its held-out losses, and the audits during it."""

from collections.abc import Sequence
from dataclasses import replace

from memguard.records import (
    ONE_TEXT,
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


def make_heldout_row(bucket: str, num_documents: int) -> ResultRow:
    """Return the row of the loss on held-out documents, without its number."""
    return ResultRow(
        probe="heldout",
        metric="nll",
        statistic="mean",
        bucket=bucket,
        num_documents=num_documents,
    )


def tabulate_training(training: TrainingSummary | None, watched: Sequence[WatchedLine]) -> Tables:
    """Return the rows of the losses before and after training, and of the audits during it.

    Args:
        training: of the run; None for a model that memguard did not train.
        watched: audits during training.
    """
    rows: list[ResultRow] = []
    metrics = []
    if training is not None and training.heldout_bucket is not None:
        row = make_heldout_row(training.heldout_bucket, training.heldout_num_documents)
        for model, nll in (
            ("trained", training.heldout_nll),
            ("base", training.base_heldout_nll),
        ):
            rows.append(fill_row(replace(row, model=model), nll, "", why_not=ONE_TEXT))
        metrics.append(HELDOUT_NLL)
    rows += [row for line in watched for row in line.results]
    return Tables(results=tuple(rows), metrics=(*metrics, *([_LEARNED] if watched else [])))
