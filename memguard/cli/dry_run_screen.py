"""Prints a dry run: coloured on a terminal, plain lines elsewhere.

The first row is shown only on a terminal, because it contains text of the documents and other
people may read a log.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import rich.console
from rich.table import Table
from rich.text import Text

from memguard.cli.options import Sentence, print_facts, print_indented, print_title
from memguard.pages import formatting as fmt
from memguard.planner.dry_run import BucketPrediction, DryRun, Remark, Topic
from memguard.planner.rows import FirstRow, RowPiece, RowToken, State

if TYPE_CHECKING:
    from memguard.workflows.training.dry_run import DryRunResult  # imports torch

SHOWN_TOKENS = 400
"""Tokens of the first row that are shown."""
_TOKEN_CHARACTERS = 40
# Two shades each separate adjacent tokens; strike and dim still work without colours.
_STYLES: dict[State, tuple[str, str]] = {
    "supervised": ("bright_white on color(22)", "bright_white on color(28)"),
    "dropped": ("strike bright_white on color(88)", "strike bright_white on color(124)"),
    "ignored": ("dim", "dim"),
    "padding": ("dim", "dim"),
}
_MEANINGS: dict[State, str] = {
    "supervised": "receives loss",
    "dropped": "left out by a mitigation",
    "ignored": "prompt, or first token",
    "padding": "fills the row",
}
_VISIBLE = str.maketrans({"\n": "↵", "\r": "↵", "\t": "→"})


def render_dry_run(result: "DryRunResult", out: rich.console.Console) -> None:
    """Print a dry run; the first row on a terminal only."""
    record = result.record
    _print_remarks(out, record.remarks, ["run"])
    _print_first_row(out, result.first_row)
    if record.tokenizer:
        print_title(out, "Mistakes in the tokens")
        _print_remarks(out, record.tokenizer, ["BOS", "EOS", "labels", "vocabulary"])
    print_title(out, "Training")
    print_facts(out, _describe_training(record))
    _print_remarks(out, record.remarks, ["EOS", "rows", "steps", "goldfish", "disk"])
    print_title(out, "Documents and audit")
    _print_buckets(out, record.buckets)
    _print_left_out(out, record)
    _print_remarks(out, record.remarks, ["audit"])


def _print_remarks(
    out: rich.console.Console, remarks: Iterable[Remark], topics: Sequence[Topic]
) -> None:
    shown = sorted(
        (remark for remark in remarks if remark.topic in topics),
        key=lambda remark: topics.index(remark.topic),
    )
    lines = []
    for remark in shown:
        is_warning = remark.level == "warning"
        text = fmt.clean_text(remark.text)
        shown_as = Sentence(f"warning: {text}", "yellow") if is_warning else Sentence(text)
        lines.append((remark.topic, shown_as))
    print_facts(out, lines)


def _describe_training(record: DryRun) -> list[tuple[str, str]]:
    length, labels = record.length, record.labels
    epochs = length.epochs
    passes = "" if epochs is None else f", {epochs:,} epoch{'' if epochs == 1 else 's'}"
    rows = "row" if length.batch_size == 1 else "rows"
    fed = length.num_tokens + length.num_padding_tokens
    supervised = labels.num_supervised / max(1, labels.num_tokens)
    dropped = 1 - labels.num_kept / max(1, labels.num_supervised)
    lost = f"{fmt.percent(dropped)} of these dropped" if dropped else "none of these dropped"
    over = (
        "all rows"
        if labels.num_rows == length.num_rows
        else f"the first {labels.num_rows:,} of {length.num_rows:,} rows"
    )
    about = "" if labels.num_rows == length.num_rows else "about "
    num_labels = round(length.num_tokens * labels.num_kept / max(1, labels.num_tokens))
    return [
        ("steps", f"{length.num_steps:,} of {length.batch_size:,} {rows}{passes}"),
        (
            "rows",
            f"{length.num_rows:,} fed, {length.num_packed_rows:,} different, of up to "
            f"{length.seq_len:,} tokens",
        ),
        (
            "tokens",
            f"{length.num_tokens:,} fed; "
            f"{fmt.percent(length.num_padding_tokens / fed)} of the positions are padding",
        ),
        (
            "labels",
            f"{about}{num_labels:,} receive loss: {fmt.percent(supervised)} of the tokens are "
            f"supervised, {lost} by mitigations (counted over {over})",
        ),
    ]


def _print_buckets(out: rich.console.Console, buckets: Sequence[BucketPrediction]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    table.add_column("bucket", overflow="fold")
    for name in ("documents", "tokens", "repeated", "audited", "if none"):
        table.add_column(name, justify="right", no_wrap=True)
    for bucket in buckets:
        none = bucket.if_none
        table.add_row(
            Text(fmt.clean_name(bucket.bucket)),
            f"{bucket.num_documents:,}",
            f"{bucket.num_tokens:,}",
            f"{bucket.planned_repetitions:,}"
            if bucket.role in ("trained", "control", "forget", "canary")
            else fmt.MISSING,
            fmt.MISSING if bucket.num_audited is None else f"{bucket.num_audited:,}",
            f"≤ {fmt.percent(none.ci[1])}" if none and none.ci else fmt.MISSING,
        )
    print_indented(out, table)
    if any(bucket.num_audited for bucket in buckets):
        text = (
            "if none: upper end of the 95 % interval of the extraction rate if no audited document "
            "is extracted."
        )
        print_indented(out, Sentence(text, "dim"))


def _print_left_out(out: rich.console.Console, record: DryRun) -> None:
    counts = record.documents
    parts = {
        "empty": counts.num_empty,
        "shorter than 'data.min_document_tokens'": counts.num_shorter,
        "cut off before a supervised token by 'data.max_document_tokens'": counts.num_cut_off,
        "near-duplicates of others, or not needed": counts.num_left_out,
        "too short for the audit": sum(bucket.num_too_short or 0 for bucket in record.buckets),
        "not auditable for another reason": sum(
            (bucket.num_not_auditable or 0) - (bucket.num_too_short or 0)
            for bucket in record.buckets
        ),
        "of the control, near-duplicates of trained documents": sum(
            bucket.num_near_duplicates or 0 for bucket in record.buckets
        ),
    }
    summary = "; ".join(f"{count:,} {what}" for what, count in parts.items() if count)
    if summary:
        print_facts(out, [("left out", summary)])


# -- the first row ---------------------------------------------------------------------------


def _print_first_row(out: rich.console.Console, row: FirstRow) -> None:
    print_title(out, "First row")
    # Not `is_terminal`, which FORCE_COLOR sets for files too.
    if not out.file.isatty():
        line = "not shown: text of your documents is printed only on a terminal"
        print_facts(out, [(f"{sum(len(p.tokens) for p in row.pieces):,} tokens", line)])
        return
    print_facts(out, _describe_states(row))
    left = SHOWN_TOKENS
    for number, piece in enumerate(row.pieces):
        if left <= 0:
            break
        out.print()
        print_indented(out, _name_piece(piece, number, row))
        print_indented(out, _paint(piece.tokens[:left]))
        left -= len(piece.tokens)
    hidden = sum(len(piece.tokens) for piece in row.pieces) - SHOWN_TOKENS
    if hidden > 0:
        print_indented(out, Text(f"... and {hidden:,} more tokens", style="dim"))


def _describe_states(row: FirstRow) -> Iterable[tuple[str, Text]]:
    for state, meaning in _MEANINGS.items():
        count = row.count(state)
        if count:
            sample = Text(f" {state} ", style=_STYLES[state][0])
            yield f"{count:,}", sample.append(f"  {meaning}", style="not strike default on default")


def _name_piece(piece: RowPiece, number: int, row: FirstRow) -> Text:
    which = f" {number + 1} of {len(row.pieces)}" if len(row.pieces) > 1 else ""
    name = f"document{which} '{fmt.clean_name(piece.id)}'"
    text = Text(f"{name}, bucket {fmt.clean_name(piece.bucket)}", style="bold")
    if len(piece.tokens) < piece.num_document_tokens:
        end = piece.start + len(piece.tokens)
        text.append(f", tokens {piece.start:,}-{end:,} of {piece.num_document_tokens:,}")
    return text


def _paint(tokens: Sequence[RowToken]) -> Text:
    text = Text(overflow="fold")
    for number, token in enumerate(tokens):
        shown = fmt.clean_text(token.text.translate(_VISIBLE), _TOKEN_CHARACTERS) or "·"
        text.append(shown, style=_STYLES[token.state][number % 2])
    return text
