"""Models in memory that are wrapped by peft, by `torch.compile` or for several processes.

    DistributedDataParallel   -> the module of this rank
    OptimizedModule           -> the module that was compiled
    PeftModel (LoRA)          -> the transformers model inside, whose layers hold the adapter
    FSDP1, DeepSpeed          refused: their weights cannot be read where they are

Switched off, the adapter's layers compute what they wrap. That is the model before training only
if nothing else was changed: `check_switchable` refuses what peft trains or has merged elsewhere.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memguard.errors import MemguardError, ModelError
from memguard.hf.checkpoint import load_config

_NEUTRAL_INITS = (True, False, None, "gaussian", "orthogonal")
"""Initialisations that leave the base's weights as they are."""


SAVED = "save it and run `memguard audit --model DIR --members FILE --out DIR`"
"""What to do with a model that cannot be audited where it is."""
_SHARDING = {"FullyShardedDataParallel": "FSDP1", "DeepSpeedEngine": "DeepSpeed"}
"""Names of classes, since DeepSpeed need not be installed."""


def unwrap(model: Any) -> tuple[Any, str, Sequence[Any]]:
    """Return the transformers model inside wrappers, the wrappers, and the active adapter.

    The outermost wrapper is the first. Refused are adapters of another kind than LoRA and DoRA,
    which are not in the layers, and weights sharded by FSDP1 or DeepSpeed.
    """
    wrappers = []
    while (inner := _find_inner(model)) is not None:
        wrappers.append(model)
        model = inner
    _refuse_sharding(*wrappers, model)
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model, "", wrappers
    wrappers.append(model)
    names = list(model.active_adapters)
    configs = [model.peft_config[name] for name in names]
    for name, config in zip(names, configs, strict=True):
        kind = getattr(config.peft_type, "value", str(config.peft_type))
        if kind != "LORA":
            raise ModelError(
                f"'model': the adapter '{name}' is of kind {kind}, and an audit reads LoRA and "
                "DoRA. Merge it and audit the merged model"
            )
    described = ", ".join(map(_describe, names, configs))
    return model.get_base_model(), described, wrappers


def _find_inner(model: Any) -> Any:
    if isinstance(model, DistributedDataParallel):
        return model.module
    return getattr(model, "_orig_mod", None)


def _refuse_sharding(*modules: Any) -> None:
    """Refuse FSDP1 and DeepSpeed, also of parts of the model."""
    inner = modules[-1]
    parts = list(inner.modules()) if isinstance(inner, nn.Module) else []
    names = {kind.__name__ for module in (*modules, *parts) for kind in type(module).__mro__}
    sharding = next((kind for name, kind in _SHARDING.items() if name in names), "")
    if parts and any(hasattr(parameter, "ds_id") for parameter in inner.parameters()):
        sharding = sharding or "DeepSpeed"
    if sharding:
        raise ModelError(f"'model' is sharded by {sharding}; {SAVED}")


def _describe(name: str, config: Any) -> str:
    kind = "DoRA" if config.use_dora else "LoRA"
    return f"{kind} adapter '{name}' (r={config.r}, alpha={config.lora_alpha:g})"


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter, not to the base."""
    parts = name.split(".")
    return any(part.startswith("lora_") or part == "modules_to_save" for part in parts)


def check_switchable(model: Any) -> None:
    """Check that switching the adapter off gives the model before training.

    Raises:
        ModelError: the base was trained too, resized or changed by the adapter's initialisation,
            or the adapter is merged into it.
    """
    reason = _find_change(model)
    if reason:
        raise ModelError(
            f"'base' is 'adapter-off', but without its adapter this model is not the one before "
            f"training: {reason}. Give the folder or hub id of the base model"
        )


def _find_change(model: Any) -> str:
    trained = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not is_of_adapter(name)
    ]
    if trained:
        return f"{trained[0]} is trained outside the adapter"
    for config in model.peft_config.values():
        if config.bias != "none":
            return f"'bias' is {config.bias!r}, which trains the base's biases"
        if config.init_lora_weights not in _NEUTRAL_INITS:
            return f"'init_lora_weights' {config.init_lora_weights!r} changed the base's weights"
    for name, module in model.named_modules():
        if getattr(module, "merged_adapters", None):
            return f"the adapter is merged into {name}"
    path = str(getattr(model.config, "_name_or_path", "") or "")
    if path and Path(path).is_dir():
        try:
            before = load_config(path).get_text_config().vocab_size
        except MemguardError:
            return ""  # Its folder has been changed since; the vocabulary is not known.
        now = model.get_input_embeddings().weight.shape[0]
        if now != before:
            return f"its embeddings were resized from {before:,} to {now:,} tokens"
    return ""


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """Let the layers of a model compute what their adapters wrap, for the time of a block.

    Not peft's `disable_adapters`, which changes `requires_grad` of the parameters; these are shared
    with the model that is trained.
    """
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    before = [module._disable_adapters for module in layers]
    for module in layers:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module, is_off in zip(layers, before, strict=True):
            module._disable_adapters = is_off
