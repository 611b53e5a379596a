"""What the documents alone can tell: membership scores, and copies that escape the mask.

How well trained and never-trained documents are told apart, with the model and without it; and
which rewritten copies of a text teach the tokens that the mitigation drops in the text itself.
"""

import math

from memguard.records import BLIND, AuditReport, MaskChange, MembershipScores
from memguard.report import formatting as fmt
from memguard.report.audit_probes import explain_absence
from memguard.report.page import Notice, Section, Table
from memguard.report.tables import (
    Column,
    Content,
    count_columns,
    make_rows,
    make_table,
    show_known,
    show_missing,
    show_name,
)

_NAMES = {
    "loss": "Loss",
    "loss_minus_base": "Loss minus base",
    "min_k": f"Min-K{fmt.PERCENT}",
    "min_k_plus_plus": f"Min-K{fmt.PERCENT}++",
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
    f"With fewer of them than about 3.7 / FPR (36 at 10{fmt.PERCENT}, 368 at 1{fmt.PERCENT}) it "
    "begins at 0."
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
    return _NAMES.get(score, fmt.clean_name(score, 40))


def warn_of_blind(report: AuditReport) -> Notice | None:
    """Warn where a baseline that never asks the model tells members from nonmembers.

    Of a model that memguard did not train the audit has said so in a banner, with more beside it.
    """
    if report.run is None:
        return None
    blind = next((one for one in report.membership if one.score == BLIND), None)
    if blind is None or blind.auc is None or blind.auc.ci is None or blind.auc.ci[0] <= 0.5:
        return None
    auc = fmt.interval(blind.auc)
    return Notice(
        level="warning",
        label="Membership scores prove nothing here",
        text="A bag of words that never asks the model tells trained from control documents "
        f"(AUC {auc.value}, {fmt.CI} {auc.interval}): the texts themselves differ, so that no "
        "membership score shows what the model remembers.",
    )


def _build_table(caption: str, scores: list[MembershipScores], notes: tuple[str, ...]) -> Table:
    def column_of_rate(written: str, rate: float) -> Column[MembershipScores]:
        heading = (f"TPR at {fmt.threshold(rate)} FPR", f"trained ({fmt.CI})")
        return Column(heading, lambda s: _show_rate_at(s, written, rate))

    columns: list[Column[MembershipScores]] = [
        Column(
            "Score",
            lambda s: show_name(
                name_score(s.score), fmt.clean_text(s.definition) or _DEFINITIONS.get(s.score, "")
            ),
        ),
        Column(
            ("AUC", f"0.5 is chance ({fmt.CI})"),
            lambda s: show_known(s.auc, fmt.interval, "could not be asked"),
        ),
        *(column_of_rate(*rate) for rate in _list_rates(scores) if _is_shown(rate[0], scores)),
        Column(("Trained", "documents"), lambda s: s.num_members),
        Column(("Control", "documents"), lambda s: s.num_nonmembers),
    ]
    if any(score.num_missing for score in scores):
        columns.append(Column(("Missing", "documents"), lambda s: s.num_missing))
    return make_table(caption, columns, make_rows(columns, scores), notes=notes)


def _list_rates(scores: list[MembershipScores]) -> list[tuple[str, float]]:
    """Return the false-positive rates that occur, as the record writes them, ascending."""
    written = {rate for score in scores for rate in score.tpr_at_fpr}
    known = [(rate, value) for rate in written if 0 < (value := _read_rate(rate)) < 1]
    return sorted(known, key=lambda rate: rate[1])[:_MOST_RATES]


def _read_rate(rate: str) -> float:
    try:
        return float(rate)
    except ValueError:
        return 0.0


def _count_needed(rate: float) -> int:
    # 1 / 0.001 is a hair above 1000 for some decimals.
    return math.ceil(1 / rate - 1e-6)


def _is_shown(rate: str, scores: list[MembershipScores]) -> bool:
    # A column of nothing but reasons says no more than a sentence.
    return any(one.tpr_at_fpr.get(rate) for one in scores)


def _write_notes(scores: list[MembershipScores]) -> tuple[str, ...]:
    rates = _list_rates(scores)
    left_out = [rate for written, rate in rates if not _is_shown(written, scores)]
    notes = (_RATE_NOTE,) if len(left_out) < len(rates) else ()
    needed = "; ".join(
        f"TPR at {fmt.threshold(rate)} FPR needs ≥ {_count_needed(rate):,} control documents"
        for rate in left_out
    )
    return (*notes, f"Not shown: {needed}.") if needed else notes


def _show_rate_at(score: MembershipScores, written: str, rate: float) -> Content:
    """Show the true-positive rate, or how many control documents it would take."""
    found = score.tpr_at_fpr.get(written)
    if found is not None:
        return found
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
    leaked = "some" if share is None else fmt.percent(share)
    return (
        f"What one copy hides another teaches: worst is '{_name(worst)}', where "
        f"{fmt.of(worst.num_changed, worst.num_passages)} passages have a token that training "
        f"dropped and the copy does not, {leaked} of a passage's dropped tokens in the mean."
    )


_NO_PASSAGE = "no passage differs"


def _build_mask_table(changes: list[MaskChange]) -> Table:
    columns: tuple[Column[MaskChange], ...] = (
        Column(("Copy", "how it differs"), _name),
        *count_columns(
            ("Masks changed", "passages"),
            ("Share", "of the passages"),
            lambda one: (one.num_changed, one.num_passages),
            _NO_PASSAGE,
        ),
        Column(("Leaked", "mean share of a passage's dropped tokens"), _show_leaked),
    )
    caption = "Tokens dropped in the text that receive loss in a copy of it"
    return make_table(caption, columns, make_rows(columns, changes), compact=True)


def _show_leaked(change: MaskChange) -> Content:
    if not change.num_passages:
        return show_missing(_NO_PASSAGE)
    return show_known(change.mean_leaked_share, fmt.percent, "not measured")


def _name(change: MaskChange) -> str:
    spoken = fmt.clean_name(change.rewriting.replace("_", " "), 40)
    return spoken[:1].upper() + spoken[1:]
