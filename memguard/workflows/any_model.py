"""Documents and models for the audit of a model that memguard did not train."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit.extraction import AuditDocument
from memguard.audit.parts import Identity, choose_part, list_contexts
from memguard.audit.selection import find_near_duplicates
from memguard.audit.statistics import clopper_pearson
from memguard.audit.suite import load_audit_suite
from memguard.config import AuditConfig
from memguard.data.documents import Decode, Document, document_text, load_documents
from memguard.data.duplicates import WordGrams
from memguard.data.tables import Table
from memguard.data.tokenization import build_decoder, hash_tokens, tokenize_documents
from memguard.errors import MAX_PATH, ModelError, shorten
from memguard.hf.checkpoint import find_positions, load_config, load_tokenizer
from memguard.records import DataIdentity, Rate, Role
from memguard.runtime import Console, default_cache_dir
from memguard.workflows.audit_inputs import AuditTarget
from memguard.workflows.audit_request import AuditRequest
from memguard.workflows.audited_model import ModelInMemory

# Length of a passage for a model without a stated limit (tokens).
_DEFAULT_SEQ_LEN = 4096
_NEAR_DUPLICATE_WORDS = 13


@dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    """Members or non-members."""

    name: str
    role: Role
    documents: Sequence[Document]

    def name_document(self, id: str) -> str:
        """Return an id that is unique in the audit; both sides may use the same row numbers."""
        return id if self.role == "trained" else f"{self.name}:{id}"


def describe_checkpoint(
    request: AuditRequest, settings: AuditConfig, console: Console
) -> AuditTarget:
    """Return what to audit of a model that memguard did not train.

    Raises:
        DataError: no documents, or unusable ones.
        ModelError: no usable checkpoint, base or tokenizer.
    """
    assert request.model is not None, "checked: there is a model"
    assert request.out is not None, "checked: there is a folder for the report"
    # Load the base's configuration too, so that a missing base fails before documents are read.
    configs = [_load_config(model) for model in (request.model, request.base) if model is not None]
    seq_len = find_positions(configs[0]) or _DEFAULT_SEQ_LEN
    tokenizer, missing = _load_tokenizer(request.model)
    probe = load_audit_suite(settings).extraction
    sides = list(_read_sides(request, console))
    if missing is not None:
        if any(document.input_ids is None for side in sides for document in side.documents):
            raise missing
        console.warn(f"{missing}: token ids are audited without it, scores that need text are not")
    vocab_size = getattr(configs[0].get_text_config(), "vocab_size", None)
    console.info("documents: looking for near-duplicates")
    cluster_N, overlap = _find_copies(
        sides, None if tokenizer is None else build_decoder(tokenizer)
    )
    documents: list[AuditDocument] = []
    digest = hashlib.sha256()
    for side in sides:
        for tokens in tokenize_documents(
            side.documents,
            tokenizer,
            append_eos=False,
            max_tokens=None,
            setting=f"--{side.name}",
            vocab_size=vocab_size,
        ):
            id = side.name_document(tokens.id)
            digest.update(f"{id}\0{side.name}\0{hash_tokens(tokens.input_ids)}\n".encode())
            documents.append(
                # It is not known how training cut the document.
                choose_part(
                    tokens,
                    list_contexts(tokens, seq_len),
                    Identity(
                        id=id,
                        bucket=side.name,
                        role=side.role,
                        source=tokens.source,
                        cluster=int(cluster_N[len(documents)]),
                    ),
                    kind="context",
                    probe=probe,
                    window=settings.window,
                )
            )
    if overlap is not None and overlap.num_matched:
        console.warn(_describe_overlap(overlap, len(find_near_duplicates(documents))))
    return AuditTarget(
        documents=documents,
        model=request.model,
        base=request.base,
        reference=settings.reference,
        data=DataIdentity(
            sources=list(
                dict.fromkeys(
                    Path(source).name if isinstance(source, str) else source.name
                    for source in (*request.members, *request.nonmembers)
                )
            ),
            documents_sha256=digest.hexdigest(),
            num_documents=len(documents),
            num_clusters=len(np.unique(cluster_N)),
            overlap_with_control=overlap,
            near_duplicate_words=_NEAR_DUPLICATE_WORDS,
        ),
        seed=request.seed,
        out=request.out,
        tokenizer=tokenizer,
        has_given_control=any(side.role == "control" for side in sides),
    )


def _describe_overlap(overlap: Rate, num_left_out: int) -> str:
    """Describe the shared words; of these, boilerplate does not make near-duplicates."""
    text = (
        f"{overlap.num_matched:,} of {overlap.num_documents:,} non-members share a run of "
        f"{_NEAR_DUPLICATE_WORDS} words with a member: the model may have been trained on that "
        "text. "
    )
    if not num_left_out:
        return (
            f"{text}All stay in the control, because these runs occur in too many documents to "
            "define near-duplicates"
        )
    if num_left_out == overlap.num_documents:
        return f"{text}All are near-duplicates of members and left out: no control remains"
    is_or_are = "is a near-duplicate" if num_left_out == 1 else "are near-duplicates"
    return f"{text}{num_left_out:,} {is_or_are} of members and left out of the control"


def _load_config(model: str | ModelInMemory) -> Any:
    return load_config(model) if isinstance(model, str) else model.model.config


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


def _read_sides(request: AuditRequest, console: Console) -> Iterator[_Side]:
    sides: tuple[tuple[str, Role, tuple[str | Table, ...]], ...] = (
        ("members", "trained", request.members),
        ("nonmembers", "control", request.nonmembers),
    )
    for name, role, given in sides:
        if not given:
            continue
        names = ", ".join(s if isinstance(s, str) else s.name for s in given)
        console.info(f"{name}: reading {shorten(names, MAX_PATH)}")
        loaded = load_documents(
            given,
            setting=f"--{name}",
            text_column=request.text_column,
            cache_dir=default_cache_dir(),
        )
        yield _Side(name=name, role=role, documents=loaded.documents)


def _find_copies(
    sides: Sequence[_Side], decode: Decode | None
) -> tuple[NDArray[np.int64], Rate | None]:
    """Return each document's near-duplicate cluster, and the share of non-members with overlap.

    The clusters are used for confidence intervals. The number of trained documents that contain a
    text is not counted: members may be only a sample of the training data, so the count would be
    too low.

    Args:
        sides: members, and non-members where there are any.
        decode: turns token ids into text; None compares ids as words.

    Returns:
        ``[num_documents]`` in the order of the sides; and the rate, None without non-members.
    """
    documents = [document for side in sides for document in side.documents]
    grams = WordGrams(
        (document_text(document, decode) for document in documents),
        num_words=_NEAR_DUPLICATE_WORDS,
    )
    cluster_N = grams.cluster().cluster
    if len(sides) < 2:
        return cluster_N, None
    num_nonmembers = len(sides[1].documents)
    is_member = np.arange(len(documents)) < len(documents) - num_nonmembers
    return cluster_N, clopper_pearson(grams.count_overlap(~is_member, is_member), num_nonmembers)
