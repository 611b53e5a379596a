"""Prepares a run's documents: writes the manifest and tokens that every later stage reads.

1 read       every document that the settings name, except those to be forgotten
2 tokenise   documents that are long enough; prepared documents are reused if their hash matches
3 cluster    near-duplicates
4 place      bucket, role and repetitions of each document, and of the canaries
5 write      tokens, summary and manifest
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memguard.config import DataConfig, FormatConfig
from memguard.config.mitigations import DeduplicateConfig
from memguard.data.buckets import Placement, place_for_study, place_for_training
from memguard.data.canaries import prepare_canaries
from memguard.data.chat import writes_today
from memguard.data.corpus import Corpus, load_corpus, save_corpus
from memguard.data.documents import Document, document_text, name_ids
from memguard.data.duplicates import WordGrams, find_copies
from memguard.data.encoding import build_decoder, check_lengths, find_unknown
from memguard.data.given import GivenDocuments, hash_content, hash_settings, read_given
from memguard.data.identity_key import RunIdentity
from memguard.data.sources import list_stamps
from memguard.data.tokenization import TokenizedDocument, hash_tokens, hmac_text, tokenize_documents
from memguard.errors import MAX_PATH, DataError, RecordError, shorten
from memguard.records import ManifestEntry, describe_unread
from memguard.records.folders import RunFiles
from memguard.records.run_files import PreparedSummary, has_begun, load_summary
from memguard.records.sealed import save_sealed
from memguard.runtime import Console


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditNeeds:
    """Requirements of a run's audit on its documents."""

    key: str
    """Identifies the settings that decide which documents are long enough, and the minimum."""
    is_auditable: Callable[[TokenizedDocument], bool]
    min_documents: int
    """Minimum number of auditable trained documents; 0 for a run that is not audited. No control is
    drawn if fewer would remain."""


def prepare(
    data: DataConfig,
    run_folder: Path,
    *,
    seed: int,
    epochs: int,
    deduplicate: DeduplicateConfig | None,
    audit: AuditNeeds,
    load_tokenizer: Callable[[Sequence[Document] | None], Any],
    has_chat_template: Callable[[], bool] = lambda: False,
    cache_dir: Path,
    console: Console,
    vocab_size: int | None = None,
    is_begun_with: Callable[[PreparedSummary], bool] | None = None,
    needs_key: bool = False,
    keeps_documents: bool = True,
) -> Corpus:
    """Load, tokenise, cluster and place the documents; write manifest and tokens.

    Existing prepared documents are reused if nothing they depend on has changed; sources whose
    files look the same are not opened. Each trained document is trained ``epochs`` times, unless
    ``data`` says otherwise. ``load_tokenizer`` is given None, and returns None if it needs the
    documents of `data.train`: what it then makes of them is stored. ``has_chat_template`` is for
    rows of alpaca. Token ids in the documents must be below ``vocab_size`` (rows of the model's
    embedding); None: not checked. ``is_begun_with`` returns whether training has begun on the
    documents of a summary; None if it has not begun. ``needs_key``: training derives secrets from
    the identity key. Without ``keeps_documents`` they are deleted, and no key is made.

    Raises:
        ConfigError: a library is not installed; the identity key is another, or in a wrong place.
        DataError: no documents, no supervised token, duplicate ids, too few for the buckets.
        RecordError: the prepared documents are damaged and cannot be rebuilt.
    """
    if deduplicate is not None:
        deduplicate.check_library()
    run_identity = RunIdentity(data.identity_key, run_folder)
    identity = run_identity.find(console, makes_key=keeps_documents, needs_key=needs_key)
    fingerprint = run_identity.expected if identity is None else identity.fingerprint
    others = [seed, epochs, vocab_size, fingerprint, deduplicate and deduplicate.model_dump_json()]
    form = data.model_dump_json(include={*FormatConfig.model_fields})
    # Taken before: a change in between is seen at the next start.
    files = list_stamps([one for named in data.list_sources().values() for one in named], cache_dir)
    if (known := load_tokenizer(None)) is not None:
        settings_key = hash_settings(known, data, [*others, form])
        unread = _find_unread(run_folder, files, settings_key, audit.key, console)
        if unread is not None:
            if identity is None and keeps_documents:
                run_identity.warn_of_missing(console)
            return unread
    given = read_given(data, cache_dir, console, has_chat_template=has_chat_template)
    documents = [document for _, document in given.pairs]
    # Checked before a tokenizer is trained on the documents.
    check_lengths(documents, max_tokens=data.max_document_tokens, setting="data")
    tokenizer = load_tokenizer([document for name, document in given.pairs if name == "train"])
    settings_key = hash_settings(tokenizer, data, [*others, form])
    key = hash_content(given, hash_settings(tokenizer, data, others))
    before = _find_prepared(run_folder, key, audit.key, console)
    if before is not None:
        summary = before.summary.model_copy(update={"files": files, "settings_key": settings_key})
        save_sealed(summary, run_folder / "prepared" / "summary.json")
        if identity is None and keeps_documents:
            run_identity.warn_of_missing(console)
        return before
    if identity is None:
        identity = run_identity.require()
    earlier = load_summary(run_folder)
    day = data.chat_date or (earlier and earlier.chat_date) or date.today()
    kept, num_cut_off = _tokenize(given, tokenizer, data, day, vocab_size, console)
    console.info("documents: looking for near-duplicates")
    decode = build_decoder(tokenizer)
    grams = WordGrams(
        (document_text(row.document, decode) for row in kept), num_words=data.near_duplicate_words
    )
    cluster_N = grams.cluster([hash_tokens(row.tokens.input_ids) for row in kept])
    placements = _place(kept, cluster_N, data, seed, epochs, deduplicate, audit, console)
    role = np.array([placement.role if placement else "" for placement in placements])
    origin = np.array([row.origin for row in kept])
    forgotten = cluster_N[origin == "forget"]
    placed = [
        _Placed(row.document, row.tokens, placement, int(number))
        for row, placement, number in zip(kept, placements, cluster_N, strict=True)
        if placement is not None
    ]
    drawn = prepare_canaries(
        data,
        tokenizer,
        epochs=epochs,
        seed=seed,
        texts_sha256=given.hash_training_texts(),
        # Removed documents count, so that the secrets are the same with and without a mitigation.
        num_trained=int(np.isin(role, ("trained", "background", "removed")).sum()),
        console=console,
    )
    taken = {document.id for document in documents}
    if twice := [document.id for document, _, _ in drawn if document.id in taken]:
        raise DataError(
            f"'data' has documents with the ids of canaries ({name_ids(twice)}). Rename them, or "
            "set data.canaries.count=0."
        )
    # Each has its own cluster, as if there were no canaries: they share only their template.
    first = int(cluster_N.max()) + 1
    canaries = [_Placed(*canary, number) for number, canary in enumerate(drawn, first)]
    entered = [(row.enter(identity.key), row.tokens) for row in (*placed, *canaries)]
    entries = [entry for entry, _ in entered]
    is_control = role == "control"
    summary = PreparedSummary(
        key=key,
        settings_key=settings_key,
        files=files,
        audit_key=audit.key,
        documents_sha256=_hash_documents(entered),
        sources=sorted({row.document.source for row in placed}),
        num_documents=len(placed),
        num_empty=given.num_empty,
        num_shorter=len(given.pairs) - len(kept) - num_cut_off,
        num_cut_off=num_cut_off,
        num_left_out=given.num_same_text + len(kept) - len(placed),
        num_clusters=len({row.cluster for row in placed}),
        num_control=int(is_control.sum()),
        num_removed=None if deduplicate is None else int((role == "removed").sum()),
        # Documents to be forgotten were trained in an earlier run.
        num_control_overlapping=grams.count_overlap(
            is_control, np.isin(role, ("trained", "background", "forget"))
        ),
        num_canaries=len(canaries),
        # Documents of `data.train` in a cluster with one to be forgotten.
        num_also_forgotten=given.num_same_text
        + int((np.isin(cluster_N, forgotten) & (origin == "train")).sum()),
        identity_key=identity.fingerprint,
        changes=Counter(change for row in kept for change in row.tokens.changes),
        unknown_id=find_unknown(tokenizer),
        chat_date=day if writes_today(tokenizer) else None,
    )
    if is_begun_with is not None and not is_begun_with(summary):
        raise _have_changed(run_folder)
    _report_buckets(summary, entries, console)
    own = None if tokenizer is known else tokenizer
    save_corpus(run_folder, summary, entries, [tokens for _, tokens in entered], own)
    return load_corpus(run_folder)


def _find_unread(
    run_folder: Path, files: Mapping[str, str], settings_key: str, audit_key: str, console: Console
) -> Corpus | None:
    """Return the documents prepared earlier if their sources need not be read, else None.

    No file is another or new; after training has begun, files may be missing.
    """
    summary, begun = load_summary(run_folder), has_begun(run_folder)
    if summary is None or "" in summary.files.values():
        return None
    there = {name: stamp for name, stamp in files.items() if stamp}
    missing = sorted(summary.files.keys() - there.keys())
    is_same = summary.settings_key == settings_key and there.items() <= summary.files.items()
    is_same &= begun or (summary.audit_key == audit_key and not missing)
    if not is_same or RunFiles(run_folder).find_damage("prepared"):
        return None
    if missing:
        console.warn(
            f"{len(missing):,} of {len(summary.files):,} source files are missing "
            f"('{shorten(missing[0], MAX_PATH)}'): the documents prepared before are used"
        )
    console.info(f"documents: {summary.num_documents:,} prepared before, unchanged")
    return load_corpus(run_folder)


def _find_prepared(run_folder: Path, key: str, audit_key: str, console: Console) -> Corpus | None:
    """Return the documents prepared earlier if they are complete and up to date, else None."""
    begun = has_begun(run_folder)
    damages = RunFiles(run_folder).find_damage("prepared")
    summary = load_summary(run_folder)
    if begun and summary is not None and summary.key != key:
        raise _have_changed(run_folder)
    for damage in damages:
        if damage.is_unreadable:
            # Not damage: the owner's documents must not be replaced.
            raise describe_unread(run_folder / damage.file, PermissionError())
    if damages:
        if begun and summary is not None and summary.audit_key != audit_key:
            raise RecordError(
                f"'{run_folder}': {damages[0]}, and the lengths in 'audit' or "
                "'audit.min_documents' have changed since: restore them, so that the same "
                "documents can be prepared again"
            )
        console.warn(f"{damages[0]}; the documents are prepared again")
        return None
    if summary is None:
        return None
    if summary.key == key and (begun or summary.audit_key == audit_key):
        console.info(f"documents: {summary.num_documents:,} prepared before, unchanged")
        return load_corpus(run_folder)
    console.info("documents: settings, tokenizer or texts have changed; preparing again")
    return None


def _have_changed(run_folder: Path) -> DataError:
    return DataError(
        f"the documents have changed since training began in '{run_folder}' (texts, ids, "
        "tokenizer or identity key). Restore them, choose another 'name', or delete that folder."
    )


class _Row(NamedTuple):
    """A document with enough tokens and the setting that it came from."""

    origin: str
    document: Document
    tokens: TokenizedDocument


def _tokenize(
    given: GivenDocuments,
    tokenizer: Any,
    data: DataConfig,
    day: date,
    vocab_size: int | None,
    console: Console,
) -> tuple[list[_Row], int]:
    """Tokenise the documents; leave out those too short or without supervised tokens once cut.

    The latter are counted.
    """
    with console.progress("tokenise", len(given.pairs), "documents") as advance:
        tokenized = tokenize_documents(
            [document for _, document in given.pairs],
            tokenizer,
            append_eos=data.append_eos,
            max_tokens=data.max_document_tokens,
            setting="data",
            vocab_size=vocab_size,
            day=day,
            progress=lambda done: advance(done, ""),
        )
        long_enough = [
            _Row(origin, document, tokens)
            for (origin, document), tokens in zip(given.pairs, tokenized, strict=True)
            if len(tokens.input_ids) >= data.min_document_tokens
        ]
    # The first token has no context and never receives loss.
    kept = [row for row in long_enough if row.tokens.supervised[1:].any()]
    num_cut_off = len(long_enough) - len(kept)
    if not any(row.origin == "train" for row in kept):
        least, most = data.min_document_tokens, data.max_document_tokens
        cut_off = (
            f", or no supervised token before 'data.max_document_tokens' = {most}"
            if num_cut_off
            else ""
        )
        raise DataError(
            f"'data.train': all {len(given.pairs) - len(kept)} documents have fewer than "
            f"'data.min_document_tokens' = {least} tokens{cut_off}"
        )
    if num_cut_off:
        console.warn(
            f"{num_cut_off:,} of {len(given.pairs):,} documents are left out: their supervised "
            f"tokens are beyond 'data.max_document_tokens' = {data.max_document_tokens:,}"
        )
    return kept, num_cut_off


def _place(
    kept: Sequence[_Row],
    cluster: NDArray[np.int64],
    data: DataConfig,
    seed: int,
    epochs: int,
    deduplicate: DeduplicateConfig | None,
    audit: AuditNeeds,
    console: Console,
) -> list[Placement | None]:
    """Assign each document to a bucket and mark copies as removed; None: left out."""
    auditable = np.array([audit.is_auditable(row.tokens) for row in kept], dtype=bool)
    place: Callable[..., list[Placement | None]]
    place = place_for_study
    if data.study is None:
        place = partial(place_for_training, epochs=epochs, min_documents=audit.min_documents)
    origins = [row.origin for row in kept]
    placements = place(data=data, origin=origins, cluster=cluster, auditable=auditable, seed=seed)
    if deduplicate is not None:
        placements = _remove_copies(kept, placements, deduplicate, console)
    is_trained = [placed is not None and placed.role == "trained" for placed in placements]
    num_auditable = int((auditable & is_trained).sum())
    # Fail before training, not after it.
    if num_auditable < audit.min_documents:
        longest = max(row.tokens.num_content_tokens for row in kept)
        raise DataError(
            f"'audit.min_documents' is {audit.min_documents}, but only {num_auditable} of "
            f"the documents to be trained {'is' if num_auditable == 1 else 'are'} long enough for "
            f"the audit, of text that the tokenizer knows; the longest has {longest} "
            f"token{'' if longest == 1 else 's'}, in pieces of 'data.seq_len' = {data.seq_len}. "
            "Give more or longer documents, lower 'audit.continuation_tokens' (of answers "
            "'audit.min_prefix_tokens') or 'audit.min_documents', or set audit.enabled=false."
        )
    return placements


def _remove_copies(
    kept: Sequence[_Row],
    placements: Sequence[Placement | None],
    config: DeduplicateConfig,
    console: Console,
) -> list[Placement | None]:
    trained = [n for n, placed in enumerate(placements) if placed and placed.role == "trained"]
    is_copy = np.zeros(len(kept), dtype=bool)
    is_copy[trained] = find_copies([document_text(kept[n].document) for n in trained], config)
    if num_copies := int(is_copy.sum()):
        console.info(
            f"documents: {num_copies:,} of {len(trained):,} removed as copies of an earlier "
            "document (deduplicate)"
        )
    else:
        similarity = config.similarity
        relation = "identical" if similarity == "exact" else f"{similarity:g} similar"
        console.warn(
            f"'mitigations': deduplicate has no effect: no two of {len(trained):,} documents are "
            f"{relation}. Remove it"
        )
    removed = Placement(bucket="removed", role="removed", repetitions=0)
    return [removed if copy else placed for placed, copy in zip(placements, is_copy, strict=True)]


class _Placed(NamedTuple):
    """A document of the run with its tokens, placement and cluster."""

    document: Document
    tokens: TokenizedDocument
    placement: Placement
    cluster: int

    def enter(self, hmac_key: bytes) -> ManifestEntry:
        """Return its manifest entry."""
        return ManifestEntry(
            id=self.document.id,
            text_hmac=hmac_text(hmac_key, self.document),
            has_own_id=self.document.has_own_id,
            source=self.document.source,
            bucket=self.placement.bucket,
            role=self.placement.role,
            planned_repetitions=self.placement.repetitions,
            num_repetitions=None,
            num_tokens=len(self.tokens.input_ids),
            cluster=self.cluster,
        )


def _hash_documents(entered: Sequence[tuple[ManifestEntry, TokenizedDocument]]) -> str:
    """Hash ids, buckets and tokens of all documents; the same with and without a mitigation.

    The hash of one document is stored nowhere: a text could be tested against it.
    """
    digest = hashlib.sha256()
    for entry, tokens in entered:
        # A document that a mitigation removes still belongs to the training data.
        bucket = "trained" if entry.role == "removed" else entry.bucket
        line = f"{entry.id}\0{bucket}\0{hash_tokens(tokens.input_ids)}\n"
        digest.update(line.encode(errors="surrogatepass"))
    return digest.hexdigest()


def _report_buckets(
    summary: PreparedSummary, entries: Sequence[ManifestEntry], console: Console
) -> None:
    """Print the number of documents in each bucket."""
    if summary.num_also_forgotten:
        console.info(
            f"documents: {summary.num_also_forgotten:,} of 'data.train' are not trained: they or a "
            "near-duplicate are also in 'data.forget'"
        )
    buckets: dict[str, list[int]] = {}
    for entry in entries:
        buckets.setdefault(entry.bucket, []).append(entry.num_tokens)
    parts = [f"{name} {len(t):,} ({sum(t):,} tokens)" for name, t in buckets.items()]
    console.info(f"documents: {', '.join(parts)}")
