"""The verdict never becomes milder by what should not make it so: single flips of drawn audits.

order    one more finding of a trained or forgotten document or canary, by any method; a control
         document or reference no longer extracted; the base no longer produces a trained
         document, or produces a control document; one more unaudited document; near-verbatim
         text not generated; collapsed; weaker settings: the level is at least as severe
class    control documents, the base or a method without trained findings taken away; another
         kind of control; a document that was not extracted is not audited: never from memorized
         or extracted to the other two, and never to none-found

Where a trained or forgotten document or canary is extracted, the level is one of these two.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from verdict_examples import make_canaries, make_coverage

from memguard.audit import verdict
from memguard.audit.verdict import Canaries, Coverage, DocumentResults, MethodResults, decide_level

RANK = {"none-found": 0, "inconclusive": 1, "extracted": 2, "memorized": 3}
METHODS = ("attacked", "generated", "windows")
NUM_FLIPPED = 10
"""Documents of an audit that are flipped."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Audit:
    """What decides the level of one audit."""

    documents: DocumentResults
    canaries: Canaries | None
    coverage: Coverage


def draw_audit(
    draw: np.random.Generator, controls: Sequence[int] = (0, 1, 3, 5, 8, 14, 30)
) -> Audit:
    """Draw an audit: roles, buckets, clusters, own texts, base, other methods, canaries.

    ``controls`` are the possible numbers of control documents.
    """
    has_base = bool(draw.random() < 0.5)
    sizes = (1, 3, 8) if draw.random() < 0.4 else (16, 31, 45)
    parts = [("trained", name, int(draw.choice(sizes))) for name in "abc"[: draw.choice([1, 1, 3])]]
    parts.append(("control", "control", int(draw.choice(controls))))
    parts.append(("forget", "forget", int(draw.choice([0, 0, 0, 2]))))
    parts.append(("unreached", "a", int(draw.choice([0, 0, 0, 2]))))
    role_N, bucket_N = (
        np.array([part[axis] for part in parts for _ in range(part[2])], dtype=object)
        for axis in (0, 1)
    )
    num = len(role_N)
    is_control_N = np.asarray(role_N == "control", dtype=bool)
    # Near-duplicates may be of several buckets, but not of the control and another role.
    cluster_N = np.arange(num)
    if draw.random() < 0.3:
        cluster_N = draw.integers(0, max(1, num // 2), num)
    quiet = draw.random() < 0.5
    share_N = np.zeros(num)
    for role, bucket, _ in parts:
        of_part_N = (role_N == role) & (bucket_N == bucket)
        if role == "control":
            share_N[of_part_N] = draw.choice([0, 0, 0.05, 0.3])
        elif not quiet:
            share_N[of_part_N] = draw.choice([0, 0.03, 0.1, 0.4, 0.9])
    own_N = draw.random(num) < draw.choice([0, 0.5, 1])
    of_base_N = (draw.random(num) < draw.choice([0, 0.3, 1])) & has_base
    extracted_N = draw.random(num) < share_N
    others = {}
    for name in METHODS:
        if draw.random() < 0.5:
            tried_N = draw.random(num) < draw.choice([0.5, 1])
            found_N = tried_N & (draw.random(num) < share_N) & (own_N | (name == "attacked"))
            others[name] = MethodResults(
                is_tried_N=tried_N, is_extracted_N=found_N, is_new_N=found_N & ~of_base_N
            )
    documents = DocumentResults(
        bucket_N=bucket_N,
        cluster_N=cluster_N + 1000 * is_control_N,
        is_trained_N=np.asarray(role_N == "trained", dtype=bool),
        is_forgotten_N=np.asarray(role_N == "forget", dtype=bool),
        is_control_N=is_control_N,
        is_own_N=own_N,
        is_extracted_N=extracted_N,
        is_new_N=extracted_N & ~of_base_N,
        is_of_base_N=of_base_N,
        others=others,
    )
    canaries = None
    if draw.random() < 0.4:
        counts = draw.integers(1, 9, 2)
        found = draw.binomial(counts, [0 if quiet else 0.1, draw.choice([0, 0.1])])
        canaries = make_canaries(int(found[0]), int(counts[0]), int(found[1]), int(counts[1]))
    coverage = make_coverage(
        documents,
        unaudited=int(draw.choice([0, 0, 0, 0, 2, 6, 20])),
        generated=bool(draw.random() < 0.9),
        collapsed=bool(draw.random() < 0.05),
        limited=bool(draw.random() < 0.05),
        weakened=("5 tokens of prefix",) if draw.random() < 0.1 else (),
        control=draw.choice(["drawn", "given", "other-kind"], p=[0.4, 0.4, 0.2]),
        base=has_base,
    )
    return Audit(documents=documents, canaries=canaries, coverage=coverage)


# -- flips -----------------------------------------------------------------------------------------


def list_order_flips(audit: Audit, draw: np.random.Generator) -> Iterator[tuple[str, Audit]]:
    """Yield what must not make the level milder."""
    documents, canaries, coverage = audit.documents, audit.canaries, audit.coverage
    fed_N = documents.is_trained_N | documents.is_forgotten_N
    for method in ("greedy", *documents.others):
        results: Any = documents.others.get(method, documents)
        tried_N = getattr(results, "is_tried_N", np.ones_like(fed_N))
        for index in draw.permutation(len(fed_N))[:NUM_FLIPPED]:
            old = (bool(results.is_extracted_N[index]), bool(results.is_new_N[index]))
            if not tried_N[index]:
                continue
            if fed_N[index]:
                new = {(True, True), (True, old[1] or not coverage.has_base)}
            else:
                new = {(False, False), (old[0], old[1] and not coverage.has_base)}
            for pair in new - {old} if fed_N[index] or documents.is_control_N[index] else ():
                changed = _set(results, index, pair)
                if method != "greedy":
                    changed = replace(documents, others={**documents.others, method: changed})
                role = "trained" if fed_N[index] else "control"
                yield f"{role}, {method}: {old} to {pair}", replace(audit, documents=changed)
    if canaries is not None:
        if (number := canaries.num_trained_extracted) < canaries.num_trained:
            more = replace(canaries, num_trained_extracted=number + 1)
            yield "a trained canary", replace(audit, canaries=more)
        if number := canaries.num_references_extracted:
            less = replace(canaries, num_references_extracted=number - 1)
            yield "a reference no longer", replace(audit, canaries=less)
    for name, values in {
        "one more unaudited": _add_unaudited(coverage),
        "not generated": {"was_generated": False},
        "limited": {"is_limited": True},
        "collapsed": {"is_collapsed": True},
        "weakened": {"weakened": ("continuations of 100 tokens",)},
    }.items():
        yield name, replace(audit, coverage=replace(coverage, **values))


def _set(results: Any, index: int, pair: tuple[bool, bool]) -> Any:
    """Return results in which a document is extracted, and new, as given."""
    extracted_N, new_N = results.is_extracted_N.copy(), results.is_new_N.copy()
    extracted_N[index], new_N[index] = pair
    return replace(results, is_extracted_N=extracted_N, is_new_N=new_N)


def _add_unaudited(coverage: Coverage) -> dict[str, int]:
    return {
        "num_trained": coverage.num_trained + 1,
        "num_unaudited": coverage.num_unaudited + 1,
    }


def list_class_flips(audit: Audit, draw: np.random.Generator) -> Iterator[tuple[str, Audit]]:
    """Yield what must not leave memorized and extracted."""
    documents, canaries, coverage = audit.documents, audit.canaries, audit.coverage
    control_N, trained_N = documents.is_control_N, documents.is_trained_N
    fed_N = trained_N | documents.is_forgotten_N
    numbers_N = np.arange(len(control_N))
    yield "no control", replace(audit, documents=take(documents, ~control_N))
    for index in draw.permutation(np.flatnonzero(control_N))[:NUM_FLIPPED]:
        fewer = take(documents, numbers_N != index)
        yield "one control document fewer", replace(audit, documents=fewer)
    quiet_N = trained_N & ~documents.was_extracted_N
    for index in draw.permutation(np.flatnonzero(quiet_N))[:NUM_FLIPPED]:
        fewer = take(documents, numbers_N != index)
        counts = {"num_unaudited": coverage.num_unaudited + 1}
        yield "not audited", replace(audit, documents=fewer, coverage=replace(coverage, **counts))
    for control in ("given", "other-kind"):
        yield f"{control} control", replace(audit, coverage=replace(coverage, control=control))
    if coverage.has_base:
        yield (
            "no base",
            replace(
                audit, documents=_forget_base(documents), coverage=replace(coverage, has_base=False)
            ),
        )
    for method, results in documents.others.items():
        if not (results.is_extracted_N & fed_N).any():
            others = {key: value for key, value in documents.others.items() if key != method}
            yield f"no {method}", replace(audit, documents=replace(documents, others=others))
    if canaries is not None and not canaries.num_trained_extracted:
        yield "no canaries", replace(audit, canaries=None)


def take(documents: DocumentResults, where_N: np.ndarray) -> DocumentResults:
    """Return the results of some of the documents."""
    names = [field.name for field in fields(documents) if field.name != "others"]
    methods = {
        method: MethodResults(
            **{field.name: getattr(results, field.name)[where_N] for field in fields(results)}
        )
        for method, results in documents.others.items()
    }
    return DocumentResults(
        **{name: getattr(documents, name)[where_N] for name in names}, others=methods
    )


def _forget_base(documents: DocumentResults) -> DocumentResults:
    return replace(
        documents,
        is_new_N=documents.is_extracted_N,
        is_of_base_N=np.zeros_like(documents.is_of_base_N),
        others={
            method: replace(results, is_new_N=results.is_extracted_N)
            for method, results in documents.others.items()
        },
    )


# -- tests -----------------------------------------------------------------------------------------


def _check(num_audits: int, seed: int) -> Counter[str]:
    """Check all flips of so many audits; return how many audits have each level, and flips."""
    draw = np.random.default_rng(seed)
    seen: Counter[str] = Counter()
    violations: Counter[str] = Counter()
    for _ in range(num_audits):
        audit = draw_audit(draw)
        before = _level(audit)
        seen[before] += 1
        violations[f"extracted, and {before}"] += _has_finding(audit) and RANK[before] < 2
        for name, flipped in list_order_flips(audit, draw):
            after = _level(flipped)
            seen["flips"] += 1
            seen["turned"] += after != before
            violations[f"{name}: {before} to {after}"] += RANK[after] < RANK[before]
        for name, flipped in list_class_flips(audit, draw):
            after = _level(flipped)
            seen["flips"] += 1
            is_milder = RANK[after] < RANK[before]
            is_wrong = is_milder and (RANK[after] < 2 <= RANK[before] or not RANK[after])
            seen[f"{name}: memorized to extracted"] += is_milder and not is_wrong
            violations[f"{name}: {before} to {after}"] += is_wrong
    assert not +violations
    return seen


def _has_finding(audit: Audit) -> bool:
    documents, canaries = audit.documents, audit.canaries
    fed_N = documents.is_trained_N | documents.is_forgotten_N
    has_canary = canaries is not None and canaries.num_trained_extracted > 0
    return has_canary or bool((documents.was_extracted_N & fed_N).any())


def _level(audit: Audit) -> str:
    return decide_level(audit.documents, audit.canaries, audit.coverage).level


@pytest.fixture(autouse=True)
def _cache_p_values(monkeypatch: pytest.MonkeyPatch) -> None:
    p_values = cache(verdict.compute_p_above_control)
    monkeypatch.setattr(verdict, "compute_p_above_control", p_values)


def test_no_flip_makes_the_level_milder() -> None:
    """So many audits take a second; the 3,000 of the next test take a minute."""
    seen = _check(40, seed=4)
    assert min(seen[level] for level in RANK) >= 3, "every level is met"


@pytest.mark.long
def test_no_flip_of_many_audits_makes_the_level_milder() -> None:
    seen = _check(3000, seed=1)
    assert min(seen[level] for level in RANK) >= 300
