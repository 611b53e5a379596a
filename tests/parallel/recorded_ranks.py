"""What each fake rank of a mesh runs: training and looks of an audit, all recorded.

    setup        process group, mesh, its groups connected, weights filled
    training     a step of two micro-batches: checkpointed blocks, norm clipped, AdamW
    held-out     the loss on documents; a rank has none
    budget       a look of the callback: documents scored, near-verbatim text generated
    sampling     tokens drawn from a truncated distribution

All of it is the engine's own code, run by each rank in turn on a fake process group (see
`recorded_collectives`). Left out, because a fake rank receives copies of its own values:

    check_causal_lm   compares hidden states of ranks that agree in reality and differ here
    checkpoints       torch.distributed.checkpoint plans from what the other ranks store
    errors, memory    a failure of one rank, or its free memory, is a value that ranks agree on
    NCCL              splits one communicator into groups, on GPUs only; its rule, that all ranks
                      create a group at once, is checked
"""

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from collective_faults import find_order_faults
from record_examples import make_document
from recorded_collectives import Recording, record
from tiny_families import build

from memguard.audit.decoding import Decoder
from memguard.audit.plan import AuditPlan
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.requests import Prompt
from memguard.audit.selection import Selection
from memguard.audit.suite import Suite
from memguard.audit.windows import Window
from memguard.config import AxisName, OptimConfig, ParallelConfig, TrainConfig
from memguard.config.settings import SamplingScheme
from memguard.data.loader import Batch
from memguard.hf.assembly import Assembly, build_meta_layer, fill_layer
from memguard.hf.safetensors import ModuleWeights
from memguard.mitigation import build_mitigations
from memguard.model import kv_cache
from memguard.model.causal_lm import CausalLM
from memguard.parallel.mesh_shape import AXES
from memguard.parallel.model_sizes import ModelSizes
from memguard.runtime import Runtime
from memguard.train.heldout import HeldoutLoss
from memguard.train.step import TrainStep
from memguard.workflows.common.setup import open_distributed
from memguard.workflows.training.monitor import ModelInTraining, take_snapshot

STAGES = ["setup", "training", "held-out", "budget", "sampling"]
NUM_TOKENS = 10
"""Tokens of a document, of which the last three are generated."""
NUM_KV_HEADS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mesh and what its ranks do."""

    degrees: tuple[int, int, int, int]
    """data, z, y, x."""
    order: tuple[AxisName, ...] = AXES
    is_bf16: bool = True
    fits: bool = True
    """Whether all weights gathered over z fit, so that generation gathers them once."""
    samples: bool = False
    """Whether tokens are drawn too, which sends over x only."""
    has_step_only: bool = False
    odd_rank: int | None = None
    """A rank that trains without activation checkpointing, unlike the others."""

    @property
    def num_ranks(self) -> int:
        data, z, y, x = self.degrees
        return data * z * y * x

    @property
    def name(self) -> str:
        by_axis = dict(zip(AXES, self.degrees, strict=True))
        return " ".join(f"{axis}={by_axis[axis]}" for axis in self.order)


@functools.cache
def build_model() -> Any:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": NUM_KV_HEADS, "head_dim": 8}
    return build("llama", **sizes)


def record_ranks(case: Case) -> list[Recording]:
    """Run all ranks of a mesh, one after the other."""
    recordings: list[Recording] = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(case.num_ranks):
            with record(case.num_ranks, rank, after=recordings, stand_in=complete) as recording:
                try:
                    run_rank(case, recording, Path(folder))
                except Exception as error:
                    # Calls that differ from those of the others may be its reason.
                    for fault in find_order_faults([*recordings, recording], case.name):
                        error.add_note(str(fault))
                    raise
            recordings.append(recording)
    return [recording.copy() for recording in recordings]


def complete(value: Any) -> Any:
    """Return what the ranks could send if one of them sends this."""
    if isinstance(value, torch.Tensor):
        # Sums of counts and losses, such as that of logits that are not finite.
        return torch.zeros_like(value) if value.is_floating_point() else value
    if isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
        # Results by index of the document: rank 0 has some, of other ranks' documents they are new.
        return {index: next(iter(value.values())) for index in range(8)} | value
    return value


def run_rank(case: Case, recording: Recording, folder: Path) -> None:
    data, z, y, x = case.degrees
    train = TrainConfig(
        batch_size=2 * data * z,
        micro_batch_size=1,
        precision="bf16" if case.is_bf16 else "fp32",
        activation_checkpointing="none" if recording.rank == case.odd_rank else "full",
        compile=False,
    )
    config = build_model().config
    parallel = ParallelConfig(data=data, z=z, y=y, x=x, order=case.order)
    with open_distributed(
        parallel, ModelSizes.from_config(config), batch_size=train.batch_size
    ) as distributed:
        mesh, runtime = distributed.mesh, distributed.runtime
        assert mesh is not None
        # As on GPUs.
        mesh.connect(runtime.device)
        assembly = Assembly.for_training(train, mesh=mesh, device=runtime.device)
        layer = build_meta_layer(config, assembly)
        fill_layer(layer, ModuleWeights(build_model()), name="tiny")
        recording.stage = "training"
        step = take_step(layer.lm, train, runtime)
        if case.has_step_only:
            return
        documents = [
            make_document(np.arange(NUM_TOKENS) + number) for number in range(max(data * z - 1, 1))
        ]
        recording.stage = "held-out"
        measure_loss(step, documents)
        windows = [
            Window(document=document, start=0, prefix_tokens=7, continuation_tokens=3)
            for document in documents
        ]
        with (
            # Each rank's own measurement, on a GPU.
            mock.patch.object(CausalLM, "fits_gathered", return_value=case.fits),
            # Tokens by which the cache is compared with whole rows.
            mock.patch.object(kv_cache, "_CHECKED_STEPS", 1),
        ):
            recording.stage = "budget"
            look(layer.lm, windows, runtime)
            recording.stage = "sampling"
            if case.samples:
                prompts = [Prompt.of(window, 1) for window in windows]
                scheme = SamplingScheme(top_k=5, top_p=0.9, temperature=1.0)
                Decoder(layer.lm, NUM_TOKENS, runtime).sample(prompts, scheme, 1, 0)
        recording.stage = "end"


def take_step(lm: CausalLM, train: TrainConfig, runtime: Runtime) -> TrainStep:
    step = TrainStep(
        lm=lm,
        mitigations=build_mitigations((), special_ids=[]),
        train=train,
        optim=OptimConfig(),
        seed=0,
        runtime=runtime,
    )
    ids = np.ones((2, NUM_TOKENS), dtype=np.int64)
    batch = Batch(
        input_ids=ids,
        labels=ids,
        position_ids=np.tile(np.arange(NUM_TOKENS), (2, 1)),
        document_ids=np.zeros_like(ids),
        num_supervised=2 * (NUM_TOKENS - 1),
        num_kept=2 * (NUM_TOKENS - 1),
    )
    lm.model.train()
    result = step.run(batch, lr=1e-3, step=1, first_sample=0, share=lambda: [0.0])
    assert result.grad_norm is not None, "nothing would be updated"
    return step


def measure_loss(step: TrainStep, documents: Sequence[Any]) -> None:
    corpus: Any = SimpleNamespace(
        manifest=[SimpleNamespace(role="heldout", bucket="heldout")] * len(documents),
        document=documents.__getitem__,
    )
    heldout = HeldoutLoss(
        lm=step.lm,
        corpus=corpus,
        seq_len=NUM_TOKENS,
        batch_tokens=NUM_TOKENS,
        runtime=step.runtime,
        precision=step.precision,
    )
    heldout.measure(step=1)


def look(lm: CausalLM, windows: Sequence[Window], runtime: Runtime) -> None:
    # One document for each batch.
    model = ModelInTraining(lm=lm, batch_tokens=NUM_TOKENS, runtime=runtime)
    # Every document is generated to its end: no accuracy is too low, and two edits are allowed.
    probe = ExtractionProbe(generation_floor=0, max_edit_share=0.9)
    plan = AuditPlan(
        documents=(),
        selection=Selection(windows=tuple(windows), buckets=()),
        suite=Suite(name="budget", version=1, probes=(probe,)),
        seed=0,
    )
    snapshot = take_snapshot(model, plan, needs_near_verbatim=True)
    assert not snapshot.verbatim_N.any(), "nothing would be generated"
