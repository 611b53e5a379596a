"""The form of a bundle: a ZIP archive with a statement of its files, and its check. No torch.

    write_archive     members -> archive; names and contents, in their order, determine every byte
    build_statement   in-toto Statement v1: the SHA-256 of each member, and what the audit is of
    check_bundle      reads an archive, builds it and its statement again, and compares every byte

`zipfile` accepts junk before and after an archive and a name twice, and believes the sizes that an
archive claims. So the sizes are checked before anything is read, and the whole is built again.
Hashes show damage, not forgery: anyone who can write a bundle can write its statement too. A
signature is made by other tools, of the whole file.
"""

import hashlib
import io
import json
import os
import stat
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from pydantic import Field, ValidationError

from memguard.errors import MAX_PATH, RecordError, VersionError, shorten
from memguard.records.audit import AuditReport
from memguard.records.audit_files import PAGE, REPORT, RESULTS, SCORES
from memguard.records.gate import GATE, GATE_FILES, GATE_FOLDER, GateResult
from memguard.records.record import Record, describe_unread, validate_record
from memguard.records.sealed import FileSum

FIRST_PAGE: Final = "README.txt"
STATEMENT: Final = "statement.json"
ANSWERS: Final = "answers.jsonl"
CONFIG: Final = "config.yaml"
ENVIRONMENT: Final = "environment.json"
MEMBERS: Final[Mapping[str, str]] = {
    FIRST_PAGE: "this page",
    STATEMENT: "in-toto statement: SHA-256 of each file, and of weights, documents and code",
    PAGE: "the report, to read",
    REPORT: "the report, with the verdict",
    RESULTS: "every number of the report, one row each",
    ANSWERS: "each document: extracted or not, by probe; without scores",
    ENVIRONMENT: "versions and machine of the training and of the audit",
    CONFIG: "the run's settings, defaults included",
    **{f"{GATE_FOLDER}/{name}": "of the policy that was judged" for name in GATE_FILES},
    SCORES: "PRIVATE: the scores of each document",
}
"""What each member is, in the order of the archive."""
_OPTIONAL = {CONFIG, SCORES, *(f"{GATE_FOLDER}/{name}" for name in GATE_FILES)}
MAX_BYTES = 2**30
"""Largest archive."""
_ENTRY_BYTES = 46 + 200
"""Most bytes that an entry of the archive's directory can have."""
_END = struct.Struct("<4s4H2IH")
"""Signature, two disks, entries here and in all, directory's bytes and place, comment's bytes."""
_PER_MEMBER = 30 + 46
"""Bytes that a member adds beside its content and, twice, its name."""
_NO_ARCHIVE = (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, RuntimeError)
"""What `zipfile` raises for a file that is no archive, is cut off, or asks for a password."""
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://memguard.invalid/evidence/v2"
"""Names the form of the predicate. Nothing is there: `.invalid` is reserved for names that are no
address (RFC 2606)."""


class Sources(Record):
    """What the report does not say: the files of the run, and what wrote the bundle."""

    files: dict[str, FileSum] | None
    """The files that training wrote, by path in model/ or adapter/; null without a run folder."""
    adapted_files: dict[str, FileSum] | None
    """The files of the model that the adapters belong to; null if there are no adapters."""
    manifest_sha256: str | None
    """Hash of manifest.jsonl; null without a run folder."""
    config_sha256: str | None
    """Hash of the run's config.yaml, in which no path is shortened; null without a run folder."""
    scores_sha256: str
    """Hash of records.parquet, which is not always in the bundle."""
    bundled_by: str
    """Version of memguard that wrote the bundle."""
    bundled_by_code_sha256: str
    """Hash of its source files, see `hash_code`."""
    has_private_records: bool
    """Whether records.parquet is in the bundle."""


class Evidence(Record):
    """The predicate of the statement: which audit a bundle is about, by hashes."""

    schema_name: Literal["memguard.evidence/3"] = Field("memguard.evidence/3", alias="schema")
    audit: str
    """Name of the run, or of the model."""
    created: str
    """When the audit ended; UTC, ISO 8601."""
    level: str
    verdict: str
    """Name of the level, and the sentence."""
    scope: str
    model: dict[str, Any]
    """As in report.json: names and hashes of the model and its base."""
    data: dict[str, Any]
    """As in report.json: sources, hash and number of the documents, fingerprint of the key."""
    suite: str
    suite_version: int
    audited_by: str
    """Version of memguard that audited."""
    audited_by_code_sha256: str
    sources: Sources


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A bundle in which nothing was changed after it was written, as far as hashes show."""

    evidence: Evidence
    members: Mapping[str, FileSum]
    num_bytes: int
    sha256: str
    """Hash of the bundle itself."""

    def describe(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return {
            "audit": self.evidence.audit,
            "level": self.evidence.level,
            "verdict": self.evidence.verdict,
            "num_bytes": self.num_bytes,
            "sha256": self.sha256,
            "has_private_records": self.evidence.sources.has_private_records,
            "members": {name: written.model_dump() for name, written in self.members.items()},
        }


def hash_bytes(content: bytes) -> str:
    """Return the SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def write_canonical(values: Any) -> bytes:
    """Return JSON with sorted keys and without spaces, the same for equal values."""
    return json.dumps(
        values, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    ).encode()


def describe_audit(report: AuditReport, sources: Sources) -> Evidence:
    """Return which audit a bundle is about, as its report says it."""
    return Evidence(
        audit=report.run or report.model.name,
        created=report.created,
        level=report.verdict.level,
        verdict=report.verdict.describe(),
        scope=report.verdict.scope,
        model=report.model.model_dump(mode="json"),
        data=report.data.model_dump(mode="json"),
        suite=report.method.suite,
        suite_version=report.method.suite_version,
        audited_by=report.tool_version,
        audited_by_code_sha256=report.code_sha256,
        sources=sources,
    )


def build_statement(members: Mapping[str, bytes], evidence: Evidence) -> bytes:
    """Return the contents of `statement.json`, about all members but itself, in their order."""
    return write_canonical(
        {
            "_type": STATEMENT_TYPE,
            "subject": [
                {"name": name, "digest": {"sha256": hash_bytes(members[name])}}
                for name in MEMBERS
                if name in members and name != STATEMENT
            ],
            "predicateType": PREDICATE_TYPE,
            "predicate": evidence.model_dump(mode="json"),
        }
    )


def write_archive(members: Mapping[str, bytes]) -> bytes:
    """Return the archive of members.

    Nothing is compressed, because compressed bytes depend on the version of zlib.
    """
    size = _compute_size({name: len(content) for name, content in members.items()})
    if size > MAX_BYTES:
        raise RecordError(
            f"the bundle would have {size:,} bytes, more than {MAX_BYTES:,}: leave out "
            "--with-records"
        )
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
        for name in filter(members.__contains__, MEMBERS):
            entry = zipfile.ZipInfo(name)  # Of 1980-01-01, the first day that the format has.
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            file.writestr(entry, members[name])
    return archive.getvalue()


def _compute_size(sizes: Mapping[str, int]) -> int:
    return sum(size + 2 * len(name) + _PER_MEMBER for name, size in sizes.items()) + _END.size


def check_bundle(path: Path) -> Checked:
    """Read a bundle and check every byte of it; refuse one of another version of memguard."""
    try:
        # Opening a pipe would wait for its other end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise RecordError("is no regular file, and so no bundle")
        with path.open("rb") as file:
            return check_archive(file)
    except OSError as error:
        raise describe_unread(path, error) from error
    except RecordError as error:
        raise type(error)(f"'{shorten(str(path), MAX_PATH)}' {error}") from error


def check_archive(file: BinaryIO) -> Checked:
    """Check an open bundle; the messages of its errors are predicates of it."""
    members = _read_members(file)
    file.seek(0)
    archive = file.read()
    if archive != write_archive(members):
        raise RecordError("is damaged: bytes outside of its members are not what memguard wrote")
    evidence = _check_statement(members)
    _check_members(members, evidence)
    return Checked(
        evidence=evidence,
        members={
            name: FileSum(num_bytes=len(content), sha256=hash_bytes(content))
            for name, content in members.items()
        },
        num_bytes=len(archive),
        sha256=hash_bytes(archive),
    )


def _read_members(file: BinaryIO) -> dict[str, bytes]:
    """Return the members of an archive, each of them checked by size before it is read."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END.size))
    end = file.read(_END.size)
    if len(end) < _END.size or end[:4] != b"PK\x05\x06":
        raise RecordError("is no bundle, or its end is damaged")
    count, directory_bytes = _END.unpack(end)[4:6]
    if size > MAX_BYTES or directory_bytes > count * _ENTRY_BYTES or count > 2 * len(MEMBERS):
        raise RecordError("is larger than a bundle can be, or its end is damaged")
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
            problem = None
            # What an archive claims is not what is there.
            is_stored = all(e.compress_type == zipfile.ZIP_STORED for e in archive.infolist())
            if unknown := next((name for name in names if name not in MEMBERS), None):
                problem = f"has the member {shorten(unknown)!r}, which no bundle has"
            elif len(sizes) < len(names):
                problem = "has a member twice"
            elif missing := next((n for n in MEMBERS if n not in {*names, *_OPTIONAL}), None):
                problem = f"lacks the member {missing}"
            elif _compute_size(sizes) != size or not is_stored:
                problem = "is damaged: its size is not that of its members"
            if problem is not None:
                raise RecordError(problem)
            return {name: archive.read(name) for name in MEMBERS if name in sizes}
    except _NO_ARCHIVE as error:
        raise RecordError(f"is damaged: {shorten(str(error), 80) or 'it is cut off'}") from error


def _check_statement(members: Mapping[str, bytes]) -> Evidence:
    """Build the statement again from the members, and return what it is about."""
    try:
        evidence = Evidence.model_validate(json.loads(members[STATEMENT])["predicate"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": ()}
        if first["loc"] == ("schema",) and isinstance(first["input"], str):
            raise VersionError("was written by another version of memguard") from error
        raise RecordError(f"is damaged: {STATEMENT} cannot be read") from error
    if build_statement(members, evidence) != members[STATEMENT]:
        raise RecordError(f"is damaged: {STATEMENT} is not the statement of its members")
    return evidence


def _check_members(members: Mapping[str, bytes], evidence: Evidence) -> None:
    """Refuse members that do not belong together, each of which may be intact."""
    try:
        report = validate_record(AuditReport, members[REPORT], Path(REPORT))
    except RecordError as error:
        raise VersionError(f"has a report that this version cannot read: {error}") from error
    sources, has_scores = evidence.sources, SCORES in members
    scores = sources.scores_sha256 if sources.has_private_records else None
    agrees = {
        f"{STATEMENT} is not about its {REPORT}": describe_audit(report, sources) == evidence,
        f"{STATEMENT} is not about its {CONFIG}": (
            (CONFIG in members) == (sources.config_sha256 is not None)
        ),
        f"{STATEMENT} is not about its {SCORES}": (
            scores == (hash_bytes(members[SCORES]) if has_scores else None)
        ),
    }
    prefix = f"{GATE_FOLDER}/"
    present = {name for name in GATE_FILES if f"{prefix}{name}" in members}
    if present and all(agrees.values()):
        gate = _read_gate(members)
        sums = {name: hash_bytes(members[f"{prefix}{name}"]) for name in present - {GATE}}
        agrees[f"{prefix}{GATE} judged another report"] = gate.report_sha256 == hash_bytes(
            members[REPORT]
        )
        agrees[f"files of {prefix} are not those of its {GATE}"] = sums == {
            name: written.sha256 for name, written in gate.files.items()
        }
    for problem, is_same in agrees.items():
        if not is_same:
            raise RecordError(f"contradicts itself: {problem}")


def _read_gate(members: Mapping[str, bytes]) -> GateResult:
    """Return the result of a policy, without the hash that its file ends with."""
    name = f"{GATE_FOLDER}/{GATE}"
    try:
        values = json.loads(members[name])
        values.pop("sha256")
        return GateResult.model_validate(values)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RecordError(f"has a {name} that cannot be read, or none") from error
