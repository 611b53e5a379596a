"""The largest published model that the planner expects to fit in training on this machine.

python scripts/capacity.py

    all weights   AdamW on every parameter
    LoRA          adapters on every linear layer
    QLoRA         the same over a base in NF4

Formulas of the planner only: no model is built, and nothing is measured. Rows are taken one at a
time; other programs and a container's limit are not counted.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from memguard.config import RunConfig, apply_settings, validate
from memguard.errors import ConfigError, advise_install
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.dry_run import format_bytes
from memguard.planner.fit import PlanInputs, count_parameters, rank_meshes
from memguard.planner.machine import Machine, detect_machine
from memguard.planner.step_settings import describe_work, limit_sizes
from memguard.records.record import Record
from memguard.runtime.processes import explain_unusable_gpus
from memguard.workflows.plan import MODEL_ALONE

_LORA = {"adapter.name": "lora", "adapter.r": 16}
Kind = Literal["all weights", "LoRA", "QLoRA"]
KINDS: dict[Kind, dict[str, Any]] = {
    "all weights": {},
    "LoRA": _LORA,
    "QLoRA": {**_LORA, "adapter.quantization": "nf4"},
}
"""What is trained, and the settings for it."""
_SMOL = {"vocab_size": 49152, "is_tied": True, "head_dim": 64}
_LLAMA = {"vocab_size": 128256, "num_kv_heads": 8, "head_dim": 128}
_QWEN = {
    "vocab_size": 152064,
    "num_kv_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "num_heads": 40,
    "has_qkv_bias": True,
}


def _shape(
    shared: Mapping[str, Any], num_layers: int, intermediate_size: int, **others: Any
) -> ModelSizes:
    return ModelSizes(
        **{**shared, "num_layers": num_layers, "intermediate_size": intermediate_size, **others}
    )


SHAPES: dict[str, ModelSizes] = {
    "SmolLM2 135M": _shape(_SMOL, 30, 1536, hidden_size=576, num_heads=9, num_kv_heads=3),
    "SmolLM2 360M": _shape(_SMOL, 32, 2560, hidden_size=960, num_heads=15, num_kv_heads=5),
    "Llama 3.2 1B": _shape(
        _LLAMA, 16, 8192, hidden_size=2048, num_heads=32, head_dim=64, is_tied=True
    ),
    "Llama 3.2 3B": _shape(_LLAMA, 28, 8192, hidden_size=3072, num_heads=24, is_tied=True),
    "Llama 3.1 8B": _shape(_LLAMA, 32, 14336, hidden_size=4096, num_heads=32),
    "Qwen2.5 14B": _shape(_QWEN, 48, 13824),
    "Qwen2.5 32B": _shape(_QWEN, 64, 27648),
    "Llama 3.1 70B": _shape(_LLAMA, 80, 28672, hidden_size=8192, num_heads=64),
    "Llama 3.1 405B": _shape(_LLAMA, 126, 53248, hidden_size=16384, num_heads=128),
}
"""Sizes in the config.json published with each model, the smallest first."""


class Capacity(Record):
    """The largest of the published models whose step fits, for one way to train it."""

    kind: Kind
    model: str | None
    """null if none fits."""
    num_parameters: int | None
    needed_bytes: int | None
    """Of the GPU, or of the process on a CPU, that needs most."""
    usable_bytes: int | None
    """Memory that one of them has for tensors; null if it is not known."""
    tokens_per_s: float | None
    """Of all of them together: an estimate; null where the speed of the device is not known."""
    seq_len: int
    """Length of a row (tokens)."""
    num_gpus: int
    """0: on the CPU."""
    reason: str | None
    """Why nothing can be said, or nothing fits."""


def list_capacities(
    gpus: Sequence[tuple[str, int]], *, missing: Mapping[Kind, str]
) -> Iterator[Capacity]:
    """Yield what this machine can train, one kind after the other.

    Args:
        gpus: name and memory (bytes) of each GPU that torch can use; none for the CPU.
        missing: kinds that this installation cannot train, with the reason.
    """
    for kind, settings in KINDS.items():
        values = apply_settings(MODEL_ALONE.values, settings)
        run = validate(RunConfig, values, MODEL_ALONE)
        empty = Capacity(
            kind=kind,
            model=None,
            num_parameters=None,
            needed_bytes=None,
            usable_bytes=None,
            tokens_per_s=None,
            seq_len=run.data.seq_len,
            num_gpus=len(gpus),
            reason=missing.get(kind),
        )
        if empty.reason is not None:
            yield empty
            continue
        try:
            machine = detect_machine(gpus=[(name, memory / 2**30) for name, memory in gpus])
        except ConfigError:  # The driver and the libraries alone take all memory.
            yield empty.model_copy(update={"reason": _describe_misfit()})
            continue
        yield _find_largest(empty, run, machine)


def _find_largest(empty: Capacity, run: RunConfig, machine: Machine) -> Capacity:
    """Return the capacity with the largest shape that fits."""
    usable = machine.usable_bytes
    is_known = "peak_tflops" not in machine.assumed
    work = describe_work(run, device_type="cuda" if machine.has_gpus else "cpu")
    # One row at a time. On GPUs the planner chooses how many there are on each.
    rows = {"batch_size": None} if machine.has_gpus else {"batch_size": 1, "micro_batch_size": 1}
    work = replace(work, **rows)
    for name, sizes in reversed(SHAPES.items()):
        inputs = PlanInputs(
            name=name, machine=machine, num_gpus=machine.gpus_per_node, work=work, mesh=None
        )
        _, meshes = inputs.list_meshes(limit_sizes(sizes, work))
        ranked, _ = rank_meshes(sizes, meshes, work, machine)
        if ranked:
            best = ranked[0]
            return empty.model_copy(
                update={
                    "model": name,
                    "num_parameters": count_parameters(sizes),
                    "needed_bytes": best.needed_bytes,
                    "usable_bytes": usable,
                    "tokens_per_s": best.tokens_per_s if is_known else None,
                }
            )
    return empty.model_copy(update={"usable_bytes": usable, "reason": _describe_misfit()})


def _describe_misfit() -> str:
    return f"not even {next(iter(SHAPES))} fits"


def describe_capacity(capacity: Capacity) -> str:
    """Return one line about a capacity."""
    if capacity.model is None or capacity.needed_bytes is None or capacity.usable_bytes is None:
        return f"nothing: {capacity.reason}"
    place = f" on each of {capacity.num_gpus} GPUs" if capacity.num_gpus > 1 else ""
    memory = f"{format_bytes(capacity.needed_bytes)} of {format_bytes(capacity.usable_bytes)}"
    line = f"up to {capacity.model}, {memory}{place}"
    if capacity.tokens_per_s is None:
        return line
    rounded = float(f"{capacity.tokens_per_s:.2g}")
    return f"{line}, about {rounded:,.0f} tokens/s" if rounded >= 1 else f"{line}, below 1 token/s"


def main() -> None:
    """Print one line for each kind of training."""
    usable = torch.cuda.is_available() and explain_unusable_gpus() is None
    properties = [
        torch.cuda.get_device_properties(index)
        for index in range(torch.cuda.device_count() if usable else 0)
    ]
    missing: dict[Kind, str] = {}
    if importlib.util.find_spec("bitsandbytes") is None:
        missing["QLoRA"] = f"without bitsandbytes; {advise_install('bitsandbytes')}"
    gpus = [(gpu.name, gpu.total_memory) for gpu in properties]
    for capacity in list_capacities(gpus, missing=missing):
        print(f"{capacity.kind:<12} {describe_capacity(capacity)}")
    print("By estimate, one row at a time; for your model: memguard plan --model PATH/config.json")


if __name__ == "__main__":
    main()
