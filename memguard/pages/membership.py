"""The section on membership: AUC and true-positive rates, a ROC, and the blind baseline.

list_aucs        the AUC of each score of a report
judge_score      whether a score tells trained from control documents, in words
warn_of_blind    the warning if a baseline without the model separates them
"""

import math
from dataclasses import replace

from memguard.pages import columns as cells
from memguard.pages import formatting as fmt
from memguard.pages.facts import explain_absence
from memguard.pages.page import Cell, Notice, Section, Table
from memguard.pages.pivot import ResultColumn, pivot
from memguard.pages.roc import build_roc, name_score, read_score
from memguard.records import BLIND, MEMBERS, AuditReport, ResultRow, Tables, write_parameters

_AUC, _TPR = "auc", "tpr"
_BLIND_NOTES = (
    "Detects distribution shift: a cross-fitted classifier that sees the words only. If its "
    "interval is above 0.5, trained and control documents are different kinds of text, and the "
    "scores above prove nothing about the model.",
)
_RATE_NOTE = (
    "The interval of a TPR includes the error of its threshold, which is estimated on the control "
    f"documents. With fewer than about 3.7 / FPR of them (36 at 10{fmt.PERCENT}, 368 at "
    f"1{fmt.PERCENT}) the interval starts at 0."
)
MIN_TO_JUDGE = 10
"""Minimum number of documents of either kind for a statement about a score."""
_NOT_COMPUTED = "could not be computed"


def build_membership(report: AuditReport) -> Section:
    """Build the section; without scores it gives the reason."""
    rows = list_aucs(report.tables)
    scores = [row for row in rows if read_score(row) != BLIND]
    blind = [row for row in rows if read_score(row) == BLIND][:1]
    tables = []
    if scores:
        caption = "Trained against never-trained documents"
        tables.append(_build_table(report.tables, caption, scores))
    if blind:
        caption = "Blind baseline (no model access)"
        tables.append(replace(_build_table(report.tables, caption, blind), notes=_BLIND_NOTES))
    return Section(
        key="membership",
        title="Membership inference",
        lead=(write_membership_note(report),),
        figure=build_roc(report, rows),
        tables=tuple(tables),
    )


def list_aucs(tables: Tables) -> list[ResultRow]:
    """Return the AUC of each score of a report, the blind baseline's last."""
    return tables.select("membership", _AUC, setting=None, model="trained", bucket=MEMBERS)


def judge_score(row: ResultRow) -> str:
    """Return whether a score tells trained from control documents, in either direction.

    A mitigation that drops labels makes them the least likely tokens of a trained document, so that
    scores of the least likely tokens are lower for trained documents.
    """
    if min(row.num_documents, row.num_other or 0) < MIN_TO_JUDGE:
        return "too few documents to say"
    if row.ci is None:
        return "no interval"
    low, high = row.ci
    if low > 0.5:
        return "told apart"
    return "told apart, with the opposite sign" if high < 0.5 else "not told apart"


def warn_of_blind(report: AuditReport) -> Notice | None:
    """Warn if a baseline without access to the model separates members from nonmembers.

    For models that memguard did not train, the audit already adds a more detailed banner.
    """
    blind = next((row for row in list_aucs(report.tables) if read_score(row) == BLIND), None)
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


def _build_table(tables: Tables, caption: str, scores: list[ResultRow]) -> Table:
    def name(row: ResultRow) -> Cell:
        metric = tables.find_metric("membership", _AUC, row.parameters)
        return cells.show_name(
            name_score(read_score(row)), "" if metric is None else fmt.clean_text(metric.meaning)
        )

    def find_tpr(row: ResultRow, written: str) -> ResultRow | None:
        parameters = write_parameters({"score": read_score(row), "fpr": written})
        return tables.find("membership", _TPR, MEMBERS, parameters=parameters)

    def column_of_rate(written: str, rate: float) -> cells.Column[ResultRow]:
        def show(row: ResultRow) -> Cell:
            tpr, needed = find_tpr(row, written), _count_needed(rate)
            is_short = row.is_known and (row.num_other or 0) < needed
            why_not = f"needs ≥ {needed:,} control documents" if is_short else _NOT_COMPUTED
            return cells.show_row(tpr, why_not=why_not)

        return cells.Column((f"TPR at {fmt.threshold(rate)} FPR", f"trained ({fmt.CI})"), show)

    rates = _list_rates(tables, scores)
    # One sentence below the table replaces a column that has no numbers.
    is_shown = {
        rate: any((tpr := find_tpr(row, written)) and tpr.is_known for row in scores)
        for written, rate in rates
    }
    columns: list[ResultColumn | cells.Column[ResultRow]] = [
        ResultColumn(
            ("AUC", f"0.5 is chance ({fmt.CI})"), "membership", _AUC, why_not=_NOT_COMPUTED
        ),
        cells.Column(("Trained and control", "by this score"), judge_score),
        *(column_of_rate(*pair) for pair in rates if is_shown[pair[1]]),
        cells.Column(("Trained", "documents"), lambda row: row.num_documents),
        cells.Column(("Control", "documents"), lambda row: row.num_other or 0),
    ]
    if any(row.num_missing for row in scores):
        columns.append(cells.Column(("Missing", "documents"), lambda row: row.num_missing))
    needed = "; ".join(
        f"TPR at {fmt.threshold(rate)} FPR needs ≥ {_count_needed(rate):,} control documents"
        for rate, shown in is_shown.items()
        if not shown
    )
    return pivot(
        tables,
        caption,
        cells.Column("Score", name),
        columns,
        scores,
        key=lambda row: {"bucket": MEMBERS, "parameters": row.parameters},
        notes=((_RATE_NOTE,) if any(is_shown.values()) else ())
        + ((f"Not shown: {needed}.",) if needed else ()),
    )


def _list_rates(tables: Tables, scores: list[ResultRow]) -> list[tuple[str, float]]:
    """Return the false-positive rates that occur, as text and as numbers, ascending."""
    shown = {read_score(row) for row in scores}
    rates = set()
    for row in tables.select("membership", _TPR, setting=None):
        written, _, score = row.parameters.removeprefix("fpr=").partition(", score=")
        rate = _read_rate(written)
        if score in shown and 0 < rate < 1:
            rates.add((written, rate))
    return sorted(rates, key=lambda pair: pair[1])


def _read_rate(rate: str) -> float:
    try:
        return float(rate)
    except ValueError:
        return 0.0


def _count_needed(rate: float) -> int:
    # In floating point 1 / rate may be slightly above the integer.
    return math.ceil(1 / rate - 1e-6)


def write_membership_note(report: AuditReport) -> str:
    """Explain what the scores mean, or why there are none."""
    rows = list_aucs(report.tables)
    if not rows:
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
    missing = [name_score(read_score(row)) for row in rows if not row.is_known]
    if missing:
        text += f" Could not be computed: {', '.join(missing)}."
    if report.training is None:
        return text
    return (
        f"{text} Trained documents of all buckets are taken together; documents that training did "
        "not reach are excluded."
    )
