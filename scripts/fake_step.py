"""One training step of one rank on fake tensors: its memory and its collectives.

    assemble -> allocate -> TrainStep.run        all of this is the engine's own code

The process group is fake as well. AdamW's moments exist before the step, as in every step but the
first; attention gets the mask of packed rows and, as on GPUs, long pieces.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from fake_mesh import Allocations, Calls, SentCollectives, observe, simulated_mesh
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from memguard.config import OptimConfig, TrainConfig
from memguard.data.loader import Batch
from memguard.hf.assembly import Assembly, allocate, assemble, build_meta_layer
from memguard.hf.from_config import build_on_meta
from memguard.mitigation import build_mitigations
from memguard.model.causal_lm import CausalLM
from memguard.parallel.attention_pieces import MIN_PIECE
from memguard.parallel.linear import to_local
from memguard.parallel.lora import LoraSpec
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.step_settings import StepSettings
from memguard.planner.traffic import Collective, StepTraffic
from memguard.runtime import Runtime
from memguard.train.step import TrainStep

_CPU = torch.device("cpu")
# Numbers that the trainer sends with the loss: two counts of labels, two of signals.
_NUM_SHARED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """Memory and collectives of one step of one rank."""

    num_parameters: int
    """Parameters of the whole model."""
    num_stored: int
    """Trainable parameter elements that this rank stores."""
    weight_bytes: int
    """Of all weights that this rank stores, frozen ones too."""
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    """Peak memory of all tensors together."""
    peak_origins: dict[str, int]
    """Bytes at the peak by the operation that allocated the tensor."""
    calls: Calls
    """Every collective; see `SentCollectives`."""
    stages_s: dict[str, float]
    """Duration of each stage of the simulation (seconds)."""


def simulate_step(
    hf_config: Any,
    shape: MeshShape,
    *,
    train: TrainConfig,
    seq_len: int,
    rank: int = 0,
    reshard_after_forward: bool = True,
    adapter: LoraSpec | None = None,
    quantization: Literal["nf4"] | None = None,
) -> SimulatedStep:
    """Run one training step of one rank of a mesh on fake tensors.

    An existing process group is destroyed.

    Args:
        hf_config: a transformers configuration.
        shape: the mesh; one rank runs plain modules, as training does.
        train: rows of the whole step and of a micro-batch, precision, activation checkpointing.
        seq_len: length of a row (tokens).
        rank: the simulated rank.
        reshard_after_forward: whether a block's gathered weights are freed until backward.
        adapter: adapters to train instead of the weights; None trains the weights.
        quantization: form of the frozen linear layers.

    Raises:
        ModelError: the family cannot be sharded.
        ConfigError: the model cannot run on this mesh.
    """
    stages = _Stages()
    runtime = Runtime(device=_CPU, rank=rank, world_size=shape.num_ranks)
    batch = _make_batch(-(-train.batch_size // shape.num_batch_ways), seq_len)
    with mock.patch.dict(MIN_PIECE, clear=True):
        alone = contextlib.nullcontext()
        with alone if shape.num_ranks == 1 else simulated_mesh(shape, rank) as mesh:
            stages.end("process groups")
            assembly = Assembly.for_training(
                # Compiled blocks allocate what their kernels need, which is not known here.
                train.model_copy(update={"compile": False}),
                mesh=mesh,
                device=_CPU,
                adapter=adapter,
                quantization=quantization,
                reshard_after_forward=reshard_after_forward,
            )
            if mesh is None:
                lm = assemble(build_on_meta(hf_config, dtype=assembly.dtype), assembly)
            else:
                lm = build_meta_layer(hf_config, assembly).lm
            stages.end("model on meta")
            return _take_step(lm, batch, train, runtime, stages)


def _allocate(lm: CausalLM) -> None:
    allocate(lm, _CPU)
    for module in lm.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                # `allocate` has padded uneven shards. At the first forward FSDP2 checks this by
                # address; fake tensors have no addresses, so it would pad copies.
                group._reset_sharded_params = True


def _take_step(
    lm: CausalLM, batch: Batch, train: TrainConfig, runtime: Runtime, stages: "_Stages"
) -> SimulatedStep:
    sent, memory = SentCollectives(lm.mesh, lm.model.config), Allocations()
    gradient_bytes = 0
    with memory.following_resizes(), observe(sent, memory):
        _allocate(lm)
        lm.model.train()
        step = TrainStep(
            lm=lm,
            mitigations=build_mitigations((), special_ids=[]),
            train=train,
            optim=OptimConfig(),
            seed=0,
            runtime=runtime,
        )
        stored = [parameter.local for parameter in step.parameters]
        frozen = [to_local(part) for part in lm.model.parameters() if not part.requires_grad]
        _make_moments(step)
        stages.end("weights and moments")

        def see_gradients(*_: Any) -> None:
            nonlocal gradient_bytes
            gradient_bytes = _count_bytes(tensor.grad for tensor in stored)
            stages.end("forward and backward")

        step.optimizer.inner.register_step_pre_hook(see_gradients)
        sent.calls.clear()
        memory.reset_peak()
        # As in every step but the first, labels are known and those of the next step are sent.
        labels = (float(batch.num_supervised), float(batch.num_kept))
        step.run(
            batch, lr=1e-4, step=1, first_sample=0, labels=labels, share=lambda: [0.0] * _NUM_SHARED
        )
        stages.end("update")
    moments = [
        value
        for state in step.optimizer.inner.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return SimulatedStep(
        num_parameters=sum(parameter.numel() for parameter in lm.model.parameters()),
        num_stored=sum(tensor.numel() for tensor in stored),
        weight_bytes=_count_bytes([*stored, *frozen]),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=_count_bytes(moments),
        peak_bytes=memory.peak_bytes,
        peak_origins=dict(memory.peak_origins),
        calls=sent.calls,
        stages_s=stages.seconds,
    )


def _make_moments(step: TrainStep) -> None:
    """Allocate AdamW's state, as its first step does."""
    for parameter in step.parameters:
        parameter.local.grad = torch.zeros_like(parameter.local)
    step.optimizer.begin(step=1, lr=0.0)
    step.optimizer.update()
    for parameter in step.parameters:
        parameter.local.grad = None


def _make_batch(num_rows: int, seq_len: int) -> Batch:
    """Return rows in which every token except the first receives loss."""
    shape = (num_rows, seq_len)
    ids = np.ones(shape, dtype=np.int64)
    return Batch(
        input_ids=ids,
        labels=ids,
        position_ids=np.tile(np.arange(seq_len), (num_rows, 1)),
        document_ids=np.zeros(shape, dtype=np.int64),
        num_supervised=num_rows * (seq_len - 1),
        num_kept=num_rows * (seq_len - 1),
    )


def _count_bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


class _Stages:
    """A timer that records the duration of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def end(self, name: str) -> None:
        now_s = time.perf_counter()
        self.seconds[name] = now_s - self._last_s
        self._last_s = now_s


def list_collectives(
    sizes: ModelSizes, mesh: MeshShape, settings: StepSettings
) -> list[Collective]:
    """Return all collectives of one optimizer step between two ranks or more, by the planner."""
    step = StepTraffic(sizes, mesh, settings)
    # Most blocks have the same parts.
    blocks = Counter(
        call
        for number in range(sizes.num_layers)
        for call in (*step.block(number, is_whole=False), *step.block_storage(number))
    )
    micro_batch = [
        *(_repeat(call, count) for call, count in blocks.items()),
        *step.ends(),
        *(call for unit in step.end_storage() for call in unit),
    ]
    times = settings.num_micro_batches
    # Only complete gradients go over data.
    whole = [call if call.axis == "data" else _repeat(call, times) for call in micro_batch]
    return [call for call in (*whole, *step.update()) if call.degree > 1]


def _repeat(collective: Collective, times: int) -> Collective:
    return replace(collective, num_calls=collective.num_calls * times)
