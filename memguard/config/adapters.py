"""The settings of adapters, with `peft`'s names and meanings."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from memguard.config.settings import Positive, Settings

# Fields of peft's LoraConfig that a run cannot set, because memguard does not compute them. Fields
# that do not change the adapter's arithmetic, such as 'inference_mode', are unknown like any other.
_UNSUPPORTED = (
    "alpha_pattern",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "layer_replication",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_qalora",
)


class LoraConfig(Settings):
    """Low-rank adapters (LoRA) are trained; the model's own weights are frozen."""

    name: Literal["lora"] = Field(description="Kind of adapter.")
    r: Annotated[int, Field(ge=1, le=10**5)] = Field(8, description="Rank of each adapter.")
    lora_alpha: Positive = Field(
        8, description="Adapters are multiplied by lora_alpha / r (use_rslora: / sqrt(r))."
    )
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Share of the adapters' input features dropped in training."
    )
    target_modules: tuple[str, ...] | Literal["all-linear"] = Field(
        "all-linear",
        description="Layers with an adapter, by the last part of their names, e.g. [q_proj, "
        "v_proj]; all-linear: every linear layer but the head.",
    )
    use_rslora: bool = Field(False, description="Divide lora_alpha by sqrt(r) instead of r.")
    use_dora: bool = Field(
        False, description="Train the norm of each output feature's weights too (DoRA)."
    )
    init_lora_weights: Literal[True, "gaussian"] = Field(
        True,
        description="Initial values of the first factor; the second is zero. true: uniform "
        "(Kaiming); gaussian: normal with standard deviation 1 / r.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Any) -> Any:
        if isinstance(values, dict):
            wrong = [name for name in _UNSUPPORTED if name in values]
            if wrong:
                raise ValueError(
                    f"memguard has no '{wrong[0]}' of peft: its adapters have "
                    f"{', '.join(cls.model_fields)}"
                )
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.target_modules:
            raise ValueError("'target_modules' must name a layer, or be all-linear; got []")
        if self.use_dora and self.lora_dropout:
            raise ValueError(
                "'use_dora' and 'lora_dropout' cannot be combined: DoRA would apply the frozen "
                "weights to the dropped input too; set lora_dropout to 0"
            )
        return self
