"""Sentences of the pages: limits, next steps, glossary.

Sober on purpose: a page says what was tried and what came out, never that a model is free of risk.
"""

from memguard.records import AuditReport
from memguard.report.formatting import (
    NBSP,
    PERCENT,
    format_count,
    format_number,
    format_percent,
    format_rate,
    format_settings,
    format_threshold,
    relative_change,
)
from memguard.report.page import Fact
from memguard.report.text import clean_text

CONFIDENTIALITY = (
    "Contains no excerpts: documents appear by id and keyed hash only. Ids and source names can "
    "tell something by themselves; share the page as you would share those."
)

READING_GUIDE = (
    "Lower is better on both axes: fewer documents recited, and a lower loss on documents that "
    "were never trained.",
    "One dropped token breaks a verbatim match, so a setting that drops labels can reach 0 % "
    "verbatim while most tokens are still right: read verbatim only together with near-verbatim "
    "and mean token accuracy.",
)


def write_limits(report: AuditReport) -> tuple[str, ...]:
    """Say in five sentences what this audit can and cannot tell."""
    method = report.method
    prefix = (
        f"everything before its last {method.continuation_tokens} tokens"
        if method.prefix_tokens is None
        else f"the {method.prefix_tokens} true tokens before the continuation"
    )
    probes = "; ".join(format_settings(probe) for probe in method.probes[:20])
    return (
        _write_coverage(report),
        f"The attacker is assumed to know the prefix: each document is prompted with {prefix}. "
        "Someone without that text may get less out of the model.",
        "Rates are a lower bound on what can be extracted: other prefixes, sampling, paraphrase or "
        "many attempts may bring out more than one greedy continuation does.",
        f"Only these probes were run: {probes or 'none'}. They say nothing about facts or personal "
        "data repeated in other words.",
        _write_arithmetic(report),
    )


def _write_coverage(report: AuditReport) -> str:
    scored = sum(bucket.num_documents for bucket in report.buckets)
    too_short = sum(bucket.num_too_short for bucket in report.buckets)
    not_sampled = sum(bucket.num_not_sampled for bucket in report.buckets)
    short = f"; {format_count(too_short)} were too short to audit and are not covered"
    if not_sampled:
        eligible = format_count(scored + not_sampled)
        return (
            f"A random sample was scored: {format_count(scored)} of {eligible} documents long "
            f"enough{short if too_short else ''}. The intervals say how far the sample can mislead."
        )
    start = f"Every document long enough was scored: {format_count(scored)}"
    return f"{start}{short if too_short else ''}. Intervals treat documents as independent draws."


def _write_arithmetic(report: AuditReport) -> str:
    tiny = sum(bucket.num_tiny_margin for bucket in report.buckets)
    margin = format_number(report.method.tiny_margin)
    dtype = clean_text(report.method.dtype, 20)
    if tiny:
        verdicts = "1 verdict hangs" if tiny == 1 else f"{format_count(tiny)} verdicts hang"
        return (
            f"Scored in {dtype}: {verdicts} on a gap of less than {margin} logits between the "
            "best two tokens; other hardware, batch sizes or precision could turn them."
        )
    return (
        f"Scored in {dtype}: no verdict hangs on a gap of less than {margin} logits, so other "
        "arithmetic should give the same counts."
    )


def write_next_steps(report: AuditReport) -> tuple[str, ...]:
    """Say what to do now, most useful first."""
    steps = []
    level = report.verdict.level
    mitigations = report.training.mitigations if report.training else []
    has_goldfish = any(mitigation.get("name") == "goldfish" for mitigation in mitigations)
    if report.status == "partial":
        steps.append("Run the same command again: it scores what is still missing.")
    if level == "recites":
        if report.num_findings:
            steps.append(
                "Look at the worst findings below and decide whether these texts may be repeated "
                "in public; 'audit.excerpts: true' writes their text to a private file."
            )
        if report.training and not has_goldfish:
            steps.append(
                "Train again with 'mitigations: [{name: goldfish, k: 4}]' on the same documents "
                "and seed, and put both side by side with 'memguard compare'."
            )
        elif has_goldfish:
            steps.append(
                "Goldfish loss was on and the model still recites: try a smaller k (more labels "
                "dropped), and compare near-verbatim and held-out NLL with this run."
            )
        steps.append(
            "Train documents fewer times: remove duplicates and near-duplicates, or lower 'epochs'."
        )
    if level == "no-control":
        steps.append(
            "Audit again with documents that were never trained ('data.control_fraction' above 0, "
            "or '--nonmembers'): without them a rate has no zero to be compared with."
        )
    if level == "inconclusive":
        steps.append(
            "Score more documents, trained and control alike, and read the notes above the "
            "verdict: what was measured does not decide the question."
        )
    if report.data.overlap_with_control and report.data.overlap_with_control.num_matched:
        steps.append(
            "Some control documents still share a run of words with trained ones, which raises "
            "the control's rates: leave these out of the control before the next run."
        )
    if report.method.dtype != "fp32" and any(b.num_tiny_margin for b in report.buckets):
        steps.append("Audit once more with 'audit.dtype=fp32' to settle the tiny margins.")
    if level == "not-above-control":
        steps.append(
            "Keep this page with the weights it names, and audit again when documents, epochs or "
            "mitigations change: the result holds for these probes and these documents."
        )
    return tuple(steps)


def describe_overlap(report: AuditReport) -> Fact:
    """Say how far the control is from being independent of the trained documents."""
    overlap = report.data.overlap_with_control
    if overlap is None:
        return Fact(term="Overlap with control", value="not measured")
    words = report.data.near_duplicate_words
    run = "a run of words" if words is None else f"a run of {words} words"
    return Fact(
        term="Overlap with control",
        value=format_rate(overlap),
        detail=f"Control documents that share {run} with a trained one.",
    )


def describe_loss_change(nll: float | None, base: float | None) -> str:
    """Say how far a held-out NLL moved from the base model's."""
    if nll is None or base is None:
        return ""
    change = relative_change(nll, base)
    if change is None:
        return f"base model {format_number(base)}"
    direction = "below" if change < 0 else "above"
    moved = f"{format_percent(abs(change))} {direction}" if change else "the same as"
    return f"{moved} the base model's {format_number(base)}"
