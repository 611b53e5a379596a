"""Documents and models for the audit of a model that memguard did not train.

Where its training was counted (`ForeignModel.counts`), members are audited as they were trained:
by number of repetitions, and in the pieces that truncation and packing left of them.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit.benchmarks.tasks import OpenedTask
from memguard.audit.plan import AuditPlan
from memguard.audit.selection import choose_part, find_near_duplicates, list_contexts
from memguard.audit.statistics import clopper_pearson
from memguard.audit.windows import TINY_MARGINS, AuditDocument, Part
from memguard.data.chat import writes_today
from memguard.data.documents import Decode, Document, document_text, load_documents, say_empty
from memguard.data.duplicates import WordGrams
from memguard.data.encoding import build_decoder
from memguard.data.identity_key import IdentityKey
from memguard.data.table_files import Table
from memguard.data.token_checks import Tokens, find_audit_faults
from memguard.data.tokenization import TokenizedDocument, hash_tokens, hmac_text, tokenize_documents
from memguard.errors import MAX_PATH, ModelError, shorten
from memguard.hf.checkpoint import find_positions, load_config, load_tokenizer
from memguard.records import DataIdentity, Rate, Role
from memguard.runtime import Console, default_cache_dir
from memguard.workflows.auditing.checks import CheckedAudit, ForeignModel
from memguard.workflows.auditing.model_in_memory import ModelInMemory
from memguard.workflows.auditing.target import Subject
from memguard.workflows.auditing.trained_counts import TrainedCounts

# Length of a passage for a model without a stated limit (tokens).
_DEFAULT_SEQ_LEN = 4096
_NEAR_DUPLICATE_WORDS = 13


@dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    """Members or non-members."""

    name: str
    role: Role
    documents: Sequence[Document]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Training:
    """How the members were trained, if that was counted."""

    counts: TrainedCounts | None = None
    """None if it was not counted, or the counts do not hold."""
    doses: frozenset[int] = frozenset()
    """The different numbers of repetitions, without 0."""

    def count(self, side: _Side, id: str) -> int | None:
        """Return the repetitions of a document; None if not counted."""
        if self.counts is None or side.role != "trained":
            return None
        return self.counts.num_repetitions[id]

    def name_bucket(self, side: _Side, count: int | None) -> str:
        """Return the name of a bucket, which is split by repetitions as that of a run is."""
        return side.name if count is None or len(self.doses) < 2 else f"{side.name}, {count} times"

    def list_parts(
        self, id: str, tokens: TokenizedDocument, seq_len: int
    ) -> tuple[Part, list[tuple[int, int]]]:
        """Return the parts of a document, cut as in training, of which one is audited.

        Documents of the control are cut like those that were trained.
        """
        whole = [(0, len(tokens.input_ids))]
        spans = whole if self.counts is None else self.counts.list_spans(id, whole[0][1])
        if spans == whole:
            # It was not cut, or it is not known how.
            return "context", list_contexts(tokens, seq_len)
        return "piece", [(begin, min(end, begin + seq_len)) for begin, end in spans]


def plan_foreign(
    checked: CheckedAudit,
    identity: IdentityKey,
    console: Console,
    tasks: Sequence[OpenedTask] = (),
) -> tuple[AuditPlan, Subject]:
    """Return what to audit of a model that memguard did not train."""
    given, settings = checked.source, checked.settings
    assert isinstance(given, ForeignModel), "the audit is not of a run"
    # Load the base's configuration too, so that a missing base fails before documents are read.
    configs = [
        load_config(model) if isinstance(model, str) else model.model.config
        for model in (given.model, given.base)
        if model is not None
    ]
    seq_len = find_positions(configs[0]) or _DEFAULT_SEQ_LEN
    tokenizer, missing = _load_tokenizer(given.model)
    sides = list(_read_sides(given, tokenizer, console))
    training, notes = _read_counts(given.counts, sides[0])
    if missing is not None:
        if any(document.input_ids is None for side in sides for document in side.documents):
            raise missing
        console.warn(f"{missing}: token ids are audited without it, scores that need text are not")
    vocab_size = getattr(configs[0].get_text_config(), "vocab_size", None)
    day = given.form.chat_date or date.today()
    tokenized = [
        list(
            tokenize_documents(
                side.documents,
                tokenizer,
                append_eos=False,
                max_tokens=None,
                setting=f"--{side.name}",
                vocab_size=vocab_size,
                day=day,
            )
        )
        for side in sides
    ]
    chats = any(document.format != "text" for side in sides for document in side.documents)
    if chats and given.form.chat_date is None and writes_today(tokenizer):
        console.warn(
            f"the chat template writes today's date: on another day, give 'chat_date: {day}' in "
            "--format for the same tokens"
        )
    read = [tokens for of_side in tokenized for tokens in of_side]
    console.info("documents: looking for near-duplicates")
    cluster_N, overlap = _find_copies(
        sides, training, read, None if tokenizer is None else build_decoder(tokenizer)
    )
    clusters = iter(cluster_N.tolist())
    documents: list[AuditDocument] = []
    digest = hashlib.sha256()
    text_hmacs: set[str] = set()
    num_cut = 0
    for side, of_side in zip(sides, tokenized, strict=True):
        for tokens, document in zip(of_side, side.documents, strict=True):
            text_hmac = hmac_text(identity.key, document)
            text_hmacs.add(text_hmac)
            # Both sides may use the same row numbers.
            id = tokens.id if side.role == "trained" else f"{side.name}:{tokens.id}"
            digest.update(f"{id}\0{side.name}\0{hash_tokens(tokens.input_ids)}\n".encode())
            cluster, count = next(clusters), training.count(side, tokens.id)
            if count == 0:  # Neither trained nor a fair control.
                continue
            kind, parts = training.list_parts(id, tokens, seq_len)
            num_cut += kind == "piece" and parts[-1][1] < tokens.num_content_tokens
            documents.append(
                choose_part(
                    tokens,
                    parts,
                    partial(
                        AuditDocument,
                        id=id,
                        bucket=training.name_bucket(side, count),
                        role=side.role,
                        source=tokens.source,
                        num_repetitions=count,
                        text_hmac=text_hmac,
                        has_own_id=document.has_own_id,
                        cluster=cluster,
                    ),
                    kind=kind,
                    probe=checked.suite.extraction,
                    window=settings.window,
                )
            )
    if tokenizer is not None:
        for fault in find_audit_faults(Tokens.of_documents(read), tokenizer, configs[0]):
            console.warn(fault.text)
    if overlap is not None and overlap.num_matched:
        console.warn(_describe_overlap(overlap, len(find_near_duplicates(documents))))
    plan = AuditPlan.of(
        documents,
        checked.suite,
        seed=given.seed,
        min_documents=settings.min_documents,
        max_documents_per_bucket=settings.max_documents_per_bucket,
        tiny_margin=TINY_MARGINS[settings.dtype],
        tally="missing" if training.counts is None else "complete",
        has_given_control=any(side.role == "control" for side in sides),
        window=settings.window,
        tasks=tasks,
    )
    sources = [
        Path(source).name if isinstance(source, str) else source.name
        for source in (*given.members, *given.nonmembers)
    ]
    subject = Subject(
        model=given.model,
        base=given.base,
        reference=settings.reference,
        data=DataIdentity(
            sources=list(dict.fromkeys(sources)),
            documents_sha256=digest.hexdigest(),
            num_documents=len(cluster_N),
            num_clusters=len(np.unique(cluster_N)),
            overlap_with_control=overlap,
            near_duplicate_words=_NEAR_DUPLICATE_WORDS,
            identity_key=identity.fingerprint,
            num_texts=len(text_hmacs),
        ),
        out=checked.out,
        tokenizer=tokenizer,
        notes=(
            *notes,
            *_note_cut(num_cut, len(documents), training.counts),
            *(given.model.notes if isinstance(given.model, ModelInMemory) else ()),
        ),
    )
    return plan, subject


def _read_counts(counts: TrainedCounts | None, members: _Side) -> tuple[_Training, tuple[str, ...]]:
    """Return how the members were trained, and the notes of the report on it."""
    if counts is None:
        return _Training(), ()
    if not counts.reason and any(d.id not in counts.num_repetitions for d in members.documents):
        counts = replace(counts, reason="the documents that were counted are not the members")
    if counts.reason:
        return _Training(), counts.describe()
    repetitions = [counts.num_repetitions[document.id] for document in members.documents]
    num_never = repetitions.count(0)
    notes = counts.describe()
    if num_never:
        notes += (
            f"{num_never:,} of {len(repetitions):,} members {'was' if num_never == 1 else 'were'} "
            "not found in full among the sequences that were trained, and not audited.",
        )
    return _Training(counts=counts, doses=frozenset(repetitions) - {0}), notes


def _note_cut(num_cut: int, num_documents: int, counts: TrainedCounts | None) -> tuple[str, ...]:
    """Say which part of long documents is audited, if training left out their ends."""
    if not num_cut or counts is None or counts.piece != "cut":
        return ()
    return (
        f"Training cut documents after {counts.max_tokens:,} tokens: {num_cut:,} of "
        f"{num_documents:,}, members and control, {'is' if num_cut == 1 else 'are'} audited up to "
        "there only.",
    )


def _describe_overlap(overlap: Rate, num_left_out: int) -> str:
    """Describe the shared words; not all of them make near-duplicates."""
    text = (
        f"{overlap.num_matched:,} of {overlap.num_documents:,} non-members share a run of "
        f"{_NEAR_DUPLICATE_WORDS} words with a member: the model may have been trained on that "
        "text. "
    )
    if not num_left_out:
        return (
            f"{text}All stay in the control, because these runs are too small a part of them to "
            "make near-duplicates"
        )
    if num_left_out == overlap.num_documents:
        return f"{text}All are near-duplicates of members and left out: no control remains"
    is_or_are = "is a near-duplicate" if num_left_out == 1 else "are near-duplicates"
    return f"{text}{num_left_out:,} {is_or_are} of members and left out of the control"


def _load_tokenizer(model: str | ModelInMemory) -> tuple[Any, ModelError | None]:
    """Return a model's tokenizer, or None and the reason."""
    if isinstance(model, str):
        try:
            return load_tokenizer(model), None
        except ModelError as error:
            return None, error
    if model.tokenizer is None:
        return None, ModelError("'tokenizer' is None")
    return model.tokenizer, None


def _read_sides(given: ForeignModel, tokenizer: Any, console: Console) -> Iterator[_Side]:
    sides: tuple[tuple[str, Role, tuple[str | Table, ...]], ...] = (
        ("members", "trained", given.members),
        ("nonmembers", "control", given.nonmembers),
    )
    for name, role, sources in sides:
        if not sources:
            continue
        names = ", ".join(s if isinstance(s, str) else s.name for s in sources)
        console.info(f"{name}: reading {shorten(names, MAX_PATH)}")
        loaded = load_documents(
            sources,
            setting=f"--{name}",
            form=given.form,
            has_chat_template=lambda: getattr(tokenizer, "chat_template", None) is not None,
            style=given.style,
            cache_dir=default_cache_dir(),
            say=console.info,
        )
        if loaded.num_empty:
            console.warn(f"{name}: {say_empty(loaded.num_empty)} left out")
        yield _Side(name=name, role=role, documents=loaded.documents)


def _find_copies(
    sides: Sequence[_Side],
    training: _Training,
    tokens: Sequence[TokenizedDocument],
    decode: Decode | None,
) -> tuple[NDArray[np.int64], Rate | None]:
    """Return each document's near-duplicate cluster, and the share of non-members with overlap.

    The clusters, ``[num_documents]`` in the order of the sides, are for confidence intervals. The
    number of trained documents that contain a text is not counted: members may be only a sample of
    the training data, so the count would be too low. Members that were never trained
    (``training``) have no overlap with the control; ``decode`` None compares ids as words.
    """
    documents = [document for side in sides for document in side.documents]
    grams = WordGrams(
        (document_text(document, decode) for document in documents), num_words=_NEAR_DUPLICATE_WORDS
    )
    cluster_N = grams.cluster([hash_tokens(document.input_ids) for document in tokens])
    if len(sides) < 2:
        return cluster_N, None
    in_control = np.array([side.role == "control" for side in sides for _ in side.documents])
    in_trained = np.array(
        [
            side.role == "trained" and training.count(side, document.id) != 0
            for side in sides
            for document in side.documents
        ]
    )
    num_nonmembers = int(in_control.sum())
    return cluster_N, clopper_pearson(grams.count_overlap(in_control, in_trained), num_nonmembers)
