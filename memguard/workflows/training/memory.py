"""Whether a training run fits in memory, checked before its documents are read.

    command line, before torch is imported   a model in a local folder, its config.json
    a started run, on rank 0                 any model; the GPU's memory is read from torch
    after an out-of-memory error             what helps on the run's mesh

`auto` in the settings of a run:

    setting                   GPU                                        CPU
    precision                 bf16                                       fp32
    micro_batch_size          the largest that fits by the planner       null: all rows
    activation_checkpointing  the fastest that fits by the planner       none

Where the planner cannot estimate the memory of a model, a GPU uses micro-batches of one row and
full checkpointing. `train.compile: auto` is decided later, when the number of steps is known
(compile.py).

A run is refused only if the planner's estimate of its peak, without an allowance for fragmentation,
exceeds the memory of a GPU, or of this machine divided by its processes. For models whose memory
the planner cannot estimate, only weights, gradients and moments are counted.
"""

import contextlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memguard.config import RunConfig, load_yaml
from memguard.config.mitigations import DpSgdConfig, find_mitigation
from memguard.config.optimizers import OPTIMIZERS
from memguard.errors import ConfigError, MemguardError, ModelError, StepTooLarge
from memguard.parallel.mesh_shape import MeshShape, resolve_mesh
from memguard.parallel.model_sizes import ESTIMATED_FAMILIES, ModelSizes
from memguard.planner.compute import count_token_flops
from memguard.planner.fit import SCRATCH, PlanInputs, describe_faster, find_fit, list_micro_batches
from memguard.planner.machine import Machine, detect_machine, keep_measured
from memguard.planner.plan import ModelStorage, make_plan
from memguard.planner.step_settings import describe_work
from memguard.records.folders import RunFiles
from memguard.records.run_files import has_begun, has_trained
from memguard.runtime.environment import count_gpus, is_cpu_build
from memguard.workflows.common.checks import explain_one_process

if TYPE_CHECKING:
    from memguard.runtime import Console, Runtime

_AMD_DRIVER = Path("/dev/kfd")
_GIB = 2**30


def check_memory_early(config: RunConfig, sizes: ModelSizes | None, num_processes: int) -> None:
    """Refuse a run that cannot fit, without torch, if the device is known by then."""
    if sizes is None or has_trained(Path(config.output_dir) / config.name):
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
    """Refuse a run that cannot fit."""
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
    make_plan(model, inputs).refuse_misfit()


def read_run_model(run: RunConfig) -> ModelSizes | ModelStorage:
    """Return the sizes of a run's model; if its memory cannot be estimated, its parameters."""
    from memguard.workflows.common.setup import read_model_config  # imports torch

    config = read_model_config(run)
    # Eager attention stores the scores of all pairs of tokens, which the estimate leaves out.
    is_eager = run.model.attn_implementation == "eager"
    if not is_eager and config.get_text_config().model_type in ESTIMATED_FAMILIES:
        return ModelSizes.from_config(config).for_optimizer(run.optim.name)
    return measure_model(config, run.model.path or SCRATCH, is_eager=is_eager)


def measure_model(config: Any, name: str, *, is_eager: bool = False) -> ModelStorage:
    """Return the parameters of a model whose step cannot be estimated, and why it cannot."""
    from memguard.runtime import quiet_libraries

    quiet_libraries()
    from memguard.planner.meta_model import measure_storage  # imports torch

    family = config.get_text_config().model_type
    if is_eager and family in ESTIMATED_FAMILIES:
        unknown = "the planner has no formula for eager attention"
    else:
        unknown = (
            f"the planner has no formula for layers of '{family}', only for those of "
            f"{', '.join(ESTIMATED_FAMILIES)}"
        )
    return measure_storage(config, name=name, unknown=unknown)


def resolve_auto_settings(
    config: RunConfig, runtime: "Runtime", console: "Console | None" = None
) -> RunConfig:
    """Replace `auto` in a run's settings, the same on all ranks, and refuse a run that cannot fit.

    Every rank must call this. A run that was begun before keeps its precision. Faster
    settings that `auto` does not take are written to ``console``.
    """
    machine = _describe_machine(runtime)

    def decide() -> RunConfig:
        folder = Path(config.output_dir) / config.name
        resumed = keep_precision(config, folder)
        sizes, num_ranks = None, runtime.world_size
        with contextlib.suppress(ModelError):
            model = read_run_model(resumed)
            sizes = model if isinstance(model, ModelSizes) else None
            if machine is not None and not has_trained(folder):
                check_memory(resumed, model, machine, num_ranks)
        return resolve_auto(
            resumed,
            device_type=runtime.device.type,
            sizes=sizes,
            machine=machine,
            world_size=num_ranks,
            console=console,
        )

    return runtime.from_main(decide)


def keep_measured_memory(
    config: RunConfig, runtime: "Runtime", shape: MeshShape, num_bytes: int | None = None
) -> None:
    """Store for later plans what a step needed on this GPU; None: more than it has (bytes).

    Nothing is stored on a CPU, for a model without an estimate, and for a small step.
    """
    if runtime.device.type != "cuda":
        return
    import torch

    with contextlib.suppress(MemguardError, OSError, RuntimeError):
        gpu = torch.cuda.get_device_properties(runtime.device)
        if num_bytes is None:
            free_bytes, _ = torch.cuda.mem_get_info(runtime.device)
            num_bytes = int(1.02 * (free_bytes + torch.cuda.memory_reserved(runtime.device)))
        machine = detect_machine(1, gpus=[(gpu.name, gpu.total_memory / _GIB)])
        model = read_run_model(config)
        if isinstance(model, ModelSizes):
            fit = find_fit(model, shape, describe_work(config, device_type="cuda"), machine)
            if (share := fit.find_fragmentation(num_bytes)) is not None:
                keep_measured(gpu.name, share)


def find_peak_s(
    config: RunConfig, model_config: Any, runtime: "Runtime"
) -> tuple[float, ...] | None:
    """Return what `RunState.peak_s` is; every rank must call this."""
    machine = _describe_machine(runtime)
    is_estimated = model_config.get_text_config().model_type in ESTIMATED_FAMILIES
    if machine is None or "peak_tflops" in machine.assumed or not is_estimated:
        return None
    work = describe_work(config, device_type=runtime.device.type)
    flops = count_token_flops(ModelSizes.from_config(model_config), work)
    return tuple(flop / machine.peak_flops(work.compute_bytes) for flop in flops)


def resolve_auto(
    config: RunConfig,
    *,
    device_type: str,
    sizes: ModelSizes | None,
    machine: Machine | None,
    world_size: int,
    console: "Console | None" = None,
) -> RunConfig:
    """Return the settings without `auto`, but for `train.compile`."""
    train, is_gpu = config.train, device_type == "cuda"
    work = describe_work(config, device_type=device_type)
    changes: dict[str, Any] = {}
    if train.precision == "auto":
        changes["precision"] = "bf16" if work.compute_bytes == 2 else "fp32"
    if "auto" in (train.micro_batch_size, train.activation_checkpointing):
        rows, mode = (1, "full") if is_gpu else (None, "none")
        if is_gpu and sizes is not None and machine is not None:
            batch_size = train.batch_size
            mesh = resolve_mesh(config.parallel, world_size, sizes, batch_size=batch_size)
            fit = find_fit(sizes, mesh, work, machine)
            rows, mode = fit.micro_batch_size, fit.settings.checkpointing
            faster = describe_faster(sizes, fit, work, machine)
            if console is not None and faster is not None:
                console.info(f"memory: {faster}")
        if train.micro_batch_size == "auto":
            # With dp_sgd each row has its own backward pass, and a micro-batch size is refused.
            is_private = find_mitigation(config.mitigations, DpSgdConfig) is not None
            is_whole = work.facts.gradients == "unit"
            changes["micro_batch_size"] = None if is_private or is_whole else rows
        if train.activation_checkpointing == "auto":
            changes["activation_checkpointing"] = work.checkpointing or mode
    return set_train(config, **changes)


def set_train(config: RunConfig, **changes: Any) -> RunConfig:
    """Return the settings with other values of `train`."""
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


def resolve_auto_for_documents(config: RunConfig, device_type: str) -> RunConfig:
    """Replace `auto` for a command that only reads documents, perhaps where there is no GPU."""
    config = keep_precision(config, Path(config.output_dir) / config.name)
    return resolve_auto(config, device_type=device_type, sizes=None, machine=None, world_size=1)


def keep_precision(config: RunConfig, folder: Path) -> RunConfig:
    """Return the settings with the precision that a run begun in the folder has, if it is auto."""
    is_free = config.train.precision != "auto" or not has_begun(folder)
    if is_free or RunFiles(folder).find_damage("config"):
        return config
    stored = load_yaml(folder / "config.yaml").values
    return set_train(config, precision=stored["train"]["precision"])


# -- after an out-of-memory error ----------------------------------------------------------------


def list_free(config: RunConfig) -> frozenset[str]:
    """Return the settings of `train` that `auto` chooses by memory."""
    has_none = OPTIMIZERS[config.optim.name].gradients == "none"
    names = ("micro_batch_size", "activation_checkpointing")[: 1 if has_none else 2]
    return frozenset(name for name in names if getattr(config.train, name) == "auto")


def apply_less_memory(config: RunConfig, free: Collection[str], given: str) -> RunConfig:
    """Return the settings with those of `LESS_MEMORY` that `auto` would choose."""
    settings = json.loads(given) if given else {}
    return set_train(config, **{name: settings[name] for name in free if name in settings})


def find_less_memory(
    config: RunConfig, shape: MeshShape, free: Collection[str]
) -> StepTooLarge | None:
    """Return the error with which a run starts again after its memory ran out in a step.

    The micro-batch is halved until it is one row; then more is recomputed: none, selective, full.
    On a mesh with x > 1 recomputing blocks also store their inputs in parts. ``free``: see
    `list_free`. None if nothing that needs less is left.
    """
    train, half = config.train, find_half(config, shape)
    name, value = "micro_batch_size", f"{half} or less"
    changed: Any = half
    if half is None or name not in free:
        name, changed = "activation_checkpointing", _MORE.get(train.checkpointing)
        if train.compile is True and changed == "selective":
            changed = "full"  # Older releases of transformers cannot compile selective.
        value = str(changed)
    if changed is None or name not in free:
        return None
    settings = {setting: getattr(train, setting) for setting in free} | {name: changed}
    return StepTooLarge(
        f"out of memory {_describe_step(config, shape)}, which 'auto' chose: 'train.{name}' must "
        f"be {value}",
        settings,
    )


_MORE: Mapping[str, str] = {"none": "selective", "selective": "full"}
"""The next mode of checkpointing, which recomputes more."""


def explain_out_of_memory(
    config: RunConfig, shape: MeshShape, device_type: str, *, is_loaded: bool
) -> str:
    """Return an error message that names only changes that can help."""
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
    if device_type != "cuda":
        ways.append("use a machine with more memory")
    elif explain_one_process(config) is not None:
        ways.append("use a GPU with more memory")
    else:
        ways.append(f"use more than {shape.num_ranks} GPU{'s' if shape.num_ranks > 1 else ''}")
    what = _describe_step(config, shape) if is_loaded else "while the model was loaded"
    return f"out of memory {what}: {', or '.join(ways)}. The same command resumes the run"


def _describe_step(config: RunConfig, shape: MeshShape) -> str:
    rows = _count_rows(config, shape)[1]
    return f"with {rows} row{'s' if rows > 1 else ''} of {config.data.seq_len:,} tokens at a time"


def find_half(config: RunConfig, shape: MeshShape) -> int | None:
    """Return the largest micro-batch of at most half the rows; None if it cannot be smaller."""
    num_rows, now = _count_rows(config, shape)
    if now == 1 or OPTIMIZERS[config.optim.name].gradients == "unit":
        return None
    return next(rows for rows in list_micro_batches(num_rows) if 2 * rows <= now)


def _count_rows(config: RunConfig, shape: MeshShape) -> tuple[int, int]:
    """Return the rows of a step and of a micro-batch, on one rank."""
    num_rows = -(-config.train.batch_size // shape.num_batch_ways)
    # With dp_sgd each row has its own pass.
    is_private = find_mitigation(config.mitigations, DpSgdConfig) is not None
    return num_rows, 1 if is_private else min(config.train.count_micro_rows(num_rows), num_rows)


# -- the machine ---------------------------------------------------------------------------------


def _describe_machine(runtime: "Runtime") -> Machine | None:
    """Return this machine as torch knows it, with the memory of the smallest GPU of all ranks.

    None if too little memory is left to describe it. Every rank must call this.
    """
    num_local = _count_local(runtime.world_size)
    if runtime.device.type != "cuda":
        return _detect(num_local, ())
    import torch

    gpu = torch.cuda.get_device_properties(runtime.device)
    memory_bytes = -runtime.agree_max(-gpu.total_memory)
    return _detect(num_local, [(gpu.name, memory_bytes / _GIB)] * num_local)


def _detect(num_local: int, gpus: "tuple[()] | list[tuple[str, float]] | None") -> Machine | None:
    try:
        return detect_machine(num_local, gpus=gpus)
    except ConfigError:
        return None


def _count_local(num_processes: int) -> int:
    """Return the number of ranks on this machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdigit() and int(local) > 0 else num_processes
