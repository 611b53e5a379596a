"""An audit report as a page: every sentence and figure the template shows."""

from collections.abc import Mapping

from memguard.records import AuditReport, BucketScores, Rate, RiskName
from memguard.report import formatting as fmt
from memguard.report.audit_attacks import build_attack_section, find_cost, write_cost
from memguard.report.audit_canaries import build_canaries
from memguard.report.audit_doses import (
    build_copies,
    build_dose_response,
    build_trends,
    build_watched,
    explain_no_chart,
)
from memguard.report.audit_membership import build_masks, build_membership, warn_of_blind
from memguard.report.audit_probes import (
    build_generation,
    build_grid,
    describe_not_run,
    describe_probes,
)
from memguard.report.audit_summary import (
    build_counterfactual,
    build_details,
    build_findings,
    build_summary,
    find_learned,
    tell_learned,
    write_findings_note,
)
from memguard.report.facts import (
    describe_data,
    describe_environment,
    describe_identity,
    describe_method,
    describe_training,
)
from memguard.report.page import AuditPage, Fact, Notice, Section
from memguard.report.tables import describe_times
from memguard.report.texts import (
    CONFIDENTIALITY,
    describe_loss_change,
    write_glossary,
    write_limits,
    write_next_steps,
)

VERDICT_LABELS = {
    "recites": "Memorization detected",
    "not-above-control": "No memorization detected above control",
    "no-control": "No control to compare with",
    "inconclusive": "Inconclusive",
}
_MOST_NOTICES = 50
_MOST_NAMED = 4
"""Buckets a sentence names one by one."""


def digest_report(report: AuditReport) -> AuditPage:
    """Turn an audit report into what its page shows."""
    name = fmt.clean_name(report.model.name, 120)
    return AuditPage(
        title=f"Memorization audit: {name}",
        heading=name,
        tool_version=fmt.clean_name(report.tool_version, 40),
        confidentiality=CONFIDENTIALITY,
        identity=describe_identity(report),
        notices=_collect_notices(report),
        verdict=Notice(
            level=report.verdict.level,
            label=VERDICT_LABELS[report.verdict.level],
            text=fmt.clean_text(report.verdict.sentence, 2 * fmt.SENTENCE_LIMIT),
        ),
        key_figures=_pick_key_figures(report),
        limits=write_limits(report),
        next_steps=write_next_steps(report),
        summary_lead=_write_summary_lead(report),
        summary=tuple(
            filter(
                None, (build_summary(report), build_counterfactual(report), build_details(report))
            )
        ),
        attacks=build_attack_section(report),
        dose_response=build_dose_response(report),
        dose_response_note=explain_no_chart(report),
        dose_tables=tuple(filter(None, (build_trends(report), build_copies(report)))),
        evidence=_build_evidence(report),
        findings=build_findings(report),
        findings_note=write_findings_note(report),
        training=describe_training(report.training) if report.training else (),
        training_note=(
            "Held-out NLL is the utility that must not get worse while recitation goes down."
            if report.training
            else "memguard did not train this model, so cost and utility are not known here."
        ),
        data=describe_data(report),
        method=describe_method(report),
        probes=describe_probes(report),
        probes_not_run=describe_not_run(report),
        command=fmt.clean_text(report.method.command, fmt.COMMAND_LIMIT),
        environment=describe_environment(report.environment),
        glossary=write_glossary(report),
    )


def _build_evidence(report: AuditReport) -> tuple[Section, ...]:
    """Build what further probes showed; what does not apply is left out."""
    sections = (
        build_grid(report),
        build_generation(report),
        build_membership(report),
        build_canaries(report),
        build_masks(report),
        build_watched(report),
    )
    return tuple(section for section in sections if section)


def _collect_notices(report: AuditReport) -> tuple[Notice, ...]:
    notices = [
        Notice(
            level=banner.level, label=banner.level.capitalize(), text=fmt.clean_text(banner.text)
        )
        for banner in report.banners[:_MOST_NOTICES]
    ]
    blind = warn_of_blind(report)
    if blind:
        notices.append(blind)
    learned = tell_learned(find_learned(report)[:_MOST_NAMED])
    if learned and report.verdict.level == "not-above-control":
        # Else the verdict's colour and its zeros would be taken for all there is to know.
        notices.append(Notice(level="warning", label="Partly learned", text=learned))
    return tuple(notices)


def _pick_key_figures(report: AuditReport) -> tuple[Fact, ...]:
    """Pick the verdict's rate, base model and control, the tokens, the attack cost, the loss."""
    metric = report.verdict.metric
    named = (bucket for bucket in report.buckets if bucket.bucket == report.verdict.bucket)
    bucket = next(named, None)
    control = next((b for b in report.buckets if b.role == "control"), None)
    figures = []

    def add(term: str, risks: Mapping[RiskName, Rate]) -> None:
        rate = risks.get(metric)
        if rate is None:
            return
        value = fmt.of(rate.num_matched, rate.num_documents)
        detail = f"{fmt.percent(rate.rate)}, {fmt.percent_ci(rate.ci)}"
        figures.append(Fact(term, value, detail=detail if rate.num_documents else ""))

    if bucket:
        times = describe_times(bucket, report)
        known = report.dose_response and bucket.num_repetitions is not None
        spoken = fmt.RISK_LABELS[metric]
        add(f"{spoken}, {times if known else fmt.clean_name(bucket.bucket, 40)}", bucket.risks)
        add("Base model, same documents", bucket.base_risks)
    if control and control is not bucket:
        add("Control, never trained", control.risks)
    if bucket and bucket.model.mean_token_accuracy:
        figures.append(_show_accuracy(bucket, control))
    if bucket:
        figures += _show_cost(report, bucket.bucket)
    training = report.training
    if training and training.heldout_nll is not None:
        figures.append(
            Fact(
                "Held-out NLL",
                fmt.number(training.heldout_nll),
                detail=describe_loss_change(training.heldout_nll, training.base_heldout_nll),
            )
        )
    return tuple(figures)


def _show_accuracy(bucket: BucketScores, control: BucketScores | None) -> Fact:
    others = {"control": control.model if control else None, "base model": bucket.base}
    known = (
        f"{name} {fmt.percent(scores.mean_token_accuracy.value)}"
        for name, scores in others.items()
        if scores and scores.mean_token_accuracy
    )
    mine = bucket.model.mean_token_accuracy
    value = fmt.percent(mine.value if mine else None)
    return Fact("Token accuracy, teacher-forced", value, detail=", ".join(known))


def _show_cost(report: AuditReport, bucket: str) -> list[Fact]:
    """Show what the documents of the verdict's bucket cost; nothing where nobody asked."""
    found = find_cost(report, bucket)
    if found is None or not found.model.num_documents:
        return []
    details = [f"cheapest {write_cost(found.model, found.model.lowest)}"]
    if found.base and found.base.num_documents:
        details.append(f"base model {write_cost(found.base, found.base.median)}")
    value = write_cost(found.model, found.model.median)
    return [Fact("Attack cost, median queries", value, detail=", ".join(details))]


def _write_summary_lead(report: AuditReport) -> tuple[str, ...]:
    method = report.method
    share = fmt.threshold(method.max_edit_share)
    lead = [
        "Exact match understates memorization: one wrong token breaks it. Near-verbatim is what "
        f"greedy decoding really generates from the prefix, with at most {share} of the tokens "
        "inserted, deleted or replaced. The worst rate of extraction decides the verdict: these "
        "two, and those of sampling and attacks below where they ran.",
        "Teacher-forced columns say what is known token by token to someone who supplies the true "
        "text so far. They are not extraction and decide nothing.",
        _tell_generated(report),
    ]
    learned = tell_learned(find_learned(report)[:_MOST_NAMED])
    if learned:
        lead.append(learned)
    if not any(bucket.base for bucket in report.buckets):
        lead.append(
            "No base model was scored: what the model knew before this training is in these "
            "numbers too."
        )
    return tuple(lead)


def _tell_generated(report: AuditReport) -> str:
    """Say of how many documents text was generated, and what is known of the others."""
    found = report.generated
    if found.reason_not_generated is not None:
        return f"Nothing was generated: {fmt.clean_text(found.reason_not_generated)}."
    text = f"Text was generated for {fmt.count(found.num_generated)} documents"
    if found.num_verbatim:
        text += (
            f"; that of {fmt.count(found.num_verbatim)} others, which are verbatim, is known "
            "from the teacher-forced pass"
        )
    left = found.num_below_floor - found.num_checked
    if left:
        text += (
            f". {fmt.count(left)} documents with a teacher-forced accuracy below "
            f"{fmt.threshold(found.floor)} were not generated; in a random sample of "
            f"{fmt.count(found.num_checked)} such documents that were, none is near-verbatim"
        )
    return f"{text}."
