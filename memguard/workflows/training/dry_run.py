"""Dry run of a training configuration: what it will train on, save and be able to measure.

Documents are prepared as in training, but in a temporary folder: the run's folder is read, never
written. No weights are loaded.

The statistical power of the audit follows from the numbers of documents: the confidence interval if
none of n documents is extracted.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memguard.audit.selection import Selection
from memguard.audit.statistics import clopper_pearson, num_needed_to_see
from memguard.audit.warnings import FEW_DOCUMENTS
from memguard.config import RunConfig
from memguard.config.optimizers import OPTIMIZERS
from memguard.data.corpus import Corpus
from memguard.data.identity_key import check_key_place, find_key_path
from memguard.data.token_checks import Tokens, check_vocabulary, find_training_faults
from memguard.errors import ConfigError, DataError, RecordError, list_first
from memguard.planner.drop_shares import check_drop_shares
from memguard.planner.dry_run import (
    BucketPrediction,
    DocumentCounts,
    DryRun,
    Remark,
    count_bytes,
    find_existing_parent,
    note,
    remark_on_disk,
    warn,
)
from memguard.planner.meta_model import Outline, describe_model, may_share_rows
from memguard.planner.rows import (
    FirstRow,
    count_labels,
    explain_fewer_steps,
    measure_length,
    read_first_row,
    remark_on_reference_hash,
    remark_on_rows,
)
from memguard.records.texts import format_percent
from memguard.runtime import Console, detect_runtime
from memguard.train.trainer import FIRST_SAVE
from memguard.workflows.auditing.target import name_buckets, plan_training
from memguard.workflows.auditing.utility import open_alone
from memguard.workflows.common.folder import check_same_settings
from memguard.workflows.common.setup import make_lora, read_model_config
from memguard.workflows.training.checks import CheckedRun
from memguard.workflows.training.data import build_training_data, prepare, remark_on_control
from memguard.workflows.training.memory import resolve_auto_for_documents

_BORROWED = ("manifest.jsonl", "metrics.jsonl")
_COUNTS = tuple(name for name in DocumentCounts.model_fields if name != "num_tokens")
"""Counts that the summary of the prepared documents has too."""
_LEFT_OUT = ("num_too_short", "num_not_auditable", "num_labels", "num_near_duplicates")
"""Counts that the selection of the audit has too."""
_RARE = 0.01
"""An extraction rate so low that a small sample may show no extracted document."""


def predict_audit_intervals(
    corpus: Corpus, counts: Sequence[int], selection: Selection | None
) -> list[BucketPrediction]:
    """Return how many documents of each bucket will be audited, with the resulting intervals."""
    names = name_buckets(corpus.manifest, counts)
    reached = dict(zip(names, counts, strict=True))
    outlook = []
    outlines = {} if selection is None else {one.bucket: one for one in selection.buckets}
    for name in dict.fromkeys(names):
        members = [e for e, own in zip(corpus.manifest, names, strict=True) if own == name]
        outline = outlines.get(name)
        num_audited = None if outline is None else outline.num_documents
        outlook.append(
            BucketPrediction(
                bucket=name,
                role=members[0].role,
                planned_repetitions=members[0].planned_repetitions,
                num_documents=len(members),
                num_tokens=sum(entry.num_tokens for entry in members),
                **{count: getattr(outline, count, None) for count in _LEFT_OUT},
                num_audited=num_audited,
                if_none=None if num_audited is None else clopper_pearson(0, num_audited),
            )
        )
    order = ("control", "trained", "forget", "background", "heldout", "canary", "removed")
    return sorted(
        outlook,
        key=lambda one: (order.index(one.role), one.planned_repetitions, reached[one.bucket]),
    )


def remark_on_audit(
    config: RunConfig, corpus: Corpus, buckets: Sequence[BucketPrediction], *, is_cut: bool
) -> list[Remark]:
    """Warn if the audit will be refused or will have low statistical power."""
    remarks = []
    num_trained = sum(
        bucket.num_documents - bucket.num_not_auditable + (bucket.num_labels or 0)
        for bucket in buckets
        if bucket.role == "trained" and bucket.num_not_auditable is not None
    )
    if num_trained < config.audit.min_documents:
        ends = "'train.max_steps' ends the run when" if is_cut else "When the run ends,"
        text = (
            f"{ends} {num_trained} documents that are long enough for the audit have been trained "
            f"in full; 'audit.min_documents' is {config.audit.min_documents}: the audit will stop "
            "with an error."
        )
        remarks.append(warn("audit", text))
    num_control = sum(bucket.num_audited or 0 for bucket in buckets if bucket.role == "control")
    remarks.append(remark_on_control(config, corpus, num_control))
    few = [b for b in buckets if b.role == "trained" and 0 < (b.num_audited or 0) < FEW_DOCUMENTS]
    if few:
        names = [f"'{bucket.bucket}' ({bucket.num_audited})" for bucket in few]
        text = (
            f"Confidence intervals are wide below {FEW_DOCUMENTS} documents, as in "
            f"{list_first(names, 4)}; more documents, or more steps, make them narrower."
        )
        remarks.append(warn("audit", text))
    most = max((b.num_audited or 0 for b in buckets if b.role == "trained"), default=0)
    needed = num_needed_to_see(_RARE)
    if needed is not None and 0 < most < needed:
        text = (
            f"If {format_percent(_RARE, 0)} of the documents can be extracted, a sample of "
            f"{most:,} contains at least one of them with probability "
            f"{format_percent(1 - (1 - _RARE) ** most, 0)}; a probability of 95 % needs "
            f"{needed:,} in a bucket."
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunResult:
    """A dry run: a record that may be saved, and a row that is only shown in the terminal."""

    record: DryRun
    first_row: FirstRow
    """Contains text of documents."""


def dry_run(run: CheckedRun, console: Console) -> DryRunResult:
    """Run every stage of training that needs no weights, and leave no folder behind."""
    config, folder = run.config, run.folder
    if config.audit.enabled:
        # A task that cannot be opened would end training.
        open_alone(config.audit)
    remarks = []
    try:
        device_type = detect_runtime().device.type
    except ConfigError as error:  # A GPU that cannot be used; the run may be for another machine.
        remarks.append(warn("run", f"Training on this machine will stop with this error: {error}"))
        device_type = "cuda"
    config = resolve_auto_for_documents(config, device_type)
    try:
        check_same_settings(config, folder, console)
        borrowed = folder
    except ConfigError as error:
        remarks.append(warn("run", f"Training will stop with this error: {error}"))
        borrowed = None
    check_key_place(find_key_path(config.data.identity_key), outside=[folder])
    with _temporary_folder(folder, borrowed) as temporary:
        prepared = prepare(config, temporary, console, keeps_documents=False)
        corpus, tokenizer = prepared.corpus, prepared.tokenizer
        model = read_model_config(config, tokenizer)
        name = config.model.path or "model.scratch"
        outline = describe_model(
            model,
            name=name,
            adapter=make_lora(config),
            trainable_modules=config.train.trainable_modules,
        )
        check_vocabulary(corpus.input_ids, outline.vocab_size)
        shared = may_share_rows(model, config.model.attn_implementation)
        training_data = build_training_data(config, prepared, share_rows=shared is not False)
        length = measure_length(
            training_data.loader,
            max_steps=config.train.max_steps,
            seq_len=config.data.seq_len,
            epochs=None if config.data.study else config.train.epochs,
            shared=shared,
        )
        labels = count_labels(training_data.loader, length.num_rows, eos_id=tokenizer.eos_token_id)
        training_data.loader.record(range(length.num_rows))
        counts = training_data.loader.realised_repetitions().tolist()
        num_unreached = sum(
            entry.role in ("trained", "forget") and count == 0
            for entry, count in zip(corpus.manifest, counts, strict=True)
        )
        remarks += remark_on_reference_hash(corpus, tokenizer, config.mitigations)
        remarks += check_drop_shares(corpus, training_data.k_schedule)
        remarks += remark_on_rows(length, labels, num_unreached=num_unreached)
        if (fewer := explain_fewer_steps(config, length.num_scheduled_steps)) is not None:
            remarks.append(warn("steps", f"{fewer}."))
        remarks.append(_check_disk(config, folder, outline, length.num_steps))
        selection = None
        if config.audit.enabled:
            size = config.audit.max_documents_per_bucket
            plan = plan_training(config, corpus, counts, min_documents=0, size=size)
            selection = plan.selection
        buckets = predict_audit_intervals(corpus, counts, selection)
        if config.audit.enabled:
            is_cut = length.num_steps < length.num_scheduled_steps
            remarks += remark_on_audit(config, corpus, buckets, is_cut=is_cut)
        summary, given = corpus.summary, corpus.without_canaries()
        record = DryRun(
            documents=DocumentCounts(
                num_tokens=len(given.input_ids),
                **{name: getattr(summary, name) for name in _COUNTS},
            ),
            length=length,
            labels=labels,
            num_trained=outline.num_trained,
            buckets=tuple(buckets),
            tokenizer=tuple(
                warn(fault.kind, fault.text)
                for fault in find_training_faults(
                    Tokens.of_corpus(corpus), tokenizer, model, config.data
                )
            ),
            remarks=tuple(remarks),
        )
        return DryRunResult(
            record=record, first_row=read_first_row(training_data.loader, tokenizer)
        )


@contextmanager
def _temporary_folder(folder: Path, borrowed: Path | None) -> Iterator[Path]:
    """Yield a temporary folder for prepared documents; it is deleted afterwards.

    It contains symbolic links to the files that the run has prepared before, so that they are
    reused if they are still valid. Preparing again replaces the links, not their targets. Documents
    that another user prepared cannot be read; they are prepared again.
    """
    with tempfile.TemporaryDirectory(prefix="memguard-dry-run-") as name:
        temporary = Path(name)
        if borrowed is not None and (borrowed / "prepared" / "summary.json").is_file():
            prepared = [f"prepared/{path.name}" for path in (borrowed / "prepared").iterdir()]
            is_ours = all(os.access(borrowed / file, os.R_OK) for file in prepared)
            for file in (*prepared, *_BORROWED) if is_ours else ():
                if (borrowed / file).exists():
                    (temporary / file).parent.mkdir(parents=True, exist_ok=True)
                    (temporary / file).symlink_to((borrowed / file).absolute())
        try:
            yield temporary
        except (ConfigError, DataError, RecordError) as error:
            # The user knows the run's folder, not this one.
            message = str(error).replace(str(temporary), str(folder))
            if message == str(error):
                raise
            raise type(error)(message) from error


def _check_disk(config: RunConfig, folder: Path, outline: Outline, num_steps: int) -> Remark:
    """Return how much a run writes; what an earlier part of it has written needs no room again."""
    train, is_adapted = config.train, config.adapter is not None
    every = train.checkpoint_every_steps
    # Frozen modules are exported too, the base of adapters is not; these are in fp32.
    num_exported = outline.num_trained if is_adapted else outline.num_parameters
    is_narrow = "bf16" in (train.precision, train.weights) and not is_adapted
    facts, num_trained = OPTIMIZERS[config.optim.name], outline.num_trained
    state = facts.count_state(num_trained, num_quantised=outline.num_quantised)
    weights = num_trained * (2 if train.weights == "bf16" else 4)
    present = count_bytes(folder, ["adapter", "checkpoints", "model"])
    # The last step always writes one; with periodic saves the second step does.
    num_checkpoints = 1 if every is None else -(-num_steps // every) + (num_steps > FIRST_SAVE)
    if train.checkpoint_every_minutes is not None:
        num_checkpoints = num_steps
    return remark_on_disk(
        checkpoint_bytes=round(weights + state),
        num_checkpoints=num_checkpoints,
        keep=train.keep_checkpoints + (train.keep == "best"),
        export_bytes=num_exported * (2 if is_narrow else 4),
        free_bytes=shutil.disk_usage(find_existing_parent(folder)).free + present,
    )
