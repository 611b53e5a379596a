"""Which part of a document is audited: none is left out that has a prefix and a continuation."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_examples import make_document

from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.selection import (
    WhichWindow,
    choose_part,
    describe_cut,
    find_cut,
    list_contexts,
    list_pieces,
    select_windows,
)
from memguard.audit.windows import AuditDocument
from memguard.data.packing import split_points
from memguard.data.tokenization import TokenizedDocument
from memguard.errors import DataError

END = 1
"""Closes turns, completions and texts."""


def _build(form: str, lengths: list[int], closed: bool) -> TokenizedDocument:
    """Return a document of distinct tokens; of turns, every second is the assistant's."""
    ids: list[int] = []
    supervised: list[bool] = []
    content = 0
    for number, length in enumerate(lengths):
        is_own = form == "text" or number % 2 == 1
        ids += range(10 + len(ids), 10 + len(ids) + length)
        supervised += [is_own] * length
        if is_own and length:
            content = len(ids)
        if closed and (form == "messages" or number == len(lengths) - 1):
            ids.append(END)
            supervised.append(is_own)
    return TokenizedDocument(
        id="d",
        source="s",
        format=form,  # type: ignore[arg-type]
        input_ids=np.array(ids, dtype=np.int32),
        supervised=np.array(supervised, dtype=bool),
        num_content_tokens=content,
    )


@st.composite
def _documents(draw: st.DrawFn) -> TokenizedDocument:
    form = draw(st.sampled_from(["text", "prompt_completion", "messages"]))
    count = {"text": 1, "prompt_completion": 2}.get(form) or draw(st.integers(2, 6))
    lengths = [draw(st.integers(0, 70)) for _ in range(count)]
    lengths[-1] = max(1, lengths[-1]) if count <= 2 else lengths[-1]
    return _build(form, lengths, draw(st.booleans()))


def _identify(name: str = "d") -> partial[AuditDocument]:
    return partial(AuditDocument, id=name, bucket="trained", role="trained", source="s")


def _has_place(tokens: TokenizedDocument, spans: list[tuple[int, int]], probe: Any) -> bool:
    """Look for a prefix and a continuation in every part, token by token."""
    needed, is_cut = probe.needed_prefix_tokens, len(spans) > 1
    for begin, end in spans:
        end = min(end, tokens.num_content_tokens)
        if tokens.format == "text":
            if end - begin >= needed + probe.continuation_tokens:
                return True
            continue
        own = [
            place
            for place in range(begin, end)
            if tokens.supervised[place] and tokens.input_ids[place] != END
        ]
        if not own:
            continue
        if is_cut and own[-1] - begin >= needed:
            return True
        first = own[-1]
        while first > begin and tokens.supervised[first - 1]:
            first -= 1
        if not is_cut and first - begin >= needed:
            return True
    return False


@given(
    documents=st.lists(_documents(), min_size=1, max_size=8),
    seq_len=st.integers(8, 90),
    needed=st.integers(1, 12),
    size=st.integers(1, 30),
    which=st.sampled_from(["last", "first"]),
    kind=st.sampled_from(["piece", "context"]),
)
def test_every_document_is_audited_or_counted_under_one_reason(
    documents: list[TokenizedDocument],
    seq_len: int,
    needed: int,
    size: int,
    which: WhichWindow,
    kind: Any,
) -> None:
    probe = ExtractionProbe(continuation_tokens=size, min_prefix_tokens=needed)
    audited: list[AuditDocument] = []
    reasons = {"too short": 0, "cut": 0, "nothing": 0}
    for number, tokens in enumerate(documents):
        spans = (
            list_pieces(split_points(len(tokens.input_ids), seq_len))
            if kind == "piece"
            else list_contexts(tokens, seq_len)
        )
        identity = _identify(f"d{number}")
        document = choose_part(tokens, spans, identity, kind=kind, probe=probe, window=which)
        audited.append(document)
        window = probe.window(document)
        assert (window is not None) == _has_place(tokens, spans, probe)
        assert document.num_tokens == len(tokens.input_ids)
        begin = document.first_position
        assert begin in [span[0] for span in spans]
        piece = tokens.input_ids[begin : begin + len(document.input_ids)]
        assert document.input_ids.tolist() == piece.tolist()
        assert (document.part == "whole") == (len(spans) == 1)
        whole = [(0, len(tokens.input_ids))]
        if window is None:
            if len(spans) > 1 and _has_place(tokens, whole, probe):
                reasons["cut"] += 1
            elif tokens.format != "text" and not tokens.num_content_tokens:
                reasons["nothing"] += 1
            else:
                reasons["too short"] += 1
            continue
        assert window.prefix_tokens >= needed
        assert END not in window.continuation_ids[-1:]
        if tokens.format != "text":
            after = window.start + window.prefix_tokens
            assert document.supervised[after : after + window.continuation_tokens].all()
            # Nothing of the span is left out but what has to be the prefix.
            is_first = not document.supervised[after - 1]
            assert is_first or (document.part != "whole" and after == needed)
    selection = select_windows(audited, probe, seed=0, min_documents=0)
    (outline,) = selection.buckets
    assert len(selection.windows) + outline.num_not_auditable == len(documents)
    assert outline.num_too_short == reasons["too short"]
    assert outline.num_cut_too_short == reasons["cut"]
    assert outline.num_nothing_supervised == reasons["nothing"]


def _choose(tokens: TokenizedDocument, seq_len: int, which: WhichWindow = "last") -> AuditDocument:
    pieces = list_pieces(split_points(len(tokens.input_ids), seq_len))
    probe = ExtractionProbe()
    return choose_part(tokens, pieces, _identify(), kind="piece", probe=probe, window=which)


def test_a_completion_cut_in_two_is_continued_after_its_own_first_tokens() -> None:
    tokens = _build("prompt_completion", [70, 90], closed=True)  # 161 tokens: pieces of 80 and 81
    document = _choose(tokens, 128)
    window = ExtractionProbe().window(document)
    assert (document.first_position, window.prefix_tokens) == (80, 5)
    assert window.input_ids.tolist() == list(range(90, 170))
    # The first piece has the prompt and the start of the completion.
    first = _choose(tokens, 128, "first")
    window = ExtractionProbe().window(first)
    assert (first.first_position, window.prefix_tokens, window.continuation_tokens) == (0, 70, 10)


def test_a_completion_has_as_much_of_its_prompt_as_stands_in_its_piece() -> None:
    tokens = _build("prompt_completion", [150, 20], closed=True)  # 171: pieces of 85 and 86
    window = ExtractionProbe().window(_choose(tokens, 128))
    assert (window.prefix_tokens, window.continuation_tokens) == (65, 20)
    assert window.input_ids.tolist() == list(range(95, 180))


def test_a_last_piece_without_the_assistant_is_passed_over() -> None:
    tokens = _build("messages", [20, 30, 160], closed=True)  # 213: pieces of 106 and 107
    document = _choose(tokens, 128)
    window = ExtractionProbe().window(document)
    assert (document.first_position, window.prefix_tokens) == (0, 21)
    # Without what closes the turn, as where it is the last one.
    assert window.continuation_ids.tolist() == list(range(31, 61))


@pytest.mark.parametrize("which", ["last", "first"])
def test_contexts(which: WhichWindow) -> None:
    tokens = _build("text", [6001], closed=True)
    probe = ExtractionProbe()
    spans = list_contexts(tokens, 256)
    document = choose_part(tokens, spans, _identify(), kind="context", probe=probe, window=which)
    begin = {"last": 6001 - 256, "first": 0}[which]
    assert (document.first_position, document.num_tokens) == (begin, 6002)
    assert document.input_ids.tolist() == tokens.input_ids[begin : begin + 256].tolist()


def test_what_was_cut_is_told() -> None:
    whole = make_document(np.arange(60))
    assert find_cut([whole], (), window="last") is None
    part = make_document(np.arange(256), num_tokens=6001, part="context", first_position=5745)
    cut = find_cut([whole, part], (), window="last")
    assert cut is not None
    assert describe_cut(cut) == (
        "1 of 2 documents is longer than 256 tokens, the longest input of the model: the audit "
        "uses the last 256 tokens of each (the longest document has 6,001). The rest is audited "
        "only in windows of the probe 'grid'. 'audit.window=first' audits the first 256."
    )
    chat = _choose(_build("prompt_completion", [70, 90], closed=True), 128)
    window = ExtractionProbe().window(chat)
    assert window is not None
    cut = find_cut([chat], [window], window="last")
    assert (cut.num_inside_completion, cut.longest_tokens, cut.used_tokens) == (1, 161, 80)
    assert "1 of 1 documents is longer than a training row: the audit uses" in describe_cut(cut)
    assert "In 1 of them this part contains no prompt" in describe_cut(cut)


@pytest.mark.parametrize("num_unknown", [32, 33, 40])
def test_texts_that_are_mostly_unknown_to_the_tokenizer_are_not_audited(num_unknown: int) -> None:
    ids = np.arange(80, dtype=np.int32) + 100
    ids[1 : 2 * num_unknown : 2] = 7  # Half of the tokens are spaces between unknown words.
    tokens = TokenizedDocument(
        id="d",
        source="s",
        format="text",
        input_ids=ids,
        supervised=np.ones(80, dtype=bool),
        num_content_tokens=80,
        unknown_id=7,
    )
    probe = ExtractionProbe()
    document = choose_part(tokens, [(0, 80)], _identify(), kind="whole", probe=probe, window="last")
    selection = select_windows([document], probe, seed=0, min_documents=0)
    assert len(selection.windows) == 1 - selection.buckets[0].num_unknown
    assert selection.buckets[0].num_unknown == selection.buckets[0].num_not_auditable
    assert [reason for _, reason in selection.not_audited] == ["unknown text"] * (num_unknown > 32)
    if num_unknown > 32:
        with pytest.raises(DataError, match=r"only 0 of 1 .* not mostly unknown text \(as 1 are\)"):
            select_windows([document], probe, seed=0)
