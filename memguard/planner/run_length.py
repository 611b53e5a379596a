"""Steps, rows, tokens and labels of a run.

    rows of the run     row 0, row 1, ..     in the order of the schedule, to the last step
    rows of one step    cut to the longest of them; what is left over is padding

Lengths of all rows are known exactly; labels are built for the first rows only, as training
builds them, and counted.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.data.loader import Loader
from memguard.planner.dry_run import LabelCounts, Remark, RunLength, note, warn
from memguard.records import IGNORE_LABEL

COUNTED_ROWS = 256
"""Rows whose labels are built and counted."""
_MUCH_PADDING = 0.2
"""Share of padding from which on a warning is given."""


def measure_length(
    loader: Loader, *, max_steps: int | None, seq_len: int, epochs: int | None, shared: bool | None
) -> RunLength:
    """Count steps, rows and tokens of a run.

    Args:
        loader: its rows and their order.
        max_steps: `train.max_steps`.
        seq_len: length of a row (tokens).
        epochs: None for a study.
        shared: whether documents share rows; None where that is not known.
    """
    num_steps = min(loader.num_steps, max_steps or loader.num_steps)
    lengths = count_row_tokens(loader)[loader.schedule[: num_steps * loader.batch_size]]
    firsts = np.arange(0, len(lengths), loader.batch_size)
    longest = np.maximum.reduceat(lengths, firsts)
    num_rows = np.diff([*firsts, len(lengths)])
    num_tokens = int(lengths.sum())
    return RunLength(
        num_steps=num_steps,
        num_scheduled_steps=loader.num_steps,
        batch_size=loader.batch_size,
        num_rows=len(lengths),
        num_packed_rows=len(loader.rows),
        seq_len=seq_len,
        epochs=epochs,
        share_rows=shared,
        num_tokens=num_tokens,
        num_padding_tokens=int((longest * num_rows).sum()) - num_tokens,
    )


def count_row_tokens(loader: Loader) -> NDArray[np.int64]:
    """Return ``[R]`` the tokens of each packed row."""
    rows = loader.rows
    return np.add.reduceat(rows.stop - rows.start, rows.row_start[:-1])


def without_mitigations(loader: Loader) -> Loader:
    """Return the same rows with every supervised label kept."""
    return Loader(
        loader.corpus,
        loader.rows,
        loader.schedule,
        batch_size=loader.batch_size,
        pad_id=loader.pad_id,
        mask_labels=lambda _document, _ids, labels, _generator: labels,
        seed=loader.seed,
    )


def count_labels(loader: Loader, num_rows: int, *, eos_id: int | None) -> LabelCounts:
    """Build the labels of the first rows, with and without mitigations, and count them.

    Args:
        loader: the run's.
        num_rows: rows to count, at most `COUNTED_ROWS`.
        eos_id: the tokenizer's EOS; None where it has none.
    """
    lengths = count_row_tokens(loader)
    plain = without_mitigations(loader)
    num_tokens = num_supervised = num_kept = num_eos_supervised = num_eos_kept = num_without = 0
    num_counted = min(num_rows, COUNTED_ROWS)
    for sample in range(num_counted):
        labels = plain.batch([sample]).labels
        kept = loader.batch([sample]).labels != IGNORE_LABEL
        num_tokens += int(lengths[loader.schedule[sample]])
        num_supervised += int((labels != IGNORE_LABEL).sum())
        num_kept += int(kept.sum())
        num_without += not kept.any()
        if eos_id is not None:
            num_eos_supervised += int((labels == eos_id).sum())
            num_eos_kept += int(((labels == eos_id) & kept).sum())
    return LabelCounts(
        num_rows=num_counted,
        num_rows_without=num_without,
        num_tokens=num_tokens,
        num_supervised=num_supervised,
        num_kept=num_kept,
        num_eos_supervised=num_eos_supervised,
        num_eos_kept=num_eos_kept,
    )


def remark_on_rows(
    length: RunLength,
    labels: LabelCounts,
    document_tokens: Sequence[int],
    *,
    num_unreached: int,
) -> list[Remark]:
    """Return remarks on padding, rows without labels and missing steps.

    Args:
        length: of the run.
        labels: of its first rows.
        document_tokens: lengths of the documents that are trained.
        num_unreached: documents to be trained that are never fed whole.
    """
    remarks = []
    share = length.num_padding_tokens / (length.num_tokens + length.num_padding_tokens)
    if length.share_rows is False:
        text = (
            "In this model documents of one row attend to each other, so each gets its own row: "
            f"{share:.0%} of the positions are padding."
        )
        remarks.append(warn("rows", text))
    elif share > _MUCH_PADDING:
        text = (
            f"{share:.0%} of the positions are padding: another 'data.seq_len' may fit the "
            f"documents better (median {round(np.median(document_tokens)):,}, longest "
            f"{max(document_tokens):,} tokens)."
        )
        remarks.append(warn("rows", text))
    if length.share_rows is None:
        text = (
            "Without the model's weights it could not be tested whether documents of one row "
            "attend to each other; rows are counted as if they do not."
        )
        remarks.append(note("rows", text))
    if labels.num_rows_without:
        text = (
            f"{labels.num_rows_without:,} of the first {labels.num_rows:,} rows have no label that "
            "receives loss: prompts longer than a row, cut into pieces; raise 'data.seq_len'."
        )
        remarks.append(warn("rows", text))
    if length.num_steps < length.num_scheduled_steps:
        text = (
            f"'train.max_steps' ends the run after {length.num_steps:,} of "
            f"{length.num_scheduled_steps:,} steps: "
        ) + (
            f"{num_unreached:,} documents are not reached by then, and not audited."
            if num_unreached
            else "every document is reached by then, but not as often as planned."
        )
        remarks.append(warn("steps", text))
    if labels.num_eos_supervised and not labels.num_eos_kept:
        text = (
            "The mitigations drop EOS wherever it is supervised, so the model never learns to "
            "stop; take goldfish in mode hash, which keeps special tokens."
        )
        remarks.append(warn("EOS", text))
    return remarks
