"""A run's settings, checked as far as that needs neither torch nor the network: `CheckedRun`.

processes -> libraries -> paths -> model -> suite and tasks -> folder -> memory

What only started ranks can know is settled in `train_run`, `prepare_run` and `dry_run`, which take
nothing else: layers of other families, a hub model's positions, the GPU's memory as torch sees it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memguard.audit.benchmarks.tasks import check_tasks
from memguard.audit.suite import load_audit_suite
from memguard.config import RunConfig
from memguard.config.adapters import matches_target, refuse_target
from memguard.config.mitigations import DeduplicateConfig, DpSgdConfig, find_mitigation
from memguard.config.optimizers import OPTIMIZERS
from memguard.errors import ConfigError, ModelError, check_name, require_library
from memguard.hf import adapter_files
from memguard.hf.config_fields import check_fields, check_positions
from memguard.parallel.mesh_shape import AXES, resolve_mesh
from memguard.parallel.model_sizes import ESTIMATED_FAMILIES, EXPERT_COUNTS, ModelSizes
from memguard.records.run_files import has_begun
from memguard.runtime.children import own_rank
from memguard.workflows.common.checks import (
    check_device_map,
    check_paths,
    count_processes,
    count_usable_gpus,
    explain_one_process,
    has_ternary_weights,
    read_local_config,
)
from memguard.workflows.common.folder import RunFolder, check_free, check_outside_runs
from memguard.workflows.training.memory import check_memory_early

_LINEAR_LAYERS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
"""Of each block of `ESTIMATED_FAMILIES`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRun:
    """Settings of a run that passed every check that needs neither torch nor the network."""

    config: RunConfig
    """Still with `auto`."""
    folder: Path
    """Not opened, not locked."""
    num_processes: int
    """Ranks of the training: from `--nproc`, torchrun or the GPUs."""
    num_to_start: int
    """Processes that this command starts for it; 1 if it runs in this one, or torchrun did."""
    sizes: ModelSizes | None
    """Of a model in a local folder; None: known to transformers only, or no estimate."""
    notes: tuple[str, ...] = ()
    """Notes for the user, shown before the start."""


def check_run(
    config: RunConfig,
    *,
    nproc: int | None = 1,
    trains: bool = True,
    writes: bool = True,
    has_model: bool = True,
) -> CheckedRun:
    """Check the settings of a run against processes, libraries, files and memory.

    ``nproc`` None chooses by the GPUs. ``trains``: False for a command that only reads documents,
    perhaps where training cannot run; ``writes``: False for one that leaves the run's folder to
    another; ``has_model``: False if the same command trains 'model.path' first.
    """
    sizes = read_local_sizes(config)
    num_to_start, note = choose_num_processes(config, nproc, sizes)
    num_processes = count_processes(num_to_start)
    folder = Path(config.output_dir) / config.name
    if trains:
        check_processes(config, num_processes)
    if (deduplicate := find_mitigation(config.mitigations, DeduplicateConfig)) is not None:
        deduplicate.check_library()
    scratch, audit = config.model.scratch, config.audit
    # Once training has begun, the prepared documents may be used without them.
    sources = {} if has_begun(folder) else config.data.list_sources()
    check_paths(
        {f"data.{name}": given for name, given in sources.items()},
        {
            "model.path": config.model.path if has_model else None,
            "audit.reference": audit.reference if audit.enabled else None,
        },
        {"model.scratch.tokenizer": None if scratch is None else scratch.tokenizer},
    )
    if has_model:
        check_row_length(config)
        _check_targets(config)
    if scratch is not None:
        check_fields(scratch.config, place="'model.scratch.config'")
    load_audit_suite(audit)
    if audit.enabled:
        check_tasks(audit.utility)
    if writes and own_rank() == 0:
        check_outside_runs(folder, "output_dir")
        check_free(folder)
    if writes and trains:
        check_memory_early(config, sizes, num_processes)
    return CheckedRun(
        config=config,
        folder=folder,
        num_processes=num_processes,
        num_to_start=num_to_start,
        sizes=sizes,
        notes=(note,) if note else (),
    )


def choose_num_processes(
    config: RunConfig, nproc: int | None, sizes: ModelSizes | None
) -> tuple[int, str]:
    """Return the number of processes, and why some GPUs are not used ("" if all are).

    several visible GPUs   one for each that mesh, batch and model allow
    one GPU, or none       one, as where a setting needs it
    torchrun, Slurm        one here, beside those that these started
    """
    num_gpus = count_usable_gpus()
    if nproc is not None or num_gpus <= 1:
        return nproc or 1, ""
    why = explain_one_process(config)
    if why is not None:
        return 1, f"1 of {num_gpus} visible GPUs is used: {why}"
    for count in range(num_gpus, 0, -1):
        try:
            resolve_mesh(config.parallel, count, sizes, batch_size=config.train.batch_size)
        except ConfigError as error:
            why = why or error.problems[0]
            continue
        is_all = count == num_gpus
        return count, "" if is_all else f"{count} of {num_gpus} visible GPUs are used: {why}"
    # No number works: the mesh is refused with the ones that would.
    return num_gpus, ""


def check_processes(config: RunConfig, num_processes: int) -> None:
    """Reject settings that training on this number of processes does not support."""
    if (problem := next(_list_problems(config, num_processes), None)) is not None:
        raise ConfigError(problem)
    if config.adapter is not None and config.adapter.quantization is not None:
        require_library("bitsandbytes", "'adapter.quantization': nf4")
    if config.optim.name == "adamw_8bit":
        require_library("bitsandbytes", "'optim.name': adamw_8bit")
    if (dp_sgd := find_mitigation(config.mitigations, DpSgdConfig)) is not None:
        dp_sgd.check_library()
    if config.audit.enabled:
        check_device_map(config.audit, world_size=1, is_adapter=config.adapter is not None)


def _list_problems(config: RunConfig, num_processes: int) -> Iterator[str]:
    why, path = explain_one_process(config), config.model.path
    if num_processes > 1 and why is not None:
        yield f"{why}; got {num_processes}. Remove the setting, or use one process"
    scratch, optimizer = config.model.scratch, config.optim.name
    fields = read_local_config(path or "") if scratch is None else scratch.config
    is_early = OPTIMIZERS[optimizer].gradients == "unit" and not config.train.trainable_modules
    if is_early and any(fields.get(field) for field in EXPERT_COUNTS):
        yield f"'optim.name: {optimizer}' does not update experts, which this model has: use adamw"
    if config.adapter is None:
        return
    if path is not None and adapter_files.is_adapter(path):
        yield (
            f"'model.path' must not be an adapter if 'adapter' is set: '{path}' would be the base "
            "of another adapter. Merge it first with memguard export --merge"
        )
    if config.adapter.quantization is None:
        return
    degrees = {axis: getattr(config.parallel, axis) for axis in AXES}
    rest = num_processes // math.prod(degree for degree in degrees.values() if degree != -1)
    split = [axis for axis in AXES[2:] if (degrees[axis] if degrees[axis] != -1 else rest) > 1]
    if split and num_processes > 1:
        names = " and ".join(f"'parallel.{axis}'" for axis in split)
        got = ", ".join(str(degrees[axis]) for axis in split)
        yield (
            f"{names} must be 1 with 'adapter.quantization'; got {got}: weights in nf4 are split "
            "over z only. Use the axes data and z, or remove the setting"
        )
    z = degrees["z"] if degrees["z"] != -1 else rest
    if problem := adapter_files.refuse_nf4_over_z(1 if num_processes == 1 else z):
        yield f"'adapter.quantization': {problem}"
    if path is not None and has_ternary_weights(path):
        yield (
            f"'adapter.quantization' must not be set for '{path}', whose layers already round "
            "their weights ('quantization_config' in its config.json) and have no adapters: "
            "remove 'adapter' to train its weights"
        )


def _check_targets(config: RunConfig) -> None:
    """Reject a name in `adapter.target_modules` that matches no layer of a known family.

    Other models are checked once torch is imported (`setup.check_layers`).
    """
    if config.adapter is None or config.adapter.target_modules == "all-linear":
        return
    fields = read_local_config(config.model.path or "")
    family, num_blocks = fields.get("model_type"), fields.get("num_hidden_layers")
    if family not in ESTIMATED_FAMILIES or not isinstance(num_blocks, int) or num_blocks > 10**4:
        return
    layers = [f"model.layers.{i}.{name}" for i in range(num_blocks) for name in _LINEAR_LAYERS]
    for target in config.adapter.target_modules:
        if not any(matches_target(layer, (target,)) for layer in layers):
            raise refuse_target(target, family, layers)


def check_row_length(config: RunConfig) -> None:
    """Reject rows longer than the model's positions, if its configuration is a local file."""
    if config.model.scratch is not None:
        fields = config.model.scratch.config
    else:
        fields = read_local_config(config.model.path or "")
        text = fields.get("text_config")
        fields = text if isinstance(text, dict) else fields
    check_positions(fields.get("max_position_embeddings"), config.data.seq_len)


def read_local_sizes(config: RunConfig) -> ModelSizes | None:
    """Return the sizes of a model in a local folder; None if its memory cannot be estimated."""
    if config.model.path is None or config.model.attn_implementation == "eager":
        return None
    try:
        sizes = ModelSizes.from_json(read_local_config(config.model.path))
        return sizes.for_optimizer(config.optim.name)
    except (ValueError, ModelError):
        return None


# -- memguard export --merge ---------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """The arguments of `memguard export`."""

    folder: Path
    """Folder of a run that trained an adapter, or of an adapter; with a step, of any run."""
    out: Path
    dtype: str | None
    """Of the merged weights; None keeps the base's."""
    base: str | None = None
    """Folder or hub id of the base model; None locates the one that the adapter names."""
    step: int | None = None
    """Exports the checkpoint of this step; None merges the adapter."""

    @property
    def is_run(self) -> bool:
        """Whether the folder is that of a run."""
        return (self.folder / "config.yaml").is_file()

    @property
    def adapter(self) -> Path:
        """Folder of the adapter."""
        return self.folder / "adapter" if self.is_run else self.folder

    def check(self) -> None:
        """Reject arguments that cannot be used."""
        if (problem := next(self._list_problems(), None)) is not None:
            raise ConfigError(problem)
        if self.step is None:
            adapter_files.check_model(str(self.adapter), base=self.base)
        else:
            RunFolder(self.folder).find_checkpoint(self.step)

    def _list_problems(self) -> Iterator[str]:
        if self.dtype not in (None, *DTYPES):
            yield f"'--dtype' must be {', '.join(DTYPES)}; got '{self.dtype}'"
        for setting, path in (("FOLDER", self.folder), ("--base", self.base)):
            if path is not None:
                check_name(path, setting, ConfigError)
        check_outside_runs(self.out, "OUT")
        if not self.folder.is_dir():
            yield f"there is no folder '{self.folder}'; correct the path"
        if self.step is not None and not self.is_run:
            yield f"'--step' needs a run; '{self.folder}' has no config.yaml, name a run's folder"
        if self.step is None and self.is_run:
            RunFolder(self.folder).require_trained(without_documents=True)
        if self.step is None and not adapter_files.is_adapter(self.adapter):
            why = (
                "model/ of this run is complete: it trained no adapter"
                if self.is_run
                else adapter_files.explain_no_adapter(self.folder)
            )
            yield f"'{self.folder}' has no adapter to merge ({why})"
        if self.out.is_symlink() and not self.out.exists():
            yield (
                f"'{self.out}' is a link to a folder that does not exist; choose another name or "
                "delete the link"
            )
        if self.out.exists():
            yield f"'{self.out}' exists already; choose another name or delete it"
        if self.adapter.resolve() in self.out.resolve().parents:
            yield f"'{self.out}' must not be inside the adapter's folder"
