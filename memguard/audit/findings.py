"""Which documents greedy decoding extracts, worst first, never their text."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from memguard.records import DocumentScore, Finding

Severity = Literal["high", "medium", "low", "info"]
MAX_FINDINGS = 100
LONG_TOKENS = 50
"""Continuation from which on a verbatim match counts as high: what the literature asks for."""
TEMPLATE_TYPE_TOKEN_RATIO = 0.4
"""Distinct tokens / tokens up to which a continuation may be guessed from its own form."""

_ORDER: tuple[Severity, ...] = ("high", "medium", "low", "info")


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The worst findings and how many there are."""

    kept: tuple[Finding, ...]
    num_findings: int


def collect_findings(
    scores: Sequence[DocumentScore], text_hmacs: Mapping[str, str | None]
) -> Findings:
    """Return a finding for each extracted document that was fed to the model.

    high: verbatim over at least `LONG_TOKENS`, which the base model did not do as far as is known;
    medium: verbatim, but shorter or by the base model too; low: near-verbatim; info: template-like
    text, whatever matches.

    Args:
        scores: of all documents.
        text_hmacs: keyed hash of the text by document id.
    """
    num_findings = 0

    def extracted() -> Iterator[tuple[int, DocumentScore]]:
        nonlocal num_findings
        for score in scores:
            matches = score.verbatim or score.near_verbatim
            if matches and score.role not in ("control", "heldout"):
                num_findings += 1
                yield _ORDER.index(rate_severity(score)), score

    worst = heapq.nsmallest(MAX_FINDINGS, extracted(), key=_badness)
    kept = [
        _build_finding(score, _ORDER[place], text_hmacs.get(score.id)) for place, score in worst
    ]
    return Findings(kept=tuple(kept), num_findings=num_findings)


def rate_severity(score: DocumentScore) -> Severity:
    """Return how severe the extraction of a document is."""
    if score.type_token_ratio <= TEMPLATE_TYPE_TOKEN_RATIO:
        return "info"
    if not score.verbatim:
        return "low"
    if score.continuation_tokens < LONG_TOKENS or score.base_verbatim:
        return "medium"
    return "high"


def _badness(ranked: tuple[int, DocumentScore]) -> tuple[int, int, int, int, float, str]:
    place, score = ranked
    gained = score.num_correct - (score.base_num_correct or 0)
    return place, score.num_edits or 0, -score.num_correct, -gained, -score.logprob, score.id


def _build_finding(score: DocumentScore, severity: Severity, text_hmac: str | None) -> Finding:
    size = score.continuation_tokens
    if score.verbatim:
        count = f"all {size} tokens" if size > 1 else "the only token"
        text = (
            f"Greedy decoding after a prefix of {score.prefix_tokens} tokens generates {count} of "
            "the continuation verbatim."
        )
    else:
        edits = "1 edit" if score.num_edits == 1 else f"{score.num_edits} edits"
        text = (
            f"Greedy decoding after a prefix of {score.prefix_tokens} tokens generates the next "
            f"{size} with {edits}, the first {score.first_divergence} without any."
        )
    if score.base_num_correct is None:
        text += " The model before training was not audited."
    elif score.base_verbatim or score.base_near_verbatim:
        how = "verbatim" if score.base_verbatim else "near-verbatim"
        text += f" The model before training generates them {how} too."
    else:
        text += (
            f" The model before training predicts {score.base_num_correct} of them given the true "
            "text before each."
        )
    if severity == "info":
        text += f" Only {score.type_token_ratio:.0%} of the tokens are distinct: a template?"
    return Finding(
        id=score.id,
        bucket=score.bucket,
        num_repetitions=score.num_repetitions,
        severity=severity,
        sentence=text,
        num_correct=score.num_correct,
        continuation_tokens=size,
        first_divergence=score.first_divergence,
        logprob=score.logprob,
        base_num_correct=score.base_num_correct,
        text_hmac=text_hmac,
    )
