"""A model larger than one device, on one process: its blocks where there is room for them.

    GPUs first, then the CPU's memory, then disk; a block is brought to a GPU when its turn comes

`accelerate` decides and moves (`device_map="auto"`). The head stays on the first device: scores
read its weight outside the model's forward, where nobody would bring it.
"""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from accelerate import infer_auto_device_map, init_empty_weights
from accelerate.utils import get_max_memory

from memguard.errors import ModelError


def plan_devices(
    config: Any, *, dtype: torch.dtype, max_memory: Mapping[str, str] | None = None
) -> dict[str, int | str]:
    """Return the device of each module.

    Args:
        config: a transformers configuration.
        dtype: of the weights.
        max_memory: by device, e.g. ``{"0": "70GiB", "cpu": "1TB"}``; None takes what is free.

    Raises:
        ModelError: the head alone does not fit on the first device.
    """
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    # Its attributes are the truth of which weights are one.
    model.tie_weights()
    wanted = {int(k) if k.isdigit() else k: v for k, v in (max_memory or {}).items()}
    room: dict[int | str, int] = dict(get_max_memory(wanted or None))
    first: int | str = next(iter(room))
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    room[first] -= head.weight.numel() * dtype.itemsize
    if room[first] < 0:
        raise ModelError(
            f"the output embedding alone does not fit into the memory of device '{first}'. Allow "
            "more in 'audit.max_memory', or use several processes (--nproc)."
        )
    places: dict[str, int | str] = infer_auto_device_map(
        model, max_memory=room, no_split_module_classes=list(model._no_split_modules), dtype=dtype
    )
    if "" in places:  # Everything on one device.
        return places
    return {**places, name: first}
