"""Local tensors against the whole ones: storage, gradient norm, clipping, and the way back."""

from typing import Any

import pytest
import torch
from fake_mesh import simulated_mesh
from parity import OPTIM, make_batch, share
from ranks import RankPool
from test_collectives import draw
from test_shard import make_layer
from tiny_families import build
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from memguard.config import TrainConfig
from memguard.hf.assembly import Assembly, allocate, build_meta_layer
from memguard.mitigation import build_mitigations
from memguard.parallel.local_parameters import (
    LocalParameter,
    StoredPieces,
    average_copies,
    clear_gradients,
    clip_gradients,
    find_local_parameters,
    sum_partial_gradients,
    take_gradients,
)
from memguard.parallel.lora import LoraSpec
from memguard.parallel.mesh import Axis, build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.runtime import Runtime
from memguard.train.step import TrainStep

pytestmark = pytest.mark.slow

# Sums of squares of some dozen float64 numbers, in another order.
EXACT = {"rtol": 1e-14, "atol": 0.0}

# Over (z=2, x=2): whole pieces, uneven ones, an empty one on half of the ranks, copies.
PIECES: dict[str, tuple[tuple[int, ...], tuple[Any, Any]]] = {
    "both": ((5, 6), (Shard(0), Shard(1))),
    "over_x": ((6,), (Replicate(), Shard(0))),
    "one_row": ((1, 3), (Shard(0), Replicate())),
    "copies": ((4,), (Replicate(), Replicate())),
}


def make_model(mesh: DeviceMesh | None) -> nn.Module:
    model = nn.Module()
    for seed, (name, (shape, placements)) in enumerate(PIECES.items()):
        full = draw(seed, *shape)
        value = full if mesh is None else shard(full, mesh, placements)
        model.register_parameter(name, nn.Parameter(value))
    model.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    return model


def set_gradients(model: nn.Module, mesh: DeviceMesh | None, scale: float) -> None:
    for seed, (name, (shape, placements)) in enumerate(PIECES.items()):
        full = draw(50 + seed, *shape) * scale
        model.get_parameter(name).grad = full if mesh is None else shard(full, mesh, placements)


def shard(full: Tensor, mesh: DeviceMesh, placements: tuple[Any, Any]) -> DTensor:
    local = full
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            # torch.chunk leaves out the pieces that are empty.
            rank, size = mesh.get_local_rank(dim), local.shape[placement.dim]
            length = -(-size // mesh.size(dim))
            first = min(rank * length, size)
            local = local.narrow(placement.dim, first, min(length, size - first))
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


SETTINGS = [(1.0, None), (1.0, 0.5), (1.0, 1e9), (0.0, 1.0)]


def clip_all(is_sharded: bool) -> list[tuple[float, dict[str, Tensor]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("z", "x")) if is_sharded else None
    model = make_model(mesh)
    parameters = find_local_parameters(model)
    assert [each.name for each in parameters] == list(PIECES)
    found = []
    for scale, max_norm in SETTINGS:
        set_gradients(model, mesh, scale)
        take_gradients(parameters)
        norm = clip_gradients(parameters, max_norm)
        # Clipped in place: what the model's parameters hold is the same storage.
        gradients = {}
        for each in parameters:
            gradient = each.source.grad
            assert gradient is not None
            gradients[each.name] = (
                gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
            )
        found.append((norm, gradients))
        clear_gradients(parameters)
        assert all(each.source.grad is None and each.local.grad is None for each in parameters)
    return found


def restate() -> list[tuple[float, dict[str, Tensor]]]:
    found = []
    for scale, max_norm in SETTINGS:
        model = make_model(None)
        set_gradients(model, None, scale)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
        gradients = {name: model.get_parameter(name).grad for name in PIECES}
        found.append((float(norm), gradients))
    return found  # type: ignore[return-value]


@pytest.mark.quick
def test_norm_and_clipping_are_those_of_torch(ranks: RankPool) -> None:
    expected = restate()
    for found in [*ranks(clip_all, 4, True), clip_all(False)]:
        for (norm, gradients), (their_norm, their_gradients) in zip(found, expected, strict=True):
            assert norm == pytest.approx(their_norm, rel=1e-14)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, their_gradients[name], **EXACT)


def test_gradients_of_half_precision_are_measured_in_single() -> None:
    parameter = nn.Parameter(torch.ones(300_000, dtype=torch.bfloat16))
    each = LocalParameter(name="p", source=parameter, local=parameter, num_copies=1)
    parameter.grad = torch.full_like(parameter, 0.01)
    exact = float(parameter.grad[0]) * 300_000**0.5
    # torch adds squares in fp32 one after the other on CPUs; a norm in bf16 is off by 2.5e-3.
    assert clip_gradients([each], None) == pytest.approx(exact, rel=1e-3)


def test_on_one_process_the_local_parameter_is_the_parameter() -> None:
    model = build("llama")
    for each in find_local_parameters(model):
        assert each.local is each.source
        assert each.num_copies == 1
        value = torch.zeros_like(each.local)
        assert each.to_global(value) is value


def check_sharded_layer() -> list[str]:
    """On a rank of (data=2, z=2, x=2): what is wrong."""
    torch.manual_seed(0)
    plain = build("qwen2")
    layer = make_layer(MeshShape(data=2, z=2, x=2), plain)
    parameters = find_local_parameters(layer.lm.model)
    full = dict(plain.named_parameters())
    wrong = [] if [each.name for each in parameters] == list(full) else ["names"]
    num_elements = torch.zeros(1, dtype=torch.float64)
    for each in parameters:
        assert isinstance(each.source, DTensor)
        if each.local.data_ptr() != each.source.to_local().data_ptr():
            wrong.append(f"{each.name} has storage of its own")
        num_elements += each.local.numel() / each.num_copies
        again = each.to_global(each.local.detach() * 2)
        assert isinstance(again, StoredPieces)
        for start, piece in again.pieces.items():
            place = tuple(slice(a, a + n) for a, n in zip(start, piece.shape, strict=True))
            if not torch.equal(piece, 2 * full[each.name][place]):
                wrong.append(f"{each.name} is not found again")
        if sum(piece.numel() for piece in again.pieces.values()) != each.local.numel():
            wrong.append(f"{each.name} is not whole")
        step = torch.tensor(3.0)
        if each.to_global(step) is not step:
            wrong.append("a step has no place on the mesh")
    dist.all_reduce(num_elements)
    if num_elements.item() != sum(p.numel() for p in full.values()):
        wrong.append(f"{num_elements.item()} elements without copies")
    # Between forward and backward the root's parameters are gathered ones.
    ids = torch.ones(1, 4, dtype=torch.long)
    layer.lm(lambda: layer.lm.hidden_states(ids))
    try:
        find_local_parameters(layer.lm.model)
    except AssertionError as error:
        return wrong if "model.norm.weight is gathered" in str(error) else [*wrong, str(error)]
    return [*wrong, "gathered parameters are taken for stored ones"]


def test_the_local_parameters_of_a_sharded_model(ranks: RankPool) -> None:
    assert ranks(check_sharded_layer, 8) == [[]] * 8


# -- copies over y -----------------------------------------------------------------------------


def average(degree: int) -> list[tuple[str, Tensor, Tensor]]:
    """On a rank: name, gradient before and after averaging; z cuts one row into one and none."""
    mesh = init_device_mesh("cpu", (2, degree), mesh_dim_names=("z", "y"))
    model = make_model(mesh)
    parameters = find_local_parameters(model)
    for seed, parameter in enumerate(parameters):
        # Equal on all ranks, and one bit more on one of them.
        gradient = draw(70 + seed, *parameter.local.shape).float()
        parameter.local.data = parameter.local.data.float()
        parameter.local.grad = gradient * (1 + 2**-22 * (seed % 2) * (dist.get_rank() == 1))
    before = {parameter.name: parameter.local.grad.clone() for parameter in parameters}  # type: ignore[union-attr]
    y = Axis(name="y", degree=degree, rank=mesh.get_local_rank("y"), group=mesh.get_group("y"))
    average_copies(parameters, y)
    return [
        (parameter.name, before[parameter.name], parameter.local.grad.clone())  # type: ignore[union-attr]
        for parameter in parameters
        if parameter.local.grad is not None
    ]


@pytest.mark.quick
def test_copies_of_adapters_are_counted_and_their_gradients_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, spec = build("llama"), LoraSpec(r=2, alpha=2, use_dora=True)
    with simulated_mesh(MeshShape(data=2, z=3, y=1, x=2)) as mesh:
        assembly = Assembly(mesh=mesh, device=torch.device("cpu"), adapter=spec)
        layer = build_meta_layer(model.config, assembly)
        allocate(layer.lm, torch.device("cpu"))
        parameters = find_local_parameters(layer.lm.model, mesh)
        for each in parameters:
            each.local.grad = torch.ones_like(each.local)
        # As if all ranks had the same gradients.
        name = "memguard.parallel.local_parameters.all_reduce"
        monkeypatch.setattr(name, lambda tensor, axis, **_: tensor * axis.degree)
        sum_partial_gradients(parameters, mesh)
    found = {
        each.name.partition("self_attn.")[2]: (each.num_copies, each.local.grad.unique().tolist())
        for each in parameters
        if "layers.0.self_attn" in each.name and each.local.grad is not None
    }
    # Rows are dealt over data and z, and their gradients are means. x splits the features out of q
    # and into o: each rank has a part of the gradient of the factor that it does not split.
    assert found["q_proj.lora_A.weight"] == found["o_proj.lora_B.weight"] == (2 * 3 * 2, [2])
    assert found["q_proj.lora_B.weight"] == found["o_proj.lora_A.weight"] == (2 * 3, [1])
    assert found["q_proj.lora_magnitude_vector.weight"] == (2 * 3, [1])


@pytest.mark.parametrize("degree", [2, 3])
def test_gradients_of_copies_over_y_are_averaged(ranks: RankPool, degree: int) -> None:
    found = ranks(average, 2 * degree, degree)
    for z in range(2):
        members = found[z * degree : (z + 1) * degree]
        for pieces in zip(*members, strict=True):
            name = pieces[0][0]
            mean = torch.stack([before.double() for _, before, _ in pieces]).mean(0).float()
            for _, before, after in pieces:
                is_copy = PIECES[name][1][1] == Replicate()
                # Bit for bit: the mean of equal numbers is that number, over three ranks too.
                assert torch.equal(after, mean if is_copy else before), name


def train_with_noise() -> list[Tensor]:
    """On a rank of y=2: biases and head norms after two steps with noise in attention's backward.

    The noise stands for kernels whose sums have no fixed order, and differs along y.
    """
    mesh = build_mesh(MeshShape(y=2, x=2), "cpu")
    found = []
    for family in ("qwen2", "qwen3"):
        layer = make_layer(mesh, build(family))
        for name, module in layer.lm.model.named_modules():
            if name.endswith("o_proj"):
                module.register_full_backward_hook(
                    lambda _, grads, __: (grads[0] * (1 + 1e-3 * mesh.axis("y").rank),)
                )
        step = TrainStep(
            lm=layer.lm,
            mitigations=build_mitigations((), special_ids=[]),
            train=TrainConfig(batch_size=8, micro_batch_size=None),
            optim=OPTIM,
            seed=0,
            runtime=Runtime(rank=dist.get_rank(), world_size=dist.get_world_size()),
        )
        for number in range(2):
            step.run(share(make_batch(number, 97), mesh), lr=1e-2, step=1, first_sample=0)
        found += [each.local.detach().clone() for each in step.parameters if each.is_copied_over_y]
    return found


def test_copies_over_y_stay_equal_where_backward_is_not_exact(ranks: RankPool) -> None:
    # Ranks 0 and 1 are along x, which cuts the biases.
    one, two, one_y, two_y = ranks(train_with_noise, 4)
    assert len(one) == 2 * 3 + 2 * 2, "three biases a block of qwen2, two norms of qwen3"
    for rank, other in ((one, one_y), (two, two_y)):
        assert all(torch.equal(a, b) for a, b in zip(rank, other, strict=True))
