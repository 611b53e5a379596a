"""A step of 70B in NF4 on one card, beside the plan: a step of the GPU check.

The weights are made up, so that no checkpoint is needed; they are read as a run reads its own.
"""

import time
from dataclasses import replace
from typing import Any, Literal

import torch
from gpu_facts import Place, attempt, clean_up, fact, read_gb
from torch import Tensor
from workload import build_llama, build_step, describe_step, draw_batches

from memguard.config import TrainConfig
from memguard.hf.assembly import Assembly, build_meta_layer, fill_layer
from memguard.hf.from_config import build_on_meta
from memguard.model.causal_lm import CausalLM
from memguard.parallel.layout import ShardSlice
from memguard.parallel.lora import LoraSpec
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.parallel.shard import checkpoint_blocks
from memguard.planner.machine import load_machine
from memguard.planner.memory import estimate_memory
from memguard.planner.step_settings import AdapterSizes

LAYERS, LENGTH, R = 80, 2048, 16
Mode = Literal["full", "selective"]


class MadeUpWeights:
    """Any rectangle of any weight, from the same random numbers; 1 for norms."""

    origin = None

    def __init__(self, config: Any) -> None:
        """Read the shapes of a configuration's model."""
        model = build_on_meta(config, dtype=torch.bfloat16)
        self.shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        self._numbers = torch.randn(2**20).mul_(0.02).bfloat16()

    def read(self, name: str, rectangle: ShardSlice) -> Tensor:
        """Return a rectangle."""
        if len(rectangle.shape) == 1:
            return torch.ones(rectangle.shape)
        count = rectangle.num_elements
        repeats = -(-count // len(self._numbers))
        return self._numbers.repeat(repeats)[:count].reshape(rectangle.shape)


def qlora(place: Place) -> None:
    """Load once, then train steps with full and with selective recomputation."""
    if place.is_dry:
        config, length = build_llama(512, 64, 128, 2, 4, num_kv_heads=2, is_tied=False), 64
    else:
        config = build_llama(128256, 8192, 28672, LAYERS, 64, num_kv_heads=8, is_tied=False)
        length = LENGTH
    room_gb = None
    if not place.is_dry:
        room_gb = torch.cuda.mem_get_info()[0] / 1e9
    modes: tuple[Mode, ...] = ("full", "selective")
    planned = {mode: plan_gb(config, mode, length, place) for mode in modes}
    fact("plan", layers=config.num_hidden_layers, seq_len=length, free_gb=room_gb, **planned)
    fitting = [mode for mode in modes if room_gb is None or planned[mode] <= room_gb]
    for mode in modes:
        if mode not in fitting:
            fact(f"step, {mode}", skipped="by its plan it does not fit this card")
    loaded: list[CausalLM] = []
    if fitting and attempt("load", _load, place, config, loaded):
        for mode in fitting:
            attempt(f"step, {mode}", _train, place, loaded[0], mode, length, planned[mode])


def make_config(mode: Mode) -> TrainConfig:
    """Return the settings of a run."""
    settings = {"precision": "bf16", "compile": False, "batch_size": 1, "micro_batch_size": None}
    return TrainConfig.model_validate({**settings, "activation_checkpointing": mode})


def plan_gb(config: Any, mode: Mode, length: int, place: Place) -> float:
    """Return the memory that a plan expects, with the allowance for fragmentation."""
    settings = describe_step(make_config(mode), MeshShape(), seq_len=length)
    adapter = AdapterSizes(r=R, is_nf4=True)
    settings = replace(settings, has_streams=True, has_mask=place.is_dry, adapter=adapter)
    sizes = ModelSizes.from_config(config)
    use = estimate_memory(sizes, MeshShape(), settings, seq_len=length).peak
    machine = load_machine("dgx-h100")
    return (use.total + machine.fragmentation * use.transient) / 1e9


def _load(place: Place, config: Any, loaded: list[CausalLM]) -> None:
    assembly = Assembly.for_training(
        make_config("full"),
        mesh=None,
        device=place.device,
        adapter=LoraSpec(r=R, alpha=2.0 * R),
        quantization="nf4",
    )
    clean_up()
    begin_s = time.perf_counter()
    layer = build_meta_layer(config, assembly)
    fill_layer(layer, MadeUpWeights(config), name="made up")
    loaded.append(layer.lm)
    fact(
        "load",
        seconds=time.perf_counter() - begin_s,
        stored_gb=read_gb("memory_allocated"),
        peak_gb=read_gb("max_memory_allocated"),
    )


def _train(place: Place, lm: CausalLM, mode: Mode, length: int, planned_gb: float) -> None:
    """Train three steps; the first allocates, and of the others the faster is taken."""
    checkpoint_blocks(lm.model, mode)
    step = build_step(lm, make_config(mode), device=place.device, lr=1e-4)
    vocab_size = lm.model.config.vocab_size
    documents = (length // 4, length)
    batches = draw_batches(vocab_size, (1, length), document_tokens=documents, num_batches=2)
    clean_up()
    seconds = []
    for number in (1, 2, 3):
        begin_s = time.perf_counter()
        result = step.run(batches[number % 2], lr=1e-4, step=number, first_sample=0)
        seconds.append(time.perf_counter() - begin_s)
        if number == 1:
            fact(f"first step, {mode}", seconds=seconds[0], loss=result.loss, norm=result.grad_norm)
    held_gb = read_gb("max_memory_reserved")
    on_gpu: dict[str, Any] = {}
    if not place.is_dry:
        on_gpu = {
            "peak_gb": read_gb("max_memory_allocated"),
            "held_gb": held_gb,
            "plan_over_held": planned_gb / held_gb,
            "retries": torch.cuda.memory_stats()["num_alloc_retries"],
            # What the card holds beside the allocator's own.
            "used_gb": (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) / 1e9,
        }
    fact(f"step, {mode}", tokens_per_s=length / min(seconds[1:]), plan_gb=planned_gb, **on_gpu)
