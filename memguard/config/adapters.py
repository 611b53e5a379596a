"""The settings of adapters, with `peft`'s names and meanings."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from memguard.config.settings import Positive, Settings
from memguard.errors import ConfigError

# Fields of peft's LoraConfig that a run cannot set, because memguard does not compute them. Fields
# that do not change the adapter's arithmetic, such as 'inference_mode', are unknown like any other.
_UNSUPPORTED = """
    alpha_pattern bias corda_config ensure_weight_tying eva_config exclude_modules fan_in_fan_out
    layer_replication layers_pattern layers_to_transform loftq_config lora_bias modules_to_save
    rank_pattern target_parameters trainable_token_indices use_qalora
"""


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
    quantization: Literal["nf4"] | None = Field(
        None,
        description="nf4: the frozen weights of linear layers take 4 bits (QLoRA), as with "
        "load_in_4bit and bnb_4bit_quant_type nf4 in transformers; on one process, data and z.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Any) -> Any:
        if isinstance(values, dict):
            wrong = [name for name in _UNSUPPORTED.split() if name in values]
            if wrong:
                raise ValueError(
                    f"memguard has no '{wrong[0]}' of peft: its adapters have "
                    f"{', '.join(cls.model_fields)}"
                )
            targets = values.get("target_modules")
            if isinstance(targets, str) and targets != "all-linear":
                raise ValueError(
                    "'target_modules' must be all-linear or a list of names, as in [q_proj, "
                    f"v_proj]; got '{targets}'"
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


def matches_target(layer: str, target_modules: Sequence[str]) -> bool:
    """Return whether `target_modules` names a layer, as in peft: whole, or by its last parts."""
    return any(layer == target or layer.endswith(f".{target}") for target in target_modules)


def refuse_target(target: str, family: str, layers: Iterable[str]) -> ConfigError:
    """Return the error for a name that matches no layer; these are linear, without the head."""
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    return ConfigError(
        f"'adapter.target_modules' must name linear layers of {family}, its head excepted; got "
        f"'{target}'. They are {', '.join(names)}, or all-linear for all of them"
    )
