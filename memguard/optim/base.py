"""What every optimizer offers to the training step and to checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from memguard.parallel.local_parameters import LocalParameter


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """One tensor of an optimizer's state of a parameter, as this rank holds it."""

    field: str
    value: Tensor
    """Of the shape of the local tensor divided by `block`; of another shape, the same on every
    rank."""
    block: int = 1
    """Elements of the last dimension to which one number of `value` belongs."""


class Optimizer(ABC):
    """Updates the local tensors of a model's parameters."""

    updates_in_backward: ClassVar[bool] = False
    """Whether parameters are updated as soon as their gradient is reduced, which it frees."""

    def __init__(self, parameters: Sequence[LocalParameter]) -> None:
        """Keep the parameters, whose state starts empty."""
        self.parameters = parameters
        self._step, self._lr = 0, 0.0

    def begin(self, *, step: int, lr: float) -> None:
        """Prepare a step, counted from 1, before its first forward."""
        self._step, self._lr = step, lr

    @abstractmethod
    def update(self) -> None:
        """Update all parameters with the gradients of their local tensors, which are finite."""

    def state_of(self, parameter: LocalParameter) -> Iterator[StateTensor]:
        """Yield the state of a parameter, in live tensors; nothing if it never had a gradient."""
        yield from ()

    def make_room(self, parameter: LocalParameter) -> None:  # noqa: B027
        """Allocate the state of a parameter, to be filled from a checkpoint."""

    def count_gradient_bytes(self) -> int:
        """Return the size of the gradients that exist at a time."""
        return sum(count_gradient_bytes(parameter) for parameter in self.parameters)


def count_gradient_bytes(parameter: LocalParameter) -> int:
    """Return the size of the gradient of a local tensor."""
    local = parameter.local
    return local.numel() * (local.grad_dtype or local.dtype).itemsize
