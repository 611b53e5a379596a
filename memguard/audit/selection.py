"""Select what an audit measures: a sample of each bucket, and the part of each long document.

    11 tokens, rows of 4     pieces   [0, 3) [3, 7) [7, 11)     as training split it
    11 tokens, 4 positions   contexts [0, 4)        [7, 11)     of a model memguard did not train

The audit uses the last part, or the first (`audit.window`), that has a prefix and a continuation. A
document is left out only if no part of it has both, or if its answer is a label: shorter than
`LABEL_TOKENS`, and shared by at least two other documents and 1 % of all (yes and no, categories).
Near-duplicates count once: copies of one secret are no label.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from memguard.audit.windows import AuditDocument, Part, Window, WindowSettings, list_clusters
from memguard.errors import DataError
from memguard.records import BucketRow, CutDocuments
from memguard.records.tables import MOSTLY_UNKNOWN
from memguard.seeds import derive_generator

if TYPE_CHECKING:
    from memguard.data.tokenization import TokenizedDocument


LABEL_TOKENS = 10
"""An answer of at least so many tokens is no label."""
_LABEL_DOCUMENTS, _LABEL_SHARE = 3, 0.01

NotAudited = Literal["label", "too short", "cut", "nothing supervised", "unknown text"]
"""Why a document cannot be audited, as in records.parquet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The windows that are audited, and the buckets with their excluded documents."""

    windows: tuple[Window, ...]
    buckets: tuple[BucketRow, ...]
    """Control first, then trained buckets by ascending num_repetitions, then the rest."""
    not_audited: tuple[tuple[AuditDocument, NotAudited], ...] = ()
    """Documents that cannot be audited, without control documents near trained ones."""


def select_windows(
    documents: Sequence[AuditDocument],
    probe: WindowSettings,
    *,
    seed: int,
    min_documents: int = 5,
    max_documents_per_bucket: int | None = None,
) -> Selection:
    """Select the documents and their windows.

    A control document in a near-duplicate cluster with a document that is trained or to be
    forgotten is left out and counted, whether or not that document is audited itself: the model may
    have been trained on its text.

    Args:
        documents: all candidate documents, in any order.
        probe: defines the continuation and the minimum prefix.
        seed: seed of each bucket's sample, which depends on the ids, not on the order.
        min_documents: minimum number of trained documents that are long enough, labels too.
        max_documents_per_bucket: size of each bucket's sample; None takes all.

    Raises:
        DataError: two documents have the same id, or too few trained documents are long enough
            (the message suggests settings that work).
    """
    twice = [name for name, count in Counter(d.id for d in documents).items() if count > 1]
    if twice:
        raise DataError(
            f"'id' must be unique among all documents of an audit; {len(twice)} ids occur more "
            f"than once, e.g. '{twice[0]}'. Rename them in one of the sources."
        )
    windows = [probe.window(document) for document in documents]
    _check(documents, windows, probe, min_documents)
    near_duplicates = find_near_duplicates(documents)
    labels = find_labels(documents, windows)
    reasons: dict[str, NotAudited] = {
        document.id: "label" if document.id in labels else _find_reason(document)
        for document, window in zip(documents, windows, strict=True)
        if (window is None or document.id in labels) and document.id not in near_duplicates
    }
    left_out = {*near_duplicates, *reasons}
    chosen: set[str] = set()
    buckets = []
    for name in dict.fromkeys(document.bucket for document in documents):
        members = [document for document in documents if document.bucket == name]
        assert len({d.role for d in members}) == 1, f"bucket '{name}' has documents of two roles"
        eligible = sorted(
            window.document.id
            for window in windows
            if window is not None
            and window.document.bucket == name
            and window.document.id not in left_out
        )
        sample = _draw(eligible, seed, name, max_documents_per_bucket)
        chosen.update(sample)
        counts = {document.num_repetitions for document in members}
        counted = Counter(reasons.get(document.id) for document in members)
        buckets.append(
            BucketRow(
                bucket=name,
                role=members[0].role,
                num_repetitions=counts.pop() if len(counts) == 1 else None,
                num_documents=len(sample),
                num_too_short=counted["too short"],
                num_not_sampled=len(eligible) - len(sample),
                num_near_duplicates=sum(d.id in near_duplicates for d in members),
                num_cut_too_short=counted["cut"],
                num_nothing_supervised=counted["nothing supervised"],
                num_labels=counted["label"],
                num_unknown=counted["unknown text"],
            )
        )
    assert sum(b.role == "control" for b in buckets) <= 1, "an audit has one control bucket"
    return Selection(
        windows=tuple(w for w in windows if w is not None and w.document.id in chosen),
        buckets=tuple(sorted(buckets, key=_order)),
        not_audited=tuple((d, reasons[d.id]) for d in documents if d.id in reasons),
    )


def find_labels(documents: Sequence[AuditDocument], windows: Sequence[Window | None]) -> set[str]:
    """Return the ids of the documents whose answer is a label, see the top of the module."""
    clusters = dict(zip((d.id for d in documents), list_clusters(documents).tolist(), strict=True))
    answers: dict[bytes, list[str]] = {}
    for window in windows:
        if window is not None and window.continuation_tokens < LABEL_TOKENS:
            ids = window.continuation_ids.tobytes()
            answers.setdefault(ids, []).append(window.document.id)
    least = max(_LABEL_DOCUMENTS, _LABEL_SHARE * len(set(clusters.values())))
    shared = [names for names in answers.values() if len({clusters[n] for n in names}) >= least]
    return {name for names in shared for name in names}


def find_near_duplicates(documents: Sequence[AuditDocument]) -> set[str]:
    """Return the ids of control documents in a cluster with a document that the model was fed."""
    fed = {d.cluster for d in documents if d.role in ("trained", "forget")} - {None}
    return {d.id for d in documents if d.role == "control" and d.cluster in fed}


def choose_sample(
    windows: Sequence[Window], size: int | None, *, seed: int, purpose: str
) -> list[int]:
    """Return indices of a seeded sample of at most ``size`` documents of each bucket, in order.

    It depends on the documents' ids, not on their order; None takes all. Samples of other purposes
    are independent.
    """
    ranks = rank_in_buckets(windows, seed=seed, purpose=purpose)
    return [index for index, rank in enumerate(ranks) if size is None or rank < size]


def rank_in_buckets(windows: Sequence[Window], *, seed: int, purpose: str) -> list[int]:
    """Return each document's place in a seeded order of its bucket, see `choose_sample`."""
    by_bucket: dict[str, dict[str, int]] = {}
    for index, window in enumerate(windows):
        by_bucket.setdefault(window.document.bucket, {})[window.document.id] = index
    ranks = [0] * len(windows)
    for bucket, ids in by_bucket.items():
        for rank, name in enumerate(_draw(sorted(ids), seed, f"{purpose} {bucket}", len(ids))):
            ranks[ids[name]] = rank
    return ranks


def _find_reason(document: AuditDocument) -> NotAudited:
    """Return the reason why a document has no window."""
    if document.is_unknown:
        return "unknown text"
    if document.is_long_enough:
        return "cut"
    if document.format != "text" and not document.supervised.any():
        return "nothing supervised"
    return "too short"


def _order(outline: BucketRow) -> tuple[int, float, str]:
    place = {"control": 0, "trained": 1}.get(outline.role, 2)
    count = outline.num_repetitions
    return place, float("inf") if count is None else count, outline.bucket


def _draw(ids: list[str], seed: int, bucket: str, size: int | None) -> list[str]:
    if size is None:
        return ids
    order = derive_generator(seed, f"audit sample {bucket}").permutation(len(ids))
    return [ids[index] for index in order[:size]]


def _check(
    documents: Sequence[AuditDocument],
    windows: Sequence[Window | None],
    probe: WindowSettings,
    min_documents: int,
) -> None:
    trained = [document for document in documents if document.role == "trained"]
    num_unknown = sum(document.is_unknown for document in trained)
    num_enough = sum(w is not None and w.document.role == "trained" for w in windows)
    if num_enough >= min_documents:
        return
    count = f"{num_enough} of {len(trained)} trained documents {'is' if num_enough == 1 else 'are'}"
    if num_unknown:
        count += f" not mostly unknown text (as {num_unknown} are), and"
    needed = f"{probe.needed_prefix_tokens} tokens and a continuation"
    if any(document.format == "text" for document in trained):
        needed += f" of {probe.continuation_tokens}"
    raise DataError(
        f"'audit.min_documents' is {min_documents}, but only {count} long enough for a prefix of "
        f"{needed}{_suggest(trained, probe, min_documents)}"
    )


def _suggest(trained: list[AuditDocument], probe: WindowSettings, min_documents: int) -> str:
    """Suggest settings that work, computed from the lengths of the documents."""
    if len(trained) < min_documents:
        num_enough = sum(probe.window(document) is not None for document in trained)
        if not trained or num_enough:
            count = f". Set audit.min_documents={num_enough}, or add" if trained else ". Add"
            return f"{count} documents."
        lower = f"; set audit.min_documents={len(trained)}"
        return lower + _suggest(trained, probe, len(trained))
    lengths = sorted((len(d.input_ids) for d in trained if d.format == "text"), reverse=True)
    others = sum(d.format != "text" and probe.window(d) is not None for d in trained)
    rank = min_documents - others
    if len(lengths) < rank:
        return ". Lower 'audit.min_prefix_tokens', or add documents with longer prompts."
    longest, reached = lengths[0], lengths[rank - 1]
    text = f"; the longest has {longest} {'token' if longest == 1 else 'tokens'}"
    # Two thirds leave a reasonable prefix, unless the required prefix is longer.
    size = min(reached - probe.needed_prefix_tokens, 2 * reached // 3)
    if size >= 1:
        return f"{text}: try audit.continuation_tokens={size}"
    if probe.prefix_tokens is not None and reached > probe.min_prefix_tokens:
        size = min(reached - probe.min_prefix_tokens, 2 * reached // 3)
        return f"{text}: leave out audit.prefix_tokens and try audit.continuation_tokens={size}"
    return f"{text}. Add longer documents, or lower 'audit.min_prefix_tokens'."


WhichWindow = Literal["last", "first"]
Identify = Callable[..., AuditDocument]
"""Makes a document of its tokens: `AuditDocument` given all else, see `functools.partial`."""


def list_pieces(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return begin and end of each piece, in order, from the ends (`data.packing.split_points`)."""
    return list(zip([0, *ends[:-1]], ends, strict=True))


def list_contexts(tokens: "TokenizedDocument", max_tokens: int) -> list[tuple[int, int]]:
    """Return begin and end of a model's contexts at the start and at the end of a document."""
    size = tokens.num_content_tokens
    if size <= max_tokens:
        return [(0, len(tokens.input_ids))]
    return [(0, max_tokens), (size - max_tokens, size)]


def choose_part(
    tokens: "TokenizedDocument",
    spans: Sequence[tuple[int, int]],
    identify: Identify,
    *,
    kind: Part,
    probe: WindowSettings,
    window: WhichWindow,
) -> AuditDocument:
    """Return the part of a document that is audited, without special tokens after its text.

    ``spans`` are begin and end of its parts, in order; a single one if the document is not split.
    ``kind`` is that of several parts; ``probe`` decides which can be audited.
    """
    kind = kind if len(spans) > 1 else "whole"
    order = spans if window == "first" else reversed(spans)
    parts = []
    for begin, end in order:
        part = _cut(tokens, begin, end, identify, kind)
        if kind == "context" and tokens.format == "text":
            part = replace(part, whole_ids=tokens.input_ids[: tokens.num_content_tokens])
        if probe.window(part) is not None:
            return part
        parts.append(part)
    # No part can be audited: a part with supervised tokens, if any, gives the reason.
    part = next((part for part in parts if part.supervised.any()), parts[0])
    whole = _cut(tokens, 0, len(tokens.input_ids), identify, "whole")
    return replace(part, is_long_enough=kind != "whole" and probe.window(whole) is not None)


def _cut(
    tokens: "TokenizedDocument", begin: int, end: int, identify: Identify, kind: Part
) -> AuditDocument:
    end = max(begin, min(end, tokens.num_content_tokens))
    if tokens.format != "text":
        # A part may end in an earlier turn, which has the same closing tokens as the last one.
        after = slice(tokens.num_content_tokens, None)
        marks = tokens.input_ids[after][tokens.supervised[after]]
        is_content = tokens.supervised[begin:end] & ~np.isin(tokens.input_ids[begin:end], marks)
        content = np.flatnonzero(is_content)
        end = begin + int(content[-1]) + 1 if len(content) else begin
    ids, supervised = tokens.input_ids[begin:end], tokens.supervised[begin:end]
    shares = [np.mean(own == tokens.unknown_id) for own in (ids, ids[supervised]) if len(own)]
    return identify(
        is_unknown=any(share > MOSTLY_UNKNOWN for share in shares),
        input_ids=ids,
        supervised=supervised,
        format=tokens.format,
        num_tokens=len(tokens.input_ids),
        first_position=begin,
        part=kind,
    )


def find_cut(
    documents: Sequence[AuditDocument], windows: Sequence[Window], *, window: WhichWindow
) -> CutDocuments | None:
    """Count those of all given documents that were audited in part; None if there are none."""
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
