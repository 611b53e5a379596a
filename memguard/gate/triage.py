"""Documents that came out and that a person accepted: `triage.yaml`, and `memguard accept`.

    accepted:
      - document: 1f0c...9a   # keyed hash of the text, whatever probe extracts it
        by: A. Writer
        reason: The licence text, which is public.
        until: 2027-01-31     # last day; null: without end

An accepted document stays visible and counted; it never changes a rate. After its last day it
counts as open again. The file lies outside run and audit folders: it must not be sealed with what
it excuses.
"""

import contextlib
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import Field, field_validator

from memguard.config import Document, load_yaml, validate
from memguard.config.settings import Settings
from memguard.errors import MAX_PATH, ConfigError, shorten
from memguard.gate.gaps import Audited
from memguard.records import format_now
from memguard.records.audit_files import AUDIT_FILES, FINDINGS, SCORES
from memguard.records.gate import Acceptance
from memguard.records.record import describe_unread, write_atomically
from memguard.records.run_files import has_prepared

_DOCUMENT = re.compile(r"[0-9a-f]{64}")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class AcceptedDocument(Settings):
    """One entry of `triage.yaml`."""

    document: str = Field(description="keyed hash of its text, as findings.csv has it.")
    by: str = Field(description="who accepted it.")
    reason: str = Field(description="why it is accepted.")
    until: date | None = Field(
        description="last day on which it is accepted, as 2027-01-31; null: without end."
    )

    @field_validator("document")
    @classmethod
    def _check_document(cls, document: str) -> str:
        if not _DOCUMENT.fullmatch(document):
            raise ValueError(
                "must be the keyed hash of a document, 64 hexadecimal digits, as findings.csv has "
                f"it; got {shorten(repr(document))}"
            )
        return document

    @field_validator("by", "reason")
    @classmethod
    def _check_said(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("must not be empty: it is shown to everyone who reads the verdict")
        return text

    @field_validator("until", mode="before")
    @classmethod
    def _read_day(cls, until: Any) -> date | None:
        if until is None or (isinstance(until, date) and not isinstance(until, datetime)):
            return until
        # Texts only: Pydantic would take the number 20270131 for a date, too.
        if isinstance(until, str) and _DAY.fullmatch(until):
            with contextlib.suppress(ValueError):
                return date.fromisoformat(until)
        raise ValueError(f"must be a day, as 2027-01-31, or null; got {shorten(repr(until))}")


class _TriageFile(Settings):
    accepted: tuple[AcceptedDocument, ...] = Field(description="The accepted documents.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Triage:
    """The accepted documents, and the file as it was written."""

    accepted: tuple[AcceptedDocument, ...]
    text: str


def load_triage(path: Path) -> Triage:
    """Read a triage file; it may not lie inside the folder of a run or an audit.

    ConfigError has one line for each problem, with its place.
    """
    _refuse_sealed(path)
    document = load_yaml(path)
    accepted = validate(_TriageFile, document.values, document).accepted
    first: dict[str, int] = {}
    problems = []
    for index, entry in enumerate(accepted):
        if (other := first.setdefault(entry.document, index)) < index:
            place, there = (document.locate(("accepted", at, "document")) for at in (index, other))
            problems.append(
                f"{place} 'accepted[{index}].document' is the same as at {there}: name each "
                "document once"
            )
    if problems:
        raise ConfigError(*problems)
    return Triage(accepted=accepted, text=document.text)


def _refuse_sealed(path: Path) -> None:
    # As it is given too: a folder of a run may be a link to another disk.
    for place in (os.path.realpath(path), os.path.abspath(path)):
        for folder in Path(place).parents:
            is_run = (folder / "config.yaml").is_file() and has_prepared(folder)
            if is_run or (folder / AUDIT_FILES).is_file():
                raise ConfigError(
                    f"'triage' must not be inside the folder of {'a run' if is_run else 'an audit'}"
                    ": it would be sealed with what it accepts; got "
                    f"'{shorten(str(path), MAX_PATH)}'. Keep it beside the policy"
                )


def apply_triage(triage: Triage, texts: Sequence[str | None], today: date) -> list[Acceptance]:
    """Return the state of each entry of a triage; an acceptance includes its last day.

    ``texts`` has the keyed hashes of the documents that came out.
    """
    present = set(texts)
    return [
        Acceptance(
            **entry.model_dump(mode="json"),
            state=(
                "not-found"
                if entry.document not in present
                else "accepted"
                if entry.until is None or today <= entry.until
                else "expired"
            ),
        )
        for entry in triage.accepted
    ]


# -- memguard accept -------------------------------------------------------------------------------

_PREFIX = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NewAcceptance:
    """An entry that `accept` wrote."""

    entry: AcceptedDocument
    ids: list[str]
    """The documents that came out with this text."""
    is_replaced: bool
    """Whether it replaces an earlier one of the document."""


def accept(audited: Audited, named: str, path: Path, **said: str | None) -> NewAcceptance:
    """Write the acceptance of a document into a triage file, which is made if there is none.

    ``named`` is its id, or its keyed hash or the start of it; ``said`` has by, reason and until.
    """
    text, ids = _find_document(audited, named)
    values = {"document": text, **said}
    entry = validate(AcceptedDocument, values, Document(path="accept:", values=values, places={}))
    if entry.until is not None and entry.until < date.fromisoformat(format_now()[:10]):
        raise ConfigError(f"'until' must not have passed: {entry.until}. Leave it out for no end")
    _refuse_sealed(path)
    old = load_triage(path) if path.exists() else Triage(accepted=(), text="")
    kept = [one for one in old.accepted if one.document != text]
    is_replaced = len(kept) < len(old.accepted)
    content = None if is_replaced else _append(old, entry)
    write_atomically(path.resolve(), (content or _dump([*kept, entry], "accepted")).encode())
    return NewAcceptance(entry=entry, ids=ids, is_replaced=is_replaced)


def _find_document(audited: Audited, named: str) -> tuple[str, list[str]]:
    """Return the keyed hash of a document that came out, and the ids that have it."""
    documents = audited.documents
    if documents is None:
        raise describe_unread(audited.folder / SCORES, PermissionError())
    ids_N, texts_N, out_N = documents.id_N, documents.text_hmac_N, documents.came_out_N
    texts = {*texts_N[ids_N == named].tolist()}
    if len(texts) > 1:
        raise ConfigError(
            f"'{shorten(named)}' is the id of {len(texts):,} different texts: name the document by "
            f"its keyed hash, which {FINDINGS} has"
        )
    if not texts and _PREFIX.fullmatch(named):
        texts = {one for one in texts_N[out_N].tolist() if (one or "").startswith(named)}
        if len(texts) > 1:
            raise ConfigError(f"{len(texts):,} keyed hashes begin with '{named}': give more of it")
    text = next(iter(texts), None)
    rows = np.flatnonzero(out_N & (ids_N == named if text is None else texts_N == text))
    if not len(rows):
        raise ConfigError(
            f"'{shorten(named)}' is none of the {int(out_N.sum()):,} documents that came out; "
            f"{FINDINGS} of the audit lists them"
        )
    if text is None:
        raise ConfigError(
            f"'{shorten(named)}' has no keyed hash, by which it is accepted: audit again with "
            "'data.identity_key'"
        )
    return text, ids_N[rows].tolist()


def _dump(entries: Sequence[AcceptedDocument], key: str = "") -> str:
    listed = [entry.model_dump() for entry in entries]
    return yaml.safe_dump({key: listed} if key else listed, sort_keys=False, allow_unicode=True)


def _append(old: Triage, entry: AcceptedDocument) -> str | None:
    """Return the text with an entry more, its comments kept; None where its form does not allow."""
    indents = re.findall(r"^( *)- ", old.text, re.MULTILINE)
    added = textwrap.indent(_dump([entry]), indents[-1] if indents else "")
    content = f"{old.text.rstrip()}\n{added}"
    with contextlib.suppress(yaml.YAMLError):
        expected = yaml.safe_load(_dump([*old.accepted, entry], "accepted"))
        if yaml.safe_load(content) == expected:
            return content
    return None
