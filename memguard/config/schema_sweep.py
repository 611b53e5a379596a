"""The settings of a sweep: runs that differ in few settings, trained and compared."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from memguard.config.mitigations import MitigationConfig
from memguard.config.settings import Name, Settings


class SweepSetting(Settings):
    """One setting of a sweep: what differs from the common run."""

    name: Name = Field(description="Name of the setting in tables and charts.")
    overrides: dict[str, Any] = Field(
        {}, description="Settings that differ, e.g. {optim.lr: 1e-4}; not the data, model or audit."
    )
    mitigations: tuple[MitigationConfig, ...] = Field(
        (), description="Mitigations of this setting; [] is the plain loss."
    )


class SweepConfig(Settings):
    """Settings trained and audited on the same documents, steps and seeds, then compared."""

    name: Name = Field(description="Name of the sweep; its folder is 'output_dir'/'name'.")
    output_dir: str = Field("runs", description="Where the sweep's folder is made.")
    pretrain: dict[str, Any] | None = Field(
        None, description="A run trained first; its model is what every setting starts from."
    )
    run: dict[str, Any] = Field(
        description="What all settings share: a run without 'name', 'seed', 'mitigations' and "
        "'output_dir'; without 'model' where there is 'pretrain'."
    )
    settings: Annotated[tuple[SweepSetting, ...], Field(min_length=1)] = Field(
        description="The settings to compare; the first is what the others are compared with."
    )
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = Field(
        (0,), description="Each setting is trained once with each seed."
    )
    equal: Literal["steps", "supervised_tokens"] = Field(
        "steps",
        description="What settings that drop labels have as much of as the others: steps; "
        "supervised_tokens: labels that receive loss, by more background in more steps, documents "
        "of the study as often as before.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [setting.name for setting in self.settings]
        if len(set(names)) != len(names):
            raise ValueError(f"'settings' has a name twice: {', '.join(names)}")
        return self
