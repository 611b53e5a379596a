"""MeZO (arXiv:2305.17333): a step along one random direction, from two forwards.

    z    +1 or -1 for each weight, the same on every mesh (`noise`)
    s    (L(w + eps z) - L(w - eps z)) / (2 eps), the derivative of the loss along z
    w   -= lr s z

There are no gradients and no state: what a step did follows from its seed, lr and s. With K seeds
(FedKSeed, arXiv:2312.06353) a whole run is K numbers, the sums of -lr s of each seed.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from memguard.optim.base import Optimizer
from memguard.optim.noise import draw_bits
from memguard.optim.weights import Weights
from memguard.parallel.local_parameters import LocalParameter
from memguard.seeds import derive_seed

EPSILON = 1e-3


class Mezo(Optimizer):
    """Moves the weights along a random direction of each step."""

    def __init__(
        self, parameters: Sequence[LocalParameter], seed: int, num_seeds: int | None
    ) -> None:
        """Build the optimizer of weights in fp32 or wider."""
        super().__init__(parameters)
        self._weights, self._seed, self._num_seeds = Weights(seed), seed, num_seeds
        self.slope = 0.0
        """s of the step, over all rows; set before `update`."""

    @torch.no_grad()
    def compare(self, measure: Callable[[], Tensor], *, router_weight: float) -> Tensor:
        """Return the means of this rank's sums on both sides of the weights, and after them s.

        The loss is the first of the sums, and the last one with ``router_weight``. The weights are
        left on the second side.
        """
        self.move(EPSILON)
        above = measure()
        self.move(-2 * EPSILON)
        below = measure()
        difference = (above - below) / (2 * EPSILON)
        slope_1 = difference[:1] + router_weight * difference[-1:]
        return torch.cat([(above + below) / 2, slope_1])

    def finish(self) -> None:
        """Return no gradient norm."""

    def update(self) -> None:
        """Return from the second side of `compare` and take the step."""
        self.move(EPSILON - self._lr * self.slope)

    def move(self, by: float, seed: int | None = None) -> None:
        """Add ``by`` times z to the weights: z of the step, or of a seed."""
        if seed is None:
            seed = choose_seed(self._seed, self._step, self._num_seeds)
        for parameter in self.parameters:
            key = derive_seed(self._seed, f"mezo {parameter.name}", seed)
            for rows in self._weights.parts(parameter):
                value = self._weights.read(parameter, rows)
                sign = ((draw_bits(parameter, key, rows) & 1) * 2 - 1).to(value.dtype)
                moved = value + sign.view_as(value) * by
                self._weights.write(parameter, rows, moved, step=self._step)


def choose_seed(run_seed: int, step: int, num_seeds: int | None) -> int:
    """Return the seed of a step's direction: the step, or one of ``num_seeds``."""
    return step if num_seeds is None else derive_seed(run_seed, "mezo seeds", step) % num_seeds
