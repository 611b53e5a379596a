"""What `memguard audit` was asked, checked before torch is loaded."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from memguard.config import (
    AuditConfig,
    AxisName,
    Document,
    ParallelConfig,
    RunConfig,
    load_run_config,
    validate,
)
from memguard.errors import ConfigError, ModelError
from memguard.parallel.mesh_shape import AXES, ModelSizes
from memguard.planner.fit import Checkpointing, Work
from memguard.planner.machine import THIS_MACHINE, Machine, load_machine

# A mesh on the command line: `z=2,x=2`.


def read_mesh(text: str, *, command: str) -> ParallelConfig:
    """Return the mesh that was written; axes that are left out have one rank.

    Args:
        text: degrees of axes, ``z=2,x=2``.
        command: whose option it is, for messages.

    Raises:
        ConfigError: no such axis, or no number.
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
    return validate(ParallelConfig, {"data": 1} | degrees, place)


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRequest:
    """The arguments of `memguard audit`."""

    run: Path | None
    model: str | None
    base: str | None
    members: tuple[str, ...]
    nonmembers: tuple[str, ...]
    out: Path | None
    text_column: str
    mesh: str | None
    """As given: degrees of axes, `z=2,x=2`."""
    settings: dict[str, Any]
    """Fields of `AuditConfig` that were given."""
    seed: int

    def check(self) -> AuditConfig:
        """Return the audit's settings: the run's, or the defaults, with those given put in.

        Raises:
            ConfigError: arguments that contradict each other, or a value out of range.
        """
        problems = []
        if (self.run is None) == (self.model is None):
            problems.append(
                "give either the folder of a RUN, or --model DIR with --members FILE for a model "
                "memguard did not train"
            )
        elif self.run is not None:
            if self.members or self.nonmembers:
                problems.append("--members and --nonmembers belong to --model; a run knows its own")
            if self.base and self.settings.get("base") is False:
                problems.append("--base names what --no-base leaves out; give one of them")
            if not (self.run / "config.yaml").is_file():
                problems.append(
                    f"'{self.run}' is not the folder of a run (no config.yaml); for a model "
                    "memguard did not train use --model DIR --members FILE"
                )
        else:
            if not self.members:
                problems.append("--model needs --members: documents the model was trained on")
            if self.out is None:
                problems.append("--model needs --out: a folder for the report")
        if problems:
            raise ConfigError(*problems)
        self.parallel  # noqa: B018 - told before anything is read
        origin = Document(
            path="memguard audit",
            values={},
            places={(key,): f"--{key.replace('_', '-')}" for key in self.settings},
        )
        before = AuditConfig() if self.run is None else self.load_run().audit
        return validate(AuditConfig, {**before.model_dump(), **self.settings}, origin)

    @property
    def parallel(self) -> ParallelConfig | None:
        """The mesh that was asked for.

        Raises:
            ConfigError: no such axis, or no number.
        """
        return None if self.mesh is None else read_mesh(self.mesh, command="audit")

    def load_run(self) -> Any:
        """Return the settings of the run under audit."""
        assert self.run is not None, "checked: there is a run"
        return load_run_config(self.run / "config.yaml")


# What `memguard plan` was asked, checked and filled in. No torch.

OPTIONS = {
    "--seq-len": "data.seq_len",
    "--batch": "train.batch_size",
    "--micro-batch": "train.micro_batch_size",
    "--checkpointing": "train.activation_checkpointing",
    "--precision": "train.precision",
}
"""Of a model alone, and a run's settings that they stand for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """The arguments of `memguard plan`."""

    config: str | None
    model: Path | None
    gpus: int | None
    machine: str | None
    mesh: str | None
    """As given: degrees of axes, `z=2,x=2`."""
    seq_len: int | None
    batch: int | None
    micro_batch: int | None
    checkpointing: str | None
    precision: str | None

    def check(self) -> None:
        """Refuse arguments that contradict each other.

        Raises:
            ConfigError: all of them.
        """
        problems = []
        if self.config is None and self.model is None:
            problems.append("give the CONFIG of a run, or --model CONFIG_JSON for a model alone")
        if self.config is not None and "=" in self.config and not Path(self.config).exists():
            problems.append(
                f"'{self.config}' is a setting and needs the CONFIG of a run before it; for a "
                f"model alone there are {', '.join(OPTIONS)}"
            )
        elif self.config is not None:
            problems += [
                f"{option} is for a model alone; with a CONFIG write {setting}={value}"
                for option, setting in OPTIONS.items()
                if (value := getattr(self, option[2:].replace("-", "_"))) is not None
            ]
        if self.micro_batch is not None and self.config is None:
            # As a run's settings demand it.
            if self.batch is None:
                problems.append("'--micro-batch' divides the rows of '--batch': give that as well")
            elif self.batch % self.micro_batch:
                problems.append(
                    f"'--micro-batch' must divide '--batch'; got {self.micro_batch} and "
                    f"{self.batch}"
                )
        if self.checkpointing not in (None, "none", "selective", "full"):
            problems.append(
                f"'--checkpointing' must be none, selective or full; got '{self.checkpointing}'"
            )
        if self.precision not in (None, "fp32", "bf16"):
            problems.append(f"'--precision' must be fp32 or bf16; got '{self.precision}'")
        if problems:
            raise ConfigError(*problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a plan is made for."""

    name: str
    sizes: ModelSizes
    machine: Machine
    num_gpus: int
    work: Work
    mesh: ParallelConfig | None
    """The mesh asked for; None leaves it to the planner."""
    is_run: bool
    """Whether a run's settings are asked about, not a model alone."""


def ask_about_model(request: PlanRequest) -> Question:
    """Return the question about a model alone.

    Raises:
        ConfigError: no such machine or mesh.
        ModelError: no such configuration, or one of a family whose memory is not known.
    """
    assert request.model is not None, "checked: there is one"
    mesh = None if request.mesh is None else read_mesh(request.mesh, command="plan")
    machine, num_gpus = _find_gpus(request, mesh)
    checkpointing: Any = request.checkpointing
    return Question(
        name=_name(request.model),
        sizes=read_model_file(request.model),
        machine=machine,
        num_gpus=num_gpus,
        work=Work(
            seq_len=request.seq_len or 2048,
            batch_size=request.batch,
            micro_batch_size=request.micro_batch,
            checkpointing=checkpointing,
            compute_bytes=4 if request.precision == "fp32" else 2,
        ),
        mesh=mesh,
        is_run=False,
    )


def ask_about_run(request: PlanRequest, run: RunConfig, sizes: ModelSizes) -> Question:
    """Return the question about a training run, with the run's own settings.

    Raises:
        ConfigError: no such machine or mesh.
    """
    mesh = run.parallel
    if request.mesh is not None:
        asked = read_mesh(request.mesh, command="plan")
        mesh = mesh.model_copy(update={axis: getattr(asked, axis) for axis in AXES})
    machine, num_gpus = _find_gpus(request, mesh)
    train = run.train
    checkpointing: Checkpointing = train.activation_checkpointing
    return Question(
        name=_name(request.model) if request.model else run.model.path or "model.scratch",
        sizes=sizes,
        machine=machine,
        num_gpus=num_gpus,
        work=Work(
            seq_len=run.data.seq_len,
            batch_size=train.batch_size,
            micro_batch_size=train.micro_batch_size or train.batch_size,
            checkpointing=checkpointing,
            compute_bytes=2 if train.precision == "bf16" else 4,
            chunk_tokens=train.nll_chunk_tokens,
            reshard_after_forward=mesh.reshard_after_forward,
        ),
        mesh=mesh,
        is_run=True,
    )


def read_model_file(path: Path) -> ModelSizes:
    """Read the sizes from a config.json, or from the folder that it is in.

    Raises:
        ModelError: no such file, or a family whose memory is not known.
    """
    return ModelSizes.from_json(_read_json(path / "config.json" if path.is_dir() else path))


def _find_gpus(request: PlanRequest, mesh: ParallelConfig | None) -> tuple[Machine, int]:
    """Return the machine and the number of its GPUs: as asked, as the mesh says, or one node's."""
    name = request.machine or THIS_MACHINE
    degrees = [-1] if mesh is None else [getattr(mesh, axis) for axis in AXES]
    asked = request.gpus
    if asked is None and -1 not in degrees:
        asked = math.prod(degrees)
    machine = load_machine(name, num_processes=asked or 1)
    return machine, asked or machine.gpus_per_node


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"'--model' must be a config.json or a folder that has one; '{path}' cannot be read: "
            f"{error.strerror}"
        ) from error
    except ValueError as error:
        raise ModelError(f"'--model' must be a config.json; '{path}' is not JSON") from error
    if not isinstance(fields, dict):
        raise ModelError(f"'--model' must be a config.json; '{path}' holds no settings")
    return fields


def _name(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    is_named = path.is_dir() or path.name == "config.json"
    return folder.resolve().name if is_named else path.stem.removesuffix("_config")
