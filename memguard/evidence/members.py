"""The members of a bundle: their names, their order and what they are."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from memguard.errors import RecordError
from memguard.records.audit_files import PAGE, REPORT, RESULTS, SCORES
from memguard.records.gate import GATE, GATE_FOLDER, JUNIT, SARIF, SUMMARY, SUMMARY_PAGE

FIRST_PAGE: Final = "README.txt"
STATEMENT: Final = "statement.json"
ENVELOPE: Final = "statement.dsse.json"
EVIDENCE: Final = "evidence.json"
ANSWERS: Final = "answers.jsonl"
CONFIG: Final = "config.yaml"
ENVIRONMENT: Final = "environment.json"
POLICY: Final = "policy.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A file of a bundle."""

    name: str
    caption: str
    is_required: bool = True


def _optional(name: str, caption: str) -> Member:
    return Member(name=name, caption=caption, is_required=False)


MEMBERS = (
    Member(name=FIRST_PAGE, caption="this page"),
    Member(name=STATEMENT, caption="in-toto statement: the SHA-256 of each other file"),
    _optional(ENVELOPE, "the statement signed (DSSE, ed25519)"),
    Member(name=EVIDENCE, caption="hashes of weights, documents, suite, settings and code"),
    Member(name=PAGE, caption="the report, to read"),
    Member(name=REPORT, caption="the report, with the verdict"),
    Member(name=RESULTS, caption="every number of the report, one row each"),
    Member(name=ANSWERS, caption="each document: extracted or not, by probe; without scores"),
    _optional(CONFIG, "the run's settings, defaults included"),
    Member(name=ENVIRONMENT, caption="versions and machine of the training and of the audit"),
    _optional(POLICY, "a policy; NOT judged here"),
    _optional(f"{GATE_FOLDER}/{GATE}", "the policy, and the result of each rule"),
    _optional(f"{GATE_FOLDER}/{SUMMARY_PAGE}", "the same on one page"),
    _optional(f"{GATE_FOLDER}/{SUMMARY}", "the same as Markdown"),
    _optional(f"{GATE_FOLDER}/{JUNIT}", "the same for CI (JUnit)"),
    _optional(f"{GATE_FOLDER}/{SARIF}", "the findings for code scanning (SARIF)"),
    _optional(SCORES, "PRIVATE: the scores of each document"),
)
"""In the order of the archive."""


def sort_members(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return members in the order of the archive.

    Raises:
        RecordError: one is missing, or is none of a bundle; the message is a predicate.
    """
    check_names(members)
    return {member.name: members[member.name] for member in MEMBERS if member.name in members}


def check_names(names: Iterable[str]) -> None:
    """Refuse names that are not those of a bundle.

    Raises:
        RecordError: one is missing, or is none of a bundle; the message is a predicate.
    """
    present = set(names)
    known = {member.name for member in MEMBERS}
    if unknown := sorted(present - known):
        raise RecordError(f"has the member {unknown[0]}, which no bundle has")
    for member in MEMBERS:
        if member.is_required and member.name not in present:
            raise RecordError(f"lacks the member {member.name}")
