"""Settings of a training step that determine its communication, memory and time. No torch.

Work            a step as requested, e.g. by the settings of a run; the planner chooses the rest
StepSettings    a step on one mesh
AdapterSizes    adapters that are trained instead of the weights
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from memguard.config import Document, RunConfig, apply_overrides
from memguard.config.adapters import LoraConfig
from memguard.config.mitigations import DpSgdConfig, find_mitigation
from memguard.config.optimizers import OPTIMIZERS, OptimizerFacts
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import NF4_BASE, ModelSizes, Sizes

Checkpointing = Literal["none", "selective", "full"]
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a block of the families whose memory is estimated."""
ADAPTER_BYTES = 4
"""Of an element of an adapter, of its gradient and of each of its two moments (bytes)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSizes:
    """What determines the size of the adapters of a model."""

    r: int
    targets: tuple[str, ...] = LINEAR_LAYERS
    """Layers that have an adapter: their names, or the last parts of them."""
    use_dora: bool = False
    has_dropout: bool = False
    is_nf4: bool = False
    """Whether the frozen linear layers are stored in NF4."""

    @classmethod
    def from_settings(cls, config: LoraConfig | None) -> "AdapterSizes | None":
        """Read the sizes from the settings of a run; None if it trains the weights."""
        if config is None:
            return None
        targets: tuple[str, ...] = LINEAR_LAYERS
        if config.target_modules != "all-linear":
            targets = tuple(config.target_modules)
        return cls(
            r=config.r,
            targets=targets,
            use_dora=config.use_dora,
            has_dropout=config.lora_dropout > 0,
            is_nf4=config.quantization == "nf4",
        )


def limit_sizes(sizes: Sizes, work: "Work") -> Sizes:
    """Return the sizes that determine the valid meshes: a base in NF4 takes data and z only."""
    if work.adapter is not None and work.adapter.is_nf4:
        return NF4_BASE
    return sizes.for_optimizer(work.optimizer) if isinstance(sizes, ModelSizes) else sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOptions:
    """Settings of a step that do not depend on its mesh."""

    chunk_tokens: int = 4096
    """Tokens whose logits exist at a time."""
    compute_bytes: int = 2
    """Of an element of activations and gathered weights (bytes)."""
    reshard_after_forward: bool = True
    is_compiled: bool = False
    """Whether torch.compile fuses element-wise work."""
    adapter: AdapterSizes | None = None
    """Adapters that are trained instead of the weights; None trains the weights."""
    trained_modules: tuple[str, ...] | None = None
    """See `train.trainable_modules`; None trains all weights, () needs no gradients."""
    optimizer: str = "adamw"
    """See `optim.name`."""
    weight_bytes: int = 4
    """Of a stored weight of the model, unless adapters are trained (bytes)."""

    @property
    def facts(self) -> OptimizerFacts:
        """What the optimizer keeps."""
        return OPTIMIZERS[self.optimizer]

    @property
    def stored_bytes(self) -> int:
        """Of a stored weight of the model (bytes)."""
        return self.weight_bytes if self.adapter is None else self.compute_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Work(StepOptions):
    """One optimizer step as requested; None leaves a choice to the planner."""

    seq_len: int
    """Length of a row (tokens)."""
    batch_size: int | None = None
    """Rows of a step; None: one row on each rank that splits the batch."""
    micro_batch_size: int | None = None
    """Rows of a forward pass on one rank; None: as many as fit."""
    checkpointing: Checkpointing | None = None
    chunk_tokens: int = 1024
    alternatives: tuple[tuple[str, str, int], ...] = ()
    """Settings that need less, the smallest change first; their optimizer, bytes of a weight."""
    may_be_compiled: bool = False
    """Whether `train.compile` is auto and may compile the blocks, which estimates leave out."""

    def num_rows(self, mesh: MeshShape) -> int:
        """Return the rows of a step on one rank."""
        return 1 if self.batch_size is None else -(-self.batch_size // mesh.num_batch_ways)


_LESS_MEMORY = (
    "optim.name=adamw_8bit",
    "train.weights=bf16",
    "optim.name=adamw_8bit train.weights=bf16",
    "optim.name=adalomo optim.max_grad_norm=null train.micro_batch_size=null",
    "optim.name=adalomo optim.max_grad_norm=null train.micro_batch_size=null train.weights=bf16",
)


def _list_alternatives(config: RunConfig) -> Iterator[tuple[str, str, int]]:
    values = Document(path="", values=config.model_dump(), places={})
    for settings in _LESS_MEMORY:
        with suppress(ValidationError):
            changed = RunConfig.model_validate(apply_overrides(values, settings.split()).values)
            yield settings, changed.optim.name, 2 if changed.train.weights == "bf16" else 4


def describe_work(config: RunConfig, *, device_type: str) -> Work:
    """Return a run's optimizer step for the planner, which on a GPU chooses what is `auto`."""
    train, is_gpu = config.train, device_type == "cuda"
    rows, mode = train.micro_batch_size, train.activation_checkpointing
    facts = OPTIMIZERS[config.optim.name]
    has_modes = is_gpu and facts.gradients != "none"
    if find_mitigation(config.mitigations, DpSgdConfig) is not None:
        rows = 1
    elif facts.gradients == "unit" or rows is None or (rows == "auto" and not is_gpu):
        rows = train.batch_size
    is_bf16 = train.precision == "bf16"
    if train.precision == "auto":
        is_bf16 = is_gpu or train.weights == "bf16"
    return Work(
        seq_len=config.data.seq_len,
        batch_size=train.batch_size,
        micro_batch_size=None if rows == "auto" else rows,
        checkpointing=mode if mode != "auto" else None if has_modes else "none",
        compute_bytes=2 if is_bf16 else 4,
        chunk_tokens=train.nll_chunk_tokens,
        reshard_after_forward=config.parallel.reshard_after_forward,
        is_compiled=train.compile is True,
        may_be_compiled=train.compile == "auto"
        and is_gpu
        and config.adapter is None
        and not train.deterministic,
        adapter=AdapterSizes.from_settings(config.adapter),
        trained_modules=() if facts.gradients == "none" else train.trainable_modules,
        optimizer=config.optim.name,
        weight_bytes=2 if train.weights == "bf16" else 4,
        alternatives=tuple(_list_alternatives(config)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings(StepOptions):
    """Settings of a step that, with model and mesh, determine communication, memory and time."""

    num_tokens: int
    """Of one micro-batch on one rank, padding included (tokens)."""
    num_labels: int
    """Of one micro-batch on one rank, those that receive loss (tokens)."""
    num_micro_batches: int = 1
    checkpointing: Checkpointing = "none"
    sums_nll: bool = True
    """Whether the loss is a plain sum, as mitigations that only drop labels leave it."""
    has_streams: bool = False
    """Whether memory is allocated from pools of CUDA streams (see memory.py), as on GPUs."""
    has_mask: bool = True
    """Whether attention reads a mask of all pairs of tokens, as on CPUs and in fp32. Flash
    attention reads where documents end, and does not repeat keys and values."""

    @property
    def gradient_bytes(self) -> int:
        """Of a stored gradient (bytes): those of several micro-batches are summed in fp32."""
        return 4 if self.num_micro_batches > 1 else self.weight_bytes

    @property
    def wide_bytes(self) -> int:
        """Of an element of statistics, logits and reduced gradients (bytes)."""
        return max(4, self.compute_bytes)


def stores_parts(mesh: MeshShape, settings: StepSettings) -> bool:
    """Return whether each rank along x stores a part of the tokens of a block's input.

    All of them have the same input, and backward gathers it before it recomputes the block. Set
    this to False where the engine stores whole inputs.
    """
    return mesh.x > 1 and settings.checkpointing != "none"


def count_part(mesh: MeshShape, settings: StepSettings) -> int:
    """Return the tokens of a block's input that each rank along x stores; the last is padded."""
    return -(-settings.num_tokens // mesh.x)
