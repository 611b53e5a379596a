"""Whether a training run fits in memory, checked before its documents are read.

    command line, before torch is imported   a model in a local folder, its config.json
    a started run, on rank 0                 any model; the GPU's memory is read from torch
    after an out-of-memory error             what helps on the run's mesh

A run is refused only if the planner's estimate of its peak, without an allowance for fragmentation,
exceeds the memory of a GPU, or of this machine divided by its processes. Of models whose memory the
planner cannot estimate only weights, gradients and moments are counted.
"""

import contextlib
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from memguard.config import RunConfig, load_yaml
from memguard.config.mitigations import DpSgdConfig, find_mitigation
from memguard.errors import ConfigError, MemguardError, ModelError
from memguard.hf.adapter_files import find_config
from memguard.parallel.mesh_shape import MeshShape, resolve_mesh
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.fit import find_fit, list_micro_batches, resolve_auto
from memguard.planner.machine import Machine, detect_machine
from memguard.planner.plan import PlanInputs
from memguard.planner.storage import ModelStorage
from memguard.records.run_files import find_config_damage, has_begun, has_trained
from memguard.workflows.plan import plan_model, read_run_model
from memguard.workflows.process_limits import count_gpus

if TYPE_CHECKING:
    from memguard.runtime import Runtime

ValueT = TypeVar("ValueT")

_AMD_DRIVER = Path("/dev/kfd")
_GIB = 2**30


def check_memory_early(config: RunConfig, num_processes: int) -> None:
    """Refuse a run that cannot fit, without torch, if model and device are known by then.

    Args:
        config: the run's settings.
        num_processes: number of training processes.

    Raises:
        ConfigError: names what would fit; or the mesh does not match processes, model or batch.
    """
    if has_trained(Path(config.output_dir) / config.name):
        return
    sizes = read_local_sizes(config)
    if sizes is None:
        return
    has_gpus = count_gpus() > 0 and not is_cpu_build()
    if not has_gpus and _AMD_DRIVER.exists():
        return  # Its memory is known to torch only.
    machine = _detect(_count_local(num_processes), None if has_gpus else ())
    if machine is not None and machine.has_gpus == has_gpus:
        check_memory(config, sizes, machine, num_processes)


def check_memory(
    config: RunConfig, model: ModelSizes | ModelStorage, machine: Machine, num_processes: int
) -> None:
    """Refuse a run that cannot fit.

    Args:
        config: the run's settings.
        model: sizes of its model; if its memory cannot be estimated, its parameters.
        machine: the machine it runs on.
        num_processes: number of training processes.

    Raises:
        ConfigError: names what would fit; or the mesh does not match processes, model or batch.
    """
    inputs = PlanInputs.for_run(config, machine, num_processes)
    if isinstance(model, ModelSizes):
        mesh = resolve_mesh(
            config.parallel,
            num_processes,
            model if num_processes > 1 else None,
            batch_size=config.train.batch_size if num_processes > 1 else None,
        )
        # Fragmentation is an assumption, and a run that might fit must not be refused.
        exact = machine.model_copy(update={"fragmentation": 0.0})
        if find_fit(model, mesh, inputs.work, exact).fits:
            return
    plan_model(model, inputs).refuse_misfit()


def resolve_auto_settings(
    config: RunConfig, runtime: "Runtime", *, halve: bool = False
) -> RunConfig:
    """Replace `auto` in a run's settings, the same on all ranks, and refuse a run that cannot fit.

    A run that was begun before keeps its precision.

    Args:
        config: the run's settings.
        runtime: this process's device and ranks; every rank must call this.
        halve: use half of the micro-batch that `auto` chooses, because it did not fit.

    Raises:
        ConfigError: names what would fit.
    """
    memory_bytes = _agree_gpu_memory(runtime)

    def decide() -> RunConfig:
        machine = _describe_machine(runtime, memory_bytes)
        folder = Path(config.output_dir) / config.name
        resumed = keep_precision(config, folder)
        sizes = None
        num_ranks = runtime.world_size
        with contextlib.suppress(ModelError):
            model = read_run_model(resumed)
            sizes = model if isinstance(model, ModelSizes) else None
            if machine is not None and not has_trained(folder):
                check_memory(resumed, model, machine, num_ranks)
        resolved = resolve_auto(
            resumed,
            device_type=runtime.device.type,
            sizes=sizes,
            machine=machine,
            world_size=num_ranks,
        )
        return _halve(resolved, num_ranks) if halve else resolved

    return _decide_on_main(runtime, decide)


def settle_for_documents(config: RunConfig, device_type: str) -> RunConfig:
    """Replace `auto` for a command that only reads documents, perhaps where there is no GPU.

    Args:
        config: the run's settings.
        device_type: "cuda" or "cpu".
    """
    config = keep_precision(config, Path(config.output_dir) / config.name)
    return resolve_auto(config, device_type=device_type, sizes=None, machine=None, world_size=1)


def keep_precision(config: RunConfig, folder: Path) -> RunConfig:
    """Return the settings with the precision that a run begun in the folder has, if it is auto."""
    if config.train.precision != "auto" or not has_begun(folder) or find_config_damage(folder):
        return config
    stored = load_yaml(folder / "config.yaml").values
    changes = {"precision": stored["train"]["precision"]}
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


def read_local_sizes(config: RunConfig) -> ModelSizes | None:
    """Return the sizes of a model in a local folder, without torch.

    None if the model is not there, or if its memory cannot be estimated.
    """
    if config.model.path is None or config.model.attn_implementation == "eager":
        return None
    try:
        fields = json.loads(find_config(config.model.path).read_bytes())
        return ModelSizes.from_json(fields) if isinstance(fields, dict) else None
    except (OSError, ValueError, RecursionError, ModelError):
        return None


def is_cpu_build() -> bool:
    """Return whether the installed torch cannot use GPUs; does not import it."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


# -- after an out-of-memory error ----------------------------------------------------------------


class OutOfMemory(MemguardError):
    """Memory ran out in training; the message names what helps on the run's mesh."""


class MicroBatchTooLarge(OutOfMemory):
    """Memory ran out in the first steps with a micro-batch that `auto` chose."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, of a GPU or of this machine."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # torch's allocator on the CPU has no error of its own.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def explain_halving(config: RunConfig, shape: MeshShape, half: int) -> str:
    """Return why a run's micro-batch, which `auto` chose, must be halved."""
    return (
        f"out of memory {_describe_step(config, shape)}, which 'auto' chose: "
        f"'train.micro_batch_size' must be {half} or less"
    )


def explain_out_of_memory(
    config: RunConfig, shape: MeshShape, device_type: str, *, is_loaded: bool
) -> str:
    """Return an error message that names only changes that can help.

    Args:
        config: the run's settings, without `auto`.
        shape: the run's mesh.
        device_type: "cuda" or "cpu".
        is_loaded: whether the model was loaded before memory ran out.
    """
    train = config.train
    ways = []
    smaller = find_half(config, shape)
    if is_loaded and smaller is not None:
        ways.append(f"set 'train.micro_batch_size' to {smaller}")
    if is_loaded and train.checkpointing != "full":
        ways.append("set 'train.activation_checkpointing' to full")
    if shape.data > 1:
        ways.append(
            f"set 'parallel.data' to 1 and 'parallel.z' to {shape.num_batch_ways}, which shares "
            "the weights"
        )
    is_one = find_mitigation(config.mitigations, DpSgdConfig) is not None or train.dropout
    if device_type != "cuda":
        ways.append("use a machine with more memory")
    elif is_one:
        ways.append("use a GPU with more memory")
    else:
        ways.append(f"use more than {shape.num_ranks} GPU{'s' if shape.num_ranks > 1 else ''}")
    what = _describe_step(config, shape) if is_loaded else "while the model was loaded"
    return f"out of memory {what}: {', or '.join(ways)}. The same command resumes the run"


def _describe_step(config: RunConfig, shape: MeshShape) -> str:
    num_rows = _count_rows(config, shape)
    rows = min(config.train.count_micro_rows(num_rows), num_rows)
    if find_mitigation(config.mitigations, DpSgdConfig) is not None:
        rows = 1
    return f"with {rows} row{'s' if rows > 1 else ''} of {config.data.seq_len:,} tokens at a time"


def find_half(config: RunConfig, shape: MeshShape) -> int | None:
    """Return the largest micro-batch of at most half the rows; None if it cannot be smaller."""
    if find_mitigation(config.mitigations, DpSgdConfig) is not None:
        return None  # Each row has its own pass.
    num_rows = _count_rows(config, shape)
    now = min(config.train.count_micro_rows(num_rows), num_rows)
    if now == 1:
        return None
    return next(rows for rows in list_micro_batches(num_rows) if 2 * rows <= now)


def _halve(config: RunConfig, num_ranks: int) -> RunConfig:
    half = find_half(config, resolve_mesh(config.parallel, num_ranks))
    if half is None:
        return config
    train = config.train.model_copy(update={"micro_batch_size": half})
    return config.model_copy(update={"train": train})


def _count_rows(config: RunConfig, shape: MeshShape) -> int:
    return -(-config.train.batch_size // shape.num_batch_ways)


# -- the machine ---------------------------------------------------------------------------------


def _decide_on_main(runtime: "Runtime", decide: Callable[[], ValueT]) -> ValueT:
    return runtime.broadcast_object(runtime.only_on_main(decide))


def _agree_gpu_memory(runtime: "Runtime") -> int:
    """Return the memory of the smallest GPU of all ranks (bytes); 0 on the CPU."""
    if runtime.device.type != "cuda":
        return 0
    import torch

    return -runtime.agree_max(-torch.cuda.get_device_properties(runtime.device).total_memory)


def _describe_machine(runtime: "Runtime", memory_bytes: int) -> Machine | None:
    """Return this machine as torch knows it; None if too little memory is left to describe it."""
    num_local = _count_local(runtime.world_size)
    if runtime.device.type != "cuda":
        return _detect(num_local, ())
    import torch

    name = torch.cuda.get_device_name(runtime.device)
    return _detect(num_local, [(name, memory_bytes / _GIB)] * num_local)


def _detect(num_local: int, gpus: "tuple[()] | list[tuple[str, float]] | None") -> Machine | None:
    try:
        return detect_machine(num_local, gpus=gpus)
    except ConfigError:
        return None


def _count_local(num_processes: int) -> int:
    """Return the number of ranks on this machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdigit() and int(local) > 0 else num_processes
