"""What the audit of a run will be able to show, before the run is trained.

An interval is as wide as its number of documents makes it: if none of n is recited, and if half
of them are, both are known beforehand.
"""

from collections.abc import Sequence

from memguard.audit.banners import FEW_DOCUMENTS
from memguard.audit.extraction import AuditDocument
from memguard.audit.selection import BucketOutline, select_windows
from memguard.audit.statistics import clopper_pearson, num_needed_to_see
from memguard.cli.subjects import list_audited, load_probe, name_buckets
from memguard.config import RunConfig
from memguard.data.corpus import Corpus
from memguard.planner.dry_run import BucketOutlook, Remark, note, warn

_RARE = 0.01
"""A share of recited documents that few of them would not show."""


def foresee_audit(config: RunConfig, corpus: Corpus, counts: Sequence[int]) -> list[BucketOutlook]:
    """Say which documents the audit will ask of each bucket, and how sure that makes it.

    Args:
        config: the run's settings.
        corpus: its documents.
        counts: times each document will have been fed whole.
    """
    names = name_buckets(corpus.manifest, counts)
    reached = dict(zip(names, counts, strict=True))
    documents = list_audited(
        corpus,
        counts,
        seq_len=config.data.seq_len,
        probe=load_probe(config.audit),
        window=config.audit.window,
    )
    outlook = []
    asked = _count_audited(config, documents) if config.audit.enabled else {}
    for name in dict.fromkeys(names):
        members = [e for e, own in zip(corpus.manifest, names, strict=True) if own == name]
        num_audited, outline = asked.get(name, (None, None))
        outlook.append(
            BucketOutlook(
                bucket=name,
                role=members[0].role,
                planned_repetitions=members[0].planned_repetitions,
                num_documents=len(members),
                num_tokens=sum(entry.num_tokens for entry in members),
                num_too_short=None if outline is None else outline.num_too_short,
                num_not_auditable=None if outline is None else outline.num_not_auditable,
                num_audited=num_audited,
                if_none=None if num_audited is None else clopper_pearson(0, num_audited),
                if_half=None
                if num_audited is None
                else clopper_pearson(num_audited // 2, num_audited),
            )
        )
    order = ("control", "trained", "forget", "background", "heldout", "canary", "removed")
    return sorted(
        outlook,
        key=lambda each: (
            order.index(each.role),
            each.planned_repetitions,
            reached[each.bucket],
        ),
    )


def _count_audited(
    config: RunConfig, documents: Sequence[AuditDocument]
) -> dict[str, tuple[int, BucketOutline]]:
    """Return for each bucket how many documents are audited, and why others are not."""
    selection = select_windows(
        documents,
        load_probe(config.audit),
        seed=config.seed,
        min_documents=0,
        max_documents_per_bucket=config.audit.max_documents_per_bucket,
    )
    asked = [window.document.bucket for window in selection.windows]
    return {outline.bucket: (asked.count(outline.bucket), outline) for outline in selection.buckets}


def remark_on_audit(
    config: RunConfig, corpus: Corpus, buckets: Sequence[BucketOutlook], *, is_cut: bool
) -> list[Remark]:
    """Warn where the audit will be refused, or show little.

    Args:
        config: of the run.
        corpus: its documents.
        buckets: what is foreseen of them.
        is_cut: whether 'train.max_steps' ends the run early.
    """
    remarks = []
    num_trained = sum(
        bucket.num_documents - bucket.num_not_auditable
        for bucket in buckets
        if bucket.role == "trained" and bucket.num_not_auditable is not None
    )
    if num_trained < config.audit.min_documents:
        ends = "'train.max_steps' ends the run when" if is_cut else "When the run ends,"
        text = (
            f"{ends} {num_trained} documents that are long enough for the audit have been trained "
            f"whole; 'audit.min_documents' is {config.audit.min_documents}: the audit will refuse."
        )
        remarks.append(warn("audit", text))
    control = next((bucket for bucket in buckets if bucket.role == "control"), None)
    if control is None:
        text = (
            "There is no control: without documents that are never trained, reciting cannot be "
            "told from what the model could continue anyway."
        )
        remarks.append(warn("audit", text))
    elif (control.num_audited or 0) < FEW_DOCUMENTS:
        text = (
            f"Only {control.num_audited or 0} control documents can be asked, below "
            f"{FEW_DOCUMENTS}: give documents of your own in 'data.control', more in 'data.train', "
            "or lower 'audit.continuation_tokens'."
        )
        remarks.append(warn("audit", text))
    few = [b for b in buckets if b.role == "trained" and 0 < (b.num_audited or 0) < FEW_DOCUMENTS]
    if few:
        names = ", ".join(f"'{bucket.bucket}' ({bucket.num_audited})" for bucket in few[:4])
        others = f" and {len(few) - 4} more" if len(few) > 4 else ""
        text = (
            f"Intervals are wide below {FEW_DOCUMENTS} documents, as in {names}{others}; more "
            "documents, or more steps, make them narrower."
        )
        remarks.append(warn("audit", text))
    most = max((b.num_audited or 0 for b in buckets if b.role == "trained"), default=0)
    needed = num_needed_to_see(_RARE)
    if needed is not None and 0 < most < needed:
        text = (
            f"Of documents of which {_RARE:.0%} are extracted, {most:,} show one with probability "
            f"{1 - (1 - _RARE) ** most:.0%}; it takes {needed:,} in a bucket for 95 %."
        )
        remarks.append(note("audit", text))
    overlapping = corpus.summary.num_control_overlapping
    if overlapping:
        text = (
            f"{overlapping:,} of {corpus.summary.num_control:,} control documents share a run of "
            f"{config.data.near_duplicate_words} words with a trained one."
        )
        remarks.append(note("audit", text))
    return remarks
