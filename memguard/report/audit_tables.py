"""Tables of the audit page, from the records of buckets, findings and membership."""

from collections.abc import Mapping, Sequence

from memguard.records import AuditReport, BucketScores, Finding, MembershipScores, Rate
from memguard.report.formatting import (
    CI,
    MISSING,
    Estimate,
    format_count,
    format_hash,
    format_interval,
    format_number,
    format_of,
    format_percent,
    format_percent_range,
    format_points,
    format_repetitions,
    format_zero_bound,
)
from memguard.report.page import Bar, Cell, Row, Table
from memguard.report.text import clean_name, clean_text

SHOWN_FINDINGS = 15
MOST_FINDINGS = 1000
_ROLES = {
    "trained": "trained",
    "control": "control, never trained",
    "background": "trained beside the buckets",
    "heldout": "held out, never trained",
}


def make_headings(*labels: str | tuple[str, str]) -> tuple[Cell, ...]:
    """Make column headings; a pair is a heading with a smaller line."""
    return tuple(
        Cell(text=label, kind="text")
        if isinstance(label, str)
        else Cell(text=label[0], detail=label[1], kind="text")
        for label in labels
    )


def make_rate_cell(
    rate: float | None, ci: tuple[float, float] | None, num_matched: int, num_documents: int
) -> Cell:
    """Show counts, percentage, interval and a bar."""
    if rate is None:
        return Cell(text=MISSING, detail="no documents")
    low, high = ci or (rate, rate)
    return Cell(
        text=format_of(num_matched, num_documents),
        detail=f"{format_percent(rate)} ({format_percent_range(ci)})",
        bar=Bar(fill=_css(rate), low=_css(low), width=_css(high - low)),
    )


def _css(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"


def _rate(rate: Rate) -> Cell:
    return make_rate_cell(rate.rate, rate.ci, rate.num_matched, rate.num_documents)


def _estimate(estimate: Estimate) -> Cell:
    return Cell(text=estimate.value, detail=estimate.interval)


def _head(bucket: BucketScores) -> Cell:
    return Cell(text=clean_name(bucket.bucket), detail=_ROLES[bucket.role], kind="text")


def _base_head(bucket: BucketScores) -> Cell:
    return Cell(text="Base model", detail=f"on {clean_name(bucket.bucket, 40)}", kind="text")


def build_summary(buckets: Sequence[BucketScores]) -> Table:
    """Build the main table: rates and token accuracy of each bucket, base model below."""
    rows = []
    for bucket in buckets:
        differences = (bucket.verbatim_minus_control, bucket.near_verbatim_minus_control)
        accuracy = bucket.model.mean_token_accuracy
        cells = (
            Cell(text=format_repetitions(bucket.num_repetitions)),
            _rate(bucket.model.verbatim),
            _rate(bucket.model.near_verbatim),
            _estimate(format_interval(accuracy)),
            *(_estimate(format_points(difference)) for difference in differences),
        )
        control = bucket.role == "control"
        rows.append(Row(head=_head(bucket), cells=cells, tone="control" if control else ""))
        if bucket.base is None:
            continue
        base_cells = (
            Cell(text=""),
            _rate(bucket.base.verbatim),
            _rate(bucket.base.near_verbatim),
            _estimate(format_interval(bucket.base.mean_token_accuracy)),
            Cell(text=""),
            Cell(text=""),
        )
        rows.append(Row(head=_base_head(bucket), cells=base_cells, tone="base"))
    return Table(
        caption="Documents the model continues as they were written",
        columns=make_headings(
            "Bucket",
            "Repetitions",
            ("Verbatim", f"share ({CI})"),
            ("Near-verbatim", f"share ({CI})"),
            ("Mean token accuracy", f"0 to 1 ({CI})"),
            ("Verbatim − control", f"points ({CI})"),
            ("Near-verbatim − control", f"points ({CI})"),
        ),
        rows=tuple(rows),
        notes=_write_zero_notes(buckets),
    )


def _write_zero_notes(buckets: Sequence[BucketScores]) -> tuple[str, ...]:
    """Say what 0 matches mean, once for each bucket that has none."""
    zeros = [b for b in buckets if b.num_documents and not b.model.near_verbatim.num_matched]
    return tuple(
        f"{clean_name(b.bucket)}: 0 of {format_count(b.num_documents)} near-verbatim; if these "
        f"were a random sample, the true rate is {format_zero_bound(b.num_documents)}."
        for b in zeros[:8]
    )


def build_details(buckets: Sequence[BucketScores], continuation_tokens: int) -> Table:
    """Build the second table: how far, how surely, and who was left out."""
    rows = []
    for bucket in buckets:
        cells = (
            Cell(text=format_number(bucket.model.median_first_divergence, 1)),
            Cell(text=format_number(bucket.mean_extraction_strength)),
            _estimate(format_interval(bucket.model.mean_logprob)),
            Cell(text=format_number(bucket.mean_type_token_ratio)),
            Cell(text=format_number(bucket.mean_argmax_type_token_ratio)),
            Cell(text=format_count(bucket.num_tiny_margin)),
            Cell(text=format_count(bucket.num_documents)),
            Cell(text=format_count(bucket.num_too_short)),
            Cell(text=format_count(bucket.num_not_sampled)),
        )
        control = bucket.role == "control"
        rows.append(Row(head=_head(bucket), cells=cells, tone="control" if control else ""))
        if bucket.base is None:
            continue
        base_cells = (
            Cell(text=format_number(bucket.base.median_first_divergence, 1)),
            Cell(text=""),
            _estimate(format_interval(bucket.base.mean_logprob)),
            *(Cell(text="") for _ in range(6)),
        )
        rows.append(Row(head=_base_head(bucket), cells=base_cells, tone="base"))
    return Table(
        caption="How far, how surely, and which documents are not in the rates",
        columns=make_headings(
            "Bucket",
            ("Median first divergence", f"token, of {continuation_tokens:,}"),
            ("Extraction strength", "mean, 0 to 1"),
            ("Log-probability", f"nats a token ({CI})"),
            ("Type-token ratio", "true text"),
            ("Type-token ratio", "model's choices"),
            ("Tiny margins", "documents"),
            ("Scored", "documents"),
            ("Too short", "documents"),
            ("Not sampled", "documents"),
        ),
        rows=tuple(rows),
    )


def build_membership(scores: Sequence[MembershipScores]) -> Table:
    """Build the table of how well trained and never-trained documents can be told apart."""
    return Table(
        caption="Telling trained documents from never-trained ones",
        columns=make_headings(
            "Score",
            ("AUC", f"0.5 is chance ({CI})"),
            ("Trained", "documents"),
            ("Control", "documents"),
        ),
        rows=tuple(
            Row(
                head=Cell(text=clean_name(score.score), kind="text"),
                cells=(
                    _estimate(format_interval(score.auc)),
                    Cell(text=format_count(score.num_members)),
                    Cell(text=format_count(score.num_nonmembers)),
                ),
            )
            for score in scores
        ),
    )


def build_findings(report: AuditReport) -> Table:
    """Build the list of findings, worst first as the record has them; never any text."""
    rows = tuple(_finding_row(finding) for finding in report.findings[:MOST_FINDINGS])
    return Table(
        caption="Worst findings",
        columns=make_headings(
            ("Document", "and what was found"),
            "Severity",
            "Bucket",
            "Repetitions",
            "Tokens right",
            ("First divergence", "token"),
            ("Log-probability", "nats, in all"),
            ("Base model", "tokens right"),
            ("Text", "keyed hash"),
        ),
        rows=rows[:SHOWN_FINDINGS],
        more_rows=rows[SHOWN_FINDINGS:],
        long_names=True,
    )


def _finding_row(finding: Finding) -> Row:
    whole = finding.continuation_tokens
    diverged = finding.first_divergence < whole
    base = finding.base_num_correct
    return Row(
        head=Cell(text=clean_name(finding.id), detail=clean_text(finding.sentence), kind="text"),
        cells=(
            Cell(text=finding.severity, kind="level", level=finding.severity),
            Cell(text=clean_name(finding.bucket), kind="text"),
            Cell(text=format_repetitions(finding.num_repetitions)),
            Cell(text=format_of(finding.num_correct, whole)),
            Cell(text=format_count(finding.first_divergence) if diverged else "none"),
            Cell(text=format_number(finding.logprob, 2)),
            Cell(text=MISSING if base is None else format_of(base, whole)),
            Cell(text=format_hash(finding.text_hmac), kind="hash"),
        ),
    )


def build_environment(environment: Mapping[str, str]) -> Table | None:
    """Build the table of versions and hardware, by name; None where nothing is recorded."""
    if not environment:
        return None
    return Table(
        caption="Environment",
        columns=make_headings("Name", "Value"),
        rows=tuple(
            Row(
                head=Cell(text=clean_name(name), kind="text"),
                cells=(Cell(text=clean_text(value, 200), kind="code"),),
            )
            for name, value in sorted(environment.items())[:200]
        ),
    )
