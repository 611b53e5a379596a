"""peft folders of tiny models, written by peft itself."""

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import torch
from tiny_families import build


def adapt(model: Any, *, seed: int = 0, **fields: Any) -> Any:
    """Attach an adapter whose B and magnitudes are random, so that every factor has an effect."""
    import peft  # Ranks that import the tests do not need it.

    with warnings.catch_warnings():
        # About heads and tied weights, which the tests mean.
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **fields})
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_A" in name or "lora_B" in name or "lora_embedding" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
    return adapted.eval()


def save_adapter(
    folder: Path, family: str = "llama", *, base: dict[str, Any] | None = None, **fields: Any
) -> Any:
    """Write `base/` and `adapter/` into a folder; return the model with the adapter.

    Args:
        folder: of both.
        family: of the base, see `build`.
        base: changes to the base's configuration.
        fields: of `LoraConfig`; all linear layers by default.
    """
    model = build(family, **(base or {}))
    model.save_pretrained(folder / "base")
    adapted = adapt(model, **{"target_modules": "all-linear", **fields})
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        adapted.save_pretrained(folder / "adapter")
    return adapted
