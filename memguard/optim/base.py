"""What every optimizer offers to the training step and to checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from memguard.parallel.local_parameters import LocalParameter


class Optimizer(ABC):
    """Updates the local tensors of a model's parameters."""

    blocks: ClassVar[Mapping[str, int]] = MappingProxyType({})
    """Elements of the last dimension to which one number of a state's tensor belongs, if several;
    by the name of the tensor."""

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

    def state_of(self, parameter: LocalParameter) -> Mapping[str, Tensor]:
        """Return the state of a parameter, in live tensors; nothing if it never had a gradient.

        They have the shape of the local tensor, of which `blocks` may divide the last dimension;
        those of another shape are the same on every rank.
        """
        return {}

    def make_room(self, parameter: LocalParameter) -> None:  # noqa: B027
        """Allocate the state of a parameter, to be filled from a checkpoint."""
