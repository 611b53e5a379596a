"""AdamW in 8 bits on meshes, given the gradients of one process: the same bits, also resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from ranks import RankPool
from tiny_families import build
from torch import Tensor, nn
from torch import distributed as dist

from memguard.config import OptimConfig
from memguard.hf.assembly import Assembly, build_meta_layer, fill_layer
from memguard.hf.safetensors import ModuleWeights
from memguard.optim import build_optimizer
from memguard.optim.base import Optimizer
from memguard.parallel.local_parameters import LocalParameter, LocalPiece, find_local_parameters
from memguard.parallel.mesh_shape import MeshShape
from memguard.records.run_files import CheckpointManifest, load_checkpoint_manifest
from memguard.runtime import Runtime
from memguard.seeds import derive_generator
from memguard.train.checkpoint import TrainState, load_checkpoint, save_checkpoint, to_stored
from memguard.train.checkpoint_storage import load_metadata

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.slow

Degrees = tuple[int, int, int, int]
# The head's 97 rows are cut unevenly; up to four ranks along x have whole blocks.
_WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
# A fused layer whose rows are cut; one that is stored [in, out], whose columns are; three experts,
# of which z = 2 cuts the width.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _WIDE,
    "phi3": _WIDE,
    "gpt2": {**_WIDE, "n_embd": 256, "n_layer": 1},
    "mixtral": {**_WIDE, "num_local_experts": 3, "intermediate_size": 512},
}
BF16 = ("phi3", "gpt2")
"""Families whose weights are stored in bf16, rounded with the same bits on every mesh."""
NUM_STEPS = 4


def build_model(family: str) -> nn.Module:
    model: nn.Module = build(family, **FAMILIES[family])
    return model.to(torch.bfloat16 if family in BF16 else torch.float32)


def make_optimizer(parameters: list[LocalParameter]) -> Optimizer:
    return build_optimizer(parameters, OptimConfig(name="adamw_8bit"), seed=7)


def take_steps(
    parameters: list[LocalParameter], optimizer: Optimizer, first: int, last: int
) -> None:
    """Update with gradients that depend on the element of the whole tensor alone."""
    for step in range(first, last + 1):
        for each in parameters:
            draw = derive_generator(step, each.name)
            whole = torch.from_numpy(draw.normal(size=tuple(each.source.shape), scale=1e-3))
            gradient = torch.zeros_like(each.local)
            for piece in each.split():
                gradient[piece.slices] = find_part(whole, piece)
            each.local.grad = gradient
        optimizer.begin(step=step, lr=1e-3)
        optimizer.update()


def find_part(whole: Tensor, piece: LocalPiece) -> Tensor:
    """Return the part of a whole tensor that a piece of it holds."""
    sizes = [part.stop - part.start for part in piece.slices]
    return whole[tuple(slice(a, a + size) for a, size in zip(piece.start, sizes, strict=True))]


def list_state(each: LocalParameter, optimizer: Optimizer) -> dict[str, Tensor]:
    return {"weights": each.local.detach(), **optimizer.state_of(each)}


def count_differences(
    ours: tuple[list[LocalParameter], Optimizer], alone: tuple[list[LocalParameter], Optimizer]
) -> list[str]:
    """Return the tensors of this rank that have other bits than their place on one process."""
    different = []
    for each, whole in zip(ours[0], alone[0], strict=True):
        assert each.name == whole.name
        expected = list_state(whole, alone[1])
        found = list_state(each, ours[1])
        assert found.keys() == expected.keys()
        for field, value in found.items():
            theirs = expected[field]
            if not value.ndim:
                different += [f"{each.name}.{field}"] * (value != theirs)
                continue
            for piece in each.split():
                place = piece.divided(ours[1].blocks.get(field, 1))
                if not torch.equal(value[place.slices], find_part(theirs, place)):
                    different.append(f"{each.name}.{field}")
    return different


def run(
    degrees: Degrees, families: list[str], first: int, last: int, read: Path | None, write: Path
) -> dict[str, list[str]]:
    """On a rank: go on from a checkpoint, take steps, compare, and save.

    Returns:
        Of each family the tensors that differ from those of one process, which took all steps.
    """
    shape = MeshShape(**dict(zip(("data", "z", "y", "x"), degrees, strict=True)))
    mesh, device = mesh_of(shape), torch.device("cpu")
    runtime = Runtime(device=device, rank=dist.get_rank(), world_size=dist.get_world_size())
    different = {}
    for family in families:
        model = build_model(family)
        dtype = next(model.parameters()).dtype
        layer = build_meta_layer(model.config, Assembly(mesh=mesh, device=device, dtype=dtype))
        fill_layer(layer, ModuleWeights(model), name="test")
        parameters = find_local_parameters(layer.lm.model, mesh)
        optimizer = make_optimizer(parameters)
        state = TrainState(parameters=parameters, optimizer=optimizer, buffers={}, arrays={})
        if read is not None:
            path = next((read / family).iterdir())
            stored = load_metadata(path, load_checkpoint_manifest(path).files)
            load_checkpoint(path, state, stored=stored, runtime=runtime)
        take_steps(parameters, optimizer, first, last)
        assert {each.local.dtype for each in parameters} == {dtype}
        alone = find_local_parameters(model)
        optimizer_alone = make_optimizer(alone)
        take_steps(alone, optimizer_alone, 1, last)
        different[family] = count_differences((parameters, optimizer), (alone, optimizer_alone))
        save(state, write / family, runtime)
    return different


def save(state: TrainState, folder: Path, runtime: Runtime) -> None:
    log = folder.parent / "metrics.jsonl"
    if runtime.is_main:
        folder.mkdir(parents=True)
        log.write_text("a line\n")
    progress = CheckpointManifest(
        step=1,
        run_key="",
        sample_sha256=None,
        num_supervised_tokens=0,
        num_kept_tokens=0,
        num_rows=0,
        train_s=0.0,
        torch_version=torch.__version__,
        files={},
    )
    runtime.from_main(lambda: None)
    tensors = to_stored(state.parts())
    save_checkpoint(folder, tensors, runtime, progress=progress, log=log, log_bytes=7, keep=1)


def check(ranks: RankPool, degrees: Degrees, families: list[str], *paths: Any) -> None:
    for different in ranks(run, torch.Size(degrees).numel(), degrees, families, *paths):
        assert different == {family: [] for family in families}


def test_a_run_has_the_bits_of_one_process_on_the_meshes_that_it_moves_to(
    ranks: RankPool, tmp_path: Path
) -> None:
    families = ["llama", "gpt2"]
    check(ranks, (1, 2, 1, 2), families, 1, 2, None, tmp_path / "first")
    check(ranks, (1, 1, 2, 1), families, 3, NUM_STEPS, tmp_path / "first", tmp_path / "second")


MESHES = [
    (data, z, y, x)
    for data in (1, 2)
    for z in (1, 2)
    for y in (1, 2)
    for x in (1, 2)
    if 1 < data * z * y * x <= 8
]


@pytest.mark.mesh
@pytest.mark.parametrize("degrees", [*MESHES, (1, 1, 1, 4), (1, 1, 2, 4)], ids=str)
def test_every_mesh_has_the_bits_of_one_process(
    ranks: RankPool, tmp_path: Path, degrees: Degrees
) -> None:
    families = list(FAMILIES)
    check(ranks, degrees, families, 1, 2, None, tmp_path / "first")
    # On from there with the axes the other way round, three ranks, and one.
    for number, others in enumerate([degrees[::-1], (1, 3, 1, 1), (1, 1, 1, 1)]):
        target = tmp_path / str(number)
        check(ranks, others, families, 3, NUM_STEPS, tmp_path / "first", target)
