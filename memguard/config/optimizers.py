"""What each optimizer keeps of a parameter, and what it cannot be combined with. No torch.

                  state, bytes a parameter               gradients
    adamw         8, two moments in fp32                 all
    adamw_8bit    2.125 where quantised, else 8          all
    adalomo       none; two means of a matrix            one unit's
    lomo          none                                   one unit's
    mezo          none                                   none

Which tensors are quantised follows from the shape of the whole tensor, so that it is the same on
every mesh. A mesh must not cut a block of their last dimension.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memguard.config.training import OptimConfig, TrainConfig

BLOCK = 64
"""Elements of the last dimension that share one scale in the state of `adamw_8bit`."""
_LEAST_QUANTISED = 4096
_MOMENTS_BYTES = 8.0


def is_quantised(shape: Sequence[int], *, is_embedding: bool = False) -> bool:
    """Return whether `adamw_8bit` keeps the moments of a whole tensor of this shape in 8 bits.

    As in transformers' Trainer, but of matrices only: meshes cut vectors anywhere, and all of them
    together are small. A head that is tied to the embedding is one.
    """
    is_large = len(shape) > 1 and math.prod(shape) >= _LEAST_QUANTISED
    return is_large and shape[-1] % BLOCK == 0 and not is_embedding


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFacts:
    """What memory and settings depend on."""

    state_bytes: float = 0
    """Of a parameter; of one that is quantised, if the optimizer quantises."""
    wide_bytes: float = 0
    """Of a parameter that is not quantised."""
    quantises: bool = False
    has_means: bool = False
    """Whether it keeps the means of each matrix over rows and over columns, whole on every rank."""
    gradients: str = "all"
    """Which exist at a time: "all", those of one "unit", or "none"."""
    settings: frozenset[str] = frozenset()
    """Fields of `optim` that it reads, of those that not all do."""
    why_no_clipping: str | None = None
    """Why 'max_grad_norm' must be null; None: it may be set."""

    @property
    def updates_in_backward(self) -> bool:
        """Whether a weight is updated, and its gradient freed, as soon as this is complete."""
        return self.gradients == "unit"

    def count_state(self, numel: int, *, quantised: bool) -> float:
        """Return the state of a tensor with this many elements (bytes), without means."""
        return numel * (self.state_bytes if quantised else self.wide_bytes)


_ADAMW = frozenset({"betas", "eps", "weight_decay"})
OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(state_bytes=_MOMENTS_BYTES, wide_bytes=_MOMENTS_BYTES, settings=_ADAMW),
    "adamw_8bit": OptimizerFacts(
        state_bytes=2 * (1 + 4 / BLOCK), wide_bytes=_MOMENTS_BYTES, quantises=True, settings=_ADAMW
    ),
    "adalomo": OptimizerFacts(
        gradients="unit",
        has_means=True,
        why_no_clipping="which updates weights before the norm of all gradients is known",
    ),
    "lomo": OptimizerFacts(
        gradients="unit",
        why_no_clipping="where it would take two backward passes (adalomo needs none)",
    ),
    "mezo": OptimizerFacts(
        gradients="none",
        settings=frozenset({"num_seeds"}),
        why_no_clipping="which has no gradients",
    ),
}
"""By the values of 'optim.name'."""
_PARTICULAR = frozenset().union(*(facts.settings for facts in OPTIMIZERS.values()))


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
    # A run's own config.yaml has every default written out.
    for setting, field in type(optim).model_fields.items():
        value = getattr(optim, setting)
        if setting in _PARTICULAR - facts.settings and value != field.default:
            got = list(value) if isinstance(value, tuple) else value
            raise ValueError(f"'optim.{setting}' does nothing with {this}: leave it out; got {got}")
    if facts.why_no_clipping is not None and optim.max_grad_norm is not None:
        why = f"'optim.max_grad_norm' must be null with {this}, {facts.why_no_clipping}"
        raise ValueError(f"{why}; got {optim.max_grad_norm:g}")
    has_backward, is_bf16 = facts.gradients != "none", train.weights == "bf16"
    is_split = isinstance(micro, int) and micro < train.batch_size
    recomputes = train.activation_checkpointing not in ("auto", "none")
    problems = {
        f"{this} updates the model's weights, which 'adapter' freezes: use adamw or adamw_8bit": (
            facts.gradients != "all" and has_adapter
        ),
        f"{this} has no gradient of each row, which 'mitigations': dp_sgd clips: use adamw": (
            facts.gradients != "all" and has_dp
        ),
        f"'train.micro_batch_size' must be null with {this}, whose first backward updates the "
        f"weights; got {micro}. Lower 'train.batch_size' instead": (
            facts.updates_in_backward and is_split
        ),
        f"'train.weights' must be fp32 with {this}, whose small changes bf16 would round away; got "
        "bf16": (not has_backward and is_bf16),
        f"'train.dropout' must be 0 or null with {this}, whose two forwards would drop different "
        f"activations; got {train.dropout}": (not has_backward and bool(train.dropout)),
        f"'train.activation_checkpointing' does nothing with {this}, which has no backward: leave "
        f"it out; got {train.activation_checkpointing}": (not has_backward and recomputes),
        "'train.weights' must be fp32 with 'adapter', whose own weights are few; got bf16. The "
        "frozen ones have the type of 'train.precision'": (is_bf16 and has_adapter),
        "'train.weights' must be fp32 with 'mitigations': dp_sgd, whose sums and noise are fp32; "
        "got bf16": (is_bf16 and has_dp),
    }
    if (problem := next((text for text, applies in problems.items() if applies), None)) is not None:
        raise ValueError(problem)
