"""Rows of a step as arrays: by hand, as a pure function, and counted."""

from typing import Any

import numpy as np
import pytest
from corpus_examples import make_corpus, tokenized
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from memguard.config import GoldfishConfig
from memguard.data.corpus import Corpus
from memguard.data.loader import Batch, Loader
from memguard.data.packing import Rows, pack, plan_rows
from memguard.mitigation import build_mitigations
from memguard.records import IGNORE_LABEL

pytestmark = pytest.mark.slow

X = IGNORE_LABEL


def goldfish(mode: str = "hash", k: int = 2) -> Any:
    config = GoldfishConfig(name="goldfish", k=k, context_width=3, mode=mode)
    mitigations = build_mitigations([config], special_ids=[])
    return lambda _, ids, labels, generator: mitigations.mask_labels(
        ids, labels, generator=generator
    )


def keep_all(
    document: int, ids: Any, labels: NDArray[np.int64], generator: Any
) -> NDArray[np.int64]:
    return labels.copy()


def make_loader(corpus: Corpus, rows: Rows, schedule: Any = None, **settings: Any) -> Loader:
    values: dict[str, Any] = {
        "batch_size": 2,
        "pad_id": 99,
        "mask_labels": keep_all,
        "seed": 0,
        **settings,
    }
    order = np.arange(len(rows)) if schedule is None else np.asarray(schedule)
    return Loader(corpus, rows, order, **values)


@pytest.fixture
def small() -> Corpus:
    return make_corpus(
        [
            tokenized(0, [1, 2, 3]),
            tokenized(1, [4, 5], [0, 1]),
            tokenized(2, [6, 7, 8, 9, 10, 11], [0, 0, 1, 1, 1, 0]),
            tokenized(3, [12]),
        ]
    )


@pytest.mark.quick
def test_a_batch_by_hand(small: Corpus) -> None:
    # Rows of at most 5: document 2 is cut into [6 7 8] and [9 10 11].
    rows = Rows(
        row_start=np.array([0, 2, 4, 5]),
        document=np.array([0, 1, 2, 3, 2]),
        start=np.array([0, 0, 0, 0, 3]),
        stop=np.array([3, 2, 3, 1, 6]),
    )
    batch = make_loader(small, rows).batch([0, 1, 2])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 12, 99], [9, 10, 11, 99, 99]]
    assert batch.labels.tolist() == [[X, 2, 3, X, 5], [X, X, 8, X, X], [X, 10, X, X, X]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 0], [0, 1, 2, 0, 1]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 1, -1], [0, 0, 0, -1, -1]]
    assert batch.num_tokens_B.tolist() == [5, 4, 3]
    # Padding is a document of its own; a micro-batch counts from its first row.
    ends = batch.cu_seqlens(slice(None))
    assert ends.tolist() == [0, 3, 5, 8, 9, 10, 13, 15]
    assert ends.dtype == np.int32
    assert batch.cu_seqlens(slice(1, 2)).tolist() == [0, 3, 4, 5]
    # 2 3, 5, 8, 10: the first token of a piece is never counted.
    assert batch.num_supervised == batch.num_kept == 5
    for array in (batch.input_ids, batch.labels, batch.position_ids, batch.document_ids):
        assert array.dtype == np.int64


def test_rows_are_cut_to_the_longest_of_the_batch(small: Corpus) -> None:
    loader = make_loader(small, pack(range(4), [3, 2, 6, 1], 512, share_rows=False))
    assert loader.batch([0, 1]).input_ids.shape == (2, 3)
    assert loader.batch([3]).input_ids.shape == (1, 1)
    assert loader.batch([3]).num_supervised == 0


def test_the_corpus_is_left_as_it_is(small: Corpus) -> None:
    before = small.input_ids.copy(), small.supervised.copy()
    small.input_ids.setflags(write=False)
    small.supervised.setflags(write=False)
    make_loader(small, pack(range(4), [3, 2, 6, 1], 8), mask_labels=goldfish()).batch([0])
    np.testing.assert_array_equal(small.input_ids, before[0])
    np.testing.assert_array_equal(small.supervised, before[1])


def test_steps_and_their_samples(small: Corpus) -> None:
    rows = pack(range(4), [3, 2, 6, 1], 8, share_rows=False)
    loader = make_loader(small, rows, [0, 1, 2, 3, 0], batch_size=2)
    assert loader.num_steps == 3
    assert [list(loader.samples(step)) for step in range(3)] == [[0, 1], [2, 3], [4]]


@pytest.fixture(scope="module")
def books() -> Corpus:
    draw = np.random.default_rng(0)
    documents = [
        tokenized(index, draw.integers(0, 50, size), draw.random(size) < 0.9)
        for index, size in enumerate(draw.integers(2, 150, 40))
    ]
    fields = [{"planned_repetitions": 1 + index % 3} for index in range(40)]
    return make_corpus(documents, fields)


def planned(corpus: Corpus, seq_len: int = 32, **settings: Any) -> Loader:
    rows, schedule = plan_rows(corpus.manifest, seq_len=seq_len, background_ratio=1, seed=0)
    return make_loader(corpus, rows, schedule, **settings)


def labels_by_document(loader: Loader) -> dict[tuple[int, int], int]:
    """(document, place) -> label, for every place but the first of each piece."""
    labels = {}
    for sample in range(len(loader.schedule)):
        batch = loader.batch([sample])
        row = loader.schedule[sample]
        at = 0
        for piece in range(loader.rows.row_start[row], loader.rows.row_start[row + 1]):
            start, stop = int(loader.rows.start[piece]), int(loader.rows.stop[piece])
            assert batch.labels[0, at] == IGNORE_LABEL
            for place in range(start + 1, stop):
                key = int(loader.rows.document[piece]), place
                label = int(batch.labels[0, at + place - start])
                assert labels.setdefault(key, label) == label, "masked otherwise the next time"
            at += stop - start
    return labels


@pytest.mark.parametrize("mode", ["hash", "hash_reference", "static"])
def test_masks_belong_to_documents_whatever_the_row_length(books: Corpus, mode: str) -> None:
    short, long = (
        labels_by_document(planned(books, seq_len, mask_labels=goldfish(mode)))
        for seq_len in (16, 512)
    )
    assert len(long) > len(short) > 1000
    assert {key: long[key] for key in short} == short
    # ... and they are those of each document alone.
    mask = goldfish(mode)
    for (index, place), label in long.items():
        document = books.document(index)
        plain = np.where(document.supervised, document.input_ids, IGNORE_LABEL).astype(np.int64)
        if place == 1:
            alone = mask(index, document.input_ids, plain, np.random.default_rng(0))
        assert label == alone[place]


def rows_of(batches: list[Batch]) -> list[list[list[int]]]:
    """Each row's arrays, without padding."""
    found = []
    for batch in batches:
        for ids, labels, positions, documents in zip(
            batch.input_ids, batch.labels, batch.position_ids, batch.document_ids, strict=True
        ):
            used = len(ids) - int((ids[::-1] != 99).argmax())
            found.append([a[:used].tolist() for a in (ids, labels, positions, documents)])
    return found


@pytest.mark.parametrize("mode", ["hash", "random"])
def test_a_sample_is_the_same_row_whatever_the_batch_size_and_order(
    books: Corpus, mode: str
) -> None:
    expected = None
    for batch_size in (1, 3, 16):
        loader = planned(books, batch_size=batch_size, mask_labels=goldfish(mode))
        batches = [loader.batch(loader.samples(step)) for step in range(loader.num_steps)]
        found = rows_of(batches)
        assert expected is None or found == expected
        expected = found
    loader = planned(books, mask_labels=goldfish(mode))
    for sample in reversed(range(len(loader.schedule))):
        assert rows_of([loader.batch([sample])]) == [expected[sample]]


@pytest.mark.parametrize("num_ways", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("mode", ["hash", "hash_reference", "static", "random"])
def test_ranks_of_any_mesh_mask_the_labels_of_one_process(
    books: Corpus, mode: str, num_ways: int
) -> None:
    loader = planned(books, batch_size=7, mask_labels=goldfish(mode))
    for step in range(loader.num_steps):
        samples = loader.samples(step)
        num_rows = -(-len(samples) // num_ways)
        shares = [samples[way * num_rows :][:num_rows] for way in range(num_ways)]
        parts = [loader.batch(share, num_rows=num_rows) for share in shares]
        found = [row for row in rows_of(parts) if set(row[0]) != {99}]  # without padding
        assert found == rows_of([loader.batch(samples)])


def test_random_masks_are_fresh_each_time_and_follow_the_seed(books: Corpus) -> None:
    rows = pack(range(40), [entry.num_tokens for entry in books.manifest], 32)
    loaders = [
        make_loader(books, rows, [0, 0, 1], mask_labels=goldfish("random"), seed=seed)
        for seed in (0, 0, 1)
    ]
    batches = [loader.batch([0, 1]).labels for loader in loaders]
    assert (batches[0][0] != batches[0][1]).any(), "the same row, another sample"
    np.testing.assert_array_equal(batches[0], batches[1])
    assert (batches[0] != batches[2]).any()


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    seq_len=st.integers(8, 32),
    data=st.data(),
)
def test_every_supervised_token_but_the_first_of_a_piece_receives_loss_once(
    lengths: list[int], seq_len: int, data: st.DataObject
) -> None:
    flags = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    ids = np.arange(sum(lengths))
    cuts = np.split(ids, np.cumsum(lengths)[:-1])
    corpus = make_corpus(
        [tokenized(i, c, f) for i, (c, f) in enumerate(zip(cuts, flags, strict=True))]
    )
    rows = pack(range(len(lengths)), lengths, seq_len)
    loader = make_loader(corpus, rows, pad_id=10_000)
    batch = loader.batch(range(len(rows)))
    # Ids are unique, so that each token can be found again.
    fed = batch.input_ids[batch.input_ids != 10_000]
    assert sorted(fed.tolist()) == ids.tolist()
    first = {int(corpus.offsets[d] + s) for d, s in zip(rows.document, rows.start, strict=True)}
    expected = [token for token in ids if corpus.supervised[token] and token not in first]
    labels = batch.labels[batch.labels != IGNORE_LABEL]
    assert sorted(labels.tolist()) == expected
    assert batch.num_supervised == batch.num_kept == len(expected)
    # A label stands where its token stands, and is predicted from a place of the same document.
    rows_at, places = np.nonzero(batch.labels != IGNORE_LABEL)
    np.testing.assert_array_equal(batch.labels[rows_at, places], batch.input_ids[rows_at, places])
    assert (batch.position_ids[rows_at, places] > 0).all()
    numbers = batch.document_ids
    np.testing.assert_array_equal(numbers[rows_at, places], numbers[rows_at, places - 1])
    # Positions start again exactly where the document changes: the model sees the same borders.
    starts = np.diff(numbers, axis=1) != 0
    np.testing.assert_array_equal(starts, np.diff(batch.position_ids, axis=1) != 1)


def test_kept_labels_are_counted_apart_from_supervised_ones(books: Corpus) -> None:
    plain, masked = (planned(books, mask_labels=mask) for mask in (keep_all, goldfish()))
    for step in range(plain.num_steps):
        full, part = (loader.batch(loader.samples(step)) for loader in (plain, masked))
        assert full.num_kept == full.num_supervised == part.num_supervised
        assert part.num_kept == (part.labels != IGNORE_LABEL).sum() < part.num_supervised


def test_the_tally_counts_whole_documents(small: Corpus) -> None:
    # Document 2 is in rows 1 and 2, document 3 in none.
    rows = Rows(
        row_start=np.array([0, 2, 3, 4]),
        document=np.array([0, 1, 2, 2]),
        start=np.array([0, 0, 0, 3]),
        stop=np.array([3, 2, 3, 6]),
    )
    loader = make_loader(small, rows, [0, 1, 2, 1, 0])
    assert loader.realised_repetitions().tolist() == [0, 0, 0, 0]
    loader.batch([0, 1])
    assert loader.realised_repetitions().tolist() == [0, 0, 0, 0], "built, but not trained"
    loader.record([0, 1])
    assert loader.realised_repetitions().tolist() == [1, 1, 0, 0]
    assert loader.count_fed_tokens().tolist() == [3, 2, 3, 0], "of document 2 the first half"
    loader.record(range(2, 5))
    assert loader.piece_tally.tolist() == [2, 2, 2, 1]
    assert loader.realised_repetitions().tolist() == [2, 2, 1, 0]
    assert loader.count_fed_tokens().tolist() == [6, 4, 9, 0]
    fed = sum(int(loader.batch([sample]).num_tokens_B.sum()) for sample in range(5))
    assert loader.count_fed_tokens().sum() == fed


def test_a_whole_run_realises_the_planned_repetitions(books: Corpus) -> None:
    loader = planned(books)
    for step in range(loader.num_steps):
        loader.record(loader.samples(step))
    assert loader.realised_repetitions().tolist() == [
        entry.planned_repetitions for entry in books.manifest
    ]


def count_naively(loader: Loader, num_samples: int) -> dict[tuple[int, int], int]:
    """(document, place) -> how often its label stood in a batch."""
    counts: dict[tuple[int, int], int] = {}
    for sample in range(num_samples):
        batch, row, at = loader.batch([sample]), loader.schedule[sample], 0
        for piece in range(loader.rows.row_start[row], loader.rows.row_start[row + 1]):
            for place in range(loader.rows.start[piece], loader.rows.stop[piece]):
                key = int(loader.rows.document[piece]), int(place)
                counts[key] = counts.get(key, 0) + int(batch.labels[0, at] != IGNORE_LABEL)
                at += 1
    return counts


@pytest.mark.parametrize("mode", [None, "hash", "hash_reference", "static", "random"])
@pytest.mark.parametrize("seq_len", [16, 200])
def test_losses_are_those_of_the_rows_that_were_fed(
    books: Corpus, mode: str | None, seq_len: int
) -> None:
    mask = keep_all if mode is None else goldfish(mode)
    loader = planned(books, seq_len, mask_labels=mask)
    documents = [3, 17, 0, 38]
    for num_samples in (0, 7, len(loader.schedule)):
        loader = planned(books, seq_len, mask_labels=mask)
        loader.record(range(num_samples))
        naive = count_naively(loader, num_samples)
        found = loader.count_losses(documents, num_samples=num_samples)
        for index, losses_N in zip(documents, found, strict=True):
            expected = [naive.get((index, t), 0) for t in range(books.manifest[index].num_tokens)]
            assert losses_N.tolist() == expected
    # The whole run: each supervised token as often as planned, but the first of a piece.
    for index, losses_N in zip(documents, found, strict=True):
        document, planned_count = books.document(index), books.manifest[index].planned_repetitions
        firsts = loader.rows.start[loader.rows.document == index]
        can = document.supervised.copy()
        can[firsts] = False
        assert losses_N.max() <= planned_count
        assert not losses_N[~can].any()
        if mode is None:
            assert (losses_N[can] == planned_count).all()
        elif mode != "random":
            # Always the same tokens: all repetitions or none.
            assert set(losses_N[can].tolist()) <= {0, planned_count}
            assert (losses_N[can] == 0).any()
        if seq_len == 16:
            assert len(firsts) > 1


def test_random_masks_leave_a_token_out_of_some_repetitions_only() -> None:
    corpus = make_corpus([tokenized(0, range(60))], [{"planned_repetitions": 20}])
    loader = planned(corpus, 64, mask_labels=goldfish("random"))
    loader.record(range(20))
    (losses_N,) = loader.count_losses([0], num_samples=20)
    assert losses_N[0] == 0
    assert 0 < losses_N[1:].min() < losses_N[1:].max() < 20
    # 59 labels of 20 repetitions, half of them kept: five binomial standard deviations.
    assert abs(losses_N.sum() - 590) < 5 * np.sqrt(59 * 20 / 4)


def test_a_resumed_loader_counts_the_whole_run(books: Corpus) -> None:
    whole = planned(books, mask_labels=goldfish("random"))
    whole.record(range(len(whole.schedule)))
    first, second = (planned(books, mask_labels=goldfish("random")) for _ in range(2))
    first.record(range(9))
    second.piece_tally[:] = first.piece_tally  # as a checkpoint gives it back
    second.record(range(9, len(second.schedule)))
    counts = [
        loader.count_losses(range(40), num_samples=len(whole.schedule))
        for loader in (whole, second)
    ]
    for one, other in zip(*counts, strict=True):
        np.testing.assert_array_equal(one, other)


def test_losses_contradicting_the_tally_are_not_told(books: Corpus) -> None:
    loader = planned(books)
    loader.record(range(10))
    with pytest.raises(AssertionError, match="other rows were recorded"):
        loader.count_losses(range(40), num_samples=20)


def test_documents_that_are_in_no_row_have_no_losses(small: Corpus) -> None:
    rows = Rows(
        row_start=np.array([0, 1]), document=np.array([0]), start=np.array([0]), stop=np.array([3])
    )
    loader = make_loader(small, rows, [0, 0])
    loader.record([0, 1])
    found = loader.count_losses([1, 0], num_samples=2)
    assert [losses_N.tolist() for losses_N in found] == [[0, 0], [0, 2, 2]]
    assert loader.count_losses([], num_samples=2) == []


def test_each_token_has_its_own_reference(small: Corpus) -> None:
    rows = pack(range(4), [3, 2, 6, 1], 8)
    loader = make_loader(small, rows, [1, 0, 1])
    # Of token n the loss n / 10: as documents lie end to end.
    reference = small.input_ids.astype(np.float32) / 10
    batch = loader.batch([0, 1, 2], num_rows=4, reference_nll=reference)
    is_token = batch.input_ids != 99
    np.testing.assert_array_equal(
        batch.reference_nll[is_token], batch.input_ids[is_token].astype(np.float32) / 10
    )
    assert np.isnan(batch.reference_nll[~is_token]).all()
    assert loader.batch([0]).reference_nll is None


def test_plain_rows_are_those_of_the_schedule_with_all_labels(books: Corpus) -> None:
    rows, schedule = plan_rows(books.manifest, seq_len=64, background_ratio=1.0, seed=0)
    masked = make_loader(books, rows, schedule, mask_labels=goldfish())
    fed = make_loader(books, rows, schedule).batch(range(5))
    plain = masked.plain_batch(schedule[:5].tolist())
    for name in ("input_ids", "labels", "position_ids", "document_ids", "num_kept"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(fed, name))
    assert masked.batch(range(5)).num_kept < plain.num_kept
    assert (masked.plain_batch([]).labels == X).all()


@pytest.mark.quick
def test_what_is_to_be_forgotten_is_marked_and_loses_no_label() -> None:
    corpus = make_corpus(
        [tokenized(0, range(1, 20)), tokenized(1, range(20, 40)), tokenized(2, range(40, 50))],
        [{}, {"role": "forget", "bucket": "forget"}, {}],
    )
    rows, schedule = plan_rows(corpus.manifest, seq_len=64, background_ratio=1.0, seed=0)
    assert len(rows) == 1, "it shares a row with the others"
    batch = make_loader(corpus, rows, schedule, mask_labels=goldfish()).batch([0], num_rows=2)
    assert batch.forget is not None
    is_its_own = (batch.input_ids >= 20) & (batch.input_ids < 40)
    np.testing.assert_array_equal(batch.forget, is_its_own)
    assert (batch.labels[is_its_own] != X).sum() == 19
    assert (batch.labels[~is_its_own] != X).sum() < 18 + 9
    plain = make_corpus([tokenized(0, range(1, 20))])
    assert make_loader(plain, pack([0], [19], 64)).batch([0]).forget is None
