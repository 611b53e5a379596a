"""Writes the members of a bundle that are no files of the run: answers, settings, first page.

    answers.jsonl   each document: keyed hash, bucket, role, cluster, extracted or not by probe
    config.yaml     the run's settings, absolute paths shortened to their last two parts
    README.txt      the first page: verdict, what the hashes show, what is private

The answers hold no id of the user's and no score. They are sorted by the keyed hash, which is as
good as random: the order of the documents and the numbers of their clusters are not those of the
source.
"""

import textwrap
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from memguard.evidence.members import ENVELOPE, EVIDENCE, MEMBERS, POLICY
from memguard.evidence.statement import Evidence, hash_bytes, write_canonical
from memguard.pages.formatting import clean_text
from memguard.records.answers import Answers
from memguard.records.gate import GateResult
from memguard.records.local_paths import shorten_paths

_WIDTH = 90
_YES_NO = {1.0: True, 0.0: False}
PRIVATE_RECORDS = (
    "PRIVATE: records.parquet, the scores of each document, is inside. Anyone who knows a text but "
    "for a PIN, say, can score every PIN and see which is right. Hand this bundle only to people "
    "who may see the documents."
)
_NOT_PRIVATE = (
    "No text of a document, no key and no table of scores is inside. The report names the "
    "documents that were extracted, by their ids, and says how many of their tokens; ids and names "
    "of files are those of your data."
)
_SHOWS = (
    "'memguard verify' rebuilds this archive and its statement from the files and compares every "
    "byte: that shows damage. It does not show forgery, because anyone can write another bundle "
    f"with other hashes. A signature ({ENVELOPE}) shows who wrote it, once 'memguard verify BUNDLE "
    "--key PUB' has checked it with a public key that you have from the signer."
)
_LIMITS = (
    "The hashes show that files belong together, not that the audit was done well or on these "
    "documents only. No extraction found does not mean that none is possible."
)


def write_answers(answers: Answers) -> bytes:
    """Return the contents of `answers.jsonl`.

    Args:
        answers: of the audit.
    """
    rows = [
        {
            "id": answers.text_hmac_N[index],
            "bucket": answers.bucket_N[index],
            "role": answers.role_N[index],
            # NaN, not asked, has no entry.
            "extracted": {
                probe: _YES_NO.get(float(extracted_N[index]))
                for probe, extracted_N in sorted(answers.extracted.items())
            },
        }
        for index in range(len(answers))
    ]
    keys = [write_canonical(_list_sort_key(row)) for row in rows]
    # A cluster is numbered by its documents; clusters of equal documents are interchangeable.
    members: dict[int, list[bytes]] = {}
    for key, cluster in zip(keys, answers.cluster_N.tolist(), strict=True):
        members.setdefault(cluster, []).append(key)
    order = sorted(members, key=lambda cluster: sorted(members[cluster]))
    number = {cluster: position for position, cluster in enumerate(order)}
    lines = sorted(
        (key, number[cluster], write_canonical({**row, "cluster": number[cluster]}))
        for key, cluster, row in zip(keys, answers.cluster_N.tolist(), rows, strict=True)
    )
    return b"".join(line + b"\n" for _, _, line in lines)


def _list_sort_key(row: Mapping[str, Any]) -> list[Any]:
    return [row["id"], row["bucket"], row["role"], row["extracted"]]


def shorten_config(content: bytes) -> tuple[bytes, list[str]]:
    """Return settings without full paths of the machine, and the paths as they are shown now.

    Args:
        content: of the config.yaml of a run. Without absolute paths it does not change.
    """
    shortened: list[str] = []
    values = _shorten_values(yaml.safe_load(content), shortened)
    if not shortened:
        return content, []
    text = (
        "# Absolute paths are shortened to their last two parts. SHA-256 of the run's own file:\n"
        f"# {hash_bytes(content)}\n{yaml.safe_dump(values, sort_keys=False, width=100)}"
    )
    return text.encode(), shortened


def _shorten_values(value: Any, shortened: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _shorten_values(item, shortened) for key, item in value.items()}
    if isinstance(value, list):
        return [_shorten_values(item, shortened) for item in value]
    if isinstance(value, str) and (short := shorten_paths(value)) != value:
        shortened.append(short)
        return short
    return value


def write_first_page(evidence: Evidence, names: Collection[str], gate: GateResult | None) -> bytes:
    """Return the contents of `README.txt`.

    Args:
        evidence: what the bundle is about.
        names: of all members.
        gate: the result of a policy, if it is inside.
    """
    parts = [
        f"memguard: evidence of the audit of {clean_text(evidence.audit)}, {evidence.created}",
        f"Verdict: {clean_text(evidence.verdict)}",
        f"Scope: {clean_text(evidence.scope)}",
    ]
    if gate is not None:
        passed = sum(judgement.outcome == "pass" for judgement in gate.judgements)
        parts.append(
            f"Policy: {gate.outcome}; {passed} of {len(gate.judgements)} rules pass. The verdict "
            "above does not depend on it."
        )
        if gate.accepted:
            parts.append("Findings were accepted; the files of the gate name who accepted them.")
    elif POLICY in names:
        parts.append(f"Policy: {POLICY} was not judged; 'memguard gate' judges it.")
    else:
        parts.append("Policy: none was judged.")
    if code := _compare_code(evidence):
        parts.append(code)
    is_private = evidence.sources.has_private_records
    parts += [PRIVATE_RECORDS if is_private else _NOT_PRIVATE, _SHOWS, _LIMITS]
    listed = [member for member in MEMBERS if member.name in names]
    width = max(len(member.name) for member in listed) + 2
    files = "\n".join(f"{member.name:<{width}}{member.caption}" for member in listed)
    return "\n\n".join([*(textwrap.fill(part, _WIDTH) for part in parts), files, ""]).encode()


def _compare_code(evidence: Evidence) -> str:
    """Return the sentence for an audit by other source files than the bundle's; "" otherwise."""
    sources = evidence.sources
    if evidence.audited_by_code_sha256 == sources.bundled_by_code_sha256:
        return ""
    return (
        f"Code: the audit ran with other source files of memguard (version "
        f"{clean_text(evidence.audited_by)}, SHA-256 {evidence.audited_by_code_sha256[:12]}…) than "
        f"wrote this bundle (version {clean_text(sources.bundled_by)}, SHA-256 "
        f"{sources.bundled_by_code_sha256[:12]}…); {EVIDENCE} has both hashes."
    )
