"""What prepared documents depend on, as hashes: whether what lies there is still right."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from memguard.config import RunConfig
from memguard.data.deduplication import find_deduplicate
from memguard.data.documents import Document
from memguard.records import ManifestEntry


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
