"""The export of a model on a mesh as training does it: from a checkpoint."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save

from memguard.config import OptimConfig
from memguard.hf.assembly import AssembledModel
from memguard.hf.export import export_stored
from memguard.optim import build_optimizer
from memguard.parallel.local_parameters import find_local_parameters
from memguard.runtime import Runtime
from memguard.train.checkpoint import TrainState, to_stored
from memguard.train.checkpoint_storage import METADATA, CheckpointMetadata, JsonWriter, read_tensor


def read_all(model: Any, mesh: Any) -> dict[str, Tensor]:
    """Return the stored tensors of a model on a mesh, whole, by name; every rank calls this."""
    runtime = Runtime(rank=dist.get_rank(), world_size=dist.get_world_size())
    for parameter in model.parameters():
        # Checkpoints have what is trained; the rest is the base's.
        parameter.requires_grad_(parameter.is_floating_point())
    parameters = find_local_parameters(model, mesh)
    buffers = {
        name: model.state_dict()[name]
        for name, _ in model.named_buffers()
        if name in model.state_dict()
    }
    state = TrainState(
        parameters=parameters,
        optimizer=build_optimizer(parameters, OptimConfig()),
        buffers=buffers,
        arrays={},
    )
    folder = Path(runtime.from_main(tempfile.mkdtemp))
    writer = JsonWriter(str(folder), thread_count=1)
    save(to_stored(state.parts()), storage_writer=writer, no_dist=runtime.world_size == 1)
    stored = CheckpointMetadata.model_validate_json((folder / METADATA).read_bytes())
    tensors = {
        name.removeprefix("model."): read_tensor(folder, stored, name) for name in stored.tensors
    }
    dist.barrier()
    return tensors


def export_layer(
    layer: AssembledModel,
    tokenizer: Any,
    folder: Path,
    *,
    dtype: torch.dtype,
    once_saved: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Write the folder of a model on a mesh; every rank calls this.

    ``once_saved`` is called when the checkpoint is complete.
    """
    model = layer.lm.model
    tensors = read_all(model, layer.lm.mesh)
    once_saved()
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def read(name: str, dtype: torch.dtype) -> Tensor:
        module, _, leaf = name.rpartition(".")
        name = names.get(id(getattr(model.get_submodule(module), leaf)), name)
        tensor = tensors[name]
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    runtime = Runtime(rank=dist.get_rank(), world_size=dist.get_world_size())
    export_stored(model, read, tokenizer, folder, dtype=dtype, runtime=runtime, **options)
