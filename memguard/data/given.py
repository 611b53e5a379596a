"""Every document that a run's settings name, and which of them it shall forget."""

from dataclasses import dataclass
from pathlib import Path

from memguard.config import RunConfig
from memguard.data.documents import Document, load_documents, name_ids
from memguard.data.tokenization import hmac_text
from memguard.errors import DataError
from memguard.runtime import Console


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
