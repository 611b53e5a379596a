"""A finished run's documents, read again from where they came."""

from collections.abc import Sequence
from pathlib import Path

from memguard.config import RunConfig
from memguard.data.documents import Document, load_documents, name_ids
from memguard.data.private_key import load_private_key
from memguard.data.tokenization import hmac_text
from memguard.errors import DataError
from memguard.records import ManifestEntry


def read_texts(
    config: RunConfig, run_folder: Path, wanted: Sequence[ManifestEntry], *, cache_dir: Path
) -> dict[str, Document]:
    """Return documents of a run by id, and see that they are what it was given.

    Args:
        config: of the finished run.
        run_folder: with the key under which the manifest's hashes were made.
        wanted: entries of its manifest.
        cache_dir: for derived sources.

    Raises:
        DataError: a source cannot be read, documents have changed since, or the key is gone.
    """
    hmacs = {entry.id: entry.text_hmac for entry in wanted}
    if not (run_folder / "audit" / "private" / "hmac.key").exists():
        raise DataError(
            f"'{run_folder}/audit/private/hmac.key' is missing: nothing else tells whether "
            "documents are those of the run. Bring it back."
        )
    key = load_private_key(run_folder)
    found: dict[str, Document] = {}
    for setting in ("train", "control", "background", "heldout", "forget"):
        sources = [name for name in getattr(config.data, setting) if name != "remainder"]
        if not sources:
            continue
        loaded = load_documents(
            sources,
            setting=f"data.{setting}",
            text_column=config.data.text_column,
            cache_dir=cache_dir,
        )
        for document in loaded.documents:
            if hmacs.get(document.id) == hmac_text(key, document):
                found[document.id] = document
    changed = [name for name in hmacs if name not in found]
    if changed:
        raise DataError(
            f"{len(changed)} of the documents of '{run_folder}' are gone or have other texts now "
            f"({name_ids(changed)}). Bring them back as they were trained."
        )
    return found
