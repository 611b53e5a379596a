"""Blocks of experts on meshes: numbers of one process, its parts of memory, few collectives."""

import copy
from typing import Any

import pytest
import torch
from meshes import all_rectangles
from parity import Case
from ranks import RankPool
from test_collectives import Operators
from test_parity import check
from test_shard import draw_ids, make_layer, plain_gradients, sum_loss
from tiny_families import LEAKING, build
from torch import nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from memguard.errors import ModelError
from memguard.hf.assembly import Assembly, build_meta_layer
from memguard.parallel.experts import Experts4D, ExpertsBlock4D, Local4D
from memguard.parallel.fused import Parts
from memguard.parallel.hf_plan import PLACEMENTS, plan_sharding
from memguard.parallel.layout import ShardSlice, find_rectangle
from memguard.parallel.linear import Linear4D
from memguard.parallel.local_parameters import find_local_parameters
from memguard.parallel.lora import LoraSpec
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.shard import checkpoint_blocks

pytestmark = pytest.mark.slow

FAMILIES = (
    *("mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "olmoe", "qwen2_moe"),
    *("dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe"),
)
# 2 ranks along z do not divide 3 experts.
_ODD = (("num_local_experts", 3),)
# float32: 1e-7 an operation, some hundred operations deep.
_SINGLE = 1e-5


def case_of(family: str, *changes: tuple[str, Any], **settings: Any) -> Case:
    """Experts one by one: kernels for all at once have no float64."""
    return Case(
        family=family,
        changes=(("experts_implementation", "eager"), *changes),
        packed=family not in LEAKING,
        **settings,
    )


@pytest.mark.quick
def test_a_sample_equals_one_process(ranks: RankPool) -> None:
    cases = [
        case_of("mixtral", *_ODD, num_steps=2, micro_batch_size=2, checkpointing="selective"),
    ]
    check(ranks, (1, 1, 2, 2), cases)


@pytest.mark.mesh
@pytest.mark.parametrize("degrees", [(2, 2, 1, 1), (1, 2, 1, 2), (1, 2, 2, 2)], ids=str)
def test_meshes_equal_one_process(ranks: RankPool, degrees: Any) -> None:
    # test_parity has more meshes.
    check(ranks, degrees, [case_of(family) for family in FAMILIES])


@pytest.mark.mesh
@pytest.mark.parametrize("degrees", [(1, 2, 1, 2), (1, 4, 1, 1)], ids=str)
def test_experts_that_z_does_not_divide(ranks: RankPool, degrees: Any) -> None:
    check(ranks, degrees, [case_of(family, *_ODD) for family in ("mixtral", "gpt_oss")])


@pytest.mark.mesh
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_no_number(ranks: RankPool, mode: str) -> None:
    cases = [case_of(family, checkpointing=mode, micro_batch_size=4) for family in FAMILIES]
    check(ranks, (1, 1, 2, 2), cases)


@pytest.mark.mesh
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_kernels_of_all_experts_at_once(ranks: RankPool, mode: str) -> None:
    """Those of transformers' default, in fp32; one step, as AdamW magnifies what differs."""
    cases = [
        Case(
            family=family,
            changes=(("experts_implementation", implementation),),
            packed=family not in LEAKING,
            dtype=torch.float32,
            num_steps=1,
            checkpointing=mode,
        )
        for family in FAMILIES
        for implementation in ("grouped_mm", "batched_mm")
    ]
    check(ranks, (1, 1, 2, 2), cases, _SINGLE)


@pytest.mark.mesh
def test_adapters_of_attention_equal_peft(ranks: RankPool) -> None:
    spec = LoraSpec(r=4, alpha=8, target_modules=("q_proj", "v_proj", "o_proj"))
    cases = [case_of(family, adapter=spec) for family in ("mixtral", "qwen2_moe")]
    check(ranks, (1, 1, 2, 2), cases)


# -- what a rank stores ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaf", "shape"), [("gate_up_proj", (8, 2 * 14336, 4096)), ("down_proj", (8, 4096, 14336))]
)
@pytest.mark.parametrize("mesh", [MeshShape(z=16), MeshShape(z=16, y=2, x=4)], ids=str)
def test_16_ranks_share_8_experts(leaf: str, shape: tuple[int, ...], mesh: MeshShape) -> None:
    """Mixtral-8x7B: along the experts, each of 16 ranks would store one of 8."""
    for ranks, rectangle in all_rectangles(shape, PLACEMENTS["experts", leaf], mesh):
        assert rectangle.num_elements * mesh.num_ranks == torch.Size(shape).numel(), ranks


def test_experts_that_z_divides_are_stored_whole() -> None:
    rectangle = find_rectangle(
        (8, 128, 32),
        PLACEMENTS["experts", "gate_up_proj"],
        MeshShape(z=4),
        {"z": 1, "y": 0, "x": 0},
    )
    assert rectangle == ShardSlice(start=(2, 0, 0), shape=(2, 128, 32))


def test_no_dimension_that_z_divides_is_padded() -> None:
    shape = (8, 5, 7)
    stored = all_rectangles(shape, (Replicate(), Replicate()), MeshShape(z=16))
    assert [rectangle.shape[0] for _, rectangle in stored] == [1] * 8 + [0] * 8


@pytest.mark.parametrize(
    ("mesh", "width", "dim"), [(MeshShape(z=3, y=2), 6, 1), (MeshShape(z=2, y=2, x=2), 8, 0)]
)
def test_a_rank_has_the_same_rows_of_gate_and_up(mesh: MeshShape, width: int, dim: int) -> None:
    """Of 4 experts, 3 ranks along z each store some rows, one of them the last of gate and up."""
    full = torch.arange(4 * 2 * width * 5).view(4, 2 * width, 5)
    num_cuts = mesh.y * mesh.x
    order = Parts(sizes=(width, width)).order(num_cuts, 1)
    assert order is not None
    placements = PLACEMENTS["experts", "gate_up_proj"]
    stored: dict[int, list[torch.Tensor]] = {number: [] for number in range(num_cuts)}
    for rank, rectangle in all_rectangles(full.shape, placements, mesh):
        local = torch.full(rectangle.shape, -1)
        for piece in order.split(rectangle):
            local[piece.mesh.slices] = full[piece.file.slices]
        stored[rank["y"] * mesh.x + rank["x"]].append(local)
    halves = [half.chunk(num_cuts, 1) for half in full.split(width, 1)]
    for number, pieces in stored.items():
        expected = torch.cat([half[number] for half in halves], 1)
        assert torch.equal(torch.cat(pieces, dim), expected)


def count_stored() -> list[tuple[int, int]]:
    """On a rank: numbers of parameters of experts, stored and of the whole model."""
    mesh = build_mesh(MeshShape(z=2, x=2), "cpu")
    found = []
    for family in ("mixtral", "gpt_oss"):
        config = build(family, num_local_experts=3).config
        layer = build_meta_layer(config, Assembly(mesh=mesh, device=torch.device("cpu")))
        named = layer.lm.model.named_parameters()
        experts: list[Any] = [p for name, p in named if ".experts." in name and p.ndim > 2]
        stored = sum(parameter.to_local().numel() for parameter in experts)
        found.append((stored, sum(parameter.numel() for parameter in experts)))
    return found


def test_fsdp_pads_no_expert(ranks: RankPool) -> None:
    for found in ranks(count_stored, 4):
        for stored, full in found:
            assert stored * 4 == full


# -- structure ---------------------------------------------------------------------------------


def describe(*families: str) -> list[dict[str, Any]]:
    """On a rank: classes of the modules of a block, and gradients that are partial."""
    return [_describe(family) for family in families]


def _describe(family: str) -> dict[str, Any]:
    plain = build(family)
    layer = make_layer(MeshShape(y=2, x=2), plain)
    block = layer.lm.model.get_submodule("model.layers.1.mlp")
    kinds = (ExpertsBlock4D, Experts4D, Local4D, Linear4D)
    listed = find_local_parameters(layer.lm.model, layer.lm.mesh)
    return {
        "names": [name for name, _ in layer.lm.model.named_parameters()]
        == [name for name, _ in plain.named_parameters()],
        "classes": {
            name: next(kind.__name__ for kind in kinds if isinstance(module, kind))
            for name, module in block.named_modules()
            if isinstance(module, kinds)
        },
        "partial": {each.name for each in listed if each.partial_over == ("y", "x")},
        "copied": {each.name for each in listed if each.is_copied_over_y},
        "bias": None
        if family != "gpt_oss"
        else block.experts.expose("down_proj_bias", block.experts.down_proj_bias).shape,
    }


def test_the_modules_of_a_block(ranks: RankPool) -> None:
    found, with_sinks = ranks(describe, 4, "qwen2_moe", "gpt_oss")[0]
    assert found["names"]
    assert found["classes"] == {
        "": "ExpertsBlock4D",
        "gate": "Local4D",
        "experts": "Experts4D",
        "shared_expert.gate_proj": "Linear4D",
        "shared_expert.up_proj": "Linear4D",
        "shared_expert.down_proj": "Linear4D",
        "shared_expert_gate": "Linear4D",
    }
    # The first layer is dense.
    gates = {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.shared_expert_gate.weight"}
    assert found["partial"] == gates
    assert not found["copied"] & gates
    # Sinks of attention are split like heads; ranks along y have the same.
    assert PLACEMENTS["sinks", "sinks"] == (Replicate(), Shard(0))
    assert "model.layers.0.self_attn.sinks" in with_sinks["copied"]
    assert with_sinks["bias"] == (4, 32), "its own features of the bias, zeros elsewhere"


def test_experts_in_another_layout_are_refused() -> None:
    model = build("mixtral")
    model.model.layers[1].mlp.experts.has_gate = False
    with pytest.raises(ModelError, match=r"no sharded form of model\.layers\.1\.mlp\.experts"):
        plan_sharding(model)


def test_one_process_stores_checkpoints_in_the_shape_of_files() -> None:
    model = build("mixtral")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    (parameter,) = [each for each in find_local_parameters(model) if each.name == name]
    stored = parameter.local.detach()
    assert stored.shape == (4, 128, 32)
    assert parameter.to_global(stored) is stored
    step = torch.zeros(())
    assert parameter.to_global(step) is step


def refuse() -> list[str]:
    """On a rank: messages about adapters, and about noise in routers."""
    mesh, messages = build_mesh(MeshShape(x=2), "cpu"), []
    for model, adapter in (
        (build("qwen2_moe"), LoraSpec(r=2, alpha=2)),
        (build("mixtral", router_jitter_noise=0.1), None),
    ):
        sharding = Assembly(mesh=mesh, device=torch.device("cpu"), adapter=adapter)
        with pytest.raises(ModelError) as refused:
            build_meta_layer(model.config, sharding)
        messages.append(str(refused.value))
    return messages


def test_what_experts_cannot_do_over_x_is_refused_by_name(ranks: RankPool) -> None:
    about_adapters, about_noise = ranks(refuse, 2)[0]
    assert "'model.layers.1.mlp.shared_expert.gate_proj' of Qwen2MoeForCausalLM" in about_adapters
    assert "use the axes data and z" in about_adapters
    assert "it has jitter_noise=0.1" in about_noise


# -- collectives -------------------------------------------------------------------------------


def count(shape: MeshShape) -> dict[str, dict[str, int]]:
    """On a rank: collectives over y and x of a block, forward and backward, by mode."""
    found = {}
    for mode in ("none", "full", "selective"):
        counts = []
        for num_layers in (1, 2):
            plain = build("mixtral", num_hidden_layers=num_layers)
            layer = make_layer(shape, plain, checkpointing=mode)
            with Operators() as forward:
                loss = sum_loss(layer, draw_ids(0))
            with Operators() as backward:
                loss.backward()
            counts.append(
                {
                    f"{direction} {name}": operators.names.count(f"_c10d_functional.{name}")
                    + operators.names.count(f"_c10d_functional.{name}_")
                    for direction, operators in (("forward", forward), ("backward", backward))
                    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
                }
            )
        one, two = counts
        found[mode] = {name: two[name] - one[name] for name in one if two[name] - one[name]}
    return found


def test_collectives_of_a_block(ranks: RankPool) -> None:
    for found in ranks(count, 4, MeshShape(y=2, x=2)):
        once = {
            # Over y: q|k|v and two norms. Over x: o and the block's exit.
            "forward all_reduce": 5,
            "forward all_gather_into_tensor": 1,
            "forward reduce_scatter_tensor": 1,
            # Over y: o's input and two norms. Over x: inputs of q|k|v and of the block.
            "backward all_reduce": 5,
            "backward all_gather_into_tensor": 1,
            "backward reduce_scatter_tensor": 1,
        }
        assert found["none"] == once
        # Each rank of x stores a part of the block's input, which backward gathers.
        gathered_input = {"backward all_gather_into_tensor": 2}
        assert found["selective"] == {**once, **gathered_input}
        # All of forward but the block's exit, after which there is nothing that backward needs.
        assert found["full"] == {
            **once,
            "backward all_reduce": once["backward all_reduce"] + 4,
            "backward all_gather_into_tensor": 3,
        }


def test_selective_checkpointing_of_experts_with_biases_on_one_process() -> None:
    """Biases are added in place to products, which must not have been kept."""
    plain = build("gpt_oss")
    expected = plain_gradients(plain, [draw_ids(0)])
    again = copy.deepcopy(plain)
    checkpoint_blocks(again, "selective")
    for name, gradient in plain_gradients(again, [draw_ids(0)]).items():
        assert torch.equal(gradient, expected[name]), name


def test_a_module_reads_its_parameters_as_local_tensors_only_in_its_forward() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, fails: bool) -> Any:
            assert not isinstance(self.weight, nn.Parameter)
            if fails:
                raise ValueError("failed")
            return self.weight

    class Halved(Local4D):
        def expose(self, leaf: str, parameter: torch.Tensor) -> torch.Tensor:
            return parameter / 2

    module = Halved.convert(Scale())
    assert module(False).tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="failed"):
        module(True)
    assert isinstance(module.weight, nn.Parameter)
