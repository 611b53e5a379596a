"""Steps of one rank: the planner's figures of them, and the engine's own on fake tensors."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
import transformers
from fake_mesh import Calls
from fake_step import SimulatedStep, list_collectives, simulate_step
from planner_models import MODEL
from ranks import RankPool

from memguard.config import TrainConfig
from memguard.parallel.lora import LoraSpec
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.memory import MemoryEstimate, estimate_memory
from memguard.planner.parameters import find_trained
from memguard.planner.step_settings import AdapterSizes, StepSettings
from memguard.planner.traffic import Collective

ONE = (1, 1, 1, 1)
MODES = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of one rank."""

    mesh: tuple[int, int, int, int] = (2, 2, 2, 2)
    family: str = "llama"
    fields: dict[str, Any] = field(default_factory=dict)
    checkpointing: Any = "none"
    is_bf16: bool = True
    num_rows: int = 1
    """Of a step on one rank."""
    micro_batch_size: int = 1
    seq_len: int = 512
    chunk_tokens: int = 1024
    reshard: bool = True
    sums_nll: bool = True
    rank: int = 0
    adapter: AdapterSizes | None = None
    modules: tuple[str, ...] | None = None

    @property
    def shape(self) -> MeshShape:
        data, z, y, x = self.mesh
        return MeshShape(data=data, z=z, y=y, x=x)

    @property
    def config(self) -> Any:
        return transformers.AutoConfig.for_model(self.family, **{**MODEL, **self.fields})

    @cached_property
    def sizes(self) -> ModelSizes:
        return ModelSizes.from_config(self.config)

    @property
    def settings(self) -> StepSettings:
        return StepSettings(
            num_tokens=self.micro_batch_size * self.seq_len,
            num_labels=self.micro_batch_size * (self.seq_len - 1),
            num_micro_batches=self.num_rows // self.micro_batch_size,
            chunk_tokens=self.chunk_tokens,
            compute_bytes=2 if self.is_bf16 else 4,
            checkpointing=self.checkpointing,
            reshard_after_forward=self.reshard,
            sums_nll=self.sums_nll,
            adapter=self.adapter,
            trained_modules=self.modules,
        )

    def estimate(self) -> MemoryEstimate:
        return estimate_memory(self.sizes, self.shape, self.settings, seq_len=self.seq_len)

    def simulate(self) -> SimulatedStep:
        train = TrainConfig(
            batch_size=self.num_rows * self.shape.num_batch_ways,
            micro_batch_size=self.micro_batch_size,
            precision="bf16" if self.is_bf16 else "fp32",
            activation_checkpointing=self.checkpointing,
            nll_chunk_tokens=self.chunk_tokens,
            trainable_modules=self.modules,
        )
        adapter = self.adapter
        return simulate_step(
            self.config,
            self.shape,
            train=train,
            seq_len=self.seq_len,
            rank=self.rank,
            reshard_after_forward=self.reshard,
            adapter=None if adapter is None else make_spec(adapter),
            quantization="nf4" if adapter is not None and adapter.is_nf4 else None,
        )

    def __str__(self) -> str:
        default = Case()
        names = [name for name in self.__dataclass_fields__ if name != "mesh"]
        changed = [name for name in names if getattr(self, name) != getattr(default, name)]
        return " ".join([str(self.mesh), *(f"{name}={getattr(self, name)}" for name in changed)])


def make_spec(adapter: AdapterSizes) -> LoraSpec:
    return LoraSpec(
        r=adapter.r,
        alpha=8,
        target_modules=adapter.targets,
        dropout=0.1 if adapter.has_dropout else 0.0,
        use_dora=adapter.use_dora,
    )


def _simulate_all(cases: Sequence[Case]) -> list[SimulatedStep]:
    return [case.simulate() for case in cases]


def simulate_all(ranks: RankPool, cases: Sequence[Case]) -> dict[str, SimulatedStep]:
    """Return the engine's step of each case, by its name."""
    steps = ranks(_simulate_all, 1, cases, timeout_s=290)[0]
    return dict(zip(map(str, cases), steps, strict=True))


def count_calls(collectives: Iterable[Collective]) -> Calls:
    calls: Calls = Counter()
    for each in collectives:
        # The simulation recognizes the update by float64; gradients of adapters are fp32.
        phase = "forward" if each.what == "gradients of adapters" else each.phase
        calls[phase, each.axis, each.operation, each.num_bytes] += each.num_calls
    return calls


def count_tensors(case: Case) -> int:
    """Return the number of trained tensors."""
    part = find_trained(case.sizes, case.shape, case.adapter, case.modules)
    units = [*(block.unit for block in part.blocks), *part.others]
    per_layer = 3 if case.adapter is not None and case.adapter.use_dora else 2
    adapted = sum(len(block.adapted) for block in part.blocks)
    return sum(len(unit.parameters) for unit in units) + per_layer * adapted


def check_memory(case: Case, step: SimulatedStep, tolerance: float) -> None:
    """Compare what is stored, and the peak within a tolerance, with the engine's own step."""
    memory = case.estimate()
    pairs = [
        (memory.peak.weights, step.weight_bytes),
        (memory.gradient_bytes, step.gradient_bytes),
        (memory.gradient_bytes, 4 * step.num_stored),
        # AdamW also counts the steps of each parameter, in four bytes.
        (memory.peak.optimizer, step.optimizer_bytes - 4 * count_tensors(case)),
    ]
    for mine, its in pairs:
        # The last rank has less of what is uneven; the estimate is of the rank that has most.
        assert mine == its if case.rank == 0 else its <= mine <= 1.05 * its
    assert memory.peak.total == pytest.approx(step.peak_bytes, rel=tolerance)
    # Of what is known exactly nothing is lost: the peak cannot be right by chance alone.
    assert memory.peak.weights + memory.peak.optimizer < step.peak_bytes


def check_traffic(case: Case, step: SimulatedStep) -> None:
    assert step.calls == count_calls(list_collectives(case.sizes, case.shape, case.settings))
