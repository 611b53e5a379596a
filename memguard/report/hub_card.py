"""README.md of a model on a hub: what its audit found, by counts and roles alone.

For readers elsewhere: of the report only counts, rates, and sentences of fixed words and counts are
shown. Names of buckets, documents, files and others' probes, settings and seeds are not read.
"""

import re
from collections.abc import Iterator, Sequence

from huggingface_hub import EvalResult, ModelCardData

from memguard.audit.suite import PROBES
from memguard.pages import formatting as fmt
from memguard.records import AuditReport
from memguard.report.model_card import (
    HOW_TO_LOAD,
    NEEDS_BASE,
    NO_AUDIT,
    escape,
    list_tags,
    write_origin,
)
from memguard.report.texts import write_counted_limits

_ROLES = {"control": "never trained", "trained": "trained", "forget": "to be forgotten"}
_NO_BASE = (
    "This repository has an adapter only, and its base model is not named. With `peft`: load the "
    'base, then `PeftModel.from_pretrained(base, ".")`.'
)


def render_hub_card(
    report: AuditReport | None,
    *,
    title: str,
    is_adapter: bool,
    base: str | None,
    has_base: bool,
    mitigations: Sequence[str],
) -> str:
    """Write README.md.

    Args:
        report: audit of these weights; None if there was none.
        title: name of the repository.
        is_adapter: whether the weights are those of an adapter.
        base: hub id of the base model; None if it has none or is not named.
        has_base: whether training started from a checkpoint instead of random weights.
        mitigations: names of memguard's mitigations in the loss.
    """
    named = [{"name": name} for name in mitigations]
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base,
        base_model_relation=("adapter" if is_adapter else "finetune") if base else None,
        tags=["memguard", *list_tags(report, named, is_adapter=is_adapter)],
        model_name=title if report else None,
        eval_results=[_make_result(_write_verdict(report))] if report else None,
    )
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {escape(title)}",
        write_origin(base, named, is_adapter=is_adapter, has_base=has_base),
        "## Memorization audit",
        *(_write_audit(report) if report else [NO_AUDIT]),
        "## How to load",
        *([NEEDS_BASE if base else _NO_BASE] if is_adapter else []),
        *([HOW_TO_LOAD] if base or not is_adapter else []),
    ]
    return "\n\n".join(sections) + "\n"


def _make_result(verdict: str) -> EvalResult:
    """Return what the hub shows beside the card: no rate alone, which could reassure."""
    return EvalResult(
        task_type="text-generation",
        dataset_type="unknown",  # The hub makes a link of others.
        dataset_name="Training documents (not published)",
        metric_type="verdict",
        metric_value=verdict,
    )


def _write_verdict(report: AuditReport) -> str:
    """Return level and sentence, in which quotes have nothing but the name of a bucket."""
    return re.sub("'.*'", "one bucket", report.verdict.describe(), flags=re.DOTALL)


def _write_audit(report: AuditReport) -> Iterator[str]:
    """Yield the paragraphs on the audit: verdict, scope, rates, limits, what was not run."""
    verdict = report.verdict
    yield f"**{escape(_write_verdict(report))}**"
    # The rest of the scope names probes, of which others' are only counted below.
    yield escape(f"{verdict.membership.sentence} {verdict.scope.partition(' Not run: ')[0]}")
    if warnings := sum(banner.level == "warning" for banner in report.banners):
        yield f"> Warnings in the report of this audit that are not shown here: {warnings:,}."
    yield _write_table(report)
    ran = [run.name for run in report.probe_runs if run.num_documents is not None]
    not_run = [run.name for run in report.probe_runs if run.num_documents is None]
    probes = f"Only these probes ran: {_name_probes(ran)}. Not run: {_name_probes(not_run)}."
    yield "\n".join(f"- {escape(limit)}" for limit in (*write_counted_limits(report), probes))
    yield (
        f"Measured by memguard {escape(report.tool_version)} on weights "
        f"`{fmt.hash(report.model.weights_sha256)}`."
    )


def _name_probes(names: Sequence[str]) -> str:
    """Name memguard's own probes, and count the others."""
    own = [name for name in names if name in PROBES]
    others = [f"{len(names) - len(own):,} more"] if len(own) < len(names) else []
    return ", ".join([*own, *others]) or "none"


def _write_table(report: AuditReport) -> str:
    """Return a row for each bucket, since a sum over them would hide the highest rate."""
    buckets = [bucket for bucket in report.tables.buckets if bucket.role in _ROLES]
    rates = [report.tables.risks(bucket.bucket) for bucket in buckets]
    is_shown = {"verbatim", "near_verbatim"}.union(*rates)
    risks = [risk for risk in fmt.RISK_LABELS if risk in is_shown]
    lines = [["Documents", "Repetitions", *(fmt.RISK_LABELS[risk] for risk in risks)]]
    lines.append(["---"] * len(lines[0]))
    for bucket, found in zip(buckets, rates, strict=True):
        cells = [fmt.rate(found[risk]) if risk in found else "not measured" for risk in risks]
        lines.append([_ROLES[bucket.role], fmt.repetitions(bucket.num_repetitions), *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
