"""Convert an audit report into the texts, tables and figures of its page."""

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
    build_change_from_base,
    build_details,
    build_findings,
    build_summary,
    find_learned,
    tell_learned,
    write_findings_note,
)
from memguard.report.audit_variants import build_variants
from memguard.report.facts import (
    describe_data,
    describe_environment,
    describe_identity,
    describe_method,
    describe_training,
)
from memguard.report.page import AuditPage, Fact, Link, Notice, Section
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
"""Buckets that a sentence lists by name."""


def digest_report(report: AuditReport, links: tuple[Link, ...] = ()) -> AuditPage:
    """Convert an audit report into the contents of its page.

    Args:
        report: the record.
        links: pages beside this one.
    """
    heading = _write_heading(report)
    return AuditPage(
        title=heading,
        heading=heading,
        links=links,
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
                None, (build_summary(report), build_change_from_base(report), build_details(report))
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
            "Held-out NLL measures utility: a mitigation should lower the extraction rate without "
            "raising it."
            if report.training
            else "memguard did not train this model, so its cost and utility are not known."
        ),
        data=describe_data(report),
        method=describe_method(report),
        probes=describe_probes(report),
        probes_not_run=describe_not_run(report),
        command=fmt.clean_text(report.method.command, fmt.COMMAND_LIMIT),
        environment=describe_environment(report.environment),
        glossary=write_glossary(report),
    )


def _write_heading(report: AuditReport) -> str:
    # The name alone can be a word such as "none", which reads as a missing title.
    if report.run is not None:
        return f"Run '{fmt.clean_name(report.run, 120)}': extraction-risk report"
    return f"Model '{fmt.clean_name(report.model.name, 120)}': extraction-risk report"


def _build_evidence(report: AuditReport) -> tuple[Section, ...]:
    """Build the sections of further probes; those that do not apply are omitted."""
    sections = (
        build_variants(report),
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
        # Without it the green verdict would suggest that nothing was learned.
        notices.append(Notice(level="warning", label="Partly learned", text=learned))
    return tuple(notices)


def _pick_key_figures(report: AuditReport) -> tuple[Fact, ...]:
    """Select the rates of verdict, base model and control, token accuracy, attack cost, loss."""
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
        has_dose = report.dose_response and bucket.num_repetitions is not None
        label = fmt.RISK_LABELS[metric]
        add(f"{label}, {times if has_dose else fmt.clean_name(bucket.bucket, 40)}", bucket.risks)
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
    accuracies = (
        f"{name} {fmt.percent(scores.mean_token_accuracy.value)}"
        for name, scores in others.items()
        if scores and scores.mean_token_accuracy
    )
    mine = bucket.model.mean_token_accuracy
    value = fmt.percent(mine.value if mine else None)
    return Fact("Teacher-forced token accuracy", value, detail=", ".join(accuracies))


def _show_cost(report: AuditReport, bucket: str) -> list[Fact]:
    """Show the attack cost of the verdict's bucket; an empty list if it was not measured."""
    cost = find_cost(report, bucket)
    if cost is None or not cost.model.num_documents:
        return []
    details = [f"cheapest {write_cost(cost.model, cost.model.lowest)}"]
    if cost.base and cost.base.num_documents:
        details.append(f"base model {write_cost(cost.base, cost.base.median)}")
    value = write_cost(cost.model, cost.model.median)
    return [Fact("Attack cost, median queries", value, detail=", ".join(details))]


def _write_summary_lead(report: AuditReport) -> tuple[str, ...]:
    method = report.method
    share = fmt.threshold(method.max_edit_share)
    lead = [
        "Exact match understates memorization: one wrong token breaks it. Near-verbatim means "
        "that the text generated by greedy decoding from the prefix differs from the true one in "
        f"at most {share} of the tokens (inserted, deleted or replaced). The highest extraction "
        "rate decides the verdict: verbatim, near-verbatim, and those of sampling and attacks if "
        "they ran.",
        "Teacher-forced columns show which tokens the model predicts when it is given the true "
        "text before each one. They are not extraction and do not affect the verdict.",
        _tell_generated(report),
    ]
    learned = tell_learned(find_learned(report)[:_MOST_NAMED])
    if learned:
        lead.append(learned)
    if not any(bucket.base for bucket in report.buckets):
        lead.append(
            "No base model was scored, so these numbers include what the model knew before this "
            "training."
        )
    return tuple(lead)


def _tell_generated(report: AuditReport) -> str:
    """Report for how many documents text was generated, and what is known of the others."""
    generated = report.generated
    if generated.reason_not_generated is not None:
        return f"Nothing was generated: {fmt.clean_text(generated.reason_not_generated)}."
    text = f"Text was generated for {fmt.count(generated.num_generated)} documents"
    if generated.num_verbatim:
        text += (
            f"; for {fmt.count(generated.num_verbatim)} others the teacher-forced pass shows that "
            "the text is verbatim"
        )
    left = generated.num_below_floor - generated.num_checked
    if left:
        text += (
            f". {fmt.count(left)} documents with a teacher-forced accuracy below "
            f"{fmt.threshold(generated.floor)} were not generated; in a random sample of "
            f"{fmt.count(generated.num_checked)} such documents that were, none is near-verbatim"
        )
    return f"{text}."
