"""Parameters and storage of any family, against built models and sharded ones."""

from typing import Any

import pytest
import torch
import transformers
from fake_mesh import simulated_mesh
from tiny_families import FAMILIES, LEAKING, MORE_FAMILIES, build

from memguard.config import ParallelConfig
from memguard.hf.assembly import Assembly, build_meta_layer
from memguard.hf.load import count_parameters
from memguard.parallel.linear import to_local
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes, StorageOnly
from memguard.planner.fit import PlanInputs
from memguard.planner.machine import Machine
from memguard.planner.meta_model import measure_storage
from memguard.planner.plan import ModelStorage, Plan, make_plan
from memguard.planner.step_settings import AdapterSizes, Work

pytestmark = pytest.mark.slow

_ALL = {**FAMILIES, **MORE_FAMILIES, **LEAKING}


def make_config(family: str) -> Any:
    return transformers.AutoConfig.for_model(family, **_ALL[family])


def measure(family: str) -> ModelStorage:
    return measure_storage(make_config(family), name="m", unknown="no formula")


@pytest.mark.parametrize("family", _ALL)
def test_parameters_are_those_of_the_built_model(family: str) -> None:
    storage = measure(family)
    assert storage.num_parameters == count_parameters(build(family))
    assert sum(count for *_, count in storage.elements) == storage.num_parameters


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
        elements=((False, False, num_parameters),),
        unknown="no formula",
    )


@pytest.mark.quick
def test_bytes_of_weights_gradients_and_moments() -> None:
    model = make_storage(1000)
    assert model.count_bytes(MeshShape(z=2), STEP) == (4 + 4 + 8) * 500
    frozen = Work(seq_len=1, adapter=AdapterSizes(r=1))
    assert model.count_bytes(MeshShape(data=2), frozen) == 2 * 1000
    in_nf4 = Work(seq_len=1, adapter=AdapterSizes(r=1, is_nf4=True))
    assert model.count_bytes(MeshShape(), in_nf4) == 500
    chosen = Work(seq_len=1, trained_modules=("lm_head",))
    assert model.count_bytes(MeshShape(), chosen) == 4 * 1000


@pytest.mark.quick
def test_only_what_certainly_cannot_fit_is_refused() -> None:
    # 16 bytes each: 3 GiB, on GPUs with 1 GiB.
    model = make_storage(3 * 2**30 // 16)

    def find(num_gpus: int, mesh: ParallelConfig | None = None) -> Plan:
        inputs = PlanInputs(name="m", machine=MACHINE, num_gpus=num_gpus, work=STEP, mesh=mesh)
        return make_plan(model, inputs)

    plan = find(4)
    least = plan.least
    assert (least.mesh, plan.num_meshes) == ({"data": 1, "z": 4, "y": 1, "x": 1}, 3)
    assert (least.at_least, least.usable) == (3 * 2**28, 2**30)
    assert least.find_misfit("G") is None
    problem = find(2).least.find_misfit("G")
    assert "needs at least 1.5 GiB for weights" in problem
    assert "use the mesh" not in problem
    problem = find(4, ParallelConfig(data=2, z=2)).least.find_misfit("G")
    assert "use the mesh (data=1, z=4, y=1, x=1) or train LoRA" in problem


def test_sizes_of_families_that_can_be_split_give_their_meshes() -> None:
    assert isinstance(measure("cohere").sizes, ModelSizes)
    assert measure("bloom").sizes == StorageOnly(family="bloom")


def test_experts_larger_than_any_memory_are_counted() -> None:
    """Not one tensor is allocated: this one would take 1.9 TB."""
    sizes = {"num_local_experts": 4096, "hidden_size": 4096, "intermediate_size": 14336}
    config = transformers.AutoConfig.for_model("mixtral", num_hidden_layers=1, **sizes)
    storage = measure_storage(config, name="m", unknown="no formula")
    assert storage.num_parameters > 4096 * 3 * 4096 * 14336
