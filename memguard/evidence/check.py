"""Reads a bundle and checks it: every byte of it, its statement, and what its files say.

    archive      the form of a bundle, and nothing before, between or after its members
    statement    built again from the members, byte for byte
    members      the report, the records and the gate's result are those that evidence.json is about
    signature    of the statement, if there is one; checked with a key only

Each check raises a RecordError, whose message is a predicate of the bundle.
"""

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from memguard.errors import RecordError, VersionError
from memguard.evidence.archive import MAX_BYTES, find_difference, read_members
from memguard.evidence.members import (
    CONFIG,
    ENVELOPE,
    EVIDENCE,
    STATEMENT,
    check_names,
    sort_members,
)
from memguard.evidence.signature import check_signature, read_envelope
from memguard.evidence.statement import (
    Evidence,
    build_statement,
    describe_audit,
    find_changed,
    hash_bytes,
)
from memguard.records.audit import AuditReport
from memguard.records.audit_files import REPORT, SCORES
from memguard.records.gate import GATE, GATE_FILES, GATE_FOLDER, GateResult
from memguard.records.record import describe_unread, validate_record
from memguard.records.sealed import FileSum

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A bundle in which nothing was changed after it was written, as far as hashes show."""

    evidence: Evidence
    members: Mapping[str, FileSum]
    num_bytes: int
    sha256: str
    """Hash of the bundle itself."""
    key_id: str | None
    """Key that the signature names; None: not signed."""
    is_signature_checked: bool
    """Whether it was checked with a key."""

    def describe(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return {
            "audit": self.evidence.audit,
            "level": self.evidence.level,
            "verdict": self.evidence.verdict,
            "num_bytes": self.num_bytes,
            "sha256": self.sha256,
            "has_private_records": self.evidence.sources.has_private_records,
            "is_signed": self.key_id is not None,
            "key_id": self.key_id,
            "is_signature_checked": self.is_signature_checked,
            "members": {name: written.model_dump() for name, written in self.members.items()},
        }


def read_bundle(path: Path) -> bytes:
    """Read a file of at most `MAX_BYTES`.

    Raises:
        RecordError: it cannot be read, or is larger or no regular file.
    """
    try:
        # Opening a pipe would wait for its other end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise RecordError(f"'{path}' is no regular file, and so no bundle")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise describe_unread(path, error) from error
    if len(content) > MAX_BYTES:
        raise RecordError(f"'{path}' has more than {MAX_BYTES:,} bytes, and so is no bundle")
    return content


def check_bundle(archive: bytes, key: "Ed25519PublicKey | None" = None) -> Checked:
    """Check the bytes of a bundle.

    Args:
        archive: the bundle.
        key: public key of the signature; None leaves it unchecked.

    Raises:
        RecordError: something was changed after it was written, or is missing, or another key
            signed it; the message is a predicate.
        VersionError: another version of memguard wrote it; as above.
    """
    members = read_members(archive)
    check_names(members)
    evidence = _check_statement(members)
    if difference := find_difference(archive, sort_members(members)):
        raise RecordError(f"is damaged: {difference}")
    _check_members(members, evidence)
    key_id = _check_signed(members, evidence, key)
    return Checked(
        evidence=evidence,
        members={
            name: FileSum(num_bytes=len(content), sha256=hash_bytes(content))
            for name, content in members.items()
        },
        num_bytes=len(archive),
        sha256=hash_bytes(archive),
        key_id=key_id,
        is_signature_checked=key is not None,
    )


def _check_statement(members: Mapping[str, bytes]) -> Evidence:
    """Build the statement again from the members, and return what it is about."""
    ordered = sort_members(members)
    if changed := find_changed(ordered, members[STATEMENT]):
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise RecordError(
            f"is damaged: {changed[0]}{more} is not what was written (its SHA-256 differs from "
            "that in the statement)"
        )
    evidence = _read_evidence(members[EVIDENCE])
    if build_statement(ordered, evidence) != members[STATEMENT]:
        raise RecordError(f"is damaged: {STATEMENT} is not the statement of its members")
    return evidence


def _read_evidence(content: bytes) -> Evidence:
    try:
        return Evidence.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("schema",) and isinstance(first["input"], str):
            raise VersionError(
                "was written by another version of memguard, which this one cannot read"
            ) from error
        raise RecordError(f"is damaged: {EVIDENCE} cannot be read") from error


def _check_members(members: Mapping[str, bytes], evidence: Evidence) -> None:
    """Refuse members that do not belong together, each of which may be intact."""
    try:
        report = validate_record(AuditReport, members[REPORT], Path(REPORT))
    except RecordError as error:
        raise VersionError(f"has a report that this version cannot read: {error}") from error
    if describe_audit(report, evidence.sources) != evidence:
        raise RecordError(f"contradicts itself: {EVIDENCE} is not about {REPORT}")
    if evidence.write() != members[EVIDENCE]:
        raise RecordError(f"is damaged: {EVIDENCE} is not what memguard writes")
    sources = evidence.sources
    if (CONFIG in members) != (sources.config_sha256 is not None):
        raise RecordError(f"contradicts itself: {EVIDENCE} does not agree with {CONFIG}")
    has_records = SCORES in members
    if has_records != sources.has_private_records or (
        has_records and hash_bytes(members[SCORES]) != sources.scores_sha256
    ):
        raise RecordError(f"contradicts itself: {EVIDENCE} does not agree with {SCORES}")
    _check_gate(members)


def _check_gate(members: Mapping[str, bytes]) -> None:
    prefix = f"{GATE_FOLDER}/"
    present = {name for name in GATE_FILES if f"{prefix}{name}" in members}
    if not present:
        return
    try:
        values = json.loads(members[f"{prefix}{GATE}"])
        values.pop("sha256")
        gate = GateResult.model_validate(values)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RecordError(f"has a {prefix}{GATE} that cannot be read, or none") from error
    if gate.report_sha256 != hash_bytes(members[REPORT]):
        raise RecordError(f"contradicts itself: {prefix}{GATE} judged another report")
    if set(gate.files) != present - {GATE} or any(
        hash_bytes(members[f"{prefix}{name}"]) != written.sha256
        for name, written in gate.files.items()
    ):
        raise RecordError(f"contradicts itself: files of {prefix} are not those of its {GATE}")


def _check_signed(
    members: Mapping[str, bytes], evidence: Evidence, key: "Ed25519PublicKey | None"
) -> str | None:
    """Check the signature, and return the key that it names; None if there is none."""
    if (ENVELOPE in members) != evidence.sources.is_signed:
        raise RecordError(
            f"lacks its signature, {ENVELOPE}"
            if evidence.sources.is_signed
            else f"has a signature, {ENVELOPE}, that was added after it was written"
        )
    if ENVELOPE not in members:
        if key is not None:
            raise RecordError("is not signed, so that no key can check who wrote it")
        return None
    envelope = read_envelope(members[ENVELOPE])
    if envelope.payload != members[STATEMENT]:
        raise RecordError(f"has a signature of another statement than {STATEMENT}")
    if key is not None:
        check_signature(envelope, key)
    return envelope.key_id
