"""The statement of a bundle: hashes of its members, and what the audit is evidence of.

    evidence.json     model, documents, suite, settings and code, by their hashes; see `Evidence`
    statement.json    in-toto Statement v1: each member with its SHA-256, and evidence.json again

A statement is canonical JSON (sorted keys, no spaces, UTF-8) and follows from the other members, so
that it can be built again and compared. Alone it shows damage, not forgery: anyone who can write a
bundle can write its statement too. `signature.py` signs it.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field

from memguard.evidence.members import ENVELOPE, STATEMENT
from memguard.records.audit import AuditReport
from memguard.records.record import Record, format_json
from memguard.records.sealed import FileSum
from memguard.records.verdict import Level

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://memguard.invalid/evidence/v1"
"""Names the form of the predicate. Nothing is there: `.invalid` is reserved for names that are no
address (RFC 2606)."""


class Weights(Record):
    """The weights that were audited."""

    name: str
    weights_sha256: str
    """As in report.json: hash of the model's files, or why there is none."""
    base: str | None
    """The model that was scored for comparison."""
    base_weights_sha256: str | None


class Documents(Record):
    """The documents that were audited."""

    documents_sha256: str
    """As in report.json: hash of the ids and token hashes of all documents, in order."""
    num_documents: int
    identity_key: str | None
    """Fingerprint of the key of the ids in answers.jsonl; null without a key."""


class Sources(Record):
    """What the report does not say: the files of the run, and how the bundle was written."""

    files: dict[str, FileSum] | None
    """The files that training wrote, by path in model/ or adapter/; null without a run folder."""
    adapted_files: dict[str, FileSum] | None
    """The files of the model that the adapters belong to; null if there are no adapters."""
    manifest_sha256: str | None
    """Hash of manifest.jsonl; null without a run folder."""
    suite_sha256: str | None
    """Hash of the suite's file; null if it is not there or no longer says what the audit ran."""
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
    is_signed: bool
    """Whether the statement was signed: a signature that was taken away is missed."""


class Evidence(Record):
    """`evidence.json`: what a bundle is about."""

    schema_name: Literal["memguard.evidence/2"] = Field("memguard.evidence/2", alias="schema")
    audit: str
    """Name of the run, or of the model."""
    created: str
    """When the audit ended; UTC, ISO 8601."""
    level: Level
    verdict: str
    """Name of the level, and the sentence."""
    scope: str
    weights: Weights
    documents: Documents
    suite: str
    suite_version: int
    audited_by: str
    """Version of memguard that audited."""
    audited_by_code_sha256: str
    """Hash of its source files, see `hash_code`."""
    sources: Sources

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    def write(self) -> bytes:
        """Return the contents of `evidence.json`."""
        return f"{format_json(self.model_dump(mode='json', by_alias=True))}\n".encode()


def describe_audit(report: AuditReport, sources: Sources) -> Evidence:
    """Return the contents of `evidence.json`.

    Args:
        report: of the audit.
        sources: what the report does not say.
    """
    return Evidence(
        audit=report.run or report.model.name,
        created=report.created,
        level=report.verdict.level,
        verdict=report.verdict.describe(),
        scope=report.verdict.scope,
        weights=Weights(
            name=report.model.name,
            weights_sha256=report.model.weights_sha256,
            base=report.model.base,
            base_weights_sha256=report.model.base_weights_sha256,
        ),
        documents=Documents(
            documents_sha256=report.data.documents_sha256,
            num_documents=report.data.num_documents,
            identity_key=report.data.identity_key,
        ),
        suite=report.method.suite,
        suite_version=report.method.suite_version,
        audited_by=report.tool_version,
        audited_by_code_sha256=report.code_sha256,
        sources=sources,
    )


def hash_bytes(content: bytes) -> str:
    """Return the SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def write_canonical(values: Any) -> bytes:
    """Return JSON with sorted keys and without spaces, the same for equal values."""
    return json.dumps(
        values, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    ).encode()


def list_subjects(members: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """Return the name and SHA-256 of each member that a statement is about, in their order."""
    return [
        (name, hash_bytes(content))
        for name, content in members.items()
        if name not in (STATEMENT, ENVELOPE)
    ]


def build_statement(members: Mapping[str, bytes], evidence: Evidence) -> bytes:
    """Return the contents of `statement.json`.

    Args:
        members: contents by name, in the order of the archive; a statement and its signature, if
            they are there, are left out.
        evidence: the contents of `evidence.json`.
    """
    return write_canonical(
        {
            "_type": STATEMENT_TYPE,
            "subject": [
                {"name": name, "digest": {"sha256": sha256}}
                for name, sha256 in list_subjects(members)
            ],
            "predicateType": PREDICATE_TYPE,
            "predicate": evidence.model_dump(mode="json", by_alias=True),
        }
    )


def find_changed(members: Mapping[str, bytes], statement: bytes) -> list[str]:
    """Return the members whose hashes differ from those in a statement; for messages only.

    A statement that cannot be read names none.
    """
    try:
        subjects = json.loads(statement)["subject"]
        named = {subject["name"]: subject["digest"]["sha256"] for subject in subjects}
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return [name for name, sha256 in list_subjects(members) if named.get(name, sha256) != sha256]
