"""Prepares the documents of a run, packs its rows and masks its labels.

Training and the dry run share this code, so that the dry run shows what training does. Both say
before training what the run's control can show.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from memguard.audit.statistics import clopper_pearson
from memguard.audit.suite import load_audit_suite
from memguard.audit.warnings import FEW_DOCUMENTS
from memguard.audit.windows import AuditDocument
from memguard.config import DataConfig, RunConfig, dump_yaml
from memguard.config.mitigations import DeduplicateConfig, DpSgdConfig, find_mitigation
from memguard.data.buckets import draws_control, size_control
from memguard.data.corpus import Corpus, load_corpus
from memguard.data.documents import Document
from memguard.data.encoding import find_special_ids
from memguard.data.loader import Loader
from memguard.data.packing import plan_rows
from memguard.data.prepare import AuditNeeds
from memguard.data.prepare import prepare as prepare_corpus
from memguard.data.tokenization import TokenizedDocument, list_token_texts
from memguard.errors import ModelError, RecordError
from memguard.hf.checkpoint import has_tokenizer, load_tokenizer
from memguard.mitigation.k_schedule import build_k_schedule
from memguard.planner.dry_run import Remark, note, warn
from memguard.records import ManifestEntry, write_atomically
from memguard.records.run_files import CheckpointManifest, add_hash_line, find_run_keys, has_trained
from memguard.records.texts import format_percent
from memguard.runtime import Console, Runtime, default_cache_dir, detect_runtime, quiet_libraries
from memguard.train.dp_sgd import compute_privacy
from memguard.train.metrics import EndMetrics, hash_tally
from memguard.train.run_state import TrainingData
from memguard.workflows.auditing.target import choose_piece, warn_of_faults
from memguard.workflows.common.folder import check_same_settings, compute_run_key, locked
from memguard.workflows.common.setup import (
    check_layers,
    load_known_tokenizer,
    read_model_config,
    train_tokenizer,
)
from memguard.workflows.training.checks import CheckedRun
from memguard.workflows.training.memory import resolve_auto_for_documents

_VERY_FEW = 10
"""Below this many control documents, 0 of m allows a rate of more than 30 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A run whose documents are ready."""

    folder: Path
    corpus: Corpus
    tokenizer: Any


def prepare_run(run: CheckedRun, console: Console | None = None) -> PreparedRun:
    """Create the run folder, then load, tokenise and place its documents."""
    config = resolve_auto_for_documents(run.config, detect_runtime().device.type)
    with locked(run.folder):
        return _prepare_and_check(config, run.folder, console or Console())


def prepare_on_ranks(
    config: RunConfig, folder: Path, console: Console, runtime: Runtime
) -> PreparedRun:
    """Prepare on rank 0; the other ranks read the files that it wrote."""
    prepared = runtime.only_on_main(lambda: _prepare_and_check(config, folder, console))
    tokenizer = runtime.broadcast_object(None if prepared is None else prepared.tokenizer)
    if prepared is not None:
        return prepared
    quiet_libraries()
    return PreparedRun(folder=folder, corpus=load_corpus(folder), tokenizer=tokenizer)


def _prepare_and_check(config: RunConfig, folder: Path, console: Console) -> PreparedRun:
    check_same_settings(config, folder, console)
    check_layers(config)
    prepared = prepare(config, folder, console)
    report_control(config, prepared.corpus, console)
    model_config = read_model_config(config, prepared.tokenizer)
    warn_of_faults(prepared.corpus, prepared.tokenizer, model_config, config, console)
    return prepared


def prepare(
    config: RunConfig, folder: Path, console: Console, *, keeps_documents: bool = True
) -> PreparedRun:
    """Load, tokenise and place the documents of a run, and write them into its folder.

    ``keeps_documents``: False for a folder that is deleted, for which no identity key is made.
    """
    quiet_libraries()
    audit = list_audit_needs(config)
    known = load_known_tokenizer(config)
    write_atomically(folder / "config.yaml", add_hash_line(dump_yaml(config)).encode())
    trained = find_run_keys(folder)
    tokenizers: list[Any] = []

    def tokenizer_for(documents: Sequence[Document] | None) -> Any:
        tokenizer = known
        if known is None and documents is not None:
            tokenizer = train_tokenizer(config, documents, console)
        elif known is None and has_tokenizer(folder / "prepared"):
            with suppress(ModelError):  # It is damaged.
                tokenizer = load_trained_tokenizer(folder)
        tokenizers.append(tokenizer)
        return tokenizer

    corpus = prepare_corpus(
        config.data,
        folder,
        seed=config.seed,
        epochs=config.train.epochs,
        deduplicate=find_mitigation(config.mitigations, DeduplicateConfig),
        audit=audit,
        load_tokenizer=tokenizer_for,
        # A tokenizer that is trained on the documents has none.
        has_chat_template=lambda: getattr(known, "chat_template", None) is not None,
        vocab_size=int(read_model_config(config, known).get_text_config().vocab_size),
        cache_dir=default_cache_dir(),
        console=console,
        is_begun_with=(lambda given: compute_run_key(config, given) in trained)
        if trained
        else None,
        # Its noise is derived from the key.
        needs_key=find_mitigation(config.mitigations, DpSgdConfig) is not None
        and not has_trained(folder),
        keeps_documents=keeps_documents,
    )
    return PreparedRun(folder=folder, corpus=corpus, tokenizer=tokenizers[-1])


def load_trained_tokenizer(folder: Path) -> Any:
    """Return the tokenizer that a run has trained on its documents; ModelError if damaged."""
    tokenizer = load_tokenizer(str(folder / "prepared"))
    for name in ("is_local", "local_files_only"):  # They would be exported.
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def list_audit_needs(config: RunConfig) -> AuditNeeds:
    """Return what the audit of a run requires of its documents."""
    probe = load_audit_suite(config.audit).extraction

    def is_auditable(document: TokenizedDocument) -> bool:
        piece = choose_piece(
            document,
            # Neither decides which piece is chosen.
            partial(AuditDocument, id="", bucket="", role="trained", source=""),
            seq_len=config.data.seq_len,
            probe=probe,
            window=config.audit.window,
        )
        return probe.window(piece) is not None

    lengths = {"suite", "continuation_tokens", "prefix_tokens", "min_prefix_tokens"}
    min_documents = config.audit.min_documents if config.audit.enabled else 0
    settings = config.audit.model_dump(mode="json", include=lengths)
    return AuditNeeds(
        key=json.dumps({**settings, "min_documents": min_documents}, sort_keys=True),
        is_auditable=is_auditable,
        min_documents=min_documents,
    )


def build_training_data(
    config: RunConfig, prepared: PreparedRun, *, share_rows: bool
) -> TrainingData:
    """Pack the documents into rows, order the rows, and mask their labels.

    ``share_rows``: the model masks attention between documents of one row.
    """
    corpus, tokenizer = prepared.corpus, prepared.tokenizer
    # dp_sgd protects rows, so a row must not contain parts of several documents.
    share_rows = share_rows and find_mitigation(config.mitigations, DpSgdConfig) is None
    rows, schedule = plan_rows(
        corpus.manifest,
        seq_len=config.data.seq_len,
        background_ratio=config.data.background_ratio,
        seed=config.seed,
        share_rows=share_rows,
    )
    k_schedule = build_k_schedule(
        config.mitigations,
        corpus.manifest,
        can_tighten=config.budget is not None and config.budget.action == "tighten",
        special_ids=sorted(find_special_ids(tokenizer)),
        token_texts=lambda: list_token_texts(tokenizer),
    )
    loader = Loader(
        corpus,
        rows,
        schedule,
        batch_size=config.train.batch_size,
        pad_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
        mask_labels=k_schedule.mask_labels,
        seed=config.seed,
    )
    return TrainingData(loader=loader, k_schedule=k_schedule)


def count_up(loader: Loader, num_samples: int) -> list[ManifestEntry]:
    """Return the manifest with the counts of fed tokens, and for canaries of tokens with loss."""
    corpus = loader.corpus
    repetitions = loader.realised_repetitions().tolist()
    fed = loader.count_fed_tokens().tolist()
    updates = [
        {"num_repetitions": count, "num_tokens_fed": num_tokens}
        for count, num_tokens in zip(repetitions, fed, strict=True)
    ]
    canaries = [i for i, entry in enumerate(corpus.manifest) if entry.role == "canary"]
    losses = loader.count_losses(canaries, num_samples=num_samples)
    for index, losses_N in zip(canaries, losses, strict=True):
        document = corpus.document(index)
        secret = document.supervised.copy()
        secret[document.num_content_tokens :] = False
        updates[index] |= {
            "num_supervised_tokens": int(secret.sum()),
            "num_loss_tokens": int((losses_N[secret] > 0).sum()),
            "num_losses": int(losses_N[secret].sum()),
        }
    return [
        entry.model_copy(update=update)
        for entry, update in zip(corpus.manifest, updates, strict=True)
    ]


def count_until(
    config: RunConfig,
    prepared: PreparedRun,
    progress: CheckpointManifest,
    read: Callable[[str], Tensor],
) -> tuple[list[ManifestEntry], EndMetrics]:
    """Return the manifest and the totals of a run that ended at a checkpoint.

    ``read`` returns one of the checkpoint's tensors.

    Raises:
        RecordError: the checkpoint counts other rows than the documents have.
    """
    tally_P, dp_sgd = read("piece_tally").numpy(), find_mitigation(config.mitigations, DpSgdConfig)
    # Whether documents share rows depends on the model; the counts tell.
    for share_rows in (True, False):
        data = build_training_data(config, prepared, share_rows=share_rows)
        loader = data.loader
        loader.record(range(progress.num_rows))
        if np.array_equal(loader.piece_tally, tally_P):
            break
    else:
        raise RecordError(f"step {progress.step}: the checkpoint counts other rows than the run's")
    if config.train.audit_every_steps is not None:
        data.k_schedule.level_of[:] = read("level").numpy()
    privacy = {}
    if dp_sgd is not None:
        fed = loader.schedule[: progress.num_rows]
        privacy = asdict(compute_privacy(dp_sgd, fed, batch_size=loader.batch_size))
    end = EndMetrics(
        **progress.model_dump(include={*EndMetrics.model_fields}),
        **privacy,
        last_step=progress.step,
        tally_sha256=hash_tally(loader.realised_repetitions(), loader.count_fed_tokens()),
    )
    return count_up(loader, progress.num_rows), end


# -- the control ----------------------------------------------------------------------------------
#
# If none of m control documents is extracted, the upper end of the 95 % interval of 0 of m bounds
# the rate at which documents that were never trained are extracted.


def report_control(config: RunConfig, corpus: Corpus, console: Console) -> None:
    """Print what the control can show, or why there is none; nothing if the user turned it off."""
    has_control = any(entry.role == "control" for entry in corpus.manifest)
    if not _wants_control(config.data) or (has_control and not config.audit.enabled):
        return
    remark = remark_on_control(config, corpus, count_audited_control(config, corpus))
    if remark.level == "warning":
        console.warn(remark.text)
    else:
        console.info(f"control: {remark.text}")


def count_audited_control(config: RunConfig, corpus: Corpus) -> int:
    """Return how many control documents the audit of a run will score.

    Those too short for it, and near-duplicates of documents that the model is fed, are left out.
    """
    is_auditable = list_audit_needs(config).is_auditable
    fed = {entry.cluster for entry in corpus.manifest if entry.role in ("trained", "forget")}
    num = sum(
        entry.role == "control"
        and entry.cluster not in fed
        and is_auditable(corpus.document(index))
        for index, entry in enumerate(corpus.manifest)
    )
    return min(num, config.audit.max_documents_per_bucket or num)


def remark_on_control(config: RunConfig, corpus: Corpus, num_audited: int) -> Remark:
    """Return what the control of a run can show, or why there is none, with the way out."""
    num_control = sum(entry.role == "control" for entry in corpus.manifest)
    if not num_control:
        return warn("audit", _explain_missing(config, corpus))
    more = _suggest_more(config, num_audited)
    if not num_audited:
        return warn(
            "audit",
            f"None of the {num_control:,} control documents can be audited: they are too short, "
            f"labels, or near-duplicates of trained documents. {more}, or lower "
            "'audit.continuation_tokens' (of answers 'audit.min_prefix_tokens').",
        )
    rate = clopper_pearson(0, num_audited)
    if rate.ci is None:
        text = f"One control document is audited: too few for an interval. {more}."
        return warn("audit", text)
    text = (
        f"If none of the {num_audited:,} control documents is extracted, up to "
        f"{format_percent(rate.ci[1])} of unseen documents still could be (95 %)."
    )
    num_left_out = num_control - num_audited
    if num_left_out and num_audited != config.audit.max_documents_per_bucket:
        text += (
            f" {num_left_out:,} more cannot be audited: too short, labels, or near-duplicates of "
            "trained documents."
        )
    if num_audited < FEW_DOCUMENTS:
        text += f" To lower this bound: {more[0].lower()}{more[1:]}."
    return warn("audit", text) if num_audited < _VERY_FEW else note("audit", text)


def _wants_control(data: DataConfig) -> bool:
    """Return whether the settings ask for a control."""
    if data.study is not None:
        return 0 in data.study.num_repetitions
    return bool(data.control) or draws_control(data)


def _suggest_more(config: RunConfig, num_audited: int) -> str:
    """Return how to have more control documents."""
    if num_audited and num_audited == config.audit.max_documents_per_bucket:
        return "Raise 'audit.max_documents_per_bucket'"
    if config.data.study is not None:
        return "Raise 'data.study.documents_per_bucket', or add documents"
    if config.data.control:
        return "Add documents to 'data.control'"
    return "Add documents to 'data.train', or name your own in 'data.control'"


def _explain_missing(config: RunConfig, corpus: Corpus) -> str:
    """Return why no document is held back, and the way out."""
    data = config.data
    if not _wants_control(data):
        return (
            "There is no control: without documents that are never trained, memorization cannot be "
            f"distinguished from text that the model can predict anyway. {_suggest_any(data)}."
        )
    if not draws_control(data):
        return (
            "There is no control: no document of 'data.control' has enough tokens. Add longer "
            "documents there."
        )
    needs = list_audit_needs(config)
    num = sum(
        entry.role in ("trained", "removed") and needs.is_auditable(corpus.document(index))
        for index, entry in enumerate(corpus.manifest)
    )
    goal = size_control(num, data.control_fraction)
    ways = "name your own documents in 'data.control'"
    if not goal:
        return (
            f"There is no control: {num:,} document{'' if num == 1 else 's'} long enough for the "
            f"audit {'is' if num == 1 else 'are'} too few to hold one back. Add documents to "
            f"'data.train', or {ways}."
        )
    if num - goal < needs.min_documents:
        return (
            f"There is no control: holding back {goal:,} of {num:,} documents would leave fewer "
            f"than 'audit.min_documents' = {needs.min_documents:,} to train. Add documents to "
            f"'data.train', {ways}, or lower 'audit.min_documents'."
        )
    return (
        f"There is no control: each near-duplicate cluster of the {num:,} documents is larger than "
        f"the {goal:,} to hold back. Add other documents to 'data.train', or {ways}."
    )


def _suggest_any(data: DataConfig) -> str:
    if data.study is not None:
        return "Put 0 in 'data.study.num_repetitions'"
    if data.forget:
        return "Name documents that the model never saw in 'data.control'"
    return "Set 'data.control_fraction' above 0, or name your own documents in 'data.control'"
