"""Goldfish masks: the published vectors, and our hash against its formula in big integers."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from plain_hash import plain_hash

from memguard.config import GoldfishConfig
from memguard.mitigation.goldfish import Goldfish, reference_table

pytestmark = pytest.mark.slow

ids_lists = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 200_000), st.just(2**31 - 1)),
    min_size=0,
    max_size=60,
)


def goldfish(**settings: Any) -> Goldfish:
    special_ids = settings.pop("special_ids", ())
    return Goldfish(GoldfishConfig(name="goldfish", **settings), special_ids=special_ids)


def drops(
    mitigation: Goldfish, ids: Any, document_ids: Any = None, generator: Any = None
) -> NDArray[np.bool_]:
    documents = None if document_ids is None else np.asarray(document_ids)
    return mitigation.drop_mask(
        np.asarray(ids, dtype=np.int64), documents, generator or np.random.default_rng(0)
    )


# -- hash_reference: the published code ----------------------------------------------------------


@pytest.fixture(scope="module")
def torch_table() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2971215073)
    return torch.rand(1_000_003, generator=generator)


def published_drops(
    tokens: torch.Tensor, table: torch.Tensor, k: int, width: int
) -> NDArray[np.bool_]:
    """The published algorithm on ``targets = tokens[1:]``, shifted back to places of tokens."""
    dropped = torch.zeros(len(tokens), dtype=torch.bool)
    targets = tokens[1:]
    if len(targets) >= width:
        key = targets.unfold(0, width, 1).prod(dim=-1) % 1_000_003
        dropped[width:] = table[key] < 1 / k
    return dropped.numpy()


def test_the_table_has_the_published_values() -> None:
    table = reference_table()
    assert len(table) == 1_000_003
    first = [0.233683884, 0.441264033, 0.741147697, 0.909271896, 0.711322308, 0.001125216]
    # The values were written down with nine digits.
    np.testing.assert_allclose(table[:6], first, atol=5e-10, rtol=0)
    np.testing.assert_allclose(table[-1], 0.836006761, atol=5e-10, rtol=0)


@pytest.mark.parametrize(
    ("k", "share"),
    [(3, 0.332313), (4, 0.249532), (8, 0.124996), (32, 0.031024), (50, 0.019901), (128, 0.007746)],
)
def test_the_table_drops_the_published_shares(k: int, share: float) -> None:
    assert round(float((reference_table() < np.float32(1 / k)).mean()), 6) == share


def test_the_table_is_torchs_bit_for_bit(torch_table: torch.Tensor) -> None:
    np.testing.assert_array_equal(reference_table(), torch_table.numpy())


@pytest.mark.parametrize(
    ("k", "width", "targets"),
    [
        (3, 4, [7, 9, 12, 13, 17, 19, 25, 28, 34, 37, 38]),
        (4, 4, [7, 12, 13, 19, 25, 28, 34, 37]),
        (3, 13, [16, 18, 21, 32, 33, 37, 38]),
        (4, 13, [18, 21, 32, 33, 37, 38]),
    ],
)
def test_reference_mode_has_the_golden_vectors(k: int, width: int, targets: list[int]) -> None:
    # The vectors are for targets 1..40, which are the tokens without the first one.
    tokens = [999, *range(1, 41)]
    dropped = drops(goldfish(k=k, context_width=width, mode="hash_reference"), tokens)
    assert (np.flatnonzero(dropped) - 1).tolist() == targets


@pytest.mark.quick
@given(ids=ids_lists, k=st.integers(2, 200), width=st.sampled_from([1, 2, 4, 13, 50]))
def test_reference_mode_equals_the_published_code(
    torch_table: torch.Tensor, ids: list[int], k: int, width: int
) -> None:
    expected = published_drops(torch.tensor(ids, dtype=torch.int64), torch_table, k, width)
    ours = drops(goldfish(k=k, context_width=width, mode="hash_reference"), ids)
    np.testing.assert_array_equal(ours, expected)


@given(
    documents=st.lists(ids_lists.filter(bool), min_size=1, max_size=4),
    width=st.sampled_from([1, 4, 13]),
)
def test_reference_mode_masks_a_packed_document_as_if_alone(
    torch_table: torch.Tensor, documents: list[list[int]], width: int
) -> None:
    mitigation = goldfish(k=3, context_width=width, mode="hash_reference")
    packed, numbers = pack(documents)
    expected = [published_drops(torch.tensor(ids), torch_table, 3, width) for ids in documents]
    np.testing.assert_array_equal(drops(mitigation, packed, numbers), np.concatenate(expected))


# -- hash: the formula of window_hash.py -----------------------------------------------------------


def pack(documents: list[list[int]]) -> tuple[list[int], list[int]]:
    """Documents laid end to end, and the number of the document of each token."""
    numbers = [n for n, document in enumerate(documents) for _ in document]
    return [token for document in documents for token in document], numbers


@given(
    documents=st.lists(ids_lists, min_size=1, max_size=4),
    width=st.integers(1, 20),
    k=st.integers(2, 9),
)
def test_hash_mode_drops_below_the_threshold_packed_or_alone(
    documents: list[list[int]], width: int, k: int
) -> None:
    mitigation = goldfish(k=k, context_width=width)
    packed, numbers = pack(documents)
    expected = [
        plain_hash(document[max(0, t - width) : t]) < (1 << 64) // k
        for document in documents
        for t in range(len(document))
    ]
    assert drops(mitigation, packed, numbers).tolist() == expected
    alone = [drops(mitigation, document).tolist() for document in documents]
    assert [flag for document in alone for flag in document] == expected


@given(
    data=st.data(), ids=st.lists(st.integers(0, 999), min_size=1, max_size=60), h=st.integers(1, 8)
)
def test_hash_mode_sees_only_the_h_tokens_before_the_label(
    data: st.DataObject, ids: list[int], h: int
) -> None:
    mitigation = goldfish(k=2, context_width=h)
    before = drops(mitigation, ids)
    changed = data.draw(st.integers(0, len(ids) - 1))
    ids[changed] += 1000
    after = drops(mitigation, ids)
    # Neither the label at `changed` itself, nor any label more than h tokens on, may notice.
    np.testing.assert_array_equal(after[: changed + 1], before[: changed + 1])
    np.testing.assert_array_equal(after[changed + h + 1 :], before[changed + h + 1 :])


def test_a_text_seen_twice_is_masked_the_same_wherever_it_stands() -> None:
    draw = np.random.default_rng(1)
    text = draw.integers(0, 50_000, 200)
    mitigation = goldfish(k=3)
    one, other = (
        drops(mitigation, np.concatenate([draw.integers(0, 50_000, n), text]))[n + 13 :]
        for n in (5, 1000)
    )
    np.testing.assert_array_equal(one, other)


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["hash", "random"])
@pytest.mark.parametrize("k", [2, 3, 4, 8, 50, 128])
def test_one_label_in_k_is_dropped(k: int, mode: str) -> None:
    count = 300_000
    ids = np.random.default_rng(k).integers(0, 32_000, count)
    dropped = drops(goldfish(k=k, mode=mode), ids)
    # Three standard deviations of a binomial share; the seeds are fixed.
    assert abs(dropped.mean() - 1 / k) < 3 * np.sqrt((1 / k) * (1 - 1 / k) / count)


@pytest.mark.parametrize("k", [4, 50])
def test_even_ids_do_not_collapse_wide_windows(k: int) -> None:
    # The published product of 50 even ids is 0 modulo 2^64, so that all labels share one fate.
    count = 200_000
    ids = 2 * np.random.default_rng(0).integers(0, 16_000, count)
    dropped = drops(goldfish(k=k, context_width=50), ids)
    assert abs(dropped.mean() - 1 / k) < 3 * np.sqrt((1 / k) * (1 - 1 / k) / count)
    reference = drops(goldfish(k=k, context_width=50, mode="hash_reference"), ids)
    assert reference[50:].all() if k == 4 else not reference.any()


def test_id_zero_does_not_collapse_the_hash() -> None:
    count = 100_000
    ids = np.random.default_rng(0).integers(0, 16_000, count)
    ids[::5] = 0
    dropped = drops(goldfish(k=4, context_width=13), ids)
    assert abs(dropped.mean() - 1 / 4) < 3 * np.sqrt(3 / 16 / count)


def test_neighbouring_labels_are_dropped_independently() -> None:
    ids = np.random.default_rng(2).integers(0, 32_000, 200_000)
    dropped = drops(goldfish(k=2), ids).astype(float)
    for lag in (1, 2, 13):
        correlation = np.corrcoef(dropped[lag:], dropped[:-lag])[0, 1]
        # A correlation of independent flags has standard deviation 1 / sqrt(N).
        assert abs(correlation) < 4 / np.sqrt(len(ids))


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["hash", "random"])
def test_special_tokens_are_never_dropped_but_count_as_context(mode: str) -> None:
    ids = np.random.default_rng(3).integers(0, 10, 5_000)
    plain = drops(goldfish(k=2, mode=mode), ids)
    exempt = drops(goldfish(k=2, mode=mode, special_ids=[3, 7, 3]), ids)
    special = np.isin(ids, [3, 7])
    assert plain[special].any()
    assert not exempt[special].any()
    np.testing.assert_array_equal(exempt[~special], plain[~special])


def test_static_mode_drops_every_kth_label_from_each_documents_first() -> None:
    # Labels start at the second token; the published code starts at their index 0.
    mask = drops(goldfish(k=3, mode="static"), [5] * 8 + [6] * 4, [0] * 8 + [1] * 4)
    assert np.flatnonzero(mask).tolist() == [1, 4, 7, 9]


def test_random_mode_is_fresh_for_each_generator_and_repeats_for_the_same() -> None:
    mitigation = goldfish(k=2, mode="random")
    ids = np.zeros(1000, dtype=np.int64)
    one, again, other = (
        drops(mitigation, ids, generator=np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, again)
    assert 400 < (one != other).sum() < 600


@pytest.mark.parametrize("mode", ["hash", "hash_reference", "static"])
def test_other_modes_do_not_draw(mode: str) -> None:
    generator = np.random.default_rng(0)
    state = generator.bit_generator.state
    drops(goldfish(mode=mode), range(100), generator=generator)
    assert generator.bit_generator.state == state


@pytest.mark.parametrize("mode", ["hash", "hash_reference", "static", "random"])
@pytest.mark.parametrize("shape", [(400, 50), (3, 5000), (2, 9000), (2, 3, 4000)])
def test_many_tokens_are_masked_as_the_same_rows_alone(mode: str, shape: tuple[int, ...]) -> None:
    """Rows are masked 8192 tokens at a time, which nobody may see."""
    draw = np.random.default_rng(5)
    ids = draw.integers(0, 32_000, shape)
    documents = np.cumsum(draw.random(shape) < 0.01, axis=-1)
    mitigation = goldfish(k=3, mode=mode, special_ids=[7, 31_000])
    rows = zip(ids.reshape(-1, shape[-1]), documents.reshape(-1, shape[-1]), strict=True)
    generator = np.random.default_rng(0)
    alone = [drops(mitigation, row, numbers, generator) for row, numbers in rows]
    together = drops(mitigation, ids, documents)
    np.testing.assert_array_equal(together.reshape(-1, shape[-1]), alone)


@pytest.mark.parametrize("mode", ["hash", "hash_reference", "static"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_rows_are_documents_and_the_integer_type_does_not_matter(mode: str, dtype: Any) -> None:
    rows = np.random.default_rng(4).integers(0, 60_000, (3, 40)).astype(dtype)
    kept = rows.copy()
    mitigation = goldfish(k=2, context_width=5, mode=mode)
    mask = mitigation.drop_mask(rows, None, np.random.default_rng(0))
    np.testing.assert_array_equal(rows, kept)
    assert mask.shape == rows.shape
    for row, row_mask in zip(rows, mask, strict=True):
        np.testing.assert_array_equal(row_mask, drops(mitigation, row))


@pytest.mark.parametrize("mode", ["hash", "hash_reference", "static", "random"])
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0), (0, 5), (2, 1)])
def test_empty_and_single_token_rows(mode: str, shape: tuple[int, ...]) -> None:
    ids = np.zeros(shape, dtype=np.int64)
    documents = np.zeros(shape, dtype=np.int64)
    for numbers in (None, documents):
        assert drops(goldfish(mode=mode), ids, numbers).shape == shape
