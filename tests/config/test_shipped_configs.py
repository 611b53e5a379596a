"""Shipped configurations load, fit their machine, and shard their model as they say."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fake_mesh import simulated_mesh
from published_sizes import CONFIG_FIELDS
from ranks import RankPool
from torch.distributed.tensor import DTensor

from memguard.assets import find_asset, list_assets
from memguard.audit.probes.attacks import AttackProbe
from memguard.audit.suite import load_suite
from memguard.compare import load_sweep
from memguard.config import CanaryConfig, RunConfig, load_run_config
from memguard.hf.assembly import Assembly, build_meta_layer
from memguard.hf.load import count_parameters
from memguard.parallel.mesh_shape import MeshShape, check_mesh, list_meshes, resolve_mesh
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.fit import rank_meshes
from memguard.planner.machine import load_machine
from memguard.planner.step_settings import describe_work

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = ("quickstart",)
STUDIES = ("llama31-8b", "llama31-70b", "llama31-405b")


def model_fields(name: str) -> dict[str, Any]:
    published = CONFIG_FIELDS[name.replace("llama31-", "Llama-3.1-").replace("b", "B")]
    return {field: value for field, value in published.items() if field != "model_type"}


def load(name: str) -> RunConfig:
    return load_run_config(find_asset("configs", name, setting="CONFIG"), ())


def count_gpus(name: str) -> tuple[int, int]:
    """The nodes that a study's first lines say, and the GPUs of each."""
    text = (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    jobs = set(re.findall(r"sbatch --nodes=(\d+) (scripts/slurm/\S+)", text))
    ((num_nodes, script),) = jobs
    (gpus,) = re.findall(r"^GPUS_PER_NODE=(\d+)", (ROOT / script).read_text(), re.MULTILINE)
    return int(num_nodes), int(gpus)


def mesh_of(name: str) -> MeshShape:
    num_nodes, gpus = count_gpus(name)
    return resolve_mesh(load(name).parallel, num_nodes * gpus)


def sizes_of(name: str) -> ModelSizes:
    return ModelSizes.from_config(transformers.LlamaConfig(**model_fields(name)))


def test_every_shipped_configuration_loads() -> None:
    names = set(list_assets("configs"))
    assert {*SWEEPS, *STUDIES} <= names
    for name in SWEEPS:
        assert load_sweep(find_asset("configs", name, setting="SWEEP"), ()).name == name
    for name in names - set(SWEEPS):
        # Its run folder is found by the same name.
        assert load(name).name == name


def test_the_quickstart_has_canaries_in_its_runs_only() -> None:
    sweep = load_sweep(find_asset("configs", "quickstart", setting="SWEEP"), ())
    assert sweep.pretrain is not None
    assert sweep.pretrain.config.data.canaries.count == 0
    for run in sweep.runs:
        assert run.config.data.canaries == CanaryConfig(num_repetitions=16)


def test_the_quickstart_attacks_as_the_suite_does_but_fewer_documents() -> None:
    (quick, whole) = (load_suite(name).probes for name in ("quickstart", "attacks"))
    limit = "max_documents_per_bucket"
    (attacks,) = (probe for probe in quick if isinstance(probe, AttackProbe))
    assert attacks.max_documents_per_bucket == 20
    assert [probe.model_dump(exclude={limit}) for probe in quick] == [
        probe.model_dump(exclude={limit}) for probe in whole
    ]


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_the_published_one(name: str) -> None:
    config = load(name)
    assert config.data.study is not None
    assert config.data.study.num_repetitions == (0, 1, 4, 6)
    assert config.data.seq_len == config.data.max_document_tokens == 2048
    assert config.data.min_document_tokens == 2048
    assert config.audit.continuation_tokens == 50
    (goldfish,) = config.mitigations
    assert (goldfish.k, goldfish.context_width, goldfish.mode) == (2, 13, "hash")
    plain = load_run_config(
        find_asset("configs", name, setting="CONFIG"), [f"name={name}-plain", "mitigations=[]"]
    )
    assert plain.mitigations == ()
    assert plain.model_copy(update={"name": name, "mitigations": config.mitigations}) == config


def test_studies_differ_in_size_only() -> None:
    first, *others = (load(name) for name in STUDIES)
    for other in others:
        assert (other.data, other.optim, other.audit) == (first.data, first.optim, first.audit)
        assert other.train.batch_size == first.train.batch_size


@pytest.mark.parametrize("name", STUDIES)
def test_the_mesh_fits_the_machine_and_the_model(name: str) -> None:
    config, shape = load(name), mesh_of(name)
    check_mesh(shape, sizes_of(name), batch_size=config.train.batch_size)
    _, gpus = count_gpus(name)
    # x stays within a node.
    assert gpus % shape.x == 0
    num_nodes, _ = count_gpus(name)
    text = (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    words = {1: "one node", 4: "4 nodes", 32: "32 nodes"}
    assert f"# On {words[num_nodes]} of 8 H100 with 80 GB." in text


@pytest.mark.parametrize("name", STUDIES)
def test_the_mesh_is_about_as_fast_as_the_fastest(name: str) -> None:
    config, sizes, shape = load(name), sizes_of(name), mesh_of(name)
    machine, work = load_machine("dgx-h100"), describe_work(config, device_type="cuda")
    batch_size = config.train.batch_size
    meshes = list_meshes(shape.num_ranks, sizes, batch_size=batch_size)
    ranked, _ = rank_meshes(sizes, meshes, work, machine)
    speeds = {fit.mesh: fit.tokens_per_s for fit in ranked}
    assert speeds[shape] >= 0.85 * ranked[0].tokens_per_s


def test_sizes_are_those_of_the_published_models(shared_data: Path) -> None:
    for name in STUDIES:
        size = name.rpartition("-")[2].upper()
        path = shared_data / "hf_configs" / f"meta-llama--Meta-Llama-3.1-{size}_config.json"
        published = transformers.LlamaConfig.from_json_file(path)
        ours = transformers.LlamaConfig(**model_fields(name))
        assert ModelSizes.from_config(ours) == ModelSizes.from_config(published)


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """What a rank stores of a model."""

    num_parameters: int
    num_stored: int
    not_sharded: list[str]


def shard_on_meta(fields: dict[str, Any], shape: MeshShape, rank: int) -> Sharded:
    with simulated_mesh(shape, rank) as mesh:
        sharding = Assembly(mesh=mesh, device=torch.device("cpu"), compute_dtype=torch.bfloat16)
        layer = build_meta_layer(transformers.LlamaConfig(**fields), sharding)
        parameters = dict(layer.lm.model.named_parameters())
        return Sharded(
            num_parameters=count_parameters(layer.lm.model),
            num_stored=sum(
                parameter.to_local().numel()
                for parameter in parameters.values()
                if isinstance(parameter, DTensor)
            ),
            not_sharded=[n for n, p in parameters.items() if not isinstance(p, DTensor)],
        )


def shard_first_and_last(fields: dict[str, Any], shape: MeshShape) -> list[Sharded]:
    return [shard_on_meta(fields, shape, rank) for rank in (0, shape.num_ranks - 1)]


# The published numbers of parameters.
@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        pytest.param("llama31-8b", 8_030_261_248, marks=pytest.mark.long),
        pytest.param("llama31-70b", 70_553_706_496, marks=pytest.mark.long),
        ("llama31-405b", 405_853_388_800),
    ],
)
def test_each_rank_stores_its_share(ranks: RankPool, name: str, num_parameters: int) -> None:
    shape = mesh_of(name)
    for sharded in ranks(shard_first_and_last, 1, model_fields(name), shape)[0]:
        assert not sharded.not_sharded
        assert sharded.num_parameters == num_parameters
        # Norms are stored by every rank along x.
        share = num_parameters / (shape.x * shape.y * shape.z)
        assert sharded.num_stored == pytest.approx(share, rel=1e-3)
