"""Loads all documents that a run's settings name: for a new run, and again after its end."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from memguard.config import DataConfig, FormatConfig
from memguard.data.chat import writes_today
from memguard.data.documents import (
    Document,
    check_ids,
    document_text,
    load_settings,
    name_ids,
)
from memguard.data.identity_key import RunIdentity
from memguard.data.tokenization import hmac_text
from memguard.data.words import normalize_text
from memguard.errors import DataError
from memguard.records import ManifestEntry
from memguard.runtime import Console


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenDocuments:
    """Documents that the settings name, before they are assigned to buckets."""

    pairs: list[tuple[str, Document]]
    """(setting the document came from, document)."""
    digests: list[str]
    """Hashes of the texts, in the order of `pairs`."""
    num_empty: int
    num_same_text: int
    """Documents of `data.train` left out because `data.forget` has the same text."""

    def hash_training_texts(self) -> str:
        """Hash the texts of ``data.train`` and ``data.background``."""
        digest = hashlib.sha256()
        for (origin, _), text in zip(self.pairs, self.digests, strict=True):
            if origin in ("train", "background"):
                digest.update(text.encode())
        return digest.hexdigest()


def read_given(
    data: DataConfig,
    cache_dir: Path,
    console: Console,
    *,
    has_chat_template: Callable[[], bool] = lambda: False,
) -> GivenDocuments:
    """Load every source of a run; leave out `data.train` documents with a text in `data.forget`.

    See `load_documents` for the arguments.

    Raises:
        DataError: no documents, duplicate ids, or no document left to train on.
    """
    loaded = list(load_settings(data, cache_dir, console.info, has_chat_template=has_chat_template))
    pairs = [(setting, document) for setting, own in loaded for document in own.documents]
    digests = [hmac_text(b"", document) for _, document in pairs]
    # Done before ids are compared: documents to be forgotten are often a subset of `data.train`.
    forms = (
        [normalize_text(document_text(document)) for _, document in pairs] if data.forget else []
    )
    to_forget = {form for (name, _), form in zip(pairs, forms, strict=False) if name == "forget"}
    left = [
        (pair, text)
        for pair, text, form in zip_longest(pairs, digests, forms)
        if pair[0] != "train" or form not in to_forget
    ]
    if not any(name == "train" for (name, _), _ in left):
        raise DataError(
            "every document of 'data.train' is also in 'data.forget': add documents that the "
            "model must retain"
        )
    check_ids([document for (_, document), _ in left], "data")
    return GivenDocuments(
        pairs=[pair for pair, _ in left],
        digests=[text for _, text in left],
        num_empty=sum(own.num_empty for _, own in loaded),
        num_same_text=len(pairs) - len(left),
    )


def hash_settings(tokenizer: Any, data: DataConfig, others: Sequence[object]) -> str:
    """Hash all inputs of manifest and tokens but the texts: tokenizer, template, settings."""
    # Settings without effect are not hashed; those of the format show in the texts.
    without = {"identity_key", *FormatConfig.model_fields}
    if data.chat_date is not None and writes_today(tokenizer):
        without.remove("chat_date")
    if not data.canaries.count:
        without.add("canaries")
    if not data.forget:
        without |= {"forget", "forget_repetitions"}
    named = data.model_dump(mode="json", exclude=without)
    settings = [named, getattr(tokenizer, "chat_template", None), *others]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update(
        (backend.to_str() if backend else repr(sorted(tokenizer.get_vocab().items()))).encode()
    )
    return digest.hexdigest()


def hash_content(given: GivenDocuments, settings_sha256: str) -> str:
    """Hash the texts, beside what `hash_settings` returns."""
    digest = hashlib.sha256(settings_sha256.encode())
    for (origin, document), text in zip(given.pairs, given.digests, strict=True):
        digest.update(f"{origin}\0{document.id}\0".encode(errors="surrogatepass"))
        digest.update(text.encode())
    return digest.hexdigest()


def read_texts(
    data: DataConfig,
    run_folder: Path,
    wanted: Sequence[ManifestEntry],
    *,
    cache_dir: Path,
    has_chat_template: Callable[[], bool] = lambda: False,
) -> dict[str, Document]:
    """Return documents of a run by id, after checking that their texts have not changed.

    ``run_folder`` contains the fingerprint of the key of its manifest's hashes, ``wanted`` are
    entries of that manifest; see `load_documents` for the other arguments.

    Raises:
        ConfigError: the identity key is not that of the run, or is where it must not be.
        DataError: a source cannot be read, documents or the key are missing, or texts have changed.
    """
    hmacs = {entry.id: entry.text_hmac for entry in wanted}
    # Without it the documents cannot be compared with those of the run.
    key = RunIdentity(data.identity_key, run_folder).require().key
    unchanged: dict[str, Document] = {}
    for _, loaded in load_settings(data, cache_dir, has_chat_template=has_chat_template):
        for document in loaded.documents:
            if hmacs.get(document.id) == hmac_text(key, document):
                unchanged[document.id] = document
    changed = [name for name in hmacs if name not in unchanged]
    if changed:
        raise DataError(
            f"{len(changed)} of the documents of '{run_folder}' are missing or have changed since "
            f"training ({name_ids(changed)}). Restore their original texts."
        )
    return unchanged
