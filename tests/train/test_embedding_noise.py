"""Noise of a row depends on its global sample index alone, and is on the embeddings only."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_families import build

from memguard.config.mitigations import NeftuneConfig
from memguard.data.loader import Batch
from memguard.mitigation.neftune import Neftune
from memguard.model.checks import build_causal_lm
from memguard.parallel.mesh import Axis
from memguard.train.embedding_noise import added_to_embeddings, draw_noise

LENGTHS = [7, 3, 5, 0]
NUM_FEATURES = 32


def make_batch(lengths: list[int], width: int = 9) -> Batch:
    shape = (len(lengths), width)
    numbers = np.where(np.arange(width) < np.array(lengths)[:, None], 0, -1)
    return Batch(
        input_ids=np.ones(shape, dtype=np.int64),
        labels=np.ones(shape, dtype=np.int64),
        position_ids=np.tile(np.arange(width), (shape[0], 1)),
        document_ids=numbers,
        num_supervised=0,
        num_kept=0,
    )


def draw(batch: Batch, *, rows: slice = slice(None), batch_rank: int = 0, **where: Any) -> Any:
    """The noise on the rank with these rows; `where`: its rank and the degree of y."""
    mesh = None
    if where:
        axis = Axis(name="y", **where)
        mesh = SimpleNamespace(axis={"y": axis}.get)
    embedding = SimpleNamespace(embedding_dim=NUM_FEATURES)
    lm: Any = SimpleNamespace(
        model=SimpleNamespace(get_input_embeddings=lambda: embedding),
        mesh=mesh,
        batch_rank=batch_rank,
    )
    neftune = Neftune(NeftuneConfig(name="neftune", alpha=2.0))
    return draw_noise(neftune, batch, rows, lm=lm, seed=3, first_sample=40)


def test_a_row_has_its_noise_wherever_it_is() -> None:
    whole = draw(make_batch(LENGTHS))
    assert whole.shape == (4, 9, NUM_FEATURES)
    for row, length in enumerate(LENGTHS):
        assert not whole[row, length:].any(), "padding has none"
        assert (whole[row, :length] != 0).all()
    assert (whole[0, :3] != whole[1, :3]).all(), "each row has its own"
    # Micro-batches, ranks with other rows beside them and other widths, features over y.
    np.testing.assert_array_equal(draw(make_batch(LENGTHS), rows=slice(1, 3)), whole[1:3])
    second = draw(make_batch(LENGTHS[2:], width=6), batch_rank=1)
    np.testing.assert_array_equal(second, whole[2:, :6])
    # Three ranks: 11, 11 and 10 features, as the weights are cut.
    pieces = [draw(make_batch(LENGTHS), rank=rank, degree=3) for rank in range(3)]
    assert [piece.shape[2] for piece in pieces] == [11, 11, 10]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=2), whole)


def test_noise_is_uniform_up_to_its_bound() -> None:
    noise = draw(make_batch([300, 20], width=300))
    for row, length in enumerate((300, 20)):
        bound = 2.0 / np.sqrt(length * NUM_FEATURES)
        values = noise[row, :length].ravel()
        # A fit as bad as this has less than one chance in a thousand; the seed is fixed.
        assert stats.kstest(values, stats.uniform(-bound, 2 * bound).cdf).pvalue > 1e-3


def test_it_is_added_within_and_nowhere_else() -> None:
    layer = build_causal_lm(build("llama"))
    ids = torch.tensor([[1, 5, 7]])
    embedding = layer.model.get_input_embeddings()
    plain = embedding(ids)
    noise = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    with added_to_embeddings(layer, noise):
        assert torch.equal(embedding(ids), plain + noise)
        noisy = layer.hidden_states(ids)
    expected = layer.model.base_model(inputs_embeds=plain + noise, use_cache=False)
    torch.testing.assert_close(noisy, expected.last_hidden_state)
    with pytest.raises(ZeroDivisionError), added_to_embeddings(layer, noise):
        raise ZeroDivisionError
    assert torch.equal(embedding(ids), plain)
