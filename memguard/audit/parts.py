"""Choose the part of a long document that is audited, and describe it for the report.

    11 tokens, rows of 4     pieces   [0, 3) [3, 7) [7, 11)     as training split it
    11 tokens, 4 positions   contexts [0, 4)        [7, 11)     of a model memguard did not train

The audit uses the last part, or the first (`audit.window`), that has a prefix and a continuation. A
document is left out only if no part of it has both.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from memguard.audit.windows import AuditDocument, Part, Window, WindowSettings
from memguard.records import CutDocuments, Role

WhichWindow = Literal["last", "first"]


class Tokens(Protocol):
    """A document of N tokens, as `data` stores it."""

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """[N] token ids."""

    @property
    def supervised(self) -> NDArray[np.bool_]:
        """[N] whether each token receives loss."""

    @property
    def num_content_tokens(self) -> int:
        """N without the special tokens after the end of the text."""

    @property
    def format(self) -> Literal["text", "messages", "prompt_completion"]:
        """Format of the source document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Attributes of a document other than its tokens; see `AuditDocument`."""

    id: str
    bucket: str
    role: Role
    source: str
    num_repetitions: int | None = None
    text_hmac: str | None = None
    has_own_id: bool = False
    cluster: int | None = None
    num_copies: int | None = None
    dose: int = 0


def list_pieces(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return begin and end of each piece of a document, in order.

    Args:
        ends: ends of the pieces, as returned by `data.packing.split_points`.
    """
    return list(zip([0, *ends[:-1]], ends, strict=True))


def list_contexts(tokens: Tokens, max_tokens: int) -> list[tuple[int, int]]:
    """Return begin and end of the contexts at the start and at the end of a document.

    Args:
        tokens: the document.
        max_tokens: number of positions of the model.
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
    probe: WindowSettings,
    window: WhichWindow,
) -> AuditDocument:
    """Return the part of a document that is audited, without special tokens after its text.

    Args:
        tokens: the whole document.
        spans: begin and end of its parts, in order; a single one if the document is not split.
        identity: attributes of the document.
        kind: kind of the parts, if there are several.
        probe: decides whether a part can be audited.
        window: whether the first or the last auditable part is used.
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
    # No part can be audited: a part with supervised tokens, if any, gives the reason.
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
        # A part may end in an earlier turn, which has the same closing tokens as the last one.
        after = slice(tokens.num_content_tokens, None)
        marks = tokens.input_ids[after][tokens.supervised[after]]
        is_content = tokens.supervised[begin:end] & ~np.isin(tokens.input_ids[begin:end], marks)
        content = np.flatnonzero(is_content)
        end = begin + int(content[-1]) + 1 if len(content) else begin
    return AuditDocument(
        **asdict(identity),
        input_ids=tokens.input_ids[begin:end],
        supervised=tokens.supervised[begin:end],
        format=tokens.format,
        num_tokens=len(tokens.input_ids),
        first_position=begin,
        part=kind,
    )


def find_cut(
    documents: Sequence[AuditDocument], windows: Sequence[Window], *, window: WhichWindow
) -> CutDocuments | None:
    """Count the documents that were audited in part; None if there are none.

    Args:
        documents: all documents that were given.
        windows: windows of the audited documents.
        window: which part was requested.
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
    """Return whether the prefix consists of the first tokens of the completion."""
    document, before = window.document, window.start + window.prefix_tokens - 1
    return document.format != "text" and bool(document.supervised[before])


def describe_cut(cut: CutDocuments) -> str:
    """Describe in one or two sentences which parts of long documents were audited."""
    num, given = cut.num_documents, cut.num_given
    subject = f"{num:,} of {given:,} documents {'is' if num == 1 else 'are'} longer than "
    which, other = cut.window, "first" if cut.window == "last" else "last"
    if cut.by == "training":
        text = (
            f"{subject}a training row: the audit uses the {which} piece of each that was trained, "
            "without the text before and after it (the longest document has "
            f"{cut.longest_tokens:,} tokens, the audited pieces at most "
            f"{cut.used_tokens:,}). 'audit.window={other}' audits the {other} pieces."
        )
    else:
        text = (
            f"{subject}{cut.used_tokens:,} tokens, the longest input of the model: the audit uses "
            f"the {which} {cut.used_tokens:,} tokens of each (the longest document has "
            f"{cut.longest_tokens:,}). The rest is audited only in windows of the probe "
            f"'grid'. 'audit.window={other}' audits the {other} {cut.used_tokens:,}."
        )
    inside = cut.num_inside_completion
    if inside:
        text += (
            f" In {inside:,} of them this part contains no prompt, or too little of it: the first "
            "tokens of the completion are the prefix, the rest is the continuation."
        )
    return text
