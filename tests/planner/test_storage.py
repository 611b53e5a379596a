"""Parameters and storage of any family, against built models and sharded ones."""

from typing import Any

import pytest
import torch
import transformers
from fake_mesh import simulated_mesh
from tiny_families import FAMILIES, LEAKING, MORE_FAMILIES, build

from memguard.hf.assembly import Assembly, build_meta_layer
from memguard.hf.load import count_parameters
from memguard.parallel.linear import to_local
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes, StorageOnly
from memguard.planner.machine import Machine
from memguard.planner.meta_model import measure_storage
from memguard.planner.step_settings import AdapterSizes, Work
from memguard.planner.storage import (
    ModelStorage,
    find_least_gpus,
    make_storage_mesh,
    rank_storage_meshes,
)

_ALL = {**FAMILIES, **MORE_FAMILIES, **LEAKING}


def make_config(family: str) -> Any:
    return transformers.AutoConfig.for_model(family, **_ALL[family])


def measure(family: str) -> ModelStorage:
    return measure_storage(make_config(family), name="m", unknown="no formula")


@pytest.mark.parametrize("family", _ALL)
def test_parameters_are_those_of_the_built_model(family: str) -> None:
    storage, model = measure(family), build(family)
    assert storage.num_parameters == count_parameters(model)
    assert sum(count for *_, count in storage.elements) == storage.num_parameters
    fields = model.config.to_dict()
    has_experts = "num_experts_per_tok" in fields or "moe_k" in fields
    if not has_experts:
        assert storage.num_active == storage.num_parameters


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_token_uses_the_others_and_its_share_of_the_experts(family: str) -> None:
    model = build(family)
    # Two of four experts.
    assert (model.config.num_local_experts, model.config.num_experts_per_tok) == (4, 2)
    in_experts = sum(
        parameter.numel()
        for module in model.modules()
        if type(module).__name__.endswith("Experts")
        for parameter in module.parameters()
    )
    assert in_experts > 0
    assert measure(family).num_active == count_parameters(model) - in_experts // 2


def test_experts_that_cost_nothing_leave_the_number_open() -> None:
    config = make_config("mixtral")
    config.zero_expert_num = 2
    assert measure_storage(config, name="m", unknown="").num_active is None


def test_layers_that_round_their_weights_are_not_split() -> None:
    """As `find_sizes` does, with the layers that training builds."""
    config = make_config("bitnet")
    config.quantization_config = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "online",
    }
    torch.compiler.set_stance("force_eager")
    try:
        storage = measure_storage(config, name="m", unknown="no formula")
    finally:
        torch.compiler.set_stance("default")
    assert storage.sizes == StorageOnly(family="bitnet")
    assert isinstance(config.quantization_config, dict), "the configuration is left as it is"


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", MeshShape(y=2, x=2)),
        ("cohere", MeshShape(z=2, x=2)),
        ("bloom", MeshShape(data=2, z=2)),
        ("gemma", MeshShape(z=2, y=2)),
    ],
)
def test_a_rank_stores_what_the_sharded_model_has(family: str, shape: MeshShape) -> None:
    stored = []
    for rank in range(shape.num_ranks):
        with simulated_mesh(shape, rank) as mesh:
            layer = build_meta_layer(
                make_config(family), Assembly(mesh=mesh, device=torch.device("cpu"))
            )
            stored.append(sum(to_local(p.data).numel() for p in layer.lm.model.parameters()))
    expected = measure(family).count_stored(shape)
    # A lower bound of the fullest rank; the mean over ranks but for the remainders.
    assert expected <= max(stored)
    assert expected == pytest.approx(sum(stored) / len(stored), rel=1e-6, abs=1)


STEP = Work(seq_len=1)
MACHINE = Machine(
    name="m",
    gpu="G",
    memory_gib=2,
    reserved_gib=1,
    gpus_per_node=4,
    link_gb_per_s=1,
    network_gb_per_s=1,
    peak_tflops=1,
)


def make_storage(num_parameters: int) -> ModelStorage:
    return ModelStorage(
        family="f",
        sizes=StorageOnly(family="f"),
        num_parameters=num_parameters,
        num_active=num_parameters,
        elements=((False, False, num_parameters),),
        unknown="no formula",
    )


def test_bytes_of_weights_gradients_and_moments() -> None:
    model = make_storage(1000)
    trained = make_storage_mesh(model, MeshShape(z=2), STEP, MACHINE).memory
    assert (trained.weights, trained.gradients, trained.optimizer) == (2000, 2000, 4000)
    assert trained.at_least == 8000
    frozen = Work(seq_len=1, adapter=AdapterSizes(r=1))
    memory = make_storage_mesh(model, MeshShape(data=2), frozen, MACHINE).memory
    assert (memory.weights, memory.gradients, memory.at_least) == (2000, None, 2000)
    # What is unknown is null, not zero.
    assert memory.model_dump()["activations"] is None


def test_the_least_number_of_gpus_holds_the_storage() -> None:
    # 16 bytes each, on GPUs with 1 GiB: 5 GiB need 5 GPUs, so 2 nodes of 4.
    model = make_storage(5 * 2**30 // 16)
    assert find_least_gpus(model, STEP, MACHINE) == 8
    assert find_least_gpus(make_storage(100), STEP, MACHINE) == 1
    ranked = rank_storage_meshes(model, [MeshShape(data=8), MeshShape(z=8)], STEP, MACHINE)
    assert [(mesh.z, mesh.can_fit) for mesh in ranked] == [(8, True), (1, False)]


def test_sizes_of_families_that_can_be_split_give_their_meshes() -> None:
    assert isinstance(measure("cohere").sizes, ModelSizes)
    assert measure("bloom").sizes == StorageOnly(family="bloom")


def test_experts_larger_than_any_memory_are_counted() -> None:
    """Not one tensor is allocated: this one would take 1.9 TB."""
    sizes = {"num_local_experts": 4096, "hidden_size": 4096, "intermediate_size": 14336}
    config = transformers.AutoConfig.for_model("mixtral", num_hidden_layers=1, **sizes)
    storage = measure_storage(config, name="m", unknown="no formula")
    assert storage.num_parameters > 4096 * 3 * 4096 * 14336
