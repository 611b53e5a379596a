"""The manifest: one line per document, with its planned and its actual training."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from memguard.errors import RecordError, VersionError
from memguard.records.record import Record, describe_unread, write_atomically

Role = Literal["trained", "control", "background", "heldout", "canary", "forget", "removed"]

IGNORE_LABEL = -100
"""Label of a position that receives no loss (transformers' convention)."""


class ManifestEntry(Record):
    """One document of a run: its planned and its actual training."""

    id: str
    text_hmac: str
    """HMAC-SHA256 of the text under the identity key: texts can be matched but not guessed."""
    has_own_id: bool = False
    """Whether the user's column `id` gave the id; else it is made of file name and row number."""
    source: str
    bucket: str
    role: Role
    planned_repetitions: int
    num_repetitions: int | None
    """Times the loader fed the whole document; null before training has ended."""
    num_tokens: int
    cluster: int
    """Documents with the same number share a run of words."""
    num_tokens_fed: int | None = None
    """Tokens of it that the loader fed, summed over repetitions and including partial ones; null
    before training has ended."""
    # Counted for canaries when training has ended; null elsewhere.
    num_supervised_tokens: int | None = None
    """Supervised tokens; for a canary those of its secret, without EOS."""
    num_loss_tokens: int | None = None
    """Supervised tokens that received loss at least once."""
    num_losses: int | None = None
    """Times that supervised tokens received loss, summed; without mitigations this is tokens x
    repetitions."""


_COUNTED = {
    "num_repetitions",
    "num_tokens_fed",
    "num_supervised_tokens",
    "num_loss_tokens",
    "num_losses",
}
"""Fields that are filled in when training has ended."""


def hash_plan(entries: Iterable[ManifestEntry]) -> str:
    """Return a hash of the planned fields, which are the same before and after training."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.model_dump_json(exclude=_COUNTED)}\n".encode())
    return digest.hexdigest()


def save_manifest(entries: Iterable[ManifestEntry], path: Path) -> None:
    """Write `manifest.jsonl` atomically, one line per document."""
    write_atomically(path, "".join(f"{e.model_dump_json()}\n" for e in entries).encode())


def load_manifest(path: Path) -> list[ManifestEntry]:
    """Read `manifest.jsonl`.

    Raises:
        VersionError: written by a version whose entries have fields unknown to this one.
        RecordError: missing, or a line is not an entry.
    """
    entries = []
    try:
        with path.open("rb") as lines:
            for line in lines:
                entries.append(ManifestEntry.model_validate_json(line))
    except OSError as error:
        raise describe_unread(path, error) from error
    except ValidationError as error:
        if not entries and all(problem["type"] == "extra_forbidden" for problem in error.errors()):
            raise VersionError(
                f"'{path}' was written by another version of memguard (it has the field "
                f"'{error.errors()[0]['loc'][0]}'): delete '{path.parent}', or choose another "
                "'name', and run memguard train again"
            ) from error
        raise RecordError(
            f"'{path}' line {len(entries) + 1} is not a manifest entry: {error.errors()[0]['msg']}"
        ) from error
    return entries
