"""Measurements of the GPU benchmarks: one step checked, and rounds of steps timed, on every rank.

A measurement runs in processes of its own (`gpu_work.py`), because two models of this size do not
fit into one GPU. Rows with goldfish alternate with plain rows on the same model, round by round.
"""

import gc
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_overlap import measure_overlap, profile_step
from gpu_sizes import NUM_BATCHES, Sizes, build_config, draw_llama, draw_rows, measure_rows
from harness import take_turns, timed
from torch import nn
from workload import as_tensors, build_step, take_rows, train_by_trainer

from memguard.config import AxisName, RunConfig, TrainConfig
from memguard.data.loader import Batch
from memguard.hf.assembly import AssembledModel, Assembly, allocate, build_meta_layer, fill_layer
from memguard.hf.safetensors import ModuleWeights
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.parallel.linear import to_local
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.shard import checkpoint_blocks, compile_blocks
from memguard.runtime import Runtime, fast_matmuls
from memguard.workflows.training.memory import resolve_auto_settings

LR = 1e-5
AXES: tuple[AxisName, ...] = ("data", "z", "y", "x")
# transformers renamed the argument in 5.2x.
_RECOMPUTE = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in transformers.TrainingArguments.__dataclass_fields__
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The training settings of one row."""

    trainer: bool = False
    """transformers' Trainer instead of memguard."""
    mesh: tuple[int, int, int, int] | None = None
    """Degrees (data, z, y, x) of the sharded engine; None uses plain modules on one process."""
    precision: str = "bf16"
    compile: bool = False
    checkpointing: str = "none"
    attn: str = "sdpa"
    """transformers' attention implementation."""
    goldfish: bool = False
    """Whether rows with goldfish k=2 are timed in turns with plain ones."""
    micro_batch_size: int | None = None
    """Rows of a forward pass of a rank; None: all that it has."""
    auto: bool = False
    """Whether precision, micro-batch and checkpointing are those of a run that sets none."""

    @property
    def shape(self) -> MeshShape | None:
        """The mesh."""
        if self.mesh is None:
            return None
        return MeshShape(**dict(zip(AXES, self.mesh, strict=True)))


def resolve_setting(sizes: Sizes, setting: Setting, runtime: Runtime) -> Setting:
    """Return the setting with what a run on this machine chooses by itself."""
    if not setting.auto:
        return setting
    fields = build_config(sizes).to_diff_dict()
    config = RunConfig.model_validate(
        {
            "name": "bench",
            "model": {"scratch": {"config": fields, "vocab_size": sizes.lm}},
            "data": {"train": ["random"], "seq_len": sizes.seq_len},
            "train": {"batch_size": sizes.batch_size},
            "parallel": dict(zip(AXES, setting.mesh or (1, 1, 1, 1), strict=True)),
        }
    )
    train = resolve_auto_settings(config, runtime).train
    return replace(
        setting,
        precision=train.precision,
        checkpointing=train.checkpointing,
        micro_batch_size=train.micro_batch_size,
    )


def build_train_config(setting: Setting) -> TrainConfig:
    """Return the settings of a run."""
    return TrainConfig.model_validate(
        {
            "precision": setting.precision,
            "compile": setting.compile,
            "activation_checkpointing": setting.checkpointing,
            "micro_batch_size": setting.micro_batch_size,
        }
    )


def build_lm(
    sizes: Sizes, setting: Setting, train: TrainConfig, device: torch.device, model: Any
) -> CausalLM:
    """Build memguard's model as a run does.

    Args:
        sizes: sizes of the model.
        setting: of the row.
        train: settings of the run.
        device: of this rank.
        model: weights to copy; None draws other random weights shard by shard.
    """
    if setting.shape is None:
        model = draw_llama(sizes, device, attn=setting.attn) if model is None else model
        lm = build_causal_lm(model, chunk_tokens=train.nll_chunk_tokens)
        checkpoint_blocks(model, setting.checkpointing)  # type: ignore[arg-type]
        if setting.compile:
            compile_blocks(model)
        return lm
    sharding = Assembly(
        mesh=build_mesh(setting.shape, device.type),
        device=device,
        compute_dtype=torch.bfloat16 if setting.precision == "bf16" else None,
        chunk_tokens=train.nll_chunk_tokens,
        checkpointing=setting.checkpointing,  # type: ignore[arg-type]
        compile=setting.compile,
    )
    layer = build_meta_layer(build_config(sizes), sharding, attn=setting.attn)
    if model is None:
        _draw_shards(layer)
    else:
        fill_layer(layer, ModuleWeights(model), name="a random Llama")
    return layer.lm


def _draw_shards(layer: AssembledModel) -> None:
    """Allocate and draw this rank's shards; speed does not depend on the values."""
    allocate(layer.lm, layer.assembly.device)
    with torch.no_grad():
        for parameter in layer.lm.model.parameters():
            local = to_local(parameter.data)
            if local.ndim == 1:
                local.fill_(1.0)
            else:
                nn.init.normal_(local, std=0.02)


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_memory(device: torch.device) -> None:
    """Reset peak memory, so that building the model is not counted as training."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# -- speed: each returns the seconds of a step of every round, by kind of rows ------------------


def time_memguard(sizes: Sizes, setting: Setting, runtime: Runtime) -> dict[str, Any]:
    """Time rounds of steps of memguard; on a mesh also profile one step."""
    device, setting = runtime.device, resolve_setting(sizes, setting, runtime)
    train = build_train_config(setting)
    lm = build_lm(sizes, setting, train, device, None)
    step = build_step(lm, train, device=device, lr=LR)
    number = 0

    def steps_of(batches: list[Batch]) -> Callable[[], None]:
        rows = [take_rows(batch, lm.batch_rank, lm.num_batch_ways) for batch in batches]

        def take_steps(count: int = sizes.num_steps) -> None:
            nonlocal number
            for _ in range(count):
                whole, mine = batches[number % NUM_BATCHES], rows[number % NUM_BATCHES]
                step.run(
                    mine,
                    lr=LR,
                    step=number + 1,
                    first_sample=number * sizes.batch_size,
                    # Known to a run from the step before.
                    labels=(whole.num_supervised, whole.num_kept),
                )
                number += 1

        take_steps(sizes.num_warmup)
        return take_steps

    forget_memory(device)
    # As training does.
    with fast_matmuls(device):
        kinds = {"plain": steps_of(draw_rows(sizes))}
        if setting.goldfish:
            kinds["goldfish"] = steps_of(draw_rows(sizes, goldfish=True))
        sides = {
            kind: timed(take_steps, sizes.num_steps, lambda: wait_for(device))
            for kind, take_steps in kinds.items()
        }
        rounds = take_turns(sides, rounds=sizes.num_rounds)
    result: dict[str, Any] = {"seconds": rounds.seconds, "used": asdict(setting)}
    if lm.mesh is not None and runtime.world_size > 1:
        groups = {axis: lm.mesh.axis(axis).group for axis in AXES}
        names = {group.group_name: axis for axis, group in groups.items() if group is not None}
        with tempfile.TemporaryDirectory() as folder:
            trace = profile_step(kinds["plain"], Path(folder))
        result["overlap"] = {
            axis: [overlap.total_ms / sizes.num_steps, overlap.share]
            for axis, overlap in measure_overlap(trace, names).items()
        }
    return result


def time_trainer(sizes: Sizes, setting: Setting, runtime: Runtime) -> dict[str, Any]:
    """Time rounds of steps of the Trainer, without logging or saving."""
    device = runtime.device
    is_cuda, seconds = device.type == "cuda", []
    begin_s = 0.0

    class RoundTimer(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            forget_memory(device)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal begin_s
            done = state.global_step - sizes.num_warmup
            if done >= 0 and done % sizes.num_steps == 0:
                wait_for(device)
                now_s = time.perf_counter()
                if done:
                    seconds.append((now_s - begin_s) / sizes.num_steps)
                begin_s = now_s

    arguments: dict[str, Any] = {
        "bf16": setting.precision == "bf16",
        "torch_compile": setting.compile,
        "use_cpu": not is_cuda,
        "dataloader_pin_memory": is_cuda,
    }
    if setting.precision == "bf16" and is_cuda:
        arguments["tf32"] = True
    is_recomputed = setting.checkpointing != "none"
    if runtime.world_size > 1 and is_cuda:
        # On the CPU accelerate has no FSDP: a dry run replicates the model.
        fsdp = {"activation_checkpointing": True} if is_recomputed else {}
        arguments |= {"fsdp": True, "fsdp_config": fsdp}
    elif is_recomputed:
        arguments[_RECOMPUTE] = True
    train_by_trainer(
        draw_llama(sizes, device, attn=setting.attn),
        draw_rows(sizes),
        RoundTimer(),
        num_ranks=runtime.world_size,
        lr=LR,
        max_steps=sizes.num_warmup + sizes.num_rounds * sizes.num_steps,
        **arguments,
    )
    return {"seconds": {"plain": seconds}, "used": asdict(setting)}


def measure_row(sizes: Sizes, setting: Setting, runtime: Runtime) -> dict[str, Any]:
    """Return seconds a step, labels kept, tokens attended, and peak memory (bytes; 0 on a CPU)."""
    result = (time_trainer if setting.trainer else time_memguard)(sizes, setting, runtime)
    result["rows"] = {
        kind: measure_rows(draw_rows(sizes, goldfish=kind == "goldfish"))
        for kind in result["seconds"]
    }
    peak = held = retries = 0
    if runtime.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(runtime.device)
        held = torch.cuda.max_memory_reserved(runtime.device)
        retries = torch.cuda.memory_stats(runtime.device)["num_alloc_retries"]
    return {
        **result,
        "peak_bytes": runtime.agree_max(peak),
        "reserved_bytes": runtime.agree_max(held),
        "num_alloc_retries": runtime.agree_max(retries),
    }


# -- correctness -------------------------------------------------------------------------------


def check_row(sizes: Sizes, setting: Setting, runtime: Runtime) -> dict[str, Any]:
    """Return loss and gradient norm of one step of memguard and of transformers' own model.

    The other side is the whole model on this rank's device, with all rows.
    """
    device = runtime.device
    batch = draw_rows(sizes, goldfish=setting.goldfish)[0]
    model = draw_llama(sizes, device).train()
    # As accelerate does for bf16=True.
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = model(**as_tensors(batch, device), use_cache=False).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    theirs = {"their_loss": float(loss.detach()), "their_norm": float(norm)}
    model.zero_grad()
    del loss
    train = build_train_config(setting)
    lm = build_lm(sizes, setting, train, device, model)
    del model
    gc.collect()
    step = build_step(lm, train, device=device, lr=LR, max_grad_norm=None)
    rows = take_rows(batch, lm.batch_rank, lm.num_batch_ways)
    result = step.run(rows, lr=LR, step=1, first_sample=0)
    return {"loss": result.loss, "norm": result.grad_norm, **theirs}
