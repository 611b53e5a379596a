"""AdamW on parts of tensors: against torch's, and on pieces of a tensor against the whole."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from bitsandbytes.functional import create_dynamic_map
from fake_mesh import simulated_mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, Shard

from memguard.config import OptimConfig
from memguard.config.optimizers import is_quantised
from memguard.errors import ConfigError
from memguard.optim import build_optimizer
from memguard.optim.blockwise import build_table
from memguard.parallel.fused import Parts
from memguard.parallel.local_parameters import LocalParameter, find_local_parameters
from memguard.parallel.mesh_shape import MeshShape

Steps = dict[str, Tensor]
SHAPE = (66, 192)
STEPS = (1, 2, 3)


def draw(step: int, shape: tuple[int, ...], scale: float = 1e-3) -> Tensor:
    """Return a gradient whose rows differ in size."""
    generator = torch.Generator().manual_seed(step)
    sizes = 10 ** torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator)
    return torch.randn(shape, generator=generator) * sizes * scale


def take_steps(
    shape: tuple[int, ...],
    cut: Callable[[Tensor], Tensor] = lambda whole: whole,
    *,
    name: str = "adamw_8bit",
    scale: float = 1e-3,
    dtype: torch.dtype = torch.float32,
    weight_decay: float = 0.1,
) -> Steps:
    """Return weights and state of a piece of a tensor, after some steps."""
    whole = draw(0, shape).to(dtype)
    local = nn.Parameter(cut(whole).clone())
    source = nn.Parameter(torch.empty(shape, device="meta"))
    each = LocalParameter(name="weight", source=source, local=local, num_copies=1)
    optim = OptimConfig.model_validate({"name": name, "weight_decay": weight_decay, "eps": 1e-15})
    optimizer = build_optimizer([each], optim)
    for step in STEPS:
        local.grad = cut(draw(step, shape, scale)).to(dtype)
        optimizer.begin(step=step, lr=1e-3)
        optimizer.update()
    state = optimizer.state_of(each)
    return {"weights": local.detach(), "change": local.detach() - cut(whole), **state}


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def assert_same(piece: Steps, whole: Steps, cut: Callable[[Tensor], Tensor]) -> None:
    assert piece.keys() == whole.keys()
    for field, value in whole.items():
        expected = value
        if field.endswith("_scales"):
            # Every element has the scale of its block.
            expected = cut(value.repeat_interleave(64, dim=-1))[..., ::64]
        elif value.ndim:
            expected = cut(value)
        assert torch.equal(piece[field], expected), field


def list_cuts() -> Iterable[Callable[[Tensor], Tensor]]:
    yield lambda whole: whole[:44]
    yield lambda whole: whole[44:]
    yield lambda whole: whole[:, 64:128]
    yield lambda whole: whole[5:7, 128:]
    yield lambda whole: whole[:0]
    # Of a fused projection: rows, or blocks of columns, of each of its parts.
    yield lambda whole: torch.cat([whole[3:20], whole[33:50]])
    yield lambda whole: torch.cat([whole[:, :64], whole[:, 128:]], dim=1)


@pytest.mark.parametrize("shape", [SHAPE, (2, 33, 192)], ids=str)
def test_pieces_have_the_codes_scales_and_weights_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = take_steps(shape)
    assert whole["exp_avg_codes"].dtype == torch.uint8
    assert whole["exp_avg_sq_scales"].shape == (*shape[:-1], 3)
    for cut in list_cuts() if len(shape) == 2 else [lambda whole: whole[1:, 7:, 64:]]:
        assert_same(take_steps(shape, cut), whole, cut)


@pytest.mark.parametrize("start", [0, 1, 13])
def test_moments_in_fp32_depend_on_no_place_in_a_vector(start: int) -> None:
    # Of 4,099 elements vectors of 8 or 16 leave others over than of the whole.
    def cut(whole: Tensor) -> Tensor:
        return whole[start : start + 4099]

    assert_same(take_steps((9001,), cut), take_steps((9001,)), cut)


def test_with_fp32_moments_it_is_the_adamw_of_torch() -> None:
    # Embeddings and vectors are not quantised.
    for shape in ((100, 30), (130,)):
        ours, theirs = take_steps(shape), take_steps(shape, name="adamw")
        assert "exp_avg_codes" not in ours
        torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=1e-6, atol=1e-9)
        for field in ("exp_avg", "exp_avg_sq"):
            assert distance(ours[field], theirs[field]) < 1e-6


def test_the_error_of_codes_does_not_grow_with_small_gradients() -> None:
    errors = []
    for scale in (1e-4, 1e-8):
        ours, exact = (
            take_steps(SHAPE, name=name, scale=scale)["change"] for name in ("adamw_8bit", "adamw")
        )
        errors.append(distance(ours, exact))
    assert 0.001 < errors[1] <= errors[0] * 1.01 < 0.02


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_of_the_nearest_value(*, is_signed: bool) -> None:
    values = create_dynamic_map(is_signed)
    number = torch.logspace(-12, 0, 4001)
    number = torch.cat([-number, torch.zeros(1), number]) if is_signed else number
    upper = (number.view(torch.int32) >> 12) + (1 << 19)
    codes = build_table(values, least=0 if is_signed else 1)[upper].long()
    nearest = (number[:, None] - values).abs()
    if not is_signed:
        nearest[:, 0] = 1
    error = (values[codes] - number).abs() - nearest.amin(1)
    assert bool((error <= number.abs() / 2048).all())
    assert is_signed or int(codes.min()) == 1


def test_small_moments_in_a_block_of_large_ones_cause_no_large_update() -> None:
    largest = {}
    for name in ("adamw", "adamw_8bit"):
        source = nn.Parameter(torch.zeros(64, 64))
        each = LocalParameter(name="weight", source=source, local=source, num_copies=1)
        optimizer = build_optimizer([each], OptimConfig.model_validate({"name": name}))
        largest[name] = 0.0
        for step in range(1, 20):
            source.grad = draw(step, (64, 64)) / 1e3
            source.grad[:, 0] *= 1e4
            before = source.detach().clone()
            optimizer.begin(step=step, lr=1e-3)
            optimizer.update()
            largest[name] = max(largest[name], float((source.detach() - before).abs().max()))
    assert largest["adamw_8bit"] < 2 * largest["adamw"]


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_moments_of_other_dtypes_are_in_fp32(name: str) -> None:
    exact = take_steps(SHAPE, name="adamw", weight_decay=0)
    wide = take_steps(SHAPE, name="adamw_8bit", dtype=torch.float64, weight_decay=0)
    assert wide["weights"].dtype == torch.float64
    same = take_steps(SHAPE, weight_decay=0)
    assert torch.equal(wide["exp_avg_codes"], same["exp_avg_codes"])
    torch.testing.assert_close(wide["change"].float(), same["change"], rtol=1e-3, atol=1e-7)
    narrow = take_steps(SHAPE, name=name, dtype=torch.bfloat16, weight_decay=0)
    assert narrow["weights"].dtype == torch.bfloat16
    if name == "adamw":
        # Gradients in bf16 differ by at most 1/256.
        assert distance(narrow["exp_avg"], exact["exp_avg"]) < 1 / 256


def test_what_has_no_gradient_has_no_state_and_keeps_its_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].requires_grad_(requires_grad=False)
    parameters = find_local_parameters(model)
    assert [each.name for each in parameters] == ["0.weight", "0.bias"]
    optimizer = build_optimizer(parameters, OptimConfig(name="adamw_8bit"))
    before = model[0].bias.detach().clone()
    model[0].weight.grad = torch.ones(64, 64)
    optimizer.begin(step=1, lr=1e-3)
    optimizer.update()
    assert len(optimizer.state_of(parameters[0])) == 5
    assert optimizer.state_of(parameters[1]) == {}
    assert torch.equal(model[0].bias, before)


def test_what_is_quantised_follows_from_the_whole_shape() -> None:
    assert is_quantised((64, 64))
    assert is_quantised((4, 32, 64))
    assert not is_quantised((63, 64))
    assert not is_quantised((400, 96))
    assert not is_quantised((4096,))
    assert not is_quantised((64, 64), is_embedding=True)


def test_embeddings_are_known_also_as_heads() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(64, 64), "head": nn.Linear(64, 64, bias=False)})
    found = {each.name: each.is_embedding for each in find_local_parameters(model)}
    assert found == {"embed.weight": True, "head.weight": False}
    model["head"].weight = model["embed"].weight
    assert [each.is_embedding for each in find_local_parameters(model)] == [True]


@pytest.mark.parametrize(
    ("shape", "placements", "order", "message"),
    [
        ((64, 384), (Shard(0), Shard(1)), None, None),
        ((97, 64), (Shard(0), Shard(0)), None, None),
        ((96, 96), (Shard(0), Shard(1)), None, None),  # Not quantised.
        ((64, 192), (Replicate(), Shard(1)), None, "got parts of 96: split fewer"),
        ((64, 384), (Shard(1), Shard(1)), None, "got parts of 96: split fewer"),
        # Whole blocks, but not of each of three projections.
        ((64, 576), (Replicate(), Shard(1)), 192, "got parts of 96: split fewer"),
        ((64, 768), (Replicate(), Shard(1)), 256, None),
    ],
)
def test_a_mesh_that_cuts_blocks_is_refused_on_every_rank(
    shape: tuple[int, ...], placements: Any, order: int | None, message: str | None
) -> None:
    fused = None if order is None else Parts(sizes=(order,) * 3).order(2, 1)
    for rank in (0, 3):
        with simulated_mesh(MeshShape(y=2, x=2), rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("y", "x"))
            local, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
            whole, part = (torch.empty(size, device="meta") for size in (shape, local))
            source = DTensor.from_local(
                part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            each = LocalParameter(
                name="down_proj.weight",
                source=nn.Parameter(source),
                local=nn.Parameter(part),
                num_copies=1,
                order=fused,
            )
            if message is None:
                build_optimizer([each], OptimConfig(name="adamw_8bit"))
                continue
            with pytest.raises(ConfigError, match=message) as caught:
                build_optimizer([each], OptimConfig(name="adamw_8bit"))
            assert len(str(caught.value)) <= 160
