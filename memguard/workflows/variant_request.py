"""Checks the argument `--variants` of `audit` before torch is imported."""

from typing import TYPE_CHECKING, cast, get_args

from memguard.config import AuditConfig
from memguard.errors import ConfigError, require_library
from memguard.hf.adapter_files import is_adapter
from memguard.records import VARIANT_LIBRARIES, VariantName
from memguard.workflows.run_checks import has_ternary_weights

if TYPE_CHECKING:
    from memguard.workflows.audited_model import ModelInMemory

_OF_ADAPTERS: tuple[VariantName, ...] = ("adapter", "merged")
_CHOICES: tuple[VariantName, ...] = tuple(name for name in get_args(VariantName) if name != "model")


def check_variants(
    names: tuple[str, ...],
    model: "str | ModelInMemory",
    settings: AuditConfig,
    num_processes: int,
) -> tuple[VariantName, ...]:
    """Return the variants to audit; the others are compared with the first one.

    A model without an adapter is the first one itself, as `model`.

    Args:
        names: as given; empty for no variants.
        model: folder or hub id of the audited model.
        settings: of the audit.
        num_processes: of the audit.

    Raises:
        ConfigError: an unknown or repeated name, a model that has no such variant, several
            processes, a model that is already quantised, or a missing library.
    """
    if not names:
        return ()
    unknown = [name for name in names if name not in _CHOICES]
    if unknown or len(set(names)) < len(names):
        raise ConfigError(
            f"'--variants' must give each of {', '.join(_CHOICES)} at most once, separated by "
            f"commas; got '{','.join(names)}'"
        )
    if not isinstance(model, str):
        raise ConfigError("'--variants' needs the folder of a model; save the model and audit that")
    given = cast("tuple[VariantName, ...]", names)
    if is_adapter(model):
        if len(given) < 2:
            other = "merged" if given[0] == "adapter" else "adapter"
            raise ConfigError(
                "'--variants' compares the others with the first one and needs two or more; got "
                f"'{given[0]}'. Write {other},{given[0]}"
            )
    else:
        wrong = [name for name in given if name in _OF_ADAPTERS]
        if wrong:
            raise ConfigError(
                f"'--variants': '{wrong[0]}' needs a model with an adapter, and '{model}' has "
                "none: its own weights are the first variant. Choose from int8, nf4"
            )
        given = ("model", *given)
    if num_processes > 1:
        raise ConfigError(
            f"'--variants' needs one process; got {num_processes}. Audit the variants without "
            "--nproc"
        )
    if settings.device_map is not None:
        raise ConfigError("'--variants' and 'audit.device_map' cannot be combined; remove one")
    quantised = [name for name in given if name in VARIANT_LIBRARIES]
    if quantised and has_ternary_weights(model):
        raise ConfigError(
            f"'--variants': '{quantised[0]}' needs a model that is not quantised; the layers of "
            f"'{model}' already round their weights ('quantization_config' in its config.json). "
            "Audit it without --variants"
        )
    for name in given:
        if (library := VARIANT_LIBRARIES.get(name)) is not None:
            require_library(library, f"'--variants': {name}", extra="quant")
    return given
