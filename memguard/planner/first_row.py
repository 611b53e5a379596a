"""The first row of a run, token by token: what receives loss and what does not.

    supervised   its label receives loss
    dropped      it would, but for a mitigation
    ignored      a prompt's token, or the first of a piece, which has nothing before it
    padding      fills the row up to the longest of its step

It contains text of documents: for the user's own screen, never for a record or a log.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memguard.data.loader import Loader
from memguard.planner.run_length import without_mitigations
from memguard.records import IGNORE_LABEL

State = Literal["supervised", "dropped", "ignored", "padding"]
_UNFINISHED = "\ufffd"


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
    """Build the rows of the first step and decode the first of them.

    Args:
        loader: the run's.
        tokenizer: the run's.
    """
    samples = loader.samples(0)
    fed = loader.batch(samples)
    plain_T = without_mitigations(loader).batch(samples).labels[0]
    kept_T = fed.labels[0]
    rows, row = loader.rows, loader.schedule[0]
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


_MAX_CHARACTER_TOKENS = 4
"""UTF-8 spreads a character over at most four bytes; what goes on longer is not one."""


def _state(plain: int, kept: int) -> State:
    if kept != IGNORE_LABEL:
        return "supervised"
    return "ignored" if plain == IGNORE_LABEL else "dropped"
