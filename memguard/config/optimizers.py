"""What each optimizer keeps of a parameter, and what it cannot be combined with. No torch.

                  state, bytes a parameter         gradients that exist at a time
    adamw         8                                all
    adamw_8bit    2.125; not quantised: 8          all
    adalomo       two means of a matrix            one unit's
    lomo          0                                one unit's
    mezo          0                                none

The shape of the whole tensor decides whether it is quantised, so that every mesh does the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
    facts, this, micro = (
        OPTIMIZERS[optim.name],
        f"'optim.name: {optim.name}'",
        train.micro_batch_size,
    )
    is_all, has_none = facts.gradients == "all", facts.gradients == "none"
    is_bf16, mode = train.weights == "bf16", train.activation_checkpointing
    # A run's own config.yaml has every default written out.
    for setting, field in type(optim).model_fields.items():
        value = getattr(optim, setting)
        if setting in (_ADAMW | _MEZO) - facts.reads and value != field.default:
            got = list(value) if isinstance(value, tuple) else value
            raise ValueError(f"'optim.{setting}' does nothing with {this}: leave it out; got {got}")
    is_split = isinstance(micro, int) and micro < train.batch_size
    problems = {
        f"'optim.max_grad_norm' must be null with {this}, {facts.why_no_clipping}; got "
        f"{optim.max_grad_norm}": facts.why_no_clipping and optim.max_grad_norm is not None,
        f"{this} updates the model's weights, which 'adapter' freezes: use adamw or adamw_8bit": (
            has_adapter and not is_all
        ),
        f"{this} has no gradient of each row, which 'mitigations': dp_sgd clips: use adamw": (
            has_dp and not is_all
        ),
        f"'train.micro_batch_size' must be null with {this}, whose first backward updates the "
        f"weights; got {micro}. Lower 'train.batch_size' instead": (
            is_split and facts.gradients == "unit"
        ),
        f"'train.weights' must be fp32 with {this}, whose small changes bf16 would round away; got "
        "bf16": is_bf16 and has_none,
        f"'train.dropout' must be 0 or null with {this}, whose two forwards would drop different "
        f"activations; got {train.dropout}": train.dropout and has_none,
        f"'train.activation_checkpointing' does nothing with {this}, which has no backward: leave "
        f"it out; got {mode}": mode not in ("auto", "none") and has_none,
        "'train.weights' must be fp32 with 'adapter', whose own weights are few; got bf16. The "
        "frozen ones have the type of 'train.precision'": is_bf16 and has_adapter,
        "'train.weights' must be fp32 with 'mitigations': dp_sgd, whose sums and noise are fp32; "
        "got bf16": is_bf16 and has_dp,
    }
    if (problem := next((text for text, applies in problems.items() if applies), None)) is not None:
        raise ValueError(problem)
