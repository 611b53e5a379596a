"""Documents into a run folder: manifest and tokens, so that every later stage reads the same."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.config import RunConfig
from memguard.config.mitigations import DeduplicateConfig
from memguard.data.buckets import Placement, place_for_study, place_for_training, remove_copies
from memguard.data.canaries import prepare_canaries
from memguard.data.corpus import Corpus, PreparedSummary, load_corpus, load_private_key, save_corpus
from memguard.data.documents import Document, document_text, load_documents, name_ids
from memguard.data.duplicates import WordGrams, find_copies, find_deduplicate, load_rensa
from memguard.data.tokenization import (
    TokenizedDocument,
    build_decoder,
    hash_tokens,
    hmac_text,
    tokenize_documents,
)
from memguard.errors import DataError
from memguard.records import ManifestEntry
from memguard.runtime import Console

# Every document that a run's settings name, and which of them it shall forget.


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenDocuments:
    """Documents as the settings name them, before anything is decided about them."""

    pairs: list[tuple[str, Document]]
    """(setting it came from, document)."""
    num_empty: int
    num_same_text: int
    """Documents of `data.train` left out, because `data.forget` has their text."""


def load_given(config: RunConfig, cache_dir: Path, console: Console) -> GivenDocuments:
    """Load every source of a run.

    Args:
        config: the run's settings.
        cache_dir: for derived sources.
        console: says what is read.

    Raises:
        DataError: no documents, ids given twice, or nothing left to train on.
    """
    pairs: list[tuple[str, Document]] = []
    num_empty = 0
    for setting in ("train", "control", "background", "heldout", "forget"):
        sources = [s for s in getattr(config.data, setting) if s != "remainder"]
        if not sources:
            continue
        console.info(f"documents: reading {', '.join(sources)}")
        loaded = load_documents(
            sources,
            setting=f"data.{setting}",
            text_column=config.data.text_column,
            cache_dir=cache_dir,
        )
        num_empty += loaded.num_empty
        pairs += [(setting, document) for document in loaded.documents]
    num_all = len(pairs)
    # Before ids are compared: a list of what shall be forgotten is often cut from the documents.
    pairs = _without_forgotten(pairs)
    seen: dict[str, int] = {}
    for _, document in pairs:
        seen[document.id] = seen.get(document.id, 0) + 1
    twice = [identifier for identifier, count in seen.items() if count > 1]
    if twice:
        raise DataError(
            f"'data': {len(twice)} ids stand for more than one document "
            f"({name_ids(twice)}). Give each its own 'id'."
        )
    return GivenDocuments(pairs=pairs, num_empty=num_empty, num_same_text=num_all - len(pairs))


def _without_forgotten(pairs: list[tuple[str, Document]]) -> list[tuple[str, Document]]:
    """Leave out documents of `data.train` whose very text is to be forgotten."""
    texts = {hmac_text(b"", document) for name, document in pairs if name == "forget"}
    if not texts:
        return pairs
    left = [
        (name, document)
        for name, document in pairs
        if name != "train" or hmac_text(b"", document) not in texts
    ]
    if not any(name == "train" for name, _ in left):
        raise DataError(
            "every document of 'data.train' stands in 'data.forget' too: give documents that the "
            "model shall retain"
        )
    return left


# What prepared documents depend on, as hashes: whether what lies there is still right.


def content_key(
    config: RunConfig,
    tokenizer: Any,
    pairs: Sequence[tuple[str, Document]],
    digests: Sequence[str],
) -> str:
    """Hash everything manifest and tokens depend on: texts, tokenizer, template, settings."""
    digest = hashlib.sha256()
    # Without canaries, or anything to forget, as it was before there were any: what was prepared
    # then is still right.
    without: set[str] = set()
    if not config.data.canaries.count:
        without.add("canaries")
    if not config.data.forget:
        without |= {"forget", "forget_repetitions"}
    settings = {
        "data": config.data.model_dump(mode="json", exclude=without),
        "epochs": config.train.epochs,
        "seed": config.seed,
        "template": getattr(tokenizer, "chat_template", None),
    }
    deduplicate = find_deduplicate(config)
    if deduplicate is not None:
        settings["deduplicate"] = deduplicate.model_dump(mode="json")
    digest.update(json.dumps(settings, sort_keys=True).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update(
        (backend.to_str() if backend else repr(sorted(tokenizer.get_vocab().items()))).encode()
    )
    for (origin, document), said in zip(pairs, digests, strict=True):
        digest.update(f"{origin}\0{document.id}\0".encode(errors="surrogatepass"))
        digest.update(said.encode())
    return digest.hexdigest()


def hash_training_texts(pairs: Sequence[tuple[str, Document]], digests: Sequence[str]) -> str:
    """Hash the texts of ``data.train`` and ``data.background``, of which ``digests`` are."""
    digest = hashlib.sha256()
    for (origin, _), said in zip(pairs, digests, strict=True):
        if origin in ("train", "background"):
            digest.update(said.encode())
    return digest.hexdigest()


def audit_key_of(config: RunConfig) -> str:
    """Return the settings that decide which documents are long enough for the audit."""
    lengths = {"suite", "continuation_tokens", "prefix_tokens", "min_prefix_tokens"}
    return json.dumps(config.audit.model_dump(mode="json", include=lengths), sort_keys=True)


def hash_entries(entries: Sequence[ManifestEntry]) -> str:
    """Hash which documents there are, in which buckets; the same with and without a mitigation."""
    digest = hashlib.sha256()
    for entry in entries:
        # What a mitigation takes out of training was given all the same.
        bucket = "trained" if entry.role == "removed" else entry.bucket
        line = f"{entry.id}\0{bucket}\0{entry.tokens_sha256}\n"
        digest.update(line.encode(errors="surrogatepass"))
    return digest.hexdigest()


def prepare(
    config: RunConfig,
    run_folder: Path,
    *,
    load_tokenizer: Callable[[Sequence[Document]], Any],
    is_auditable: Callable[[TokenizedDocument], bool],
    cache_dir: Path,
    console: Console,
    vocab_size: int | None = None,
) -> Corpus:
    """Load, tokenise, cluster and place the documents; write manifest and tokens.

    Reads what is there where nothing it depends on has changed.

    Args:
        config: the run's settings.
        run_folder: where `prepared/`, `manifest.jsonl` and the HMAC key go.
        load_tokenizer: given the documents of `data.train`, returns the tokenizer.
        is_auditable: whether a document is long enough for the audit.
        cache_dir: for derived sources.
        console: says what is done.
        vocab_size: given token ids must be below it (rows of the model's embedding); None checks
            none, as where the tokenizer is trained on the documents.

    Raises:
        ConfigError: a library that a setting needs is not installed.
        DataError: no documents, no supervised token, duplicate ids, too few for the buckets.
    """
    deduplicate = find_deduplicate(config)
    if deduplicate is not None and deduplicate.similarity != "exact":
        load_rensa()
    given = load_given(config, cache_dir, console)
    tokenizer = load_tokenizer([document for name, document in given.pairs if name == "train"])
    digests = [hmac_text(b"", document) for _, document in given.pairs]
    key = content_key(config, tokenizer, given.pairs, digests)
    audit_key = audit_key_of(config)
    if (run_folder / "prepared" / "summary.json").exists():
        corpus = load_corpus(run_folder)
        begun = (run_folder / "metrics.jsonl").exists()
        if corpus.summary.key == key and (begun or corpus.summary.audit_key == audit_key):
            console.info(f"documents: {corpus.summary.num_documents:,} prepared before, unchanged")
            return corpus
        if begun:
            raise DataError(
                f"the documents have changed since training began in '{run_folder}' (texts, ids "
                "or tokenizer). Bring them back, choose another 'name', or delete that folder."
            )
        console.info("documents: settings, tokenizer or texts have changed; preparing again")

    hmac_key = load_private_key(run_folder)
    kept, origins, num_shorter = [], [], 0
    documents = [document for _, document in given.pairs]
    with console.progress("tokenise", len(documents), "documents") as advance:
        tokenized = tokenize_documents(
            documents,
            tokenizer,
            append_eos=config.data.append_eos,
            max_tokens=config.data.max_document_tokens,
            setting="data",
            vocab_size=vocab_size,
            progress=lambda done: advance(done, ""),
        )
        for (origin, document), tokens in zip(given.pairs, tokenized, strict=True):
            if len(tokens.input_ids) < config.data.min_document_tokens:
                num_shorter += 1
                continue
            kept.append((document, tokens))
            origins.append(origin)
    if not any(origin == "train" for origin in origins):
        raise DataError(
            f"'data.train': all {num_shorter} documents have fewer than "
            f"'data.min_document_tokens' = {config.data.min_document_tokens} tokens"
        )
    _check_supervised([tokens for _, tokens in kept], config.data.seq_len)

    console.info("documents: looking for near-duplicates")
    decode = build_decoder(tokenizer)
    grams = WordGrams(
        (document_text(document, decode) for document, _ in kept),
        num_words=config.data.near_duplicate_words,
    )
    clusters = grams.cluster()
    auditable = np.array([is_auditable(tokens) for _, tokens in kept], dtype=bool)
    placements: list[Placement | None]
    if config.data.study is None:
        placements = place_for_training(
            data=config.data,
            origin=origins,
            cluster=clusters.cluster,
            auditable=auditable,
            epochs=config.train.epochs,
            seed=config.seed,
        )
    else:
        placements = place_for_study(
            data=config.data,
            origin=origins,
            cluster=clusters.cluster,
            auditable=auditable,
            seed=config.seed,
        )
    num_removed = None
    if deduplicate is not None:
        placements = _remove_copies(kept, placements, deduplicate, console)
        num_removed = sum(each is not None and each.role == "removed" for each in placements)
    roles = np.array([placement.role if placement else "" for placement in placements])
    _check_auditable(config, int((auditable & (roles == "trained")).sum()), kept)
    is_control = roles == "control"
    is_trained = (roles == "trained") | (roles == "background")
    num_also_forgotten = given.num_same_text + _count_left_out(origins, clusters.cluster)
    if num_also_forgotten:
        console.info(
            f"documents: {num_also_forgotten:,} of 'data.train' stand in 'data.forget' too, or a "
            "near-duplicate does, and are not trained"
        )
    placed = [
        _Placed(document=document, tokens=tokens, placement=placement, cluster=int(number))
        for (document, tokens), placement, number in zip(
            kept, placements, clusters.cluster, strict=True
        )
        if placement is not None
    ]
    prepared_canaries = prepare_canaries(
        config,
        tokenizer,
        texts_sha256=hash_training_texts(given.pairs, digests),
        # Removed ones count too: with and without a mitigation the same secrets are drawn.
        num_trained=int((is_trained | (roles == "removed")).sum()),
        console=console,
    )
    # A cluster each, without a look at the others: what canaries share is their template. So
    # documents are clustered and placed as if there were no canaries.
    canaries = [
        _Placed(document=document, tokens=tokens, placement=placement, cluster=number)
        for number, (document, tokens, placement) in enumerate(
            prepared_canaries, int(clusters.cluster.max()) + 1
        )
    ]
    _check_canary_ids(canaries, given.pairs)
    entries = [each.enter(hmac_key) for each in (*placed, *canaries)]
    summary = PreparedSummary(
        key=key,
        audit_key=audit_key,
        documents_sha256=hash_entries(entries),
        sources=sorted({each.document.source for each in placed}),
        num_documents=len(placed),
        num_empty=given.num_empty,
        num_shorter=num_shorter,
        num_left_out=given.num_same_text + len(kept) - len(placed),
        num_clusters=len({each.cluster for each in placed}),
        num_boilerplate_grams=clusters.num_boilerplate_grams,
        num_control=int(is_control.sum()),
        num_removed=num_removed,
        # What is to be forgotten was trained before.
        num_control_overlapping=grams.count_overlap(is_control, is_trained | (roles == "forget")),
        num_canaries=len(canaries),
        num_also_forgotten=num_also_forgotten,
    )
    if not is_control.any() and _wants_control(config):
        console.warn(
            "no document could be held back as control: too few of them are long enough for the "
            "audit, or they are near-duplicates of each other"
        )
    save_corpus(run_folder, summary, entries, [each.tokens for each in (*placed, *canaries)])
    console.info(f"documents: {_describe(entries)}")
    return load_corpus(run_folder)


def _remove_copies(
    kept: Sequence[tuple[Document, TokenizedDocument]],
    placements: Sequence[Placement | None],
    config: DeduplicateConfig,
    console: Console,
) -> list[Placement | None]:
    trained = [n for n, placed in enumerate(placements) if placed and placed.role == "trained"]
    is_copy = np.zeros(len(kept), dtype=bool)
    is_copy[trained] = find_copies([document_text(kept[n][0]) for n in trained], config)
    num_copies = int(is_copy.sum())
    if num_copies:
        console.info(
            f"documents: {num_copies:,} of {len(trained):,} removed, of which an earlier copy is "
            "trained (deduplicate)"
        )
    else:
        alike = "the same" if config.similarity == "exact" else f"{config.similarity:g} similar"
        console.warn(
            f"'mitigations': deduplicate does nothing here: no two of {len(trained):,} documents "
            f"are {alike}. Leave it out"
        )
    return remove_copies(placements, is_copy)


def _count_left_out(origins: Sequence[str], cluster: NDArray[np.int64]) -> int:
    """Count documents of `data.train` that share a cluster with what is to be forgotten."""
    origin = np.array(origins)
    shared = np.isin(cluster, cluster[origin == "forget"])
    return int((shared & (origin == "train")).sum())


def _check_supervised(documents: Sequence[TokenizedDocument], seq_len: int) -> None:
    # The first token has nothing before it and never receives loss.
    without = [document.id for document in documents if not document.supervised[1:].any()]
    if without:
        raise DataError(
            f"'data': {len(without)} of {len(documents)} documents have no supervised token "
            f"({name_ids(without)}). Are completions or assistant turns empty, or cut off by "
            "'data.max_document_tokens'?"
        )


def _check_auditable(
    config: RunConfig, num_auditable: int, kept: Sequence[tuple[Document, TokenizedDocument]]
) -> None:
    """Refuse before training what the audit would refuse after it."""
    if config.audit.enabled and num_auditable < config.audit.min_documents:
        longest = max(tokens.num_content_tokens for _, tokens in kept)
        raise DataError(
            f"'audit.min_documents' is {config.audit.min_documents}, but only {num_auditable} of "
            f"the documents to be trained {'is' if num_auditable == 1 else 'are'} long enough for "
            f"the audit; the longest has {longest} token{'' if longest == 1 else 's'}, in pieces "
            f"of 'data.seq_len' = {config.data.seq_len}. Give more or longer documents, lower "
            "'audit.continuation_tokens' or 'audit.min_documents', or set audit.enabled=false."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placed:
    """A document of the run, ready to be written."""

    document: Document
    tokens: TokenizedDocument
    placement: Placement
    cluster: int

    def enter(self, hmac_key: bytes) -> ManifestEntry:
        """Return its line of the manifest."""
        return ManifestEntry(
            id=self.document.id,
            text_hmac=hmac_text(hmac_key, self.document),
            source=self.document.source,
            bucket=self.placement.bucket,
            role=self.placement.role,
            planned_repetitions=self.placement.repetitions,
            num_repetitions=None,
            num_tokens=len(self.tokens.input_ids),
            tokens_sha256=hash_tokens(self.tokens.input_ids),
            cluster=self.cluster,
        )


def _check_canary_ids(canaries: Sequence[_Placed], pairs: Sequence[tuple[str, Document]]) -> None:
    taken = {document.id for _, document in pairs}
    twice = [each.document.id for each in canaries if each.document.id in taken]
    if twice:
        raise DataError(
            f"'data' has documents with ids of canaries ({name_ids(twice)}). Give them other ids, "
            "or set data.canaries.count=0."
        )


def _wants_control(config: RunConfig) -> bool:
    if config.data.study is not None:
        return 0 in config.data.study.num_repetitions
    return bool(config.data.control) or config.data.control_fraction > 0


def _describe(entries: Sequence[ManifestEntry]) -> str:
    buckets: dict[str, list[int]] = {}
    for entry in entries:
        buckets.setdefault(entry.bucket, []).append(entry.num_tokens)
    parts = [f"{name} {len(t):,} ({sum(t):,} tokens)" for name, t in buckets.items()]
    return ", ".join(parts)
