"""What each optimizer keeps of a parameter, and what it cannot be combined with. No torch.

The shape of the whole tensor decides whether it is quantised, so that every mesh does the same. The
means of AdaLomo, two vectors of a matrix, are not counted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memguard.config.training import OptimConfig, TrainConfig

BLOCK = 64
"""Elements of the last dimension that share the scale of their 8-bit moments."""
_MIN_ELEMENTS = 4096
_MOMENTS_BYTES = 8.0


def is_quantised(shape: Sequence[int], *, is_embedding: bool = False) -> bool:
    """Return whether adamw_8bit keeps the moments of a tensor of this whole shape in 8 bits.

    As in transformers' Trainer, but of matrices only: meshes cut vectors anywhere, and all of them
    together are small. A head that is tied to the embedding is one.
    """
    is_matrix = len(shape) >= 2 and math.prod(shape) >= _MIN_ELEMENTS
    return is_matrix and shape[-1] % BLOCK == 0 and not is_embedding


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFacts:
    """What memory and settings depend on."""

    state_bytes: float = 0
    """Of a parameter; of a quantised one if the optimizer quantises."""
    block: int = 1
    """Elements of the last dimension that a mesh must not separate."""
    gradients: Literal["all", "unit", "none"] = "all"
    """Those that exist at a time."""
    reads: frozenset[str] = frozenset()
    """Fields of `optim` that not all optimizers read."""
    why_no_clipping: str = ""
    """Why 'max_grad_norm' must be null; empty if it may be set."""

    def count_state(self, num_parameters: int, *, num_quantised: int) -> float:
        """Return the state of parameters, of which some may be quantised (bytes)."""
        wide_bytes = _MOMENTS_BYTES if self.block > 1 else self.state_bytes
        return num_quantised * self.state_bytes + (num_parameters - num_quantised) * wide_bytes


_ADAMW, _MEZO = frozenset({"betas", "eps", "weight_decay"}), frozenset({"num_seeds"})
_EARLY = "which updates weights before the norm of all gradients is known"
_TWICE = "where it would take two backward passes (adalomo needs none)"
_NONE = "which has no gradients"
OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(state_bytes=_MOMENTS_BYTES, reads=_ADAMW),
    "adamw_8bit": OptimizerFacts(state_bytes=2 + 8 / BLOCK, block=BLOCK, reads=_ADAMW),
    "adalomo": OptimizerFacts(gradients="unit", why_no_clipping=_EARLY),
    "lomo": OptimizerFacts(gradients="unit", why_no_clipping=_TWICE),
    "mezo": OptimizerFacts(gradients="none", reads=_MEZO, why_no_clipping=_NONE),
}
"""By the values of 'optim.name'."""


def check_optimizer(
    optim: OptimConfig, train: TrainConfig, *, has_adapter: bool, has_dp: bool
) -> None:
    """Check that an optimizer can be combined with the other settings of a run.

    Raises:
        ValueError: names the settings, the reason and what to change.
    """
    facts, this = OPTIMIZERS[optim.name], f"with 'optim.name: {optim.name}'"
    # A run's own config.yaml has every default written out.
    for setting, field in type(optim).model_fields.items():
        got = getattr(optim, setting)
        if setting in (_ADAMW | _MEZO) - facts.reads and got != field.default:
            raise ValueError(f"'optim.{setting}' does nothing {this}: leave it out; got {got}")
    why, clip, dropout = facts.why_no_clipping, optim.max_grad_norm, train.dropout
    micro, mode, weights = train.micro_batch_size, train.activation_checkpointing, train.weights
    is_split = isinstance(micro, int) and micro < train.batch_size
    recomputes = mode not in ("auto", "none")
    has_none, is_special = facts.gradients == "none", facts.gradients != "all"
    whole = "whose first backward updates (lower 'train.batch_size' for memory)"
    rules: list[tuple[Any, str, str, str, Any]] = [
        (why and clip is not None, "optim.max_grad_norm", "null", why, clip),
        (is_special and has_adapter, "adapter", "null", "which trains weights (use adamw)", "lora"),
        (is_special and has_dp, "mitigations", "without dp_sgd", "which clips no rows", "dp_sgd"),
        (facts.gradients == "unit" and is_split, "train.micro_batch_size", "null", whole, micro),
        (has_none and weights == "bf16", "train.weights", "fp32", "whose steps are small", weights),
        (has_none and dropout, "train.dropout", "null", "which compares two forwards", dropout),
        (has_none and recomputes, "train.activation_checkpointing", "auto", why, mode),
    ]
    for is_broken, setting, allowed, reason, got in rules:
        if is_broken:
            raise ValueError(f"'{setting}' must be {allowed} {this}, {reason}; got {got}")
    for is_given, what in ((has_adapter, "'adapter'"), (has_dp, "'mitigations': dp_sgd")):
        if weights == "bf16" and is_given:
            raise ValueError(f"'train.weights' must be fp32 with {what}; got bf16. Leave one out")
