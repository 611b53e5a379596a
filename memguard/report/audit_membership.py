"""How well trained and never-trained documents can be told apart, with and without the model."""

import math

from memguard.records import BLIND, AuditReport, MaskChange, MeasuredBucket, MembershipScores
from memguard.report.audit_probes import Group, explain_absence, find_measured, group_measures
from memguard.report.audit_summary import name_bucket
from memguard.report.formatting import (
    CI,
    PERCENT,
    clean_name,
    clean_text,
    format_count,
    format_difference,
    format_interval,
    format_of,
    format_percent,
    format_points,
    format_threshold,
)
from memguard.report.page import (
    Cell,
    Notice,
    Row,
    Section,
    Table,
    make_headings,
    show_estimate,
    show_missing,
    show_rate,
)

_NAMES = {
    "loss": "Loss",
    "loss_minus_base": "Loss minus base",
    "min_k": f"Min-K{PERCENT}",
    "min_k_plus_plus": f"Min-K{PERCENT}++",
    "zlib": "zlib",
    "lowercase": "Lower case",
    "reference": "Reference model",
    "recall": "ReCaLL",
    BLIND: "Blind",
}
_DEFINITIONS = {
    "loss": "Mean log-probability of a continuation token.",
    "loss_minus_base": "The same, minus the base model's.",
}
"""For records that hold none."""
_BLIND_NOTE = (
    "Cross-fitted on the words alone. Where this interval lies above 0.5, trained and control "
    "documents differ as texts, and the scores above prove nothing about the model."
)
_RATE_NOTE = (
    "The interval of a TPR includes the error of its threshold, which the control documents set. "
    f"With fewer of them than about 3.7 / FPR (36 at 10{PERCENT}, 368 at 1{PERCENT}) it begins "
    "at 0."
)
_MOST_SCORES = 40
_MOST_RATES = 6


def build_membership(report: AuditReport) -> Section:
    """Build the section; without scores it says why."""
    scores = [one for one in report.membership if one.score != BLIND][:_MOST_SCORES]
    blind = [one for one in report.membership if one.score == BLIND][:1]
    tables = []
    if scores:
        caption = "Telling trained documents from never-trained ones"
        tables.append(_build_table(caption, scores, _write_notes(scores)))
    if blind:
        tables.append(_build_table("The same without asking the model", blind, (_BLIND_NOTE,)))
    return Section(
        key="membership",
        title="Membership",
        short_title="Membership",
        lead=(write_membership_note(report),),
        tables=tuple(tables),
    )


def name_score(score: str) -> str:
    """Name a membership score for people."""
    return _NAMES.get(score, clean_name(score, 40))


def warn_of_blind(report: AuditReport) -> Notice | None:
    """Warn where a baseline that never asks the model tells members from nonmembers.

    Of a model that memguard did not train the audit has said so in a banner, with more beside it.
    """
    if report.run is None:
        return None
    blind = next((one for one in report.membership if one.score == BLIND), None)
    if blind is None or blind.auc is None or blind.auc.ci is None or blind.auc.ci[0] <= 0.5:
        return None
    auc = format_interval(blind.auc)
    return Notice(
        level="warning",
        label="Membership scores prove nothing here",
        text="A bag of words that never asks the model tells trained from control documents "
        f"(AUC {auc.value}, {CI} {auc.interval}): the texts themselves differ, so that no "
        "membership score shows what the model remembers.",
    )


def _build_table(caption: str, scores: list[MembershipScores], notes: tuple[str, ...]) -> Table:
    rates = [rate for rate in _list_rates(scores) if _is_shown(rate, scores)]
    has_missing = any(one.num_missing for one in scores)
    return Table(
        caption=caption,
        columns=make_headings(
            "Score",
            ("AUC", f"0.5 is chance ({CI})"),
            *((f"TPR at {_name_rate(rate)} FPR", f"trained ({CI})") for rate in rates),
            ("Trained", "documents"),
            ("Control", "documents"),
            *((("Missing", "documents"),) if has_missing else ()),
        ),
        rows=tuple(_build_row(score, rates, has_missing) for score in scores),
        notes=notes,
    )


def _list_rates(scores: list[MembershipScores]) -> list[str]:
    """Return the false-positive rates that occur, as the record writes them, ascending."""
    written = {rate for score in scores for rate in score.tpr_at_fpr if _read_rate(rate)}
    return sorted(written, key=lambda rate: _read_rate(rate) or 0.0)[:_MOST_RATES]


def _read_rate(rate: str) -> float | None:
    try:
        value = float(rate)
    except ValueError:
        return None
    return value if 0 < value < 1 else None


def _name_rate(rate: str) -> str:
    return format_threshold(_read_rate(rate) or 0.0)


def _build_row(score: MembershipScores, rates: list[str], has_missing: bool) -> Row:
    auc = score.auc
    definition = clean_text(score.definition) or _DEFINITIONS.get(score.score, "")
    return Row(
        head=Cell(text=name_score(score.score), detail=definition, kind="text"),
        cells=(
            show_estimate(format_interval(auc)) if auc else show_missing("could not be asked"),
            *(_show_rate_at(score, rate) for rate in rates),
            Cell(text=format_count(score.num_members)),
            Cell(text=format_count(score.num_nonmembers)),
            *((Cell(text=format_count(score.num_missing)),) if has_missing else ()),
        ),
    )


def _count_needed(rate: str) -> int:
    # 1 / 0.001 is a hair above 1000 for some decimals.
    return math.ceil(1 / (_read_rate(rate) or 1.0) - 1e-6)


def _is_shown(rate: str, scores: list[MembershipScores]) -> bool:
    # A column of nothing but reasons says no more than a sentence.
    return any(one.tpr_at_fpr.get(rate) for one in scores)


def _write_notes(scores: list[MembershipScores]) -> tuple[str, ...]:
    written = _list_rates(scores)
    rates = [rate for rate in written if not _is_shown(rate, scores)]
    notes = (_RATE_NOTE,) if len(rates) < len(written) else ()
    needed = "; ".join(
        f"TPR at {_name_rate(rate)} FPR needs ≥ {_count_needed(rate):,} control documents"
        for rate in rates
    )
    return (*notes, f"Not shown: {needed}.") if needed else notes


def _show_rate_at(score: MembershipScores, rate: str) -> Cell:
    """Show the true-positive rate, or how many control documents it would take."""
    found = score.tpr_at_fpr.get(rate)
    if found is not None:
        return show_rate(found)
    needed = _count_needed(rate)
    if score.auc and score.num_nonmembers < needed:
        return show_missing(f"needs ≥ {needed:,} control documents")
    return show_missing("could not be asked")


def write_membership_note(report: AuditReport) -> str:
    """Say what the scores mean, or why there are none."""
    if not report.membership:
        why = explain_absence(report, "membership", "computes no membership scores")
        return (
            f"{why} They say how well trained documents can be told from documents that were "
            "never trained."
        )
    text = (
        "AUC is the chance that a trained document scores higher than a never-trained one: 0.5 is "
        "a coin toss, 1 tells every document apart, extracted or not. An interval that holds 0.5 "
        "shows no signal with this many documents."
    )
    unasked = [name_score(one.score) for one in report.membership if one.auc is None]
    if unasked:
        text += f" Could not be asked: {', '.join(unasked[:_MOST_SCORES])}."
    if report.training is None:
        return text
    return (
        f"{text} Trained documents of all buckets stand together; those that training never "
        "reached are left out."
    )


# What this training added: model minus base model, bucket by bucket.

_METRICS = (
    ("verbatim", "Verbatim", f"points ({CI})"),
    ("near_verbatim", "Near-verbatim", f"points ({CI})"),
    ("token_accuracy", "Token accuracy", f"teacher-forced, points ({CI})"),
    ("logprob", "Log-probability", f"nats a token ({CI})"),
)


def build_counterfactual(report: AuditReport) -> Table | None:
    """Build the table from the extraction probe; None where no base model was scored."""
    groups = group_measures(report, "extraction")
    if not groups:
        return None
    group = groups[0]
    shown = [one for one in _METRICS if one[0] in group.measures]
    found = [one for name, *_ in shown for one in group.measures[name].buckets]
    if not any(one.counterfactual for one in found):
        return None
    rows = tuple(
        Row(
            head=name_bucket(bucket, report),
            cells=tuple(_show(group, name, bucket.bucket) for name, *_ in shown),
            tone="control" if bucket.role == "control" else "",
        )
        for bucket in report.buckets
    )
    return Table(
        caption="Change from base model, same documents",
        columns=make_headings("Bucket", *((label, unit) for _, label, unit in shown)),
        rows=rows,
        notes=(
            "Counterfactual: the base model stands for a model that never saw the document. In "
            "the control the difference is what training teaches of the kind of text; what goes "
            "beyond it was learned of the documents. Intervals: jackknife over clusters of "
            "near-duplicates.",
        ),
    )


def _show(group: Group, metric: str, bucket: str) -> Cell:
    found: MeasuredBucket | None = find_measured(group, metric, bucket)
    if found is None or found.counterfactual is None:
        empty = found is not None and not found.num_documents
        return show_missing("no documents" if empty else "not measured")
    if group.measures[metric].unit in ("documents", "share"):
        return show_estimate(format_points(found.counterfactual))
    return show_estimate(format_difference(found.counterfactual))


# Copies of a text, formatted otherwise, that escape the mitigation's mask.

_MOST_CHANGES = 60


def build_masks(report: AuditReport) -> Section | None:
    """Build the section; None where no mitigation drops labels."""
    changes = report.mask_changes[:_MOST_CHANGES]
    if not changes and not _drops_labels(report):
        return None
    lead = (
        _write_lead(changes)
        if changes
        else explain_absence(
            report, "mask_consistency", "does not ask whether copies of a text escape the mask"
        )
    )
    return Section(
        key="masks",
        title="Copies that escape the mask",
        short_title="Mask",
        lead=(lead,),
        tables=(_build_mask_table(changes),) if changes else (),
    )


def _drops_labels(report: AuditReport) -> bool:
    return report.training is not None and bool(report.training.dropped_fraction)


def _write_lead(changes: list[MaskChange]) -> str:
    """Name the rewriting of which most leaks, and say what that means."""
    known = [one for one in changes if one.num_passages]
    if not known:
        return "No passage differs from its rewritings: nothing can be said of copies."
    worst = max(known, key=lambda one: (one.mean_leaked_share or 0.0, one.num_changed))
    if not worst.num_changed:
        return (
            "No copy teaches a token that training dropped: the mask stays where it is, however "
            "the text is formatted."
        )
    share = worst.mean_leaked_share
    leaked = "some" if share is None else format_percent(share)
    return (
        f"What one copy hides another teaches: worst is '{_name(worst)}', where "
        f"{format_of(worst.num_changed, worst.num_passages)} passages have a token that training "
        f"dropped and the copy does not, {leaked} of a passage's dropped tokens in the mean."
    )


def _build_mask_table(changes: list[MaskChange]) -> Table:
    return Table(
        caption="Tokens dropped in the text that receive loss in a copy of it",
        columns=make_headings(
            ("Copy", "how it differs"),
            ("Masks changed", "passages"),
            ("Share", "of the passages"),
            ("Leaked", "mean share of a passage's dropped tokens"),
        ),
        rows=tuple(_build_mask_row(change) for change in changes),
        compact=True,
    )


def _build_mask_row(change: MaskChange) -> Row:
    passages, share = change.num_passages, change.mean_leaked_share
    if not passages:
        none = show_missing("no passage differs")
        return Row(head=Cell(text=_name(change), kind="text"), cells=(none, none, none))
    return Row(
        head=Cell(text=_name(change), kind="text"),
        cells=(
            Cell(text=format_of(change.num_changed, passages)),
            Cell(text=format_percent(change.num_changed / passages)),
            Cell(text=format_percent(share)) if share is not None else show_missing("not measured"),
        ),
    )


def _name(change: MaskChange) -> str:
    spoken = clean_name(change.rewriting.replace("_", " "), 40)
    return spoken[:1].upper() + spoken[1:]
