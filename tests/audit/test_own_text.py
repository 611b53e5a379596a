"""Own text against its definition in plain loops, and what each kind of shared text is."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from audit_examples import cut
from numpy.typing import NDArray
from record_examples import make_document

from memguard.audit.own_text import OwnText
from memguard.audit.passages import Codec
from memguard.audit.windows import AuditDocument, WindowSettings

WORDS = Codec(
    decode=lambda ids: " ".join(f"w{int(id)}" for id in ids),
    encode=lambda text: [int(word[1:]) for word in text.split()],
)
PROBE = WindowSettings(continuation_tokens=5, min_prefix_tokens=1)
HEADER = np.arange(40)


def build(*texts: Any, clusters: Sequence[int | None] = ()) -> tuple[list[AuditDocument], OwnText]:
    documents = [
        make_document(np.asarray(ids), name=f"{number}", cluster=cluster)
        for number, (ids, cluster) in enumerate(
            zip(texts, clusters or [None] * len(texts), strict=True)
        )
    ]
    return documents, OwnText(documents, cut(PROBE, documents), WORDS)


def find_own_naively(words: list[int], others: Sequence[list[int]], start: int) -> list[bool]:
    """Which words from ``start`` on are in no run of four words that is elsewhere or before."""
    taken = {tuple(text[i : i + 4]) for text in [*others, words[:start]] for i in range(len(text))}
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return [
        not any(runs[i] in taken for i in range(max(0, at - 3), min(at + 1, len(runs))))
        for at in range(start, len(words))
    ]


@pytest.mark.parametrize("codec", [WORDS, None])
def test_own_text_is_its_definition(codec: Codec | None) -> None:
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 300, (12, 9))
    texts = [np.concatenate(blocks[draw.integers(0, 12, draw.integers(1, 9))]) for _ in range(30)]
    for text in texts[::2]:
        place = draw.integers(0, len(text))
        text[place : place + 25] = draw.integers(1000, 9999, len(text[place : place + 25]))
    clusters = [int(c) if c < 9 else None for c in draw.integers(0, 12, len(texts))]
    documents = [
        make_document(text, name=f"{n}", cluster=cluster)
        for n, (text, cluster) in enumerate(zip(texts, clusters, strict=True))
    ]
    own = OwnText(documents, cut(PROBE, documents), codec)
    kinds = set()
    for n, (words, found) in enumerate(
        zip(map(np.ndarray.tolist, texts), own.is_own_N, strict=True)
    ):
        others = [
            texts[m].tolist()
            for m in range(len(texts))
            if m != n and (clusters[n] is None or clusters[m] != clusters[n])
        ]
        size = min(30, len(words))
        is_own = find_own_naively(words, others, len(words) - size)
        assert found == (sum(is_own) >= max(10, size / 2))
        begin = len(words) // 3
        is_own = find_own_naively(words, others, begin)
        size = min(30, len(is_own))
        expected = any(
            sum(is_own[i : i + size]) >= max(10, size / 2) for i in range(len(is_own) - size + 1)
        )
        assert own.is_own_span(documents[n].input_ids, begin, len(words)) == expected
        kinds |= {(bool(found), expected)}
    assert kinds >= {(False, False), (False, True), (True, True)}


def test_a_shared_header_is_not_own_text_and_what_follows_it_is() -> None:
    bodies = np.arange(100, 220).reshape(2, 60)
    documents, own = build(*(np.concatenate([HEADER, body]) for body in bodies))
    ids = documents[0].input_ids
    assert own.is_own_N.tolist() == [True, True]
    assert not own.is_own_span(ids, 0, 40)
    assert own.is_own_span(ids, 0, 90)
    # 12 words are too few of 30; alone they are enough.
    assert not own.is_own_span(ids, 0, 52)
    assert own.is_own_span(ids, 40, 52)
    assert not own.is_own_span(ids, 40, 49)


def test_copies_are_own_text_of_their_cluster_and_of_no_other() -> None:
    text = np.arange(60)
    assert build(text, text, clusters=(3, 3))[1].is_own_N.all()
    assert not build(text, text, clusters=(3, 4))[1].is_own_N.any()
    # A loop, and a closing that repeats the text before it.
    assert build(np.tile(text[:9], 8), np.tile(text, 2))[1].is_own_N.tolist() == [False, False]


def test_an_answer_is_compared_without_its_prompt() -> None:
    def converse(name: str, question: NDArray[np.int64], answer: NDArray[np.int64]) -> Any:
        ids = np.concatenate([question, answer])
        supervised = np.arange(len(ids)) >= len(question)
        return make_document(ids, supervised=supervised, format="messages", name=name)

    new = np.arange(1000, 1040)
    documents = [
        converse("new", HEADER, new[:12]),
        converse("few words", HEADER, new[20:29]),
        converse("quoted", np.arange(500, 530), np.arange(500, 530)),
        converse("shared", new[30:], HEADER[:30]),
    ]
    own = OwnText(documents, cut(PROBE, documents), WORDS)
    assert own.is_own_N.tolist() == [True, False, False, False]


def test_a_text_outside_of_the_context_is_compared_too() -> None:
    whole = np.arange(200)
    (long,) = (make_document(whole[150:], whole_ids=whole.astype(np.int32), name="long"),)
    other = make_document(np.concatenate([np.arange(900, 910), whole[:60]]), name="other")
    own = OwnText([long, other], cut(PROBE, [long, other]), WORDS)
    assert own.is_own_N.tolist() == [True, False]
    assert not own.is_own_span(long.grid_ids, 10, 60)
    assert own.is_own_span(long.grid_ids, 70, 120)
