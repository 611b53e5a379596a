"""Rows of a run: steps, tokens and labels, and the first row token by token.

    rows of the run     row 0, row 1, ..     in the order of the schedule, to the last step
    rows of one step    cut to the longest of them; what is left over is padding

Lengths of all rows are known exactly; labels are built for the first rows only, as training
builds them, and counted. The tokens of the first row:

    supervised   its label receives loss
    dropped      it would, but for a mitigation
    ignored      a prompt's token, or the first of a piece, which has nothing before it
    padding      fills the row up to the longest of its step

The first row contains text of documents: for the user's own screen, never for a record or a log.

The published goldfish code (mode ``hash_reference``) hashes a window by the product of its token
ids. Where an id is 0 ('!' in the vocabulary of GPT-2, <unk> in Llama's) the product is 0, and the
labels of all these windows are dropped together or kept together, independent of their text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memguard.config import GoldfishConfig, MitigationConfig, RunConfig
from memguard.config.mitigations import find_mitigation
from memguard.data.corpus import Corpus
from memguard.data.loader import Loader
from memguard.mitigation.goldfish import drops_zero_products, find_zero_products
from memguard.planner.dry_run import LabelCounts, Remark, RunLength, note, warn
from memguard.records import IGNORE_LABEL
from memguard.records.texts import format_percent

State = Literal["supervised", "dropped", "ignored", "padding"]
_UNFINISHED = "\ufffd"
_MAX_CHARACTER_TOKENS = 4
"""UTF-8 spreads a character over at most four bytes; what goes on longer is not one."""
COUNTED_ROWS = 256
"""Rows whose labels are built and counted."""


def measure_length(
    loader: Loader, *, max_steps: int | None, seq_len: int, epochs: int | None, shared: bool | None
) -> RunLength:
    """Count steps, rows and tokens of a run.

    ``epochs`` is None for a study; ``shared``, whether documents share rows, where not known.
    """
    num_steps = min(loader.num_steps, max_steps or loader.num_steps)
    lengths = count_row_tokens(loader)[loader.schedule[: num_steps * loader.batch_size]]
    firsts = np.arange(0, len(lengths), loader.batch_size)
    longest = np.maximum.reduceat(lengths, firsts)
    num_rows = np.diff([*firsts, len(lengths)])
    num_tokens = int(lengths.sum())
    return RunLength(
        num_steps=num_steps,
        num_scheduled_steps=loader.num_steps,
        batch_size=loader.batch_size,
        num_rows=len(lengths),
        num_packed_rows=len(loader.rows),
        seq_len=seq_len,
        epochs=epochs,
        share_rows=shared,
        num_tokens=num_tokens,
        num_padding_tokens=int((longest * num_rows).sum()) - num_tokens,
    )


def count_row_tokens(loader: Loader) -> NDArray[np.int64]:
    """Return ``[R]`` the tokens of each packed row."""
    rows = loader.rows
    return np.add.reduceat(rows.stop - rows.start, rows.row_start[:-1])


def count_labels(loader: Loader, num_rows: int, *, eos_id: int | None) -> LabelCounts:
    """Build the labels of the first rows, with and without mitigations, and count them.

    At most `COUNTED_ROWS` are built; ``eos_id`` is the tokenizer's, None where it has none.
    """
    num_counted, lengths = min(num_rows, COUNTED_ROWS), count_row_tokens(loader)
    counts = dict.fromkeys(LabelCounts.model_fields, 0) | {"num_rows": num_counted}
    for sample, row in enumerate(loader.schedule[:num_counted].tolist()):
        labels = loader.plain_batch([row]).labels
        kept = loader.batch([sample]).labels != IGNORE_LABEL
        is_eos = np.isin(labels, [] if eos_id is None else [eos_id])
        counts["num_tokens"] += int(lengths[row])
        counts["num_supervised"] += int((labels != IGNORE_LABEL).sum())
        counts["num_kept"] += int(kept.sum())
        counts["num_eos_supervised"] += int(is_eos.sum())
        counts["num_eos_kept"] += int((is_eos & kept).sum())
    return LabelCounts(**counts)


def explain_fewer_steps(config: RunConfig, num_steps: int) -> str | None:
    """Return that a run has fewer steps than `train.max_steps`; None if it has as many."""
    most, epochs = config.train.max_steps, config.train.epochs
    if most is None or most <= num_steps:
        return None
    what = "one epoch has" if epochs == 1 else f"{epochs:,} epochs have"
    what = what if config.data.study is None else "the study has"
    steps = f"{num_steps:,} step{'' if num_steps == 1 else 's'}"
    return f"'train.max_steps' is {most:,}, but {what} {steps}: training ends after {num_steps:,}"


def remark_on_rows(length: RunLength, labels: LabelCounts, *, num_unreached: int) -> list[Remark]:
    """Return remarks on rows of one document, missing steps and labels of EOS.

    ``num_unreached`` documents to be trained are never fed whole.
    """
    remarks = []
    if length.share_rows is False:
        share = length.num_padding_tokens / (length.num_tokens + length.num_padding_tokens)
        text = (
            "In this model documents of one row attend to each other, so each gets its own row: "
            f"{format_percent(share, 0)} of the positions are padding."
        )
        remarks.append(warn("rows", text))
    if length.share_rows is None:
        text = (
            "Without the model's weights it could not be tested whether documents of one row "
            "attend to each other; rows are counted as if they do not."
        )
        remarks.append(note("rows", text))
    if length.num_steps < length.num_scheduled_steps:
        text = (
            f"'train.max_steps' ends the run after {length.num_steps:,} of "
            f"{length.num_scheduled_steps:,} steps: "
        ) + (
            f"{num_unreached:,} document{' is' if num_unreached == 1 else 's are'} not reached by "
            "then, and not audited."
            if num_unreached
            else "every document is reached by then, but not as often as planned."
        )
        remarks.append(warn("steps", text))
    if labels.num_eos_supervised and not labels.num_eos_kept:
        text = (
            "The mitigations drop EOS wherever it is supervised, so the model never learns to "
            "stop; take goldfish in mode hash, which keeps special tokens."
        )
        remarks.append(warn("EOS", text))
    return remarks


# -- the first row ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RowToken:
    """One token of the row."""

    text: str
    """Unfiltered text of the document; empty if a later token completes the character."""
    state: State


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPiece:
    """One document of the row, or a piece of it."""

    id: str
    bucket: str
    start: int
    """First token of the piece in its document."""
    num_document_tokens: int
    tokens: tuple[RowToken, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstRow:
    """The row of global sample 0 as the first step feeds it."""

    pieces: tuple[RowPiece, ...]
    num_padding: int

    def count(self, state: State) -> int:
        """Return how many tokens of the row are in this state."""
        if state == "padding":
            return self.num_padding
        return sum(token.state == state for piece in self.pieces for token in piece.tokens)


def read_first_row(loader: Loader, tokenizer: Any) -> FirstRow:
    """Build the rows of the first step and decode the first of them."""
    fed = loader.batch(loader.samples(0))
    kept_T = fed.labels[0]
    rows, row = loader.rows, int(loader.schedule[0])
    plain_T = loader.plain_batch([row]).labels[0]
    pieces, at = [], 0
    for piece in range(rows.row_start[row], rows.row_start[row + 1]):
        start, stop = int(rows.start[piece]), int(rows.stop[piece])
        here = range(at, at := at + stop - start)
        texts = decode_tokens([int(fed.input_ids[0, t]) for t in here], tokenizer)
        entry = loader.corpus.manifest[rows.document[piece]]
        pieces.append(
            RowPiece(
                id=entry.id,
                bucket=entry.bucket,
                start=start,
                num_document_tokens=entry.num_tokens,
                tokens=tuple(
                    RowToken(text=text, state=_state(int(plain_T[t]), int(kept_T[t])))
                    for t, text in zip(here, texts, strict=True)
                ),
            )
        )
    return FirstRow(pieces=tuple(pieces), num_padding=fed.input_ids.shape[1] - at)


def decode_tokens(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text that each token adds to those before it.

    A token alone may lose its space (SentencePiece) or hold a part of a character only (byte-level
    BPE): it is decoded behind the last one that was whole. A character's bytes are shown at the
    token that completes it.
    """

    def decode(start: int, stop: int) -> str:
        text = tokenizer.decode(
            ids[start:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "one sequence gives one text"
        return text

    texts = []
    context = whole = 0
    for end in range(1, len(ids) + 1):
        before, now = decode(context, whole), decode(context, end)
        if now.endswith(_UNFINISHED) and end < len(ids) and end - whole < _MAX_CHARACTER_TOKENS:
            texts.append("")
            continue
        texts.append(now[len(before) :])
        context, whole = whole, end
    return texts


def _state(plain: int, kept: int) -> State:
    if kept != IGNORE_LABEL:
        return "supervised"
    return "ignored" if plain == IGNORE_LABEL else "dropped"


_MANY = 0.01
"""Share of the windows from which on a warning is given."""


def remark_on_reference_hash(
    corpus: Corpus, tokenizer: Any, mitigations: Sequence[MitigationConfig]
) -> list[Remark]:
    """Return a remark on the trained windows whose product is 0; empty in other modes.

    Documents longer than a row are counted whole. Training cuts them into pieces, which
    have slightly fewer windows.
    """
    config = find_mitigation(mitigations, GoldfishConfig)
    if config is None or config.mode != "hash_reference":
        return []
    num_windows = num_zero = num_ids = 0
    for index, entry in enumerate(corpus.manifest):
        if not entry.planned_repetitions:
            continue
        ids = corpus.document(index).input_ids
        is_window, is_zero = find_zero_products(ids, config.context_width)
        num_windows += int(is_window.sum())
        num_zero += int(is_zero.sum())
        num_ids += int((ids == 0).sum())
    token = f"'{tokenizer.convert_ids_to_tokens(0)}'"
    if not num_zero:
        text = f"No window of mode hash_reference has the product 0; token id 0 is {token}."
        return [note("goldfish", text)]
    share = num_zero / num_windows
    text = (
        f"Mode hash_reference multiplies the {config.context_width} token ids of a window, and "
        f"{num_zero:,} of {num_windows:,} windows ({format_percent(share)}) have the product 0: "
        + (f"token id 0, {token}, occurs {num_ids:,} times. " if num_ids else "it overflows. ")
        + _describe_fate(config)
    )
    if share < _MANY:
        return [note("goldfish", text)]
    return [warn("goldfish", f"{text} Mode 'hash' distinguishes all windows.")]


def _describe_fate(config: GoldfishConfig) -> str:
    """Describe whether the labels of these windows receive loss."""
    ks = [config.k, *config.k_by_dose.values()]
    dropped = [k for k in ks if drops_zero_products(k)]
    if len(dropped) == len(ks):
        return "None of the labels of these windows receives loss."
    if not dropped:
        return "All labels of these windows receive loss, so the mitigation does not protect them."
    return (
        f"With k up to {max(dropped)} all labels of these windows are left out of the loss; with a "
        "larger k all of them receive loss."
    )
