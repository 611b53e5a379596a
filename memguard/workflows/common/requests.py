"""The arguments of `compare`, `plan` and `export`, and paths, checked before torch is imported."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from memguard.audit.benchmarks.tasks import check_tasks
from memguard.audit.suite import load_audit_suite
from memguard.compare import Sweep
from memguard.config import AxisName, Document, ParallelConfig, RunConfig, validate
from memguard.data import sources
from memguard.errors import (
    MAX_PATH,
    ConfigError,
    DataError,
    ModelError,
    check_name,
    escape_name,
    shorten,
)
from memguard.hf import adapter_files, checkpoint_files
from memguard.hf.config_fields import check_fields
from memguard.records.texts import shorten_paths
from memguard.runtime.environment import MORE_MACHINES, check_num_processes
from memguard.workflows.common.checks import (
    check_documents_libraries,
    check_processes,
    check_row_length,
    check_targets,
)
from memguard.workflows.common.folder import RunFolder, check_outside_runs

_SMALLER_SWEEPS = "split the settings into sweeps on several machines"
_MOST_MISSING = 20
"""Maximum number of paths in one message."""


def make_command(*arguments: str) -> str:
    """Return the user's command for a record, with absolute paths shortened to their end.

    Records are shared with others; full local paths must not be.

    Args:
        arguments: of the command; by default those that the user typed.
    """
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    if not arguments and name != "memguard":
        return "memguard.api, called by another program"
    words = map(shorten_paths, map(escape_name, arguments or sys.argv[1:]))
    return shlex.join(["memguard", *words])


def read_mesh(text: str, *, command: str) -> ParallelConfig:
    """Parse a mesh; axes that are not given have one rank.

    Args:
        text: degrees of axes, ``z=2,x=2``.
        command: command of the option, for messages.

    Raises:
        ConfigError: an unknown axis, or a value that is not a number.
    """
    names: tuple[str, ...] = get_args(AxisName)
    parts = [part.partition("=") for part in text.split(",")]
    degrees: dict[str, Any] = {axis.strip(): degree.strip() for axis, _, degree in parts}
    unknown = [axis for axis in degrees if axis not in names]
    if unknown or len(degrees) < len(parts):
        raise ConfigError(
            f"'--mesh' must give each of {', '.join(names)} at most once, as in z=2,x=2; "
            f"got '{text}'"
        )
    place = Document(path=f"memguard {command} --mesh", values={}, places={})
    return validate(ParallelConfig, {"data": 1, "z": 1} | degrees, place)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRequest:
    """The arguments of `memguard compare`."""

    given: tuple[str, ...]
    """A sweep and changes to its settings, or the folders of finished runs."""
    out: Path | None
    jobs: int | None
    fix: bool
    num_processes: int | None
    """Value of `--nproc`; None if left out."""
    utility: str | None = None
    """Value of `--utility`; None if left out."""

    @property
    def are_runs(self) -> bool:
        """Whether the first argument is the folder of a run instead of a sweep."""
        return (Path(self.given[0]) / "config.yaml").is_file()

    def check(self) -> None:
        """Reject arguments that contradict each other.

        Raises:
            ConfigError: names the first contradiction.
        """
        if (self.num_processes or 1) > 1 and not self.fix:
            raise ConfigError("--nproc needs --fix; a sweep trains several runs with --jobs")
        if not self.are_runs:
            if self.fix:
                raise ConfigError("--fix needs a finished RUN; a sweep names its own settings")
            if self.out is not None:
                raise ConfigError("--out needs RUNs; a sweep has 'output_dir' in its YAML")
            if self.utility is not None:
                raise ConfigError("--utility needs RUNs; a sweep has 'utility' in its YAML")
            check_num_processes(self.jobs or 1, option="--jobs", way_out=_SMALLER_SWEEPS)
            return
        if self.out is not None:
            check_outside_runs(self.out, "--out")
        check_num_processes(self.num_processes or 1, option="--nproc", way_out=MORE_MACHINES)
        if self.jobs is not None:
            raise ConfigError("--jobs needs a sweep; finished RUNs are not trained")
        if self.fix and len(self.given) > 1:
            raise ConfigError(f"--fix takes one RUN; got {len(self.given)}")
        if self.fix and self.utility is not None:
            raise ConfigError(
                "--utility does not go with --fix; compare the two RUNs with it afterwards"
            )


MODEL_ALONE = Document(
    path="memguard plan",
    values={
        "name": "plan",
        "model": {"path": "model"},
        "data": {"train": ["documents"], "seq_len": 2048},
    },
    places={},
)
"""Settings of a run that stands for a model alone in `memguard plan`; users may change them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """The arguments of `memguard plan`."""

    run: RunConfig
    """Settings of the run; for a model alone `MODEL_ALONE` with those that were given."""
    is_run: bool
    """Whether the plan is for a run instead of a model alone."""
    model: Path | None
    gpus: int | None
    machine: str | None
    mesh: str | None
    """Degrees of axes as given, `z=2,x=2`."""
    arguments: tuple[str, ...] | None = None
    """The run's CONFIG and settings as given on the command line; None: not from there."""

    def check(self) -> None:
        """Reject arguments that cannot be used together.

        Raises:
            ConfigError: neither a run nor a model; or rows of a micro-batch, but not of a step.
        """
        if self.is_run:
            return
        if self.model is None:
            raise ConfigError(
                "give the CONFIG of a run before its settings, or --model CONFIG_JSON for a model "
                "alone"
            )
        given = self.run.train.model_fields_set
        if "micro_batch_size" in given and "batch_size" not in given:
            raise ConfigError(
                "'train.micro_batch_size' needs 'train.batch_size', whose rows it divides"
            )


DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """The arguments of `memguard export`."""

    folder: Path
    """Folder of a run that trained an adapter, or of an adapter."""
    out: Path
    merge: bool
    dtype: str | None
    """Of the written weights; None keeps the base's."""
    base: str | None = None
    """Folder or hub id of the base model; None locates the one that the adapter names."""

    @property
    def is_run(self) -> bool:
        """Whether the folder is that of a run."""
        return (self.folder / "config.yaml").is_file()

    @property
    def adapter(self) -> Path:
        """Folder of the adapter."""
        return self.folder / "adapter" if self.is_run else self.folder

    def check(self) -> None:
        """Reject arguments that cannot be used.

        Raises:
            ConfigError: an option is missing or invalid; there is no adapter; OUT exists.
            ModelError: the run is unfinished; the adapter or its base cannot be read.
            RecordError: the run is damaged.
        """
        if not self.merge:
            raise ConfigError("give --merge: export writes an adapter merged into its base")
        if self.dtype not in (None, *DTYPES):
            raise ConfigError(f"'--dtype' must be {', '.join(DTYPES)}; got '{self.dtype}'")
        for setting, path in (("FOLDER", self.folder), ("--base", self.base)):
            if path is not None:
                check_name(path, setting, ConfigError)
        check_outside_runs(self.out, "OUT")
        if not self.folder.is_dir():
            raise ConfigError(f"there is no folder '{self.folder}'; correct the path")
        if self.is_run:
            RunFolder(self.folder).require_trained(without_documents=True)
        if not adapter_files.is_adapter(self.adapter):
            why = (
                "model/ of this run is complete: it trained no adapter"
                if self.is_run
                else adapter_files.explain_no_adapter(self.folder)
            )
            raise ConfigError(f"'{self.folder}' has no adapter to merge ({why})")
        if self.out.is_symlink() and not self.out.exists():
            raise ConfigError(
                f"'{self.out}' is a link to a folder that does not exist; choose another name or "
                "delete the link"
            )
        if self.out.exists():
            raise ConfigError(f"'{self.out}' exists already; choose another name or delete it")
        if self.adapter.resolve() in self.out.resolve().parents:
            raise ConfigError(f"'{self.out}' must not be inside the adapter's folder")
        adapter_files.check_model(str(self.adapter), base=self.base)


# Checks that the given paths exist, before torch is imported and anything is read.
#
#     documents   --members, --nonmembers, data.train, data.control, ...
#     models      --model, --base, --reference, model.path, ...
#     suite       --suite, audit.suite
#
# One message lists all missing paths. Hub ids are not checked here; loading them reports errors.


def check_run(
    config: RunConfig, *, num_processes: int | None = None, has_model: bool = True
) -> None:
    """Check that the documents, models and suite of a run exist and suit its processes.

    Args:
        config: the run's settings.
        num_processes: number of training processes; None if nothing is trained.
        has_model: False if the same command trains 'model.path' first.

    Raises:
        ConfigError: the suite or a benchmark task is missing or invalid; a library is missing; a
            setting does not work with this number of processes; adapters for layers that do not
            exist.
        DataError: documents are missing.
        ModelError: a folder is missing, or has no checkpoint; rows are longer than the model's
            maximum.
    """
    if num_processes is not None:
        check_processes(config, num_processes)
    check_documents_libraries(config)
    documents = {f"data.{name}": given for name, given in config.data.list_sources().items()}
    models = {"model.path": config.model.path if has_model else None}
    if config.audit.enabled:
        models["audit.reference"] = config.audit.reference
    scratch = config.model.scratch
    check_paths(
        documents,
        models,
        {"model.scratch.tokenizer": None if scratch is None else scratch.tokenizer},
    )
    if has_model:
        check_row_length(config)
        check_targets(config)
    if scratch is not None:
        check_fields(scratch.config, place="'model.scratch.config'")
    load_audit_suite(config.audit)
    if config.audit.enabled:
        check_tasks(config.audit.utility)


def check_sweep(sweep: Sweep) -> None:
    """Check each run of a sweep; see `check_run`."""
    for run in sweep.in_order:
        # With 'pretrain' the other runs start from a model that the sweep trains first.
        has_model = run is sweep.pretrain or not sweep.pretrain
        check_run(run.config, num_processes=1, has_model=has_model)


def check_paths(
    documents: Mapping[str, Sequence[str]],
    models: Mapping[str, str | None],
    tokenizers: Mapping[str, str | None],
) -> None:
    """Raise one error that names all missing paths; then check the models' folders."""
    for setting, given in documents.items():
        for source in given:
            check_name(source, setting, DataError)
    for setting, model in {**models, **tokenizers}.items():
        if model is not None:
            check_name(model, setting, ModelError)
    no_documents = [
        f"'{setting}': there is no file or folder '{shorten(source, MAX_PATH)}'"
        for setting, given in documents.items()
        for source in given
        if sources.is_missing(source)
    ]
    no_models = [
        f"'{setting}': there is no folder '{shorten(path, MAX_PATH)}'"
        for setting, path in {**models, **tokenizers}.items()
        if path is not None and checkpoint_files.is_missing(path)
    ]
    missing = [*no_documents, *no_models]
    if missing:
        kind = DataError if no_documents else ModelError
        way_out = "Correct the path." if len(missing) == 1 else "Correct the paths."
        more = len(missing) - _MOST_MISSING
        listed = "; ".join(missing[:_MOST_MISSING]) + (f" and {more:,} more" if more > 0 else "")
        raise kind(f"{listed}. {way_out}")
    for setting, given in documents.items():
        for source in given:
            sources.check_source(source, setting=setting)
    for path in models.values():
        if path is not None:
            adapter_files.check_model(path)
