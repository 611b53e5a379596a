"""What `memguard plan` was asked, checked and filled in. No torch."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.cli.mesh_option import read_mesh
from memguard.config import ParallelConfig, RunConfig
from memguard.errors import ConfigError, ModelError
from memguard.parallel.mesh_shape import AXES, ModelSizes
from memguard.planner.fit import Checkpointing, Work
from memguard.planner.machine import THIS_MACHINE, Machine, load_machine

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
