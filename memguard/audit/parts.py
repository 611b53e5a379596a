"""Which part of a long document is audited, and what a report says of that.

    11 tokens, rows of 4     pieces   [0, 3) [3, 7) [7, 11)     as training cut it
    11 tokens, 4 positions   contexts [0, 4)        [7, 11)     of a model memguard did not train

Audited is the last of them, or the first (`audit.window`), that has a prefix and a continuation: a
document is left out only where no part of it has both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from memguard.audit.extraction import AuditDocument, ExtractionProbe, Part, Window
from memguard.records import CutDocuments, Role

WhichWindow = Literal["last", "first"]


class Tokens(Protocol):
    """A document of N tokens, as `data` has it."""

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """[N]."""

    @property
    def supervised(self) -> NDArray[np.bool_]:
        """[N] which of them receive loss."""

    @property
    def num_content_tokens(self) -> int:
        """N without what follows the text at its end."""

    @property
    def format(self) -> Literal["text", "messages", "prompt_completion"]:
        """What it was made from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What an audit knows of a document beside its tokens; see `AuditDocument`."""

    id: str
    bucket: str
    role: Role
    source: str
    num_repetitions: int | None = None
    text_hmac: str | None = None
    cluster: int | None = None
    num_copies: int | None = None
    dose: int = 0


def list_pieces(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return begin and end of each piece of a document, in order.

    Args:
        ends: of the pieces, as `data.packing.split_points` has them.
    """
    return list(zip([0, *ends[:-1]], ends, strict=True))


def list_contexts(tokens: Tokens, max_tokens: int) -> list[tuple[int, int]]:
    """Return begin and end of what fits at the start of a document, and at its end.

    Args:
        tokens: the document.
        max_tokens: positions of the model.
    """
    size = tokens.num_content_tokens
    if size <= max_tokens:
        return [(0, len(tokens.input_ids))]
    return [(0, max_tokens), (size - max_tokens, size)]


def choose_part(
    tokens: Tokens,
    spans: Sequence[tuple[int, int]],
    identity: Identity,
    *,
    kind: Part,
    probe: ExtractionProbe,
    window: WhichWindow,
) -> AuditDocument:
    """Return the part of a document that is audited, without what follows the text at its end.

    Args:
        tokens: the whole document.
        spans: begin and end of its parts, in order; one where the document is whole.
        identity: of the document.
        kind: what the parts are, where there are several.
        probe: decides whether a part can be audited.
        window: which of the parts that can be audited is taken.
    """
    kind = kind if len(spans) > 1 else "whole"
    order = spans if window == "first" else reversed(spans)
    parts = []
    for begin, end in order:
        part = _cut(tokens, begin, end, identity, kind)
        if kind == "context" and tokens.format == "text":
            part = replace(part, whole_ids=tokens.input_ids[: tokens.num_content_tokens])
        if probe.window(part) is not None:
            return part
        parts.append(part)
    # None can be audited: one with supervised tokens, if there is one, says why.
    part = next((part for part in parts if part.supervised.any()), parts[0])
    whole = _cut(tokens, 0, len(tokens.input_ids), identity, "whole")
    return replace(part, is_long_enough=kind != "whole" and probe.window(whole) is not None)


def _cut(
    tokens: Tokens,
    begin: int,
    end: int,
    identity: Identity,
    kind: Part,
) -> AuditDocument:
    end = max(begin, min(end, tokens.num_content_tokens))
    if tokens.format != "text":
        # A part may end in an earlier turn: what closes the last one closes that as well.
        after = slice(tokens.num_content_tokens, None)
        marks = tokens.input_ids[after][tokens.supervised[after]]
        is_content = tokens.supervised[begin:end] & ~np.isin(tokens.input_ids[begin:end], marks)
        content = np.flatnonzero(is_content)
        end = begin + int(content[-1]) + 1 if len(content) else begin
    return AuditDocument(
        id=identity.id,
        bucket=identity.bucket,
        role=identity.role,
        source=identity.source,
        num_repetitions=identity.num_repetitions,
        input_ids=tokens.input_ids[begin:end],
        supervised=tokens.supervised[begin:end],
        format=tokens.format,
        num_tokens=len(tokens.input_ids),
        text_hmac=identity.text_hmac,
        first_position=begin,
        cluster=identity.cluster,
        num_copies=identity.num_copies,
        dose=identity.dose,
        part=kind,
    )


def describe_cut(
    documents: Sequence[AuditDocument], windows: Sequence[Window], *, window: WhichWindow
) -> CutDocuments | None:
    """Count the documents that are audited by a part; None where all are whole.

    Args:
        documents: all that were given.
        windows: what is continued of them.
        window: which part was wanted.
    """
    cut = [document for document in documents if document.part != "whole"]
    if not cut:
        return None
    return CutDocuments(
        num_documents=len(cut),
        num_given=len(documents),
        longest_tokens=max(document.num_tokens for document in cut),
        used_tokens=max(len(document.input_ids) for document in cut),
        window=window,
        by="training" if cut[0].part == "piece" else "context",
        num_inside_completion=sum(map(_begins_inside, windows)),
    )


def _begins_inside(window: Window) -> bool:
    """Tell whether a completion's own first tokens are its prefix."""
    document, before = window.document, window.start + window.prefix_tokens - 1
    return document.format != "text" and bool(document.supervised[before])


def tell_cut(cut: CutDocuments) -> str:
    """Say in one or two sentences what of long documents was audited."""
    num, given = cut.num_documents, cut.num_given
    subject = f"{num:,} of {given:,} documents {'is' if num == 1 else 'are'} longer than "
    which, other = cut.window, "first" if cut.window == "last" else "last"
    if cut.by == "training":
        text = (
            f"{subject}'data.seq_len' and trained in pieces: the audit uses the {which} piece of "
            "each, without the text before and after it (the longest document has "
            f"{cut.longest_tokens:,} tokens, the pieces that were used at most "
            f"{cut.used_tokens:,}). '--window {other}' audits the {other} pieces."
        )
    else:
        text = (
            f"{subject}{cut.used_tokens:,} tokens, the most that the model is given at once: the "
            f"audit uses the {which} {cut.used_tokens:,} of each (the longest has "
            f"{cut.longest_tokens:,}) and says nothing of the rest, except in windows of the probe "
            f"'grid'. '--window {other}' audits the {other} {cut.used_tokens:,}."
        )
    inside = cut.num_inside_completion
    if inside:
        text += (
            f" In {inside:,} of them that part holds no prompt, or too little of it: the first "
            "tokens of the completion serve as the prefix, the rest as the continuation."
        )
    return text
