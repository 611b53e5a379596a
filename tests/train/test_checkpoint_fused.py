"""Checkpoints of parameters of several projections: names, shapes and values of one process."""

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_examples import load_state, save_state
from ranks import RankPool
from test_background_save import change, held
from tiny_families import build
from torch import distributed as dist

from memguard.config import OptimConfig
from memguard.hf.assembly import Assembly, build_meta_layer, fill_layer
from memguard.hf.safetensors import ModuleWeights
from memguard.optim import build_optimizer
from memguard.parallel.local_parameters import find_local_parameters
from memguard.parallel.lora import LoraSpec, attach_lora, fill_lora
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.records.run_files import load_checkpoint_manifest
from memguard.runtime import Console, Runtime
from memguard.train.checkpoint import TrainState, load_checkpoint, save_checkpoint, to_stored
from memguard.train.checkpoint_storage import load_metadata
from memguard.train.resume import BackgroundSave

pytestmark = pytest.mark.slow

# A fused layer over x and z with a bias; a weight that is stored [in, out]; adapters with
# magnitudes; experts, which z=2 does not divide.
CASES: dict[str, tuple[dict[str, Any], LoraSpec | None]] = {
    "falcon": ({"bias": True}, None),
    "gpt2": ({}, None),
    "phi3": ({}, LoraSpec(r=3, alpha=6, use_dora=True)),
    "mixtral": ({"num_local_experts": 3}, None),
}


def make_state(model: Any, mesh: Any = None) -> TrainState:
    parameters = find_local_parameters(model, mesh)
    optimizer = build_optimizer(parameters, OptimConfig())
    state = TrainState(parameters=parameters, optimizer=optimizer, buffers={}, arrays={})
    state.make_room()
    return state


def build_plain(family: str) -> Any:
    fields, adapter = CASES[family]
    model = build(family, **fields)
    if adapter is not None:
        attach_lora(model, adapter)
        fill_lora(model, adapter)
    return model


@torch.no_grad()
def fill_randomly(state: TrainState) -> None:
    generator = torch.Generator().manual_seed(5)
    for each in state.parameters:
        moments = state.optimizer.inner.state[each.local]
        for tensor in (each.local, moments["exp_avg"], moments["exp_avg_sq"]):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))


def pass_on(folders: dict[str, Path], degrees: tuple[int, int, int]) -> dict[str, int]:
    """On a rank: load each checkpoint, and save it as another step while the state changes.

    Returns the number of tensors of each family that are several rectangles.
    """
    z, y, x = degrees
    mesh = build_mesh(MeshShape(z=z, y=y, x=x), "cpu")
    runtime = Runtime(
        device=torch.device("cpu"), rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    num_pieces: dict[str, int] = {}
    for family, path in folders.items():
        fields, adapter = CASES[family]
        plain = build(family, **fields)
        sharding = Assembly(mesh=mesh, device=torch.device("cpu"), adapter=adapter)
        layer = build_meta_layer(plain.config, sharding)
        fill_layer(layer, ModuleWeights(plain), name="test")
        state = make_state(layer.lm.model, mesh)
        manifest = load_checkpoint_manifest(path)
        stored = load_metadata(path, manifest.files)
        load_checkpoint(path, state, stored=stored, runtime=runtime)
        saves = BackgroundSave(runtime, Console(quiet=True), timeout=timedelta(minutes=1))
        save = partial(
            save_checkpoint,
            path.parent,
            progress=manifest.model_copy(update={"step": 2, "files": {}}),
            log=path / "metrics.jsonl",
            log_bytes=7,
            keep=2,
        )
        with pytest.MonkeyPatch.context() as patch, held(patch) as let_go:
            saves.start(state, save)
            change(state)
            let_go()
            saves.wait()
        num_pieces[family] = 3 * sum(each.order is not None for each in state.parameters)
    return num_pieces


@pytest.mark.parametrize(
    "degrees", [(2, 1, 2), pytest.param((1, 2, 4), marks=pytest.mark.mesh)], ids=str
)
def test_a_checkpoint_goes_to_a_mesh_and_back_bit_for_bit(
    ranks: RankPool, tmp_path: Path, degrees: tuple[int, int, int]
) -> None:
    folders, before = {}, {}
    for family in CASES:
        (tmp_path / family).mkdir()
        state = make_state(build_plain(family))
        fill_randomly(state)
        before[family] = to_stored(state.parts())
        folders[family] = save_state(tmp_path / family / "checkpoints", 1, state)
    world_size = torch.Size(degrees).numel()
    for num_pieces in ranks(pass_on, world_size, folders, degrees, timeout_s=280):
        # Two blocks: weight and bias; the second factors and magnitudes of two layers; gate and up.
        # Three tensors of each.
        assert num_pieces == {"falcon": 12, "gpt2": 12, "phi3": 24, "mixtral": 6}
    for family in CASES:
        state = make_state(build_plain(family))
        load_state(tmp_path / family / "checkpoints" / "step-00000002", state)
        after = to_stored(state.parts())
        assert after.keys() == before[family].keys()
        for name, tensor in after.items():
            assert torch.equal(tensor, before[family][name]), (family, name)
