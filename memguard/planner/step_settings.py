"""Settings of a training step that determine its communication, memory and time. No torch."""

from dataclasses import dataclass
from typing import Literal

from memguard.planner.adapters import AdapterSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """Settings of a step that, with model and mesh, determine communication, memory and time."""

    num_tokens: int
    """Of one micro-batch on one rank, padding included (tokens)."""
    num_labels: int
    """Of one micro-batch on one rank, those that receive loss (tokens)."""
    num_micro_batches: int = 1
    chunk_tokens: int = 4096
    """Tokens whose logits exist at a time."""
    compute_bytes: int = 2
    """Of an element of activations and gathered weights (bytes)."""
    checkpointing: Literal["none", "full", "selective"] = "none"
    reshard_after_forward: bool = True
    sums_nll: bool = True
    """Whether the loss is a plain sum, as mitigations that only drop labels leave it."""
    has_mask: bool = True
    """Whether attention reads a mask of all pairs of tokens, as on CPUs and in fp32. Flash
    attention reads where documents end, and does not repeat keys and values."""
    is_compiled: bool = False
    """Whether torch.compile fuses element-wise work."""
    adapter: AdapterSizes | None = None
    """Adapters that are trained instead of the weights; None trains the weights."""
    trained_modules: tuple[str, ...] | None = None
    """See `train.trainable_modules`; None trains all weights."""

    @property
    def wide_bytes(self) -> int:
        """Of an element of statistics, logits and reduced gradients (bytes)."""
        return max(4, self.compute_bytes)
