"""Random bits of a parameter on every mesh, and weights stored in bf16."""

from dataclasses import dataclass, replace

import pytest
import torch
from meshes import all_rectangles
from test_optim_weights_mesh import sum_gradients
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from memguard.config import TrainConfig
from memguard.optim.noise import draw_bits
from memguard.optim.weights import Weights, round_to_bf16
from memguard.parallel.fused import FeatureOrder
from memguard.parallel.layout import ShardSlice
from memguard.parallel.local_parameters import LocalParameter, LocalPiece
from memguard.parallel.mesh_shape import MeshShape

NONE = ShardSlice(start=(0,), shape=(0,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut(LocalParameter):
    """A rectangle of a tensor that no other rank holds."""

    rectangle: ShardSlice = NONE

    def split(self) -> list[LocalPiece]:
        if self.order is None:
            whole = ShardSlice(start=(0,) * self.local.ndim, shape=self.rectangle.shape)
            return [LocalPiece(slices=whole.slices, start=self.rectangle.start)]
        return [
            LocalPiece(slices=piece.mesh.slices, start=piece.file.start)
            for piece in self.order.split(self.rectangle)
        ]


def cut(shape: tuple[int, ...], rectangle: ShardSlice, order: FeatureOrder | None = None) -> Cut:
    source = nn.Parameter(torch.empty(shape, device="meta"))
    local = nn.Parameter(torch.zeros(rectangle.shape, dtype=torch.bfloat16))
    return Cut(
        name="layer.weight",
        source=source,
        local=local,
        num_copies=1,
        order=order,
        rectangle=rectangle,
    )


def whole(shape: tuple[int, ...]) -> Cut:
    return cut(shape, ShardSlice(start=(0,) * len(shape), shape=shape))


@pytest.mark.parametrize(
    ("shape", "placements", "order"),
    [
        ((6, 8), (Shard(1), Shard(0)), None),
        ((7, 8), (Shard(0), Shard(1)), None),  # Uneven rows.
        ((12, 8), (Shard(1), Shard(0)), FeatureOrder(0, ((0, 2), (6, 4), (2, 4), (10, 2)))),
        ((8, 12), (Shard(0), Shard(1)), FeatureOrder(1, ((0, 2), (6, 4), (2, 4), (10, 2)))),
        ((3, 4, 8), (Shard(1), Replicate()), None),
        ((3, 8, 4), (Replicate(), Shard(1)), FeatureOrder(1, ((0, 2), (4, 2), (2, 2), (6, 2)))),
        ((10,), (Replicate(), Shard(0)), None),
    ],
)
@pytest.mark.parametrize("mesh", [MeshShape(z=2, y=2, x=2), MeshShape(x=4), MeshShape(z=3)])
def test_pieces_are_written_to_the_bits_of_the_whole(
    shape: tuple[int, ...],
    placements: tuple[Shard | Replicate, Shard | Replicate],
    order: FeatureOrder | None,
    mesh: MeshShape,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memguard.optim.weights._PART_ELEMENTS", 16)
    weights = Weights(seed=3)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def write(parameter: Cut, value: Tensor) -> Tensor:
        rows = value.view(-1, value.shape[-1]) if value.ndim > 1 else value
        for part in weights.parts(parameter):
            weights.write(parameter, part, rows[part], step=2)
            assert torch.equal(
                weights.read(parameter, part), weights.read(parameter, part).bfloat16().float()
            )
        return parameter.local.detach()

    expected = write(whole(shape), value)
    assert not torch.equal(expected, value.bfloat16())
    for _, rectangle in all_rectangles(shape, placements, mesh):
        parameter = cut(shape, rectangle, order)
        mine, wanted = torch.empty(rectangle.shape), torch.empty_like(parameter.local)
        for piece in parameter.split():
            sizes = (here.stop - here.start for here in piece.slices)
            there = ShardSlice(start=piece.start, shape=tuple(sizes)).slices
            mine[piece.slices], wanted[piece.slices] = value[there], expected[there]
        assert torch.equal(write(parameter, mine), wanted)


def test_bits_of_indices_above_32_bits() -> None:
    shape = (1 << 22, 4096)
    ends = [
        cut(shape, ShardSlice(start=(row, 0), shape=(2, 4096)))
        for row in (0, (1 << 20) - 1, (1 << 22) - 2)
    ]
    first, middle, last = (draw_bits(part, 7, slice(0, 2)) for part in ends)
    # Rows 2^20 apart have the same index modulo 2^32.
    for one, other in ((first[0], middle[1]), (first[0], first[1]), (first[0], last[0])):
        assert (one == other).float().mean() < 0.01
    assert torch.equal(draw_bits(ends[2], 7, slice(1, 2)), last[1:])
    assert (draw_bits(ends[2], 8, slice(0, 2)) == last).float().mean() < 0.01


def test_bits_are_independent_of_their_neighbours() -> None:
    bits = draw_bits(whole((512, 512)), 7, slice(0, 512))
    signs = torch.stack([(bits >> bit & 1) * 2.0 - 1 for bit in range(32)])
    limit = 5 / 512  # Five standard deviations.
    assert signs.mean((1, 2)).abs().max() < limit
    assert (signs[:16] * signs[16:]).mean((1, 2)).abs().max() < limit
    for here, next_ in ((signs[:, 1:], signs[:, :-1]), (signs[..., 1:], signs[..., :-1])):
        assert (here * next_).mean((1, 2)).abs().max() < limit


def test_rounding_is_to_a_neighbour_and_unbiased() -> None:
    bits = draw_bits(whole((64, 4096)), 1, slice(0, 64))
    for number in (1.001, -1.001, 3e-5, 1.0, -0.0, 1e-40):
        rounded = round_to_bf16(torch.full(bits.shape, number), bits).double()
        lower = torch.tensor(number).view(torch.int32) & -0x10000
        both = torch.stack([lower, lower + 0x10000]).view(torch.float32).double()
        assert set(rounded.unique().tolist()) <= set(both.tolist())
        distance = float((both[1] - both[0]).abs())
        assert abs(float(rounded.mean()) - float(torch.tensor(number))) < distance / 100


def test_rounding_of_numbers_at_the_ends() -> None:
    largest = torch.finfo(torch.float32).max
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    numbers = torch.cat([torch.tensor([torch.inf, -torch.inf, largest, -largest]), nan])
    low, high = (
        round_to_bf16(numbers, torch.full((7,), bits, dtype=torch.int32)) for bits in (0, 0xFFFF)
    )
    top = torch.finfo(torch.bfloat16).max
    assert low[:4].tolist() == [torch.inf, -torch.inf, top, -top]
    assert high[:4].tolist() == [torch.inf, -torch.inf, torch.inf, -torch.inf]
    assert low[4:].isnan().all()
    assert high[4:].isnan().all()


def test_the_rounding_depends_on_seed_step_and_parameter() -> None:
    def write(seed: int, step: int, name: str) -> Tensor:
        parameter = replace(whole((16, 64)), name=name)
        Weights(seed).write(parameter, slice(0, 16), torch.full((16, 64), 1.002), step=step)
        return parameter.local.detach()

    first, *others = (write(*key) for key in ((1, 1, "a"), (2, 1, "a"), (1, 2, "a"), (1, 1, "b")))
    assert torch.equal(first, write(1, 1, "a"))
    assert not any(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_weights_are_written_as_they_are(dtype: torch.dtype) -> None:
    local = nn.Parameter(torch.zeros(3, 4, dtype=dtype))
    parameter = LocalParameter(name="w", source=local, local=local, num_copies=1)
    value = torch.randn(3, 4, dtype=dtype)
    for rows in Weights(0).parts(parameter):
        Weights(0).write(parameter, rows, value[rows], step=1)
        assert torch.equal(Weights(0).read(parameter, rows), value[rows])


def test_parts_are_bounded() -> None:
    parameter = whole((5000, 640))
    parts = list(Weights(0).parts(parameter))
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert parts[-1].stop == 5000
    assert max((part.stop - part.start) * 640 for part in parts) <= 1 << 20
    assert list(Weights(0).parts(whole((0, 4)))) == []


def test_gradients_of_one_process_add_up_in_fp32() -> None:
    error, error_in_bf16 = sum_gradients(MeshShape())
    assert error < 1e-6
    assert error_in_bf16 > 1e-3


def test_weights_in_bf16_need_arithmetic_in_bf16() -> None:
    for precision in ("auto", "bf16"):
        TrainConfig.model_validate({"weights": "bf16", "precision": precision})
    with pytest.raises(ValueError, match="'precision' must be bf16 or auto with 'weights' bf16"):
        TrainConfig.model_validate({"weights": "bf16", "precision": "fp32"})
