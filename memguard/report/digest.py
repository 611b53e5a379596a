"""An audit report as a page: every sentence and figure the template shows."""

from memguard.records import AuditReport, BucketScores, TrainingSummary
from memguard.report.audit_tables import (
    MOST_FINDINGS,
    build_details,
    build_environment,
    build_findings,
    build_membership,
    build_summary,
)
from memguard.report.dose_response import build_dose_response, explain_no_chart
from memguard.report.formatting import (
    MISSING,
    format_count,
    format_duration,
    format_hash,
    format_number,
    format_of,
    format_percent,
    format_percent_ci,
    format_settings,
    format_threshold,
)
from memguard.report.page import AuditPage, Fact, Notice
from memguard.report.prose import (
    CONFIDENTIALITY,
    describe_loss_change,
    describe_overlap,
    write_glossary,
    write_limits,
    write_next_steps,
)
from memguard.report.text import COMMAND_LIMIT, SENTENCE_LIMIT, clean_name, clean_text

VERDICT_LABELS = {
    "recites": "Recites trained documents",
    "not-above-control": "Not above the control",
    "no-control": "No control to compare with",
    "inconclusive": "Inconclusive",
}
_MOST_NOTICES = 50
_MOST_SOURCES = 40


def digest_report(report: AuditReport) -> AuditPage:
    """Turn an audit report into what its page shows."""
    name = clean_name(report.model.name)
    return AuditPage(
        title=f"Memorization audit: {name}",
        heading=name,
        tool_version=clean_name(report.tool_version, 40),
        confidentiality=CONFIDENTIALITY,
        identity=_describe_identity(report),
        notices=_collect_notices(report),
        verdict=Notice(
            level=report.verdict.level,
            label=VERDICT_LABELS[report.verdict.level],
            text=clean_text(report.verdict.sentence, 2 * SENTENCE_LIMIT),
        ),
        key_figures=_pick_key_figures(report),
        limits=write_limits(report),
        next_steps=write_next_steps(report),
        summary_lead=_write_summary_lead(report),
        summary=build_summary(report.buckets),
        details=build_details(report.buckets, report.method.continuation_tokens),
        dose_response=build_dose_response(report),
        dose_response_note=explain_no_chart(report),
        membership=build_membership(report.membership) if report.membership else None,
        membership_note=_write_membership_note(report),
        findings=build_findings(report) if report.findings else None,
        findings_note=_write_findings_note(report),
        training=_describe_training(report.training) if report.training else (),
        training_note=(
            "Held-out NLL is the utility that must not get worse while recitation goes down."
            if report.training
            else "memguard did not train this model, so cost and utility are not known here."
        ),
        data=_describe_data(report),
        method=_describe_method(report),
        probes=tuple(format_settings(probe) for probe in report.method.probes[:50]),
        command=clean_text(report.method.command, COMMAND_LIMIT),
        environment=build_environment(report.environment),
        glossary=write_glossary(report),
    )


def _describe_identity(report: AuditReport) -> tuple[Fact, ...]:
    base = report.model.base
    created = clean_name(report.created, 40).replace("T", " ").replace("Z", " UTC")
    return (
        Fact(term="Weights", value=format_hash(report.model.weights_sha256), code=True),
        Fact(term="Parameters", value=format_count(report.model.num_parameters)),
        Fact(
            term="Base model",
            value=clean_name(base) if base else "not scored",
            detail=format_hash(report.model.base_weights_sha256) if base else "",
        ),
        Fact(term="Documents", value=format_hash(report.data.documents_sha256), code=True),
        Fact(term="Run", value=clean_name(report.run) if report.run else "not trained here"),
        Fact(term="Made", value=created, detail=f"memguard {clean_name(report.tool_version, 40)}"),
    )


def _collect_notices(report: AuditReport) -> tuple[Notice, ...]:
    notices = [
        Notice(level=banner.level, label=banner.level.capitalize(), text=clean_text(banner.text))
        for banner in report.banners[:_MOST_NOTICES]
    ]
    if report.status == "partial":
        text = "This audit ended before all documents were scored; every number is preliminary."
        notices.insert(0, Notice(level="warning", label="Partial", text=text))
    return tuple(notices)


def _find_bucket(report: AuditReport) -> BucketScores | None:
    named = (bucket for bucket in report.buckets if bucket.bucket == report.verdict.bucket)
    return next(named, None)


def _pick_key_figures(report: AuditReport) -> tuple[Fact, ...]:
    """Pick the verdict's rate, its base model, the control and the loss."""
    metric = report.verdict.metric
    spoken = metric.replace("_", "-")
    bucket = _find_bucket(report)
    control = next((b for b in report.buckets if b.role == "control"), None)
    figures = []

    def add(term: str, scores: object) -> None:
        rate = getattr(scores, metric)
        value = format_of(rate.num_matched, rate.num_documents)
        detail = f"{format_percent(rate.rate)}, {format_percent_ci(rate.ci)}"
        figures.append(Fact(term=term, value=value, detail=detail if rate.num_documents else ""))

    if bucket:
        add(f"{spoken.capitalize()}, {clean_name(bucket.bucket, 40)}", bucket.model)
        if bucket.base:
            add("Base model, same documents", bucket.base)
    if control and control is not bucket:
        add("Control, never trained", control.model)
    training = report.training
    if training and training.heldout_nll is not None:
        figures.append(
            Fact(
                term="Held-out NLL",
                value=format_number(training.heldout_nll),
                detail=describe_loss_change(training.heldout_nll, training.base_heldout_nll),
            )
        )
    return tuple(figures)


def _write_summary_lead(report: AuditReport) -> tuple[str, ...]:
    threshold = format_threshold(report.method.near_verbatim_threshold)
    lead = (
        "One wrong token breaks a verbatim match, so verbatim alone flatters a model that was "
        f"kept from learning some tokens. Near-verbatim asks for {threshold} of the "
        f"{report.method.continuation_tokens:,} tokens; the worse of the two decides the verdict."
    )
    if any(bucket.base for bucket in report.buckets):
        return (lead,)
    return (
        lead,
        "No base model was scored: what the model knew before this training is in these numbers "
        "too.",
    )


def _write_membership_note(report: AuditReport) -> str:
    if not report.membership:
        return (
            "No membership score: it needs documents that were never trained. Where there are "
            "some, it says how well one can tell which documents were trained."
        )
    return (
        "The chance that a trained document scores higher than a never-trained one. 0.5 is a coin "
        "toss; an interval that holds 0.5 shows no signal with so many documents; 1 tells every "
        "document apart, recited or not."
    )


def _write_findings_note(report: AuditReport) -> str:
    if not report.num_findings:
        return "No document met the rule for a finding under the probes listed."
    shown = min(len(report.findings), MOST_FINDINGS)
    found = format_count(report.num_findings)
    all_shown = shown >= report.num_findings
    return (
        f"{'All' if all_shown else f'The first {format_count(shown)} of'} {found} findings, worst "
        "first. Text is referred to by keyed hash; the key stays in the run's private folder."
    )


def _describe_training(training: TrainingSummary) -> tuple[Fact, ...]:
    mitigations = [format_settings(mitigation) for mitigation in training.mitigations[:20]]
    heldout = [f"{format_count(training.heldout_num_documents)} documents"]
    heldout.append(f"{format_count(training.heldout_num_tokens)} tokens")
    if training.heldout_bucket:
        heldout.append(f"bucket {clean_name(training.heldout_bucket)}")
    asked = [m["k"] for m in training.mitigations if isinstance(m.get("k"), int) and m["k"] > 0]
    target = f"asked for: 1 in {asked[0]:,}, {format_threshold(1 / asked[0])}" if asked else ""
    return (
        Fact(term="Mitigations", value="; ".join(mitigations) or "none (plain loss)"),
        Fact(term="Labels dropped", value=format_percent(training.dropped_fraction), detail=target),
        Fact(
            term="Held-out NLL",
            value=format_number(training.heldout_nll),
            detail=describe_loss_change(training.heldout_nll, training.base_heldout_nll),
        ),
        Fact(term="Held-out on", value=", ".join(heldout)),
        Fact(term="Steps", value=format_count(training.num_steps)),
        Fact(term="Supervised tokens", value=format_count(training.num_supervised_tokens)),
        Fact(term="Time", value=format_duration(training.train_s)),
    )


def _describe_data(report: AuditReport) -> tuple[Fact, ...]:
    data = report.data
    sources = [clean_name(source, 120) for source in data.sources[:_MOST_SOURCES]]
    if len(data.sources) > _MOST_SOURCES:
        sources.append(f"and {len(data.sources) - _MOST_SOURCES:,} more")
    return (
        Fact(term="Sources", value=", ".join(sources) or MISSING),
        Fact(term="Documents", value=format_count(data.num_documents)),
        Fact(
            term="Clusters of near-duplicates",
            value=format_count(data.num_clusters),
            detail="Control and buckets are drawn over clusters, not over single documents.",
        ),
        describe_overlap(report),
        Fact(
            term="Hash",
            value=clean_name(data.documents_sha256, 80),
            detail="Over ids and token hashes of all documents, in order.",
            code=True,
        ),
    )


def _describe_method(report: AuditReport) -> tuple[Fact, ...]:
    method = report.method
    prefix = method.prefix_tokens
    prefix_text = "everything before the continuation" if prefix is None else f"{prefix:,} tokens"
    suite = f"{clean_name(method.suite)}, version {method.suite_version:,}"
    base_hash = report.model.base_weights_sha256
    facts = [
        Fact(term="Suite", value=suite),
        Fact(term="Continuation", value=f"{method.continuation_tokens:,} tokens"),
        Fact(term="Prefix", value=prefix_text),
        Fact(term="Near-verbatim from", value=format_threshold(method.near_verbatim_threshold)),
        Fact(term="Tiny margin below", value=f"{format_number(method.tiny_margin)} logits"),
        Fact(term="Arithmetic", value=clean_name(method.dtype, 20)),
        Fact(term="Tokens of a forward pass", value=format_count(method.batch_tokens)),
        Fact(term="Seed", value=str(method.seed)),
        Fact(term="Time", value=format_duration(method.wall_s)),
        Fact(term="Weights", value=clean_name(report.model.weights_sha256, 80), code=True),
    ]
    if base_hash:
        facts.append(Fact(term="Base weights", value=clean_name(base_hash, 80), code=True))
    return tuple(facts)
