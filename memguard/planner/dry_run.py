"""The record of a dry run: what a run will do, computed before any weight is loaded.

reference_hash.py  windows that the published goldfish hash cannot distinguish
rows.py            steps, rows, tokens, labels; the first row, for the screen only: it has text
disk.py            checkpoints and export against free disk

This record neither names nor quotes a document.
"""

from typing import Literal

from memguard.records import Rate, Record, Role

Topic = Literal[
    "BOS",
    "EOS",
    "labels",
    "vocabulary",
    "rows",
    "steps",
    "goldfish",
    "disk",
    "audit",
    "run",
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
