"""Which documents are audited, and what a refusal suggests."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_examples import make_document

from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.selection import choose_sample, select_windows
from memguard.audit.windows import AuditDocument
from memguard.errors import DataError


def _documents(lengths: list[int], **fields: object) -> list:
    bucket = fields.get("bucket", "trained")
    return [
        make_document(np.zeros(length), name=f"{bucket}-{index}", **fields)
        for index, length in enumerate(lengths)
    ]


def test_buckets_in_order_with_counts() -> None:
    documents = [
        *_documents([80] * 6, bucket="x16", num_repetitions=16),
        *_documents([80] * 3, bucket="rest", role="background"),
        *_documents([80, 9, 80], bucket="x4", num_repetitions=4),
        *_documents([9], bucket="x0", role="control", num_repetitions=0),
    ]
    documents[1] = make_document(np.zeros(80), name="odd", bucket="x16", num_repetitions=15)
    selection = select_windows(documents, ExtractionProbe(), seed=0, max_documents_per_bucket=4)
    rows = [
        (b.bucket, b.num_repetitions, b.num_too_short, b.num_not_sampled) for b in selection.buckets
    ]
    assert rows == [("x0", 0, 1, 0), ("x4", 4, 1, 0), ("x16", None, 0, 2), ("rest", 1, 0, 0)]
    assert len(selection.windows) == 2 + 4 + 3
    order = [document.id for document in documents]
    chosen = [window.document.id for window in selection.windows]
    assert chosen == sorted(chosen, key=order.index)


def test_sample_depends_on_seed_and_ids_only() -> None:
    documents = _documents([80] * 40)

    def chosen(seed: int, given: list[AuditDocument]) -> set[str]:
        selection = select_windows(given, ExtractionProbe(), seed=seed, max_documents_per_bucket=9)
        return {window.document.id for window in selection.windows}

    assert chosen(0, documents) == chosen(0, documents[::-1])
    assert chosen(0, documents) != chosen(1, documents)
    assert len(chosen(0, documents)) == 9


def test_a_smaller_sample_for_what_costs_more() -> None:
    documents = [
        *_documents([80] * 30, bucket="x0", role="control"),
        *_documents([80] * 6, bucket="x4"),
    ]

    def chosen(size: int | None, given: list[AuditDocument], purpose: str = "attacks") -> list[str]:
        windows = select_windows(given, ExtractionProbe(), seed=0).windows
        indices = choose_sample(windows, size, seed=0, purpose=purpose)
        assert indices == sorted(set(indices))
        return [windows[index].document.id for index in indices]

    assert chosen(None, documents) == [document.id for document in documents]
    names = chosen(8, documents)
    assert [name[:2] for name in names] == ["x0"] * 8 + ["x4"] * 6
    assert set(names) == set(chosen(8, documents[::-1]))
    # Another probe's sample is another one: else what one found would be all that any found.
    assert names != chosen(8, documents, "written on")


def test_control_documents_near_trained_ones_are_left_out() -> None:
    def control(name: str, cluster: int | None, length: int = 80) -> AuditDocument:
        return make_document(
            np.zeros(length), name=name, bucket="control", role="control", cluster=cluster
        )

    documents = [
        control("apart", 10),
        control("apart too", 10),
        control("unknown", None),
        control("of a trained one", 0),
        control("of one too short to audit", 6),
        control("of one to be forgotten", 7),
        control("of background", 8),
        control("too short itself", 0, length=9),
        control("only too short", 11, length=9),
        *(make_document(np.zeros(80), name=f"t{n}", cluster=n) for n in range(6)),
        make_document(np.zeros(9), name="short", cluster=6),
        make_document(np.zeros(80), name="unknown trained", cluster=None),
        make_document(np.zeros(80), name="f", bucket="forget", role="forget", cluster=7),
        make_document(np.zeros(80), name="b", bucket="background", role="background", cluster=8),
    ]
    selection = select_windows(documents, ExtractionProbe(), seed=0)
    chosen = [w.document.id for w in selection.windows if w.document.role == "control"]
    assert chosen == ["apart", "apart too", "unknown", "of background"]
    outline, *others = selection.buckets
    assert (outline.bucket, outline.num_near_duplicates, outline.num_too_short) == ("control", 4, 1)
    assert outline.num_not_sampled == outline.num_cut_too_short == 0
    assert [bucket.num_near_duplicates for bucket in others] == [0] * 3
    # The trained documents stay, also those whose near-duplicate was left out.
    assert len(selection.windows) == 4 + 7 + 1 + 1


def test_trained_documents_left_out_by_sampling_still_count_as_trained() -> None:
    documents = [
        make_document(np.zeros(80), name=f"{role}-{n}", bucket=role, role=role, cluster=n)
        for role in ("trained", "control")
        for n in range(9)
    ]
    documents.append(
        make_document(np.zeros(80), name="apart", bucket="control", role="control", cluster=99)
    )
    for seed in range(3):
        selection = select_windows(
            documents, ExtractionProbe(), seed=seed, max_documents_per_bucket=3
        )
        control = selection.buckets[0]
        chosen = [w.document.id for w in selection.windows if w.document.role == "control"]
        assert chosen == ["apart"]
        assert (control.num_near_duplicates, control.num_not_sampled) == (9, 0)


def test_a_control_of_near_duplicates_only_is_an_empty_bucket() -> None:
    documents = [
        make_document(np.zeros(80), name=f"{role}-{n}", bucket=role, role=role, cluster=n)
        for role in ("trained", "control")
        for n in range(6)
    ]
    selection = select_windows(documents, ExtractionProbe(), seed=0)
    assert [(b.bucket, b.num_near_duplicates) for b in selection.buckets] == [
        ("control", 6),
        ("trained", 0),
    ]
    assert {window.document.role for window in selection.windows} == {"trained"}


def test_ids_must_be_unique() -> None:
    twice = [*_documents([80] * 6), make_document(np.zeros(80), name="trained-2")]
    with pytest.raises(DataError, match=r"1 ids occur more than once, e\.g\. 'trained-2'"):
        select_windows(twice, ExtractionProbe(), seed=0)


def test_refusal_says_what_would_work() -> None:
    documents = _documents([24] * 8 + [12] * 4)
    with pytest.raises(DataError) as caught:
        select_windows(documents, ExtractionProbe(), seed=0)
    assert str(caught.value) == (
        "'audit.min_documents' is 5, but only 0 of 12 trained documents are long enough for a "
        "prefix of 5 tokens and a continuation of 50; the longest has 24 tokens: try "
        "audit.continuation_tokens=16"
    )


@given(
    lengths=st.lists(st.integers(1, 90), max_size=12),
    num_chats=st.integers(0, 3),
    minimum=st.integers(1, 8),
    prefix=st.none() | st.integers(1, 60),
)
def test_suggestion_works(
    lengths: list[int], num_chats: int, minimum: int, prefix: int | None
) -> None:
    documents = [
        *_documents(lengths),
        *_documents([9] * num_chats, bucket="chat", format="messages", role="trained"),
    ]
    probe = ExtractionProbe(prefix_tokens=prefix)

    def suffices(min_documents: int, **fields: int | None) -> bool:
        changed = ExtractionProbe(**{**probe.model_dump(), **fields})
        try:
            select_windows(documents, changed, seed=0, min_documents=min_documents)
        except DataError:
            return False
        return True

    if suffices(minimum):
        return
    with pytest.raises(DataError) as caught:
        select_windows(documents, probe, seed=0, min_documents=minimum)
    message = str(caught.value).lower()
    fewer = re.search(r"set audit\.min_documents=(\d+)", message)
    size = re.search(r"audit\.continuation_tokens=(\d+)", message)
    needed = int(fewer[1]) if fewer else minimum
    # It is lowered only where there are too few documents, whatever their lengths.
    assert (fewer is not None) == (0 < len(documents) < minimum)
    changes: dict[str, int | None] = {}
    if size:
        changes["continuation_tokens"] = int(size[1])
    if "leave out audit.prefix_tokens" in message:
        changes["prefix_tokens"] = None
        # Only where no length would do with the prefix.
        assert not any(suffices(needed, continuation_tokens=each) for each in range(1, 91))
    if size or message.endswith("or add documents."):
        assert suffices(needed, **changes)
        return
    # Nothing else is said only where no length would do, with the prefix or without.
    assert not any(
        suffices(needed, continuation_tokens=each, prefix_tokens=given)
        for each in range(1, 91)
        for given in (prefix, None)
    )
    if not documents:
        assert message.endswith(". add documents.")
    else:
        assert "lower 'audit.min_prefix_tokens'" in message


def _answers(role: str, *answers: list[int], **fields: object) -> list[AuditDocument]:
    """Return conversations of 20 tokens and an answer."""
    return [
        make_document(
            [n, *range(19), *answer],
            name=f"{role}-{n}",
            bucket=role,
            role=role,
            format="messages",
            supervised=np.arange(20 + len(answer)) >= 20,
            **fields,
        )
        for n, answer in enumerate(answers)
    ]


def test_short_answers_that_many_documents_share_are_labels() -> None:
    yes, long, pins = [7, 8], [*range(10)], [[n, n] for n in range(20, 50)]
    trained = _answers("trained", yes, yes, *[long] * 4, [5], [5], *pins)
    control = _answers("control", yes)
    selection = select_windows([*trained, *control], ExtractionProbe(), seed=0)
    # Three share it, one of them unseen; ten tokens are too long, and two documents too few.
    assert [(b.bucket, b.num_labels, b.num_not_auditable) for b in selection.buckets] == [
        ("control", 1, 1),
        ("trained", 2, 2),
    ]
    assert [(document.id, why) for document, why in selection.not_audited] == [
        ("trained-0", "label"),
        ("trained-1", "label"),
        ("control-0", "label"),
    ]
    assert len(selection.windows) == len(trained) - 2
    # Three of 300 are 1 %, of 301 they are not.
    for total, num_labels in ((300, 3), (301, 0)):
        others = [[0, n] for n in range(total - len(trained) - 1)]
        documents = [*trained, *control, *_answers("background", *others)]
        assert len(select_windows(documents, ExtractionProbe(), seed=0).not_audited) == num_labels


def test_copies_of_one_secret_are_no_label_and_ends_of_texts_may_be() -> None:
    copies = _answers("trained", *[[7, 8]] * 9, cluster=1)
    assert len(select_windows(copies, ExtractionProbe(), seed=0).windows) == 9
    texts = [make_document([n, *range(30)], name=str(n), cluster=n) for n in range(9)]
    # Labels are long enough for `min_documents`.
    selection = select_windows(texts, ExtractionProbe(continuation_tokens=9), seed=0)
    assert (selection.windows, selection.buckets[0].num_labels) == ((), 9)
