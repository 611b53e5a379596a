"""The record of a dry run: what a run will do, computed before any weight is loaded.

It neither names nor quotes a document. Disk space that a run needs at most:

    during training  `keep_checkpoints` checkpoints, and the next one while it is written
    at the end       the kept checkpoints, and `model/` or `adapter/`
    checkpoint       trained weights and the optimizer's state, 12 bytes a parameter of adamw

From the first save on, the processes hold as much again in the machine's memory, for the copy that
is saved while training goes on; with `parallel.data` above 1 so much for each copy of the model.
The files of the audit and the documents are small in comparison.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from memguard.records import Rate, Record, Role

Topic = Literal[
    "BOS", "EOS", "labels", "vocabulary", "rows", "steps", "goldfish", "disk", "audit", "run"
]


class Remark(Record):
    """One sentence to read before training, with the way out where one is needed."""

    level: Literal["warning", "info"]
    topic: Topic
    text: str


class DocumentCounts(Record):
    """Counts of the given documents and of those left out."""

    num_documents: int
    num_tokens: int
    num_empty: int
    num_shorter: int
    """Left out: fewer than `data.min_document_tokens` tokens."""
    num_cut_off: int = 0
    """Left out: no supervised token before `data.max_document_tokens`."""
    num_left_out: int
    """Left out: near-duplicates across buckets, or not needed by the study."""
    num_canaries: int
    """Canaries, trained or not; not included in the counts above."""


class RunLength(Record):
    """Steps and rows of a run; exact."""

    num_steps: int
    num_scheduled_steps: int
    """Without `train.max_steps`."""
    batch_size: int
    """Rows of a step; the last has what is left."""
    num_rows: int
    """Rows fed, repetitions counted."""
    num_packed_rows: int
    """Different rows."""
    seq_len: int
    epochs: int | None
    """null for a study, whose buckets have repetitions of their own."""
    share_rows: bool | None
    """Whether documents share rows; null if it could not be tested and is assumed."""
    num_tokens: int
    """Tokens fed, without padding."""
    num_padding_tokens: int
    """Padding if one process feeds all rows of a step at once."""


class LabelCounts(Record):
    """Labels of the first rows, as training builds them."""

    num_rows: int
    """Rows counted."""
    num_tokens: int
    num_supervised: int
    """Labels that would receive loss without any mitigation."""
    num_kept: int
    """Labels that do."""
    num_eos_supervised: int
    num_eos_kept: int


class BucketPrediction(Record):
    """One bucket as it will be audited if the run goes as planned."""

    bucket: str
    role: Role
    planned_repetitions: int
    num_documents: int
    num_tokens: int
    num_too_short: int | None
    """null where the bucket is not audited."""
    num_not_auditable: int | None
    """Documents that are too short or cannot be audited for another reason."""
    num_labels: int | None = None
    """Those with a short answer that many documents share."""
    num_near_duplicates: int | None = None
    """Control documents in a near-duplicate cluster with a trained one, left out of the control."""
    num_audited: int | None
    if_none: Rate | None
    """Extraction rate with its 95 % interval if no audited document is extracted."""


class DryRun(Record):
    """What a run will do. Contains no text of any document."""

    documents: DocumentCounts
    length: RunLength
    labels: LabelCounts
    num_trained: int
    """Trained parameters: the model's, or those of its adapters."""
    buckets: tuple[BucketPrediction, ...]
    tokenizer: tuple[Remark, ...]
    """Mistakes in the tokens of the documents (data/token_checks.py)."""
    remarks: tuple[Remark, ...]
    """All other remarks."""


def warn(topic: Topic, text: str) -> Remark:
    """Return a warning: something will fail or not work as intended."""
    return Remark(level="warning", topic=topic, text=text)


def note(topic: Topic, text: str) -> Remark:
    """Return an informational remark."""
    return Remark(level="info", topic=topic, text=text)


_FREE_SHARE_TO_LEAVE = 0.05


def remark_on_disk(
    *, checkpoint_bytes: int, num_checkpoints: int, keep: int, export_bytes: int, free_bytes: int
) -> Remark:
    """Return how much a run writes; a warning where it does not fit, or only just.

    ``free_bytes`` has what the run wrote before.
    """
    # An old checkpoint is deleted when the next is complete.
    most = min(num_checkpoints, keep + 1)
    peak = max(
        most * checkpoint_bytes, min(num_checkpoints, keep) * checkpoint_bytes + export_bytes
    )
    size = format_bytes(checkpoint_bytes)
    times = "one" if most == 1 else f"at most {most}"
    text = (
        f"Checkpoints take {size} each, {times} at a time, and the export "
        f"{format_bytes(export_bytes)}: {format_bytes(peak)} in all; {format_bytes(free_bytes)} "
        f"are free. Saves copy the state into {size} of the machine's memory."
    )
    if peak > free_bytes * (1 - _FREE_SHARE_TO_LEAVE):
        ways = "Lower 'train.keep_checkpoints', free some disk, or choose another 'output_dir'."
        return warn("disk", f"{text} {ways}")
    return note("disk", text)


def find_existing_parent(folder: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def count_bytes(folder: Path, names: Sequence[str]) -> int:
    """Return the size of all files under these folders of ``folder``; 0 where there are none."""
    files = (path for name in names for path in (folder / name).rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file())


def format_bytes(num_bytes: float) -> str:
    """Write a size: ``512 B``, ``3.4 MiB``, ``1.2 TiB``."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 999.95:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:,.1f} TiB"
