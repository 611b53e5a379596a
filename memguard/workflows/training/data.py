"""Prepares the documents of a run, packs its rows and masks its labels.

Training and the dry run share this code, so that the dry run shows what training does.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.audit.selection import Identity
from memguard.audit.suite import load_audit_suite
from memguard.config import RunConfig, dump_yaml
from memguard.config.mitigations import DeduplicateConfig, DpSgdConfig, find_mitigation
from memguard.data.corpus import Corpus, CorpusDocument
from memguard.data.documents import Document
from memguard.data.encoding import find_special_ids
from memguard.data.loader import Loader
from memguard.data.packing import plan_rows
from memguard.data.prepare import AuditNeeds
from memguard.data.prepare import prepare as prepare_corpus
from memguard.data.tokenization import TokenizedDocument, list_token_texts
from memguard.mitigation import Mitigations
from memguard.mitigation.k_schedule import KSchedule, build_k_schedule
from memguard.records import write_atomically
from memguard.records.run_files import add_hash_line, find_run_keys, has_trained
from memguard.runtime import Console, default_cache_dir, quiet_libraries
from memguard.workflows.auditing.target import choose_piece
from memguard.workflows.common.folder import hash_prepared
from memguard.workflows.common.setup import load_known_tokenizer, read_model_config, train_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A run whose documents are ready."""

    folder: Path
    corpus: Corpus
    tokenizer: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingData:
    """The rows of a run in their order, and the mitigations that mask labels or losses."""

    loader: Loader
    k_schedule: KSchedule

    @property
    def mitigations(self) -> Mitigations:
        """The loss-stage mitigations, which are the same for all documents."""
        return self.k_schedule.levels[0]


def prepare(
    config: RunConfig, folder: Path, console: Console, *, keeps_documents: bool = True
) -> PreparedRun:
    """Load, tokenise and place the documents of a run.

    Args:
        config: of the run.
        folder: everything is written there, except an identity key that has to be made.
        console: reports progress.
        keeps_documents: False for a folder that is deleted: no identity key is made.

    Raises:
        ConfigError: no such suite; see `data.prepare`.
        DataError: see `data.prepare`.
        ModelError: no usable checkpoint or tokenizer.
    """
    quiet_libraries()
    audit = list_audit_needs(config)
    known = load_known_tokenizer(config)
    write_atomically(folder / "config.yaml", add_hash_line(dump_yaml(config)).encode())
    trained = find_run_keys(folder)
    tokenizers: list[Any] = []

    def tokenizer_for(documents: Sequence[Document]) -> Any:
        tokenizer = train_tokenizer(config, documents, console) if known is None else known
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
        vocab_size=_count_vocabulary(config, known),
        cache_dir=default_cache_dir(),
        console=console,
        is_begun_with=(lambda given: hash_prepared(config, given) in trained) if trained else None,
        # Its noise is derived from the key.
        needs_key=find_mitigation(config.mitigations, DpSgdConfig) is not None
        and not has_trained(folder),
        keeps_documents=keeps_documents,
    )
    return PreparedRun(folder=folder, corpus=corpus, tokenizer=tokenizers[0])


def list_audit_needs(config: RunConfig) -> AuditNeeds:
    """Return what the audit of a run requires of its documents.

    Raises:
        ConfigError: no such suite.
    """
    probe = load_audit_suite(config.audit).extraction

    def is_auditable(document: TokenizedDocument | CorpusDocument) -> bool:
        piece = choose_piece(
            document,
            # Neither decides which piece is chosen.
            Identity(id="", bucket="", role="trained", source=""),
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


def _count_vocabulary(config: RunConfig, tokenizer: Any) -> int | None:
    """Return the rows of the model's embedding; None if the tokenizer is not trained yet."""
    if config.model.scratch is not None and tokenizer is None:
        return None
    return int(read_model_config(config, tokenizer).get_text_config().vocab_size)


def build_training_data(
    config: RunConfig, prepared: PreparedRun, *, share_rows: bool
) -> TrainingData:
    """Pack the documents into rows, order the rows, and mask their labels.

    Args:
        config: the run's settings.
        prepared: its documents and tokenizer.
        share_rows: whether the model masks attention between documents of one row.
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
