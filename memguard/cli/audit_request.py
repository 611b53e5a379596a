"""What `memguard audit` was asked, checked before torch is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.cli.mesh_option import read_mesh
from memguard.config import AuditConfig, Document, ParallelConfig, load_run_config, validate
from memguard.errors import ConfigError


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
