"""The sections "Membership inference" and "Copies that escape the mask".

The first one shows how well scores separate trained from never-trained documents, with the model
and without it. The second one shows which rewritten copies of a text have loss on tokens that the
mitigation drops in the text itself.
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
"""For records without definitions."""
_BLIND_NOTE = (
    "Detects distribution shift: a cross-fitted classifier that sees the words only. If its "
    "interval is above 0.5, trained and control documents are different kinds of text, and the "
    "scores above prove nothing about the model."
)
_RATE_NOTE = (
    "The interval of a TPR includes the error of its threshold, which is estimated on the control "
    f"documents. With fewer than about 3.7 / FPR of them (36 at 10{fmt.PERCENT}, 368 at "
    f"1{fmt.PERCENT}) the interval starts at 0."
)
MIN_TO_JUDGE = 10
"""Minimum number of documents of either kind for a statement about a score."""
_MOST_SCORES = 40
_MOST_RATES = 6


def build_membership(report: AuditReport) -> Section:
    """Build the section; without scores it gives the reason."""
    scores = [row for row in report.membership if row.score != BLIND][:_MOST_SCORES]
    blind = [row for row in report.membership if row.score == BLIND][:1]
    tables = []
    if scores:
        caption = "Trained against never-trained documents"
        tables.append(_build_table(caption, scores, _write_notes(scores)))
    if blind:
        tables.append(_build_table("Blind baseline (no model access)", blind, (_BLIND_NOTE,)))
    return Section(
        key="membership",
        title="Membership inference",
        short_title="Membership",
        lead=(write_membership_note(report),),
        tables=tuple(tables),
    )


def name_score(score: str) -> str:
    """Return the display name of a membership score."""
    return _NAMES.get(score, fmt.clean_name(score, 40))


def judge_score(score: MembershipScores) -> str:
    """Return whether a score tells trained from control documents, in either direction.

    A mitigation that drops labels makes them the least likely tokens of a trained document, so that
    scores of the least likely tokens are lower for trained documents.
    """
    if min(score.num_members, score.num_nonmembers) < MIN_TO_JUDGE:
        return "too few documents to say"
    if score.auc is None or score.auc.ci is None:
        return "no interval"
    low, high = score.auc.ci
    if low > 0.5:
        return "told apart"
    return "told apart, with the opposite sign" if high < 0.5 else "not told apart"


def warn_of_blind(report: AuditReport) -> Notice | None:
    """Warn if a baseline without access to the model separates members from nonmembers.

    For models that memguard did not train, the audit already adds a more detailed banner.
    """
    blind = report.blind_auc
    if report.run is None or blind is None or blind.ci is None or blind.ci[0] <= 0.5:
        return None
    auc = fmt.interval(blind)
    return Notice(
        level="warning",
        label="Membership scores prove nothing here",
        text="A bag-of-words classifier without access to the model separates trained from "
        f"control documents (AUC {auc.value}, {fmt.CI} {auc.interval}): the texts themselves "
        "differ, so no membership score shows what the model remembers.",
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
            lambda s: show_known(s.auc, fmt.interval, "could not be computed"),
        ),
        Column(("Trained and control", "by this score"), judge_score),
        *(column_of_rate(*rate) for rate in _list_rates(scores) if _is_shown(rate[0], scores)),
        Column(("Trained", "documents"), lambda s: s.num_members),
        Column(("Control", "documents"), lambda s: s.num_nonmembers),
    ]
    if any(score.num_missing for score in scores):
        columns.append(Column(("Missing", "documents"), lambda s: s.num_missing))
    return make_table(caption, columns, scores, notes=notes)


def _list_rates(scores: list[MembershipScores]) -> list[tuple[str, float]]:
    """Return the false-positive rates that occur, as text and as numbers, ascending."""
    texts = {rate for score in scores for rate in score.tpr_at_fpr}
    rates = [(text, rate) for text in texts if 0 < (rate := _read_rate(text)) < 1]
    return sorted(rates, key=lambda pair: pair[1])[:_MOST_RATES]


def _read_rate(rate: str) -> float:
    try:
        return float(rate)
    except ValueError:
        return 0.0


def _count_needed(rate: float) -> int:
    # In floating point 1 / rate may be slightly above the integer.
    return math.ceil(1 / rate - 1e-6)


def _is_shown(rate: str, scores: list[MembershipScores]) -> bool:
    # One sentence below the table replaces a column that has no numbers.
    return any(score.tpr_at_fpr.get(rate) for score in scores)


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
    """Show the true-positive rate, or the number of control documents that it needs."""
    tpr = score.tpr_at_fpr.get(written)
    if tpr is not None:
        return tpr
    needed = _count_needed(rate)
    if score.auc and score.num_nonmembers < needed:
        return show_missing(f"needs ≥ {needed:,} control documents")
    return show_missing("could not be computed")


def write_membership_note(report: AuditReport) -> str:
    """Explain what the scores mean, or why there are none."""
    if not report.membership:
        reason = explain_absence(report, "membership", "computes no membership scores")
        return (
            f"{reason} Membership scores measure how well trained documents can be distinguished "
            "from documents that were never trained."
        )
    text = (
        "AUC is the probability that a trained document scores higher than a never-trained one: "
        "0.5 is chance, 1 separates all documents, extracted or not, and so does 0, with the "
        "opposite sign: an interval wholly below 0.5 is as much a trace of training as one above "
        "it. An interval that contains 0.5 shows no signal with this number of documents."
    )
    missing = [name_score(row.score) for row in report.membership if row.auc is None]
    if missing:
        text += f" Could not be computed: {', '.join(missing[:_MOST_SCORES])}."
    if report.training is None:
        return text
    return (
        f"{text} Trained documents of all buckets are taken together; documents that training did "
        "not reach are excluded."
    )


_MOST_CHANGES = 60


def build_masks(report: AuditReport) -> Section | None:
    """Build the section; None if no mitigation drops labels."""
    changes = report.mask_changes[:_MOST_CHANGES]
    if not changes and not _drops_labels(report):
        return None
    lead = (
        _write_lead(changes)
        if changes
        else explain_absence(
            report, "mask_consistency", "does not test whether copies of a text escape the mask"
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
    """Name the rewriting that leaks most, and explain what that means."""
    measured = [change for change in changes if change.num_passages]
    if not measured:
        return "No passage differs from its rewritings, so copies could not be tested."
    worst = max(measured, key=lambda c: (c.mean_leaked_share or 0.0, c.num_changed))
    if not worst.num_changed:
        return (
            "No copy has loss on a token that training dropped: the mask does not depend on how "
            "the text is formatted."
        )
    share, name = worst.mean_leaked_share, fmt.clean_words(worst.rewriting)
    leaked = "some" if share is None else fmt.percent(share)
    return (
        "A token that is dropped in one copy can receive loss in another one. The worst rewriting "
        f"is '{name}': {fmt.of(worst.num_changed, worst.num_passages)} passages have a "
        "token that training dropped and the copy does not, on average "
        f"{leaked} of a passage's dropped tokens."
    )


_NO_PASSAGE = "no passage differs"


def _build_mask_table(changes: list[MaskChange]) -> Table:
    columns: tuple[Column[MaskChange], ...] = (
        Column(("Copy", "how it differs"), lambda change: fmt.clean_words(change.rewriting)),
        *count_columns(
            ("Masks changed", "passages"),
            ("Share", "of the passages"),
            lambda change: (change.num_changed, change.num_passages),
            _NO_PASSAGE,
        ),
        Column(("Leaked", "mean share of a passage's dropped tokens"), _show_leaked),
    )
    caption = "Tokens dropped in the text that receive loss in a copy of it"
    return make_table(caption, columns, changes, compact=True)


def _show_leaked(change: MaskChange) -> Content:
    if not change.num_passages:
        return show_missing(_NO_PASSAGE)
    return show_known(change.mean_leaked_share, fmt.percent, "not measured")
