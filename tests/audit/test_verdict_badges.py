"""The badges of drawn audits, and of each audit one thing apart from them.

green      of the text: nothing that counts was extracted, all near-verbatim text was generated, of
           30 trained texts, most of them audited, by settings no weaker than the defaults; of
           membership: a base ran, and 30 texts on either side, of one kind, have the score
finding    one more never makes the badge of the text milder
evidence   taken away turns no badge green, and leaves the badge of the text as loud while anything
           is extracted

Levels alone: `test_verdict_monotone.py`, whose audits and flips these are.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from result_examples import make_tables
from test_verdict_monotone import (
    NUM_FLIPPED,
    Audit,
    draw_audit,
    list_class_flips,
    list_order_flips,
    take,
)
from verdict_examples import make_row

from memguard.audit import verdict
from memguard.audit.verdict_sentences import VerdictInput, build_verdict
from memguard.records import Badge, BucketRow

LOUD = {"None found": 0, "Inconclusive": 1, "Extracted": 2, "Memorized": 2}
"""How loud the badge of the text is; Memorized and Extracted are equally loud."""
MIN_TEXTS, MAX_SHARE = 30, 0.2
OTHER_TEST = (
    "evidence: without a control document",
    "evidence: without a trained document",
    "evidence: no base",
)
"""Changes after which membership is tested all the same, with other numbers."""
CONTROLS = (0, 3, 8, 14, 30, 45, 70, 70)
Scores = dict[str, NDArray[np.float64]]


def draw_scores(audit: Audit, draw: np.random.Generator) -> Scores:
    """Draw a membership score for each document; sometimes none, or missing of some."""
    num = len(audit.documents.is_trained_N)
    if draw.random() < 0.15:
        return {}
    shift = draw.choice([0, 0, 0.5, 1, 2])
    scores = {}
    # Both models score a document, or neither.
    missing_N = draw.random(num) < draw.choice([0, 0, 0.2])
    for name in ("loss", *(["loss_minus_base"] if audit.coverage.has_base else [])):
        value_N = draw.normal(size=num) + shift * audit.documents.is_trained_N
        value_N[missing_N] = np.nan
        scores[name] = value_N
    return scores


def build_badges(audit: Audit, scores: Scores) -> tuple[Badge, Badge]:
    """Return the badges of an audit's verdict."""
    documents = audit.documents
    buckets = dict.fromkeys(documents.bucket_N[~documents.is_control_N].tolist()) or {"a": None}
    rows = [make_row(bucket, documents) for bucket in buckets]
    named = [BucketRow(bucket=bucket, role="trained", num_repetitions=4) for bucket in buckets]
    results = VerdictInput(
        ids=[f"{number:03}" for number in range(len(documents.bucket_N))],
        documents=documents,
        canaries=audit.canaries,
        coverage=audit.coverage,
        tables=make_tables(rows, named),
        membership=scores,
        dose_response=True,
    )
    return build_verdict(results).badges


def list_gaps(audit: Audit, scores: Scores, badges: tuple[Badge, Badge]) -> Iterator[str]:
    """Yield each test that was not made, or did find something, behind a green badge."""
    documents, coverage = audit.documents, audit.coverage
    text, membership = badges
    trained_N = documents.is_trained_N
    if text.colour == "green":
        fed_N = trained_N | documents.is_forgotten_N
        yield from (
            f"text: {what}"
            for what, is_so in {
                "extracted": (documents.was_extracted_N & fed_N).any(),
                "a canary": audit.canaries is not None and audit.canaries.num_trained_extracted,
                "not generated": not coverage.was_generated or coverage.is_limited,
                "collapsed": coverage.is_collapsed,
                "weakened": coverage.weakened,
                "few texts": len({*documents.cluster_N[trained_N].tolist()}) < MIN_TEXTS,
                "unaudited": coverage.num_unaudited > MAX_SHARE * coverage.num_trained,
            }.items()
            if is_so
        )
    if membership.colour == "green":
        score_N = scores.get("loss_minus_base" if coverage.has_base else "loss")
        yield from ["membership: no score"] if score_N is None else []
        yield from [] if coverage.has_base else ["membership: no base"]
        yield from ["membership: other kind"] if coverage.control == "other-kind" else []
        for side, side_N in (("trained", trained_N), ("unseen", documents.is_control_N)):
            known_N = side_N if score_N is None else side_N & np.isfinite(score_N)
            if len({*documents.cluster_N[known_N].tolist()}) < MIN_TEXTS:
                yield f"membership: few {side} texts"


def list_flips(
    audit: Audit, scores: Scores, draw: np.random.Generator
) -> Iterator[tuple[str, Audit, Scores]]:
    """Yield single changes: a finding more, or evidence less."""
    for name, flipped in list_order_flips(audit, draw):
        if name.startswith(("trained,", "a trained canary")):
            yield f"finding: {name.partition(':')[0]}", flipped, scores
        elif not name.startswith(("control,", "a reference")):
            yield f"evidence: {name}", flipped, scores
    for name, flipped in list_class_flips(audit, draw):
        if name == "no base":
            kept = {key: value for key, value in scores.items() if key == "loss"}
            yield f"evidence: {name}", flipped, kept
        elif name not in (
            "given control",
            "no control",
            "one control document fewer",
            "not audited",
        ):
            yield f"evidence: {name}", flipped, scores
    yield "evidence: no score", audit, {}
    documents, coverage = audit.documents, audit.coverage
    control_N, numbers_N = documents.is_control_N, np.arange(len(documents.is_control_N))
    yield from _leave_out("no control", audit, scores, ~control_N)
    for index in draw.permutation(np.flatnonzero(control_N))[:NUM_FLIPPED]:
        yield from _leave_out("a control document", audit, scores, numbers_N != index)
    quiet_N = documents.is_trained_N & ~documents.was_extracted_N
    more = replace(audit, coverage=replace(coverage, num_unaudited=coverage.num_unaudited + 1))
    for index in draw.permutation(np.flatnonzero(quiet_N))[:NUM_FLIPPED]:
        yield from _leave_out("a trained document", more, scores, numbers_N != index)
    for method, results in documents.others.items():
        for index in draw.permutation(np.flatnonzero(~results.is_extracted_N))[:NUM_FLIPPED]:
            tried_N = results.is_tried_N & (numbers_N != index)
            others = {**documents.others, method: replace(results, is_tried_N=tried_N)}
            fewer = replace(audit, documents=replace(documents, others=others))
            yield f"evidence: not tried, {method}", fewer, scores


def _leave_out(
    name: str, audit: Audit, scores: Scores, where_N: NDArray[np.bool_]
) -> Iterator[tuple[str, Audit, Scores]]:
    kept = {key: value_N[where_N] for key, value_N in scores.items()}
    fewer = replace(audit, documents=take(audit.documents, where_N))
    yield f"evidence: without {name}", fewer, kept


def check(num_audits: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    """Check all flips of so many audits; return what was seen, and violations with a seed."""
    seen: Counter[str] = Counter()
    violations: Counter[str] = Counter()
    for number in range(num_audits):
        draw = np.random.default_rng([seed, number])
        audit = draw_audit(draw, CONTROLS)
        scores = draw_scores(audit, draw)
        before = build_badges(audit, scores)
        seen.update(f"{badge.title}: {badge.state}" for badge in before)
        violations.update(list_gaps(audit, scores, before))
        for name, flipped, kept in list_flips(audit, scores, draw):
            after = build_badges(flipped, kept)
            seen["flips"] += 1
            violations.update(list_gaps(flipped, kept, after))
            is_milder = LOUD[after[0].state] < LOUD[before[0].state]
            if is_milder:
                violations[f"{name}: {before[0].state} to {after[0].state}"] += 1
            for one, other in zip(before, after, strict=True):
                is_green = other.colour == "green" and one.colour != "green"
                if is_green and name.startswith("evidence"):
                    turn = f"{name}: {one.title}, {one.state} to {other.state}"
                    # An interval that ends near one half: other documents, another interval.
                    is_test = one.colour == "violet" and name in OTHER_TEST
                    (seen if is_test else violations)[turn] += 1
            if (before[0].state, after[0].state) == ("Memorized", "Extracted"):
                seen[f"{name}: Memorized to Extracted"] += 1
    return seen, violations


@pytest.fixture(autouse=True)
def _cache_p_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "compute_p_above_control", cache(verdict.compute_p_above_control))


def test_no_flip_makes_a_badge_milder() -> None:
    """Few audits, which take a second; many take ten minutes."""
    seen, violations = check(4, seed=151)
    assert violations == {}
    assert {"Text: None found", "Text: Extracted", "Membership: no sign"} <= seen.keys()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 22))
def test_no_flip_of_many_audits_makes_a_badge_milder(seed: int) -> None:
    """2,000 audits in all, ten minutes."""
    seen, violations = check(100, seed=seed)
    assert violations == {}
    assert min(seen[f"Text: {state}"] for state in LOUD) >= 3
