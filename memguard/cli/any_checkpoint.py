"""What the audit of a model memguard did not train measures."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memguard.audit.extraction import AuditDocument
from memguard.audit.parts import Identity, choose_part, list_contexts
from memguard.audit.statistics import clopper_pearson
from memguard.cli.audit_request import AuditRequest
from memguard.cli.subjects import Subject, load_probe
from memguard.config import AuditConfig
from memguard.data.documents import Decode, Document, document_text, load_documents
from memguard.data.duplicates import WordGrams
from memguard.data.tokenization import build_decoder, hash_tokens, tokenize_documents
from memguard.errors import ModelError
from memguard.parallel.checkpoint_folder import load_config, load_tokenizer, max_positions
from memguard.records import DataIdentity, Rate, Role
from memguard.runtime import Console, default_cache_dir

# Without a stated limit a model is asked no more than this at once.
_DEFAULT_SEQ_LEN = 4096
_NEAR_DUPLICATE_WORDS = 13


@dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    """Members or non-members, as read."""

    name: str
    role: Role
    documents: Sequence[Document]

    def name_document(self, id: str) -> str:
        """Return an id that is unique in the audit: both sides may number their rows."""
        return id if self.role == "trained" else f"{self.name}:{id}"


def describe_checkpoint(request: AuditRequest, settings: AuditConfig, console: Console) -> Subject:
    """Say what the audit of a model memguard did not train measures.

    Raises:
        DataError: no documents, or unusable ones.
        ModelError: no usable checkpoint, base or tokenizer.
    """
    assert request.model is not None, "checked: there is a model"
    assert request.out is not None, "checked: there is a folder for the report"
    # Asked for even where it is not needed: a base that is not there is told before any reading.
    limits = [max_positions(path) for path in (request.model, request.base) if path is not None]
    seq_len = limits[0] or _DEFAULT_SEQ_LEN
    tokenizer, missing = None, None
    try:
        tokenizer = load_tokenizer(request.model)
    except ModelError as error:
        missing = error
    probe = load_probe(settings)
    sides = list(_read_sides(request, console))
    if missing is not None:
        if any(document.input_ids is None for side in sides for document in side.documents):
            raise missing
        console.warn(f"{missing}: token ids are audited without it, scores that need text are not")
    vocab_size = getattr(load_config(request.model).get_text_config(), "vocab_size", None)
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
                # How it was cut in training is not known.
                choose_part(
                    tokens,
                    list_contexts(tokens, seq_len),
                    Identity(id=id, bucket=side.name, role=side.role, source=tokens.source),
                    kind="context",
                    probe=probe,
                    window=settings.window,
                )
            )
    overlap = _measure_overlap(sides, None if tokenizer is None else build_decoder(tokenizer))
    if overlap is not None and overlap.num_matched:
        console.warn(
            f"{overlap.num_matched} of {overlap.num_documents} non-members share a run of "
            f"{_NEAR_DUPLICATE_WORDS} words with a member: the model may know them from there"
        )
    return Subject(
        documents=documents,
        canaries=(),
        mitigations=(),
        model=request.model,
        base=request.base,
        base_revision=None,
        reference=request.settings.get("reference"),
        attn=None,
        data=DataIdentity(
            sources=list(
                dict.fromkeys(Path(path).name for path in (*request.members, *request.nonmembers))
            ),
            documents_sha256=digest.hexdigest(),
            num_documents=len(documents),
            num_clusters=None,
            overlap_with_control=overlap,
            near_duplicate_words=None if overlap is None else _NEAR_DUPLICATE_WORDS,
        ),
        training=None,
        tally="missing",
        run=None,
        seed=request.seed,
        out=request.out,
        has_tokenizer=tokenizer is not None,
    )


def _read_sides(request: AuditRequest, console: Console) -> Iterator[_Side]:
    sides: tuple[tuple[str, Role, tuple[str, ...]], ...] = (
        ("members", "trained", request.members),
        ("nonmembers", "control", request.nonmembers),
    )
    for name, role, given in sides:
        if not given:
            continue
        console.info(f"{name}: reading {', '.join(given)}")
        loaded = load_documents(
            given,
            setting=f"--{name}",
            text_column=request.text_column,
            cache_dir=default_cache_dir(),
        )
        yield _Side(name=name, role=role, documents=loaded.documents)


def _measure_overlap(sides: Sequence[_Side], decode: Decode | None) -> Rate | None:
    """Return how many non-members share a run of words with a member; None without non-members."""
    if len(sides) < 2:
        return None
    members, nonmembers = (side.documents for side in sides)
    grams = WordGrams(
        (document_text(document, decode) for document in (*members, *nonmembers)),
        num_words=_NEAR_DUPLICATE_WORDS,
    )
    is_member = np.arange(len(members) + len(nonmembers)) < len(members)
    return clopper_pearson(grams.count_overlap(~is_member, is_member), len(nonmembers))
