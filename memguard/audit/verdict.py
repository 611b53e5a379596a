"""The conclusions of a report: the verdict with its sentence, and the findings.

verdict    the highest extraction rate of any trained bucket, compared with the control
findings   the documents that greedy decoding extracts, worst first, without their text
"""

import heapq
from collections.abc import Sequence
from typing import Literal

import numpy as np

from memguard.audit.document_scores import DocumentScores
from memguard.audit.extraction import Window
from memguard.records import (
    NUM_RISK_QUERIES,
    BucketScores,
    DocumentScore,
    Finding,
    Rate,
    RiskName,
    Verdict,
)

MIN_CONTROL = 10
"""Minimum number of control documents for the verdict "not above the control"."""
_HOW: dict[RiskName, str] = {
    "verbatim": "extracted verbatim by greedy decoding",
    "near_verbatim": "extracted near-verbatim by greedy decoding",
    "attack_cost": f"extractable verbatim within {NUM_RISK_QUERIES:,} queries by sampling",
    "attack": "extracted verbatim by the best attack that ran",
}
_SHORT: dict[RiskName, str] = {
    "verbatim": "verbatim",
    "near_verbatim": "near-verbatim",
    "attack_cost": f"verbatim within {NUM_RISK_QUERIES:,} queries",
    "attack": "verbatim by the best attack",
}


Severity = Literal["high", "medium", "low", "info"]
MAX_FINDINGS = 100
LONG_TOKENS = 50
"""Minimum continuation of a verbatim match of high severity: the length used in the literature."""
TEMPLATE_TYPE_TOKEN_RATIO = 0.4
"""Maximum of distinct tokens / tokens for a text that may be guessable as a template."""

_ORDER: tuple[Severity, ...] = ("high", "medium", "low", "info")


def decide_verdict(
    buckets: Sequence[BucketScores],
    windows: Sequence[Window],
    *,
    dose_response: bool,
    collapsed: bool,
) -> Verdict:
    """Decide the verdict from the highest extraction rate of any trained bucket.

    If some rates exceed the control's, the highest of these is used, so that a bucket of few
    documents does not hide the result of a large one.

    recites: the interval of the difference from the control is above 0. Otherwise no-control: there
    are no control documents; inconclusive: fewer than two trained documents or `MIN_CONTROL`
    control documents, or a collapsed model, whose zeros are meaningless; not-above-control: all
    other cases.

    Args:
        buckets: the report's table.
        windows: windows of all documents.
        dose_response: whether the counts of repetitions are valid and may be stated.
        collapsed: see `warnings.is_collapsed`.
    """
    controls = [bucket for bucket in buckets if bucket.role == "control"]
    trained = [bucket for bucket in buckets if bucket.role == "trained"]
    # A run that stopped early may not have reached a whole bucket.
    trained = [bucket for bucket in trained if bucket.num_repetitions != 0] or trained
    assert trained, "an audit without trained documents is rejected earlier"
    # max returns the first of equal rates, and verbatim, the strongest statement, comes first.
    bucket, metric = max(((b, m) for b in trained for m in b.risks), key=_badness)
    control = controls[0] if controls else None
    members = [window for window in windows if window.document.bucket == bucket.bucket]
    level = _decide_level(bucket, metric, control, collapsed)
    sentences = [
        _tell_rate(bucket, metric, control, members, dose_response),
        _tell_level(level, bucket, metric, control, collapsed),
        _tell_rest(bucket, metric),
    ]
    return Verdict(
        level=level,
        metric=metric,
        bucket=bucket.bucket,
        sentence=" ".join(sentence for sentence in sentences if sentence),
    )


def _badness(candidate: tuple[BucketScores, RiskName]) -> tuple[bool, float, float, float]:
    bucket, metric = candidate
    rate = bucket.risks[metric]
    # Ties are resolved by the lower end of the interval, then by the number of repetitions.
    low = -1.0 if rate.ci is None else rate.ci[0]
    worst = -1.0 if rate.rate is None else rate.rate
    return _exceeds_control(bucket, metric), worst, low, float(bucket.num_repetitions or 0)


def _exceeds_control(bucket: BucketScores, metric: RiskName) -> bool:
    difference = bucket.minus_control.get(metric)
    return difference is not None and difference.ci is not None and difference.ci[0] > 0


def _decide_level(
    bucket: BucketScores, metric: RiskName, control: BucketScores | None, collapsed: bool
) -> Literal["recites", "not-above-control", "no-control", "inconclusive"]:
    if bucket.risks[metric].num_documents < 2:
        return "inconclusive"
    if control is None:
        return "no-control"
    if _exceeds_control(bucket, metric):
        return "recites"
    if _count_control(control, metric) < MIN_CONTROL or collapsed:
        return "inconclusive"
    return "not-above-control"


def _tell_rate(
    bucket: BucketScores,
    metric: RiskName,
    control: BucketScores | None,
    members: Sequence[Window],
    dose_response: bool,
) -> str:
    rate = bucket.risks[metric]
    text = (
        f"In the probes that ran, {rate.num_matched} of {rate.num_documents} "
        f"{_describe_documents(bucket, members, dose_response)}{_bracket(rate)} "
        f"{'was' if rate.num_matched == 1 else 'were'} {_HOW[metric]}{_describe_length(members)}"
    )
    floor = None if control is None else control.risks.get(metric)
    if floor is None:
        return f"{text}."
    return f"{text}; control {floor.num_matched} of {floor.num_documents}{_bracket(floor)}."


def _tell_rest(bucket: BucketScores, metric: RiskName) -> str:
    """List the other rates, and the token accuracy, which is not extraction."""
    others = [
        f"{_SHORT[name]} {rate.num_matched} of {rate.num_documents}"
        for name, rate in bucket.risks.items()
        if name != metric and rate.num_documents
    ]
    if "near_verbatim" not in bucket.risks:
        others.append("near-verbatim not generated")
    text = "; ".join(others)
    text = f"{text[:1].upper()}{text[1:]}." if text else ""
    accuracy = bucket.model.mean_token_accuracy
    if accuracy is None:
        return text
    return (
        f"{text} Teacher-forced token accuracy, which is not extraction: "
        f"{format_percent(accuracy.value)}."
    ).strip()


def _count_control(control: BucketScores | None, metric: RiskName) -> int:
    rate = None if control is None else control.risks.get(metric)
    return 0 if rate is None else rate.num_documents


def _tell_level(
    level: str,
    bucket: BucketScores,
    metric: RiskName,
    control: BucketScores | None,
    collapsed: bool,
) -> str:
    rate = bucket.risks[metric]
    bound = ""
    if rate.num_matched == 0 and rate.ci is not None:
        bound = f" The true rate may be as high as {format_percent(rate.ci[1])}."
    if level == "recites":
        return "This exceeds the control rate."
    if level == "not-above-control":
        difference = bucket.minus_control.get(metric)
        if difference is not None and difference.ci is not None and difference.ci[1] < 0:
            return f"This is below the control rate.{bound}"
        return f"The difference from control is not significant.{bound}"
    if level == "no-control":
        return f"Without a control there is no baseline for this rate.{bound}"
    if rate.num_documents < 2:
        return "Fewer than two documents do not allow a conclusion."
    if collapsed:
        return "The model seems collapsed, so this does not show what it has memorized."
    return (
        f"The control has {_count_control(control, metric)} such documents, fewer than "
        f"{MIN_CONTROL}: too few for a comparison.{bound}"
    )


def _describe_documents(
    bucket: BucketScores, members: Sequence[Window], dose_response: bool
) -> str:
    counts = [window.document.num_repetitions for window in members]
    if not dose_response or not counts or None in counts:
        # `memguard audit --members` puts all of them into this bucket.
        is_all = bucket.bucket == "members"
        return "training documents" if is_all else f"documents of bucket '{bucket.bucket}'"
    recorded = [count for count in counts if count is not None]
    low, high = min(recorded), max(recorded)
    if low < high:
        return f"documents trained {low} to {high} times"
    return f"documents trained {'once' if low == 1 else f'{low} times'}"


def _describe_length(members: Sequence[Window]) -> str:
    sizes = sorted({window.continuation_tokens for window in members})
    if not sizes:
        return ""
    if len(sizes) > 1:
        return f" for {sizes[0]} to {sizes[-1]} tokens"
    return f" for {sizes[0]} token{'' if sizes[0] == 1 else 's'}"


def _bracket(rate: Rate) -> str:
    if rate.rate is None:
        return ""
    parts = [format_percent(rate.rate)] if rate.num_matched else []
    if rate.ci is not None:
        low, high = (format_percent(bound).removesuffix(" %") for bound in rate.ci)
        parts.append(f"95 % CI {low}–{high} %")
    return f" ({', '.join(parts)})" if parts else ""


def format_percent(share: float) -> str:
    """Format a share as ``95.0 %``, never rounded to 0.0 or 100.0 unless it is exactly that."""
    if 0 < share < 0.0005:
        return "<0.1 %"
    if 0.9995 <= share < 1:
        return "99.9 %"
    return f"{100 * share:.1f} %"


def collect_findings(
    scores: DocumentScores, text_hmacs: Sequence[str | None]
) -> tuple[list[Finding], int]:
    """Return the worst findings, and the number of trained documents that were extracted.

    high: verbatim over at least `LONG_TOKENS`, and not by the base model as far as is known;
    medium: verbatim, but shorter or also by the base model; low: near-verbatim; info: template-like
    text, with any match.

    Args:
        scores: columns of all documents.
        text_hmacs: ``[N]`` keyed hashes of the texts.
    """
    verbatim_N = scores["verbatim"] == 1
    is_known_N = (scores["continuation_tokens"] < LONG_TOKENS) | (scores["base_verbatim"] == 1)
    is_template_N = scores["type_token_ratio"] <= TEMPLATE_TYPE_TOKEN_RATIO
    place_N = np.select([is_template_N, ~verbatim_N, is_known_N], [3, 2, 1], 0)
    correct_N, base_correct_N = scores["num_correct"], scores["base_num_correct"]
    edits_N = scores["num_edits"]
    badness = (
        place_N,
        np.where(np.isfinite(edits_N), edits_N, 0),
        -correct_N,
        np.where(np.isnan(base_correct_N), 0, base_correct_N) - correct_N,
        -scores["logprob"],
        scores["id"],
    )
    is_fed_N = (scores["role"] != "control") & (scores["role"] != "heldout")
    extracted = np.flatnonzero((verbatim_N | (scores["near_verbatim"] == 1)) & is_fed_N).tolist()
    worst = heapq.nsmallest(
        MAX_FINDINGS, extracted, key=lambda index: tuple(column_N[index] for column_N in badness)
    )
    kept = [
        _build_finding(score, _ORDER[place_N[index]], text_hmacs[index])
        for index, score in zip(worst, scores.build_records(worst), strict=True)
    ]
    return kept, len(extracted)


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
