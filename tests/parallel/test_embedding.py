"""The sharded token embedding against `nn.Embedding` on one process."""

from dataclasses import dataclass

import pytest
import torch
from ranks import RankPool
from test_collectives import draw
from torch import Tensor, nn

from memguard.parallel.embedding import Embedding4D, is_scaled_lookup
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape


@dataclass(frozen=True, kw_only=True)
class Case:
    """One embedding."""

    vocab_size: int
    padding_idx: int | None = None


# 5 rows are 3 + 2 over two ranks and 2 + 2 + 1 over three.
CASES = [
    Case(vocab_size=6),
    Case(vocab_size=5),
    Case(vocab_size=5, padding_idx=0),
    Case(vocab_size=5, padding_idx=2),
    Case(vocab_size=5, padding_idx=4),
]


def embed(case: Case, degrees: tuple[int, int]) -> tuple[Tensor, Tensor, tuple[slice, slice]]:
    """On a rank: local features, local gradient and which part of the weight is here."""
    y, x = degrees
    mesh = build_mesh(MeshShape(y=y, x=x), "cpu")
    full_VD = draw(0, case.vocab_size, 4)
    rows = torch.arange(case.vocab_size).chunk(x)[mesh.axis("x").rank]
    columns = torch.arange(4).chunk(y)[mesh.axis("y").rank]
    here = (slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1))
    embedding = nn.Embedding(case.vocab_size, 4, padding_idx=case.padding_idx)
    embedding.weight = nn.Parameter(full_VD[here].clone())
    Embedding4D.convert(embedding, vocab_axis=mesh.axis("x"), first_token=int(rows[0]))
    hidden_BTD = embedding(ids(case))
    # Every rank along x has the same gradient of what all of them have alike.
    hidden_BTD.backward(draw(1, 2, 5, 4)[..., here[1]])
    assert embedding.weight.grad is not None
    return hidden_BTD.detach(), embedding.weight.grad, here


def embed_all(cases: list[Case], degrees: tuple[int, int]) -> list[object]:
    return [embed(case, degrees) for case in cases]


def ids(case: Case) -> Tensor:
    """Every token, one of them twice in a row and again in the other."""
    return torch.arange(10).reshape(2, 5).flip(0) % case.vocab_size


@pytest.mark.parametrize("degrees", [(1, 3), (2, 2), (2, 1)], ids=str)
def test_rows_and_their_gradients(ranks: RankPool, degrees: tuple[int, int]) -> None:
    for found in ranks(embed_all, degrees[0] * degrees[1], CASES, degrees):
        for case, (hidden_BTD, gradient, here) in zip(CASES, found, strict=True):
            plain = nn.Embedding(case.vocab_size, 4, padding_idx=case.padding_idx)
            plain.weight = nn.Parameter(draw(0, case.vocab_size, 4))
            expected_BTD = plain(ids(case))
            expected_BTD.backward(draw(1, 2, 5, 4))
            # A sum with zeros, and at most three terms of a gradient in the same order.
            assert torch.equal(hidden_BTD, expected_BTD.detach()[..., here[1]]), case
            assert torch.equal(gradient, plain.weight.grad[here]), case


@pytest.mark.parametrize("padding_idx", [None, 0, 9])
def test_padding_does_not_matter_to_what_a_lookup_is(padding_idx: int | None) -> None:
    assert is_scaled_lookup(nn.Embedding(10, 8, padding_idx=padding_idx))
    assert is_scaled_lookup(nn.Embedding(10, 8, padding_idx=padding_idx, device="meta"))
