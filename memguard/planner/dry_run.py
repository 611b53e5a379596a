"""What a run will do, told before any weight is loaded: the record of it.

reference_hash.py  windows that the published goldfish hash cannot tell apart
tokenizer_lint.py  remarks on tokenizer, template and documents
run_length.py      steps, rows, tokens, labels
disk.py            checkpoints and export against free disk
first_row.py       the first row token by token; for the screen only, it holds text

Nothing here names a document or quotes one.
"""

from typing import Literal

from memguard.records import Rate, Record, Role

Topic = Literal[
    "BOS",
    "EOS",
    "padding",
    "template",
    "unknown",
    "vocabulary",
    "lengths",
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
    """What became of the documents that were given."""

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
    """Beside them, trained or not; not among the counts above."""


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
    """Whether documents share rows; null where it could not be tried and is taken for granted."""
    num_tokens: int
    """Tokens fed, without padding."""
    num_padding_tokens: int
    """Where one process takes all rows of a step at once."""


class LabelCounts(Record):
    """Labels of the first rows, as training builds them."""

    num_rows: int
    """Rows counted."""
    num_rows_without: int
    """Of them, without any label that receives loss."""
    num_tokens: int
    num_supervised: int
    """Labels that would receive loss without any mitigation."""
    num_kept: int
    """Labels that do."""
    num_eos_supervised: int
    num_eos_kept: int


class DiskNeed(Record):
    """What a run leaves on disk against what is free (bytes)."""

    num_parameters: int
    checkpoint_bytes: int
    num_checkpoints: int
    """At most at a time, the one being written included."""
    export_bytes: int
    prepared_bytes: int
    peak_bytes: int
    """The most that lies there at a time: checkpoints, then those kept beside the export."""
    present_bytes: int
    """Of it, there already from earlier."""
    free_bytes: int


class BucketOutlook(Record):
    """One bucket as the audit will see it if the run goes as planned."""

    bucket: str
    role: Role
    planned_repetitions: int
    num_documents: int
    num_tokens: int
    num_too_short: int | None
    """null where the bucket is not audited."""
    num_not_auditable: int | None
    """The same and those that cannot be audited for another reason."""
    num_audited: int | None
    if_none: Rate | None
    """With its 95 % interval, if no audited document is recited."""
    if_half: Rate | None
    """The same if half of them are."""


class DryRun(Record):
    """What a run will do. Holds no text of any document."""

    documents: DocumentCounts
    length: RunLength
    labels: LabelCounts
    disk: DiskNeed
    buckets: tuple[BucketOutlook, ...]
    tokenizer: tuple[Remark, ...]
    """What tokenizer, template and documents make of each other."""
    remarks: tuple[Remark, ...]
    """Everything else."""


def warn(topic: Topic, text: str) -> Remark:
    """Make a remark that something will go wrong, or not as meant."""
    return Remark(level="warning", topic=topic, text=text)


def note(topic: Topic, text: str) -> Remark:
    """Make a remark that says how things are."""
    return Remark(level="info", topic=topic, text=text)
