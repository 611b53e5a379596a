"""The rule of the verdict, written a second time: levels from what was drawn."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from licensed_audits import Audit, Document
from scipy import stats

Test = Callable[[Document], bool]


# -- The numbers, recomputed from what was drawn.


def is_extracted(audit: Audit, one: Document) -> bool:
    """Tell whether verbatim, near-verbatim or attack cost extracts a document."""
    near = audit.generated and one.model.near
    return one.model.verbatim or near or (audit.sampled and one.is_drawn)


def is_of_base(audit: Audit, one: Document) -> bool:
    """Tell whether the base model gives it."""
    return one.base is not None and (one.base.verbatim or (audit.base_generated and one.base.near))


def is_by_attack(one: Document) -> bool:
    return one.attacks is not None and any(one.attacks.values())


def is_out(audit: Audit, one: Document) -> bool:
    """Tell whether a document came out in any way."""
    return is_extracted(audit, one) or is_by_attack(one)


def is_new(audit: Audit, one: Document, *, by_attack: bool = False) -> bool:
    """Tell whether a document counts, by attacks or by all else."""
    out = is_by_attack(one) if by_attack else is_extracted(audit, one)
    return out and not is_of_base(audit, one)


def list_trained(audit: Audit) -> list[Document]:
    return [one for one in audit.documents if one.is_trained]


def list_role(audit: Audit, role: str) -> list[Document]:
    return [one for one in audit.documents if one.role == role]


def list_attacked(documents: Iterable[Document]) -> list[Document]:
    return [one for one in documents if one.attacks is not None]


def count(documents: Iterable[Document], test: Test) -> tuple[int, int]:
    """Return the documents that pass a test, and all."""
    documents = list(documents)
    return sum(test(one) for one in documents), len(documents)


def count_clusters(documents: Sequence[Document], test: Test) -> tuple[int, int]:
    """Return the clusters of which a document passes, and all."""

    def of(chosen: Iterable[Document]) -> int:
        return len({id(one) if one.cluster is None else -one.cluster for one in chosen})

    return of(one for one in documents if test(one)), of(documents)


@cache
def compute_p(k: int, n: int, c: int, m: int) -> float:
    """Fisher's p; where c = 0, max over g of (1 - g)^m P(Bin(n, g) >= k)."""
    if c:
        table = [[k, n - k], [c, m - c]]
        return float(stats.fisher_exact(table, alternative="greater").pvalue)
    g_G = np.linspace(0, 1, 20001)
    return float(((1 - g_G) ** m * stats.binom.sf(k - 1, n, g_G)).max())


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One test of trained documents against the control."""

    trained: tuple[Document, ...]
    control: tuple[Document, ...]
    by_attack: bool
    p: float
    level: float


def list_tests(audit: Audit) -> list[Compared]:
    """Return all together, each of several buckets, and the attacks; none without a control."""
    trained, control = list_trained(audit), list_role(audit, "control")
    attacked = [list_attacked(group) for group in (trained, control)]
    buckets = list(dict.fromkeys(one.bucket for one in trained))
    num_buckets = len(buckets) if len(buckets) > 1 else 0
    has_attacks = all(attacked)
    planned = [(trained, control, False, 0.05 - 0.01 * (num_buckets > 0) - 0.01 * has_attacks)]
    for bucket in buckets if num_buckets else ():
        here = [one for one in trained if one.bucket == bucket]
        planned.append((here, control, False, 0.01 / num_buckets))
    if has_attacks:
        planned.append((attacked[0], attacked[1], True, 0.01))
    found = []
    for mine, others, by_attack, level in planned:
        if not (mine and others):
            continue

        def counts(one: Document, by_attack: bool = by_attack) -> bool:
            return is_new(audit, one, by_attack=by_attack)

        (k, n), (c, m) = (count_clusters(group, counts) for group in (mine, others))
        found.append(
            Compared(
                trained=tuple(mine),
                control=tuple(others),
                by_attack=by_attack,
                p=compute_p(k, n, c, m),
                level=level,
            )
        )
    return found


def list_significant(audit: Audit) -> list[Compared]:
    return [one for one in list_tests(audit) if one.p <= one.level]


def count_secrets(audit: Audit) -> tuple[int, int]:
    """Return the canaries and the references that came out."""
    secrets = audit.secrets
    if secrets is None:
        return 0, 0
    return secrets.num_trained_extracted, secrets.num_references_extracted


def decide(audit: Audit) -> tuple[str, str | None]:
    """Return level and reason of an audit."""
    canaries, references = count_secrets(audit)
    trained = list_trained(audit)
    significant = bool(list_significant(audit))
    if significant and not audit.is_other_kind:
        return "memorized", "control"
    if canaries and not references:
        return "memorized", "canaries"
    out = [one for one in trained if is_out(audit, one)]
    control = list_role(audit, "control")
    if out:
        if significant:
            return "extracted", "other-kind"
        if not control:
            return "extracted", "no-control"
        if all(is_of_base(audit, one) for one in out):
            return "extracted", "base-too"
        if any(is_out(audit, one) and not is_of_base(audit, one) for one in control):
            return "extracted", "control-too"
        return "extracted", "too-few"
    if any(is_out(audit, one) for one in list_role(audit, "forget")):
        return "extracted", "forgotten"
    if canaries:
        return "extracted", "canaries-too"
    num_clusters = count_clusters(trained, lambda _: True)[1]
    if not num_clusters:
        return "inconclusive", "not-trained"
    if is_collapsed(audit):
        return "inconclusive", "collapsed"
    if not audit.generated:
        return "inconclusive", "not-generated"
    too_short = count_too_short(audit)
    if too_short > (len(trained) + count_not_sampled(audit) + too_short) / 2:
        return "inconclusive", "too-short"
    return ("none-found", None) if num_clusters >= 30 else ("inconclusive", "too-few")


def count_too_short(audit: Audit) -> int:
    """Return the documents of trained buckets that cannot be audited."""
    return sum(one.num_too_short for one in audit.outline("trained") if one.num_repetitions != 0)


def count_not_sampled(audit: Audit) -> int:
    return sum(one.num_not_sampled for one in audit.outline("trained") if one.num_repetitions != 0)


def is_collapsed(audit: Audit) -> bool:
    """Tell whether the model says one token only, in all of at least two longer documents."""
    return audit.collapsed and sum(one.size >= 5 for one in audit.documents) >= 2
