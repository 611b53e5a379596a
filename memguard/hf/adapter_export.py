"""Writes trained adapters as a folder that `peft` loads; it appears only when complete.

    adapter_model.safetensors    base_model.model.{layer}.lora_A.weight [R, K], .lora_B.weight
                                 [N, R], DoRA: .lora_magnitude_vector [N]; fp32
    adapter_config.json          peft's LoraConfig, which names the base model
    README.md and the tokenizer

Adapters are small: on a mesh each rank of a replica gathers one factor at a time, and rank 0 keeps
all of them in memory and writes the files.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memguard.hf.adapter_files import QUANTIZATION
from memguard.parallel.fused import find_orders
from memguard.parallel.lora import (
    MAGNITUDE,
    LoraSpec,
    find_targets,
    is_adapter_parameter,
    shorten_targets,
)
from memguard.records.record import atomic_folder

_PREFIX = "base_model.model."


def gather_adapter(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole adapters by the names in peft's file, on the CPU; every rank calls this."""
    tensors = {}
    orders = find_orders(model)
    for name, parameter in model.named_parameters():
        if is_adapter_parameter(name):
            value = parameter.detach()
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if name in orders:
                full = orders[name].to_file(full)
            # peft stores magnitudes without the name of their parameter.
            stored = name.removesuffix(".weight") if MAGNITUDE in name else name
            tensors[_PREFIX + stored] = full.cpu().contiguous()
    return tensors


def make_peft_config(
    model: Any, spec: LoraSpec, *, base: str, revision: str | None
) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Args:
        model: with its adapters.
        spec: the adapters.
        base: folder or hub id of the base model; a folder is written as an absolute path.
        revision: of a hub id.
    """
    # peft takes seconds to import, and a run without adapters does not need it.
    from peft import LoraConfig

    alpha: Any = int(spec.alpha) if float(spec.alpha).is_integer() else spec.alpha
    config = LoraConfig(
        r=spec.r,
        lora_alpha=alpha,
        target_modules=shorten_targets(model, find_targets(model, spec.target_modules)),
        lora_dropout=spec.dropout,
        use_rslora=spec.use_rslora,
        use_dora=spec.use_dora,
        init_lora_weights="gaussian" if spec.init == "gaussian" else True,
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).exists() else base,
        revision=revision,
    )
    fields: dict[str, Any] = config.to_dict()  # type: ignore[no-untyped-call]
    return {
        # peft keeps names in sets, whose order changes from process to process.
        name: sorted(value) if isinstance(value, set) else value
        for name, value in sorted(fields.items())
    }


def write_adapter(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    tokenizer: Any,
    folder: Path,
    *,
    card: str,
    base_quantization: str | None = None,
) -> None:
    """Write a peft folder; an existing folder of that name is replaced.

    Args:
        tensors: from `gather_adapter`.
        config: from `make_peft_config`.
        tokenizer: saved with the adapters.
        folder: the target.
        card: text of README.md.
        base_quantization: form of the base in training; None if it was not quantised.
    """
    metadata = {"format": "pt"}
    if base_quantization is not None:
        metadata[QUANTIZATION] = base_quantization
    with atomic_folder(folder) as temporary:
        save_file(tensors, temporary / "adapter_model.safetensors", metadata=metadata)
        text = json.dumps(config, indent=2) + "\n"
        (temporary / "adapter_config.json").write_text(text, encoding="utf-8")
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        temporary.chmod(0o755)
