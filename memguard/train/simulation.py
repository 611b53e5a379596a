"""One training step of one rank, without its peers and without memory: what it takes and sends.

    build_meta_layer -> allocate -> TrainStep.run        the engine's own code, all of it

on fake tensors and a fake process group. AdamW's moments are there before the step, as in every
step but the first, and attention is given the mask of packed rows.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn

from memguard.config import OptimConfig, TrainConfig
from memguard.data.loader import Batch
from memguard.mitigation import build_mitigations
from memguard.parallel.allocations import Allocations
from memguard.parallel.assemble import Sharding, allocate, build_meta_layer
from memguard.parallel.mesh import Mesh4D
from memguard.parallel.mesh_shape import MeshShape, ModelSizes
from memguard.parallel.shard import checkpoint_blocks
from memguard.parallel.simulated import Calls, SentCollectives, observe, simulated_mesh
from memguard.parallel.vocab import VocabLayer
from memguard.runtime import Runtime
from memguard.train.step import TrainStep


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """What one step of one rank took and sent."""

    num_parameters: int
    """Of the whole model."""
    num_local_parameters: int
    """Elements that this rank stores, padding of FSDP2 included."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    """Most that all tensors took together."""
    peak_origins: dict[str, int]
    """Bytes at the peak by the operation that made the tensor."""
    calls: Calls
    """Every collective; see `CollectiveRecorder`."""
    stages_s: dict[str, float]
    """How long the simulation took (seconds)."""


def simulate_step(
    hf_config: Any,
    shape: MeshShape,
    *,
    train: TrainConfig,
    seq_len: int,
    rank: int = 0,
    reshard_after_forward: bool = True,
) -> SimulatedStep:
    """Take one training step of one rank of a mesh, on fake tensors.

    Args:
        hf_config: a transformers configuration.
        shape: the mesh; one rank runs plain modules, as training does.
        train: rows of the whole step and of a micro-batch, precision, what is computed again.
        seq_len: length of a row (tokens).
        rank: whose view.
        reshard_after_forward: whether a block's gathered weights are freed until backward.

    Raises:
        ModelError: a family that cannot be sharded.
        ConfigError: a mesh that this model cannot run on.
    """
    stages = _Stages()
    if shape.num_ranks == 1:
        return _simulate(hf_config, None, train, seq_len, rank, reshard_after_forward, stages)
    with simulated_mesh(shape, rank) as mesh:
        stages.end("process groups")
        return _simulate(hf_config, mesh, train, seq_len, rank, reshard_after_forward, stages)


def _simulate(
    hf_config: Any,
    mesh: Mesh4D | None,
    train: TrainConfig,
    seq_len: int,
    rank: int,
    reshard_after_forward: bool,
    stages: "_Stages",
) -> SimulatedStep:
    device = torch.device("cpu")
    ways = 1 if mesh is None else mesh.shape.num_batch_ways
    batch = _make_batch(-(-train.batch_size // ways), seq_len)
    if mesh is not None:
        sharding = Sharding(
            mesh=mesh,
            device=device,
            compute_dtype=torch.bfloat16 if train.precision == "bf16" else None,
            chunk_tokens=train.nll_chunk_tokens,
            reshard_after_forward=reshard_after_forward,
            checkpointing=train.activation_checkpointing,
        )
        layer = build_meta_layer(hf_config, sharding)
        vocab = layer.vocab
        stages.end("model on meta, sharded")
    else:
        with init_empty_weights(include_buffers=False):
            model = transformers.AutoModelForCausalLM.from_config(hf_config)
        model.tie_weights()
        vocab = VocabLayer(model, chunk_tokens=train.nll_chunk_tokens)
        checkpoint_blocks(model, train.activation_checkpointing)
        layer = None
        stages.end("model on meta")
    num_kv_heads = ModelSizes.from_config(hf_config).num_kv_heads
    sent, memory = SentCollectives(mesh, num_kv_heads), Allocations()
    with memory.following_resizes(), observe(sent, memory):
        if layer is not None:
            allocate(layer)
        else:
            _allocate_plain(vocab.model)
        vocab.model.train()
        step = TrainStep(
            vocab=vocab,
            mitigations=build_mitigations((), special_ids=[]),
            train=train,
            optim=OptimConfig(),
            seed=0,
            runtime=Runtime(
                device=device, rank=rank, world_size=1 if mesh is None else mesh.shape.num_ranks
            ),
        )
        locals_ = [each.local for each in step.parameters]
        _make_moments(step)
        for each in locals_:
            memory.add(each, "weights")
        for buffer in vocab.model.buffers():
            memory.add(buffer, "buffers")
        stages.end("weights and moments")
        memory.reset_peak()
        gradient_bytes = 0

        def see_gradients(*_: Any) -> None:
            nonlocal gradient_bytes
            gradient_bytes = _count_bytes(each.grad for each in locals_)
            stages.end("forward and backward")

        step.optimizer.register_step_pre_hook(see_gradients)
        sent.calls.clear()
        step.run(batch, lr=1e-4, step=1, first_sample=0)
        stages.end("update")
    state = [t for s in step.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return SimulatedStep(
        num_parameters=sum(p.numel() for p in vocab.model.parameters()),
        num_local_parameters=sum(each.numel() for each in locals_),
        weight_bytes=_count_bytes(locals_),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=_count_bytes(state),
        peak_bytes=memory.peak_bytes,
        peak_origins=dict(memory.peak_origins),
        calls=sent.calls,
        stages_s=stages.seconds,
    )


def _make_moments(step: TrainStep) -> None:
    """Let AdamW make its state, as its first step does."""
    for each in step.parameters:
        each.local.grad = torch.zeros_like(each.local)
    step.optimizer.step()
    for each in step.parameters:
        each.local.grad = None


def _allocate_plain(model: nn.Module) -> None:
    to_storage: Any = model._apply
    to_storage(lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t)
    model.tie_weights()


def _make_batch(num_rows: int, seq_len: int) -> Batch:
    """Return rows of which every token but the first receives loss."""
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
    """A stopwatch that is read at the end of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def end(self, name: str) -> None:
        now_s = time.perf_counter()
        self.seconds[name] = now_s - self._last_s
        self._last_s = now_s
