"""Made-up results of audits for the verdict: counts by hand, and small audits drawn at random."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from result_examples import rate_row

from memguard.audit.verdict import Canaries, Coverage, DocumentResults
from memguard.records import ResultRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Documents of one role and bucket; the first of them are extracted."""

    role: str
    """trained, forget, control, or unreached: to be trained, but never fed."""
    num: int
    bucket: str = "trained"
    extracted: int = 0
    of_base: int = 0
    """The first of all documents, which the base model produces."""
    copies: int = 1
    """Documents of a cluster."""
    attacked: int = 0
    by_attack: int = 0
    """Of the attacked ones, which are the last of the documents, the first."""


def trained(extracted: int, num: int, bucket: str = "trained", **fields: int) -> Group:
    return Group(role="trained", num=num, bucket=bucket, extracted=extracted, **fields)


def control(extracted: int, num: int, **fields: int) -> Group:
    return Group(role="control", num=num, bucket="control", extracted=extracted, **fields)


def forget(extracted: int, num: int, **fields: int) -> Group:
    return Group(role="forget", num=num, bucket="forget", extracted=extracted, **fields)


def unreached(extracted: int, num: int) -> Group:
    return Group(role="unreached", num=num, bucket="trained", extracted=extracted)


def build_results(groups: Sequence[Group]) -> DocumentResults:
    """Return the results of all documents of these groups."""
    roles, buckets, clusters, rows = [], [], [], []
    for place, group in enumerate(groups):
        first_attacked = group.num - group.attacked
        for number in range(group.num):
            roles.append(group.role)
            buckets.append(group.bucket)
            clusters.append(1000 * place + number // group.copies)
            by_attack = 0 <= number - first_attacked < group.by_attack
            rows.append(
                (
                    number < group.extracted,
                    number < group.of_base,
                    number >= first_attacked,
                    by_attack,
                )
            )
    role_N = np.array(roles, dtype=object)
    flags_NF = np.array(rows, dtype=bool).reshape(-1, 4)
    return DocumentResults(
        bucket_N=np.array(buckets, dtype=object),
        cluster_N=np.array(clusters, dtype=np.int64),
        is_trained_N=np.asarray(role_N == "trained", dtype=bool),
        is_forgotten_N=np.asarray(role_N == "forget", dtype=bool),
        is_control_N=np.asarray(role_N == "control", dtype=bool),
        is_extracted_N=flags_NF[:, 0],
        is_of_base_N=flags_NF[:, 1],
        is_attacked_N=flags_NF[:, 2],
        is_extracted_by_attack_N=flags_NF[:, 3],
    )


def make_canaries(trained: int, num_trained: int, references: int, num_references: int) -> Canaries:
    return Canaries(
        num_trained=num_trained,
        num_trained_extracted=trained,
        num_references=num_references,
        num_references_extracted=references,
    )


def make_coverage(
    documents: DocumentResults,
    *,
    too_short: int = 0,
    generated: bool = True,
    collapsed: bool = False,
    other_kind: bool = False,
) -> Coverage:
    return Coverage(
        num_trained=int(documents.is_trained_N.sum()) + too_short,
        num_too_short=too_short,
        was_generated=generated,
        is_collapsed=collapsed,
        is_other_kind=other_kind,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnAudit:
    """What decides the level of one audit."""

    documents: DocumentResults
    canaries: Canaries | None
    coverage: Coverage
    has_base: bool


def draw_audit(draw: np.random.Generator) -> DrawnAudit:
    """Draw a small audit: roles, buckets, clusters, base, attacks, canaries, a given control."""
    shares = (0.0, 0.0, 0.1, 0.3, 0.8, 1.0)
    # A few are large enough for none-found.
    sizes = (1, 2, 4, 8) if draw.random() < 0.7 else (15, 31)
    parts: list[tuple[str, str, int]] = [
        ("trained", name, int(draw.choice(sizes)))
        for name in ("a", "b", "c")[: draw.integers(1, 4)]
    ]
    if draw.random() < 0.8:
        parts.append(("control", "control", int(draw.choice([1, 3, 8, 20, 40]))))
    if draw.random() < 0.3:
        parts.append(("forget", "forget", int(draw.integers(1, 4))))
    if draw.random() < 0.2:
        parts.append(("unreached", "a", int(draw.integers(1, 4))))
    role_N = np.array([role for role, _, num in parts for _ in range(num)], dtype=object)
    bucket_N = np.array([bucket for _, bucket, num in parts for _ in range(num)], dtype=object)
    num = len(role_N)
    is_control_N = np.asarray(role_N == "control", dtype=bool)
    # Near-duplicates may be of several buckets, but not of the control and another role.
    cluster_N = np.arange(num)
    if draw.random() < 0.5:
        cluster_N = draw.integers(0, max(1, num // 2), num) + 1000 * is_control_N
    quiet = draw.random() < 0.3
    share_N = np.zeros(num)
    for role, bucket, _ in parts:
        of_part_N = (role_N == role) & (bucket_N == bucket)
        share_N[of_part_N] = 0.0 if quiet and role != "control" else draw.choice(shares)
    has_base = bool(draw.random() < 0.5)
    attacked_N = (draw.random(num) < draw.choice([0.0, 0.5, 1.0])).astype(bool)
    canaries = None
    if draw.random() < 0.5:
        counts = draw.integers(1, 9, 2)
        found = draw.binomial(counts, draw.choice([0.0, 0.0, 0.3], 2))
        canaries = make_canaries(int(found[0]), int(counts[0]), int(found[1]), int(counts[1]))
    documents = DocumentResults(
        bucket_N=bucket_N,
        cluster_N=cluster_N.astype(np.int64),
        is_trained_N=np.asarray(role_N == "trained", dtype=bool),
        is_forgotten_N=np.asarray(role_N == "forget", dtype=bool),
        is_control_N=is_control_N,
        is_extracted_N=draw.random(num) < share_N,
        is_of_base_N=(draw.random(num) < draw.choice([0.0, 0.2, 1.0])) & has_base,
        is_attacked_N=attacked_N,
        is_extracted_by_attack_N=attacked_N & (draw.random(num) < share_N),
    )
    coverage = make_coverage(
        documents,
        too_short=int(draw.choice([0, 0, 3, 100])),
        generated=bool(draw.random() < 0.8),
        collapsed=bool(draw.random() < 0.1),
        other_kind=bool(draw.random() < 0.2),
    )
    return DrawnAudit(documents=documents, canaries=canaries, coverage=coverage, has_base=has_base)


def list_flips(audit: DrawnAudit) -> list[tuple[str, DrawnAudit]]:
    """Return the audits in which one more text is extracted that should not be, or one less else.

    One trained or forgotten document or trained canary is extracted that was not, or one control
    document or reference is not that was.
    """
    documents, canaries = audit.documents, audit.canaries
    flips = []
    for name in ("is_extracted_N", "is_extracted_by_attack_N"):
        flags_N = getattr(documents, name)
        fed_N = documents.is_trained_N | documents.is_forgotten_N
        may_N = (fed_N & ~flags_N) | (documents.is_control_N & flags_N)
        if name == "is_extracted_by_attack_N":
            may_N &= documents.is_attacked_N
        for index in np.flatnonzero(may_N):
            changed_N = flags_N.copy()
            changed_N[index] ^= True
            changed = replace(documents, **{name: changed_N})
            flips.append((f"{name}[{index}]", replace(audit, documents=changed)))
    if canaries is not None:
        if canaries.num_trained_extracted < canaries.num_trained:
            more = replace(canaries, num_trained_extracted=canaries.num_trained_extracted + 1)
            flips.append(("trained canary", replace(audit, canaries=more)))
        if canaries.num_references_extracted:
            less = replace(canaries, num_references_extracted=canaries.num_references_extracted - 1)
            flips.append(("reference", replace(audit, canaries=less)))
    return flips


def make_row(bucket: str, documents: DocumentResults) -> ResultRow:
    """Return a bucket's verbatim rate."""
    here_N = documents.bucket_N == bucket
    num_matched = int((documents.is_extracted_N & here_N).sum())
    return rate_row("extraction", "verbatim", bucket, num_matched, int(here_N.sum()))
