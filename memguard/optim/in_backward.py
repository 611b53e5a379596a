"""Optimizers that update weights inside backward, as soon as their gradients are reduced.

    hook     of each parameter: FSDP2 calls it after its all-reduce, on one process autograd does
    unit     parameters whose gradients arrive together: those of an FSDP2 unit, or one
    update   after the unit's last gradient; then all of them are freed

LOMO (arXiv:2306.09782) is SGD. AdaLomo (arXiv:2310.10195) divides by the root of mean squares:

    r, c     means of g^2 over columns and over rows, decayed by 1 - step^-0.8
    u        g / sqrt(r c / mean r)                     of a vector, one row: g / sqrt(c)
    w       -= lr  max(1e-3, RMS w)  u / max(1, RMS u)

Every rank has r and c of the whole tensor: it fills in what it holds, and all-reduces over z, y and
x add this up, of all parameters of a unit in one tensor. They add in float64, where sums of a few
fp32 numbers do not depend on the order, so that copies of a weight stay equal.

No gradient is clipped, as the norm of all is known last. If it is not finite, weights are lost.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from memguard.errors import ConfigError
from memguard.optim.base import Optimizer
from memguard.optim.noise import as_rows, find_place
from memguard.optim.weights import Weights
from memguard.parallel.collectives import all_reduce
from memguard.parallel.local_parameters import (
    LocalParameter,
    average_copies,
    clear_gradients,
    sum_squares,
    take_gradients,
)
from memguard.parallel.mesh import Mesh4D, world_axis

_LEAST_SQUARE, _LEAST_RMS = 1e-30, 1e-3


class Lomo(Optimizer):
    """SGD inside backward, without a state."""

    def __init__(
        self, parameters: Sequence[LocalParameter], weights: Weights, mesh: Mesh4D | None
    ) -> None:
        """Register the hooks; ConfigError if a parameter is neither a matrix nor a vector."""
        super().__init__(parameters)
        assert not any(each.is_adapter for each in parameters), "FSDP2 does not reduce them"
        if any(each.partial_over or each.source.ndim > 2 for each in parameters):
            raise ConfigError(
                f"'optim.name: {type(self).__name__.lower()}' updates matrices and vectors, not "
                "the tensors of experts or convolutions: use adamw or adamw_8bit"
            )
        self._weights, self._mesh = weights, mesh
        self._means: dict[str, Tensor] = {}
        self._units: dict[str, list[LocalParameter]] = {}
        for parameter in parameters:
            self._units.setdefault(parameter.unit, []).append(parameter)
            hook = partial(self._receive, parameter)
            parameter.source.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._arrived: list[LocalParameter] = []
        self._updated: set[str] = set()
        """Names of the parameters whose gradients have arrived in this step."""
        self._square = torch.zeros(())  # This rank's share of the squared norm.

    @torch.no_grad()
    def finish(self) -> float:
        """End the step after its backward; return the norm of all gradients."""
        self._update_unit()  # One with parameters that have no gradient.
        square, self._square = self._square, torch.zeros(())
        self._updated, self._step = set(), 0
        return float((square if self._mesh is None else all_reduce(square, world_axis())).sqrt())

    def update(self) -> None:
        """Do nothing: backward has updated all parameters."""

    @torch.no_grad()
    def _receive(self, parameter: LocalParameter, _: Tensor) -> None:
        """Take the gradient of a parameter, which is complete."""
        if not self._step:
            clear_gradients([parameter])  # Of a rehearsal.
            return
        assert parameter.name not in self._updated, "a step has one micro-batch"
        if self._arrived and self._arrived[0].unit != parameter.unit:
            self._update_unit()
        self._arrived.append(parameter)
        self._updated.add(parameter.name)
        if len(self._arrived) == len(self._units[parameter.unit]):
            self._update_unit()

    def _update_unit(self) -> None:
        """Update the parameters whose gradients have arrived, and free these."""
        unit, self._arrived = self._arrived, []
        if not unit:
            return
        take_gradients(unit)
        if self._mesh is not None:
            average_copies(unit, self._mesh.axis("y"))
        self._square = self._square.to(unit[0].local.device) + sum_squares(unit).double()
        for parameter, rate in zip(unit, self._find_rates(unit), strict=True):
            for rows, change_RC in self._changes(parameter):
                old = self._weights.read(parameter, rows)
                new = old - (change_RC * rate).view_as(old)
                self._weights.write(parameter, rows, new, step=self._step)
            gradient = parameter.local.grad
            if gradient is not None and gradient.is_cuda:
                # FSDP2 allocates it on another stream, which must not reuse it too early.
                gradient.record_stream(torch.cuda.current_stream(gradient.device))
        clear_gradients(unit)

    def _find_rates(self, unit: Sequence[LocalParameter]) -> Sequence[float | Tensor]:
        """Return the factors of the changes of some parameters."""
        return [self._lr] * len(unit)

    def _changes(self, parameter: LocalParameter) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of the local tensor and by what they change; here their gradients."""
        for rows, gradient_RC, _, _ in self._parts(parameter):
            yield rows, gradient_RC

    def _parts(self, parameter: LocalParameter) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield rows of the local tensor: slice, gradients, rows and columns of the whole tensor.

        A vector is a matrix of one row, whose columns are cut into parts.
        """
        assert parameter.local.grad is not None, "it has arrived"
        gradient = as_rows(parameter.local.grad)
        place_R, place_C = (place.to(gradient.device) for place in find_place(parameter))
        for rows in self._weights.parts(parameter):
            part = gradient[rows].to(_wide(parameter))
            if part.ndim == 1:
                yield rows, part[None], place_R, place_C[rows]
            else:
                yield rows, part, place_R[rows], place_C


class AdaLomo(Lomo):
    """AdaLomo, whose state is the vectors r and c of each parameter, in one tensor."""

    def state_of(self, parameter: LocalParameter) -> Mapping[str, Tensor]:
        """Return r and c of a parameter, if it ever had a gradient."""
        means = self._means.get(parameter.name)
        return {} if means is None else {"means": means}

    def make_room(self, parameter: LocalParameter) -> None:
        """Allocate r and c of a parameter."""
        self._means[parameter.name] = _zeros(parameter, sum(_count(parameter)))

    def _find_rates(self, unit: Sequence[LocalParameter]) -> Sequence[float | Tensor]:
        """Move r and c towards the means of this step; return lr max(.., RMS w) / max(1, RMS u)."""
        sums = self._add_over_mesh(unit, [self._measure(parameter) for parameter in unit])
        for parameter, sum_T in zip(unit, sums, strict=True):
            decay = 1 - self._step**-0.8 if parameter.name in self._means else 0.0
            if parameter.name not in self._means:
                self.make_room(parameter)
            means, (num_rows, num_columns) = self._means[parameter.name], _count(parameter)
            row_R, column_C = torch.split(sum_T[:-1], [num_rows, num_columns])
            new = torch.cat([row_R / num_columns, column_C / num_rows]) + _LEAST_SQUARE
            means.mul_(decay).add_(new.to(means), alpha=1 - decay)
        own = [
            sum((u_RC.square().sum()[None] for _, u_RC in self._changes(each)), _zeros(each, 1))
            for each in unit
        ]
        rates = []
        for each, sum_T, u_1 in zip(unit, sums, self._add_over_mesh(unit, own), strict=True):
            rms_w, rms_u = (torch.cat([sum_T[-1:], u_1]) / math.prod(each.source.shape)).sqrt()
            rate = self._lr * rms_w.clamp_min(_LEAST_RMS) / rms_u.clamp_min(1)
            rates.append(rate.to(_wide(each)))
        return rates

    def _measure(self, parameter: LocalParameter) -> Tensor:
        """Return this rank's sums of g^2 by row and by column of the whole tensor, and of w^2."""
        row_R, column_C, weight_1 = (_zeros(parameter, size) for size in (*_count(parameter), 1))
        for rows, gradient_RC, place_R, place_C in self._parts(parameter):
            square_RC = gradient_RC.square()
            row_R[place_R] += square_RC.sum(1)
            column_C[place_C] += square_RC.sum(0)
            weight_1 += self._weights.read(parameter, rows).square().sum()
        return torch.cat([row_R, column_C, weight_1])

    def _changes(self, parameter: LocalParameter) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of the local tensor and their u."""
        # Factors one by one: the product of both means could be too small for fp32.
        row_R, column_C = torch.split(self._means[parameter.name].double(), _count(parameter))
        factor_R = (row_R / row_R.mean()).rsqrt().to(_wide(parameter))
        factor_C = column_C.rsqrt().to(_wide(parameter))
        for rows, gradient_RC, place_R, place_C in self._parts(parameter):
            yield rows, gradient_RC * factor_R[place_R, None] * factor_C[place_C]

    def _add_over_mesh(
        self, unit: Sequence[LocalParameter], values: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return in float64 the sums of some values over the parts of their parameters."""
        sizes = [len(value) for value in values]
        flat = torch.cat([value.double() for value in values])
        if self._mesh is None:
            return torch.split(flat, sizes)
        for axis in (self._mesh.axis("z"), self._mesh.axis("y"), self._mesh.axis("x")):
            flat = all_reduce(flat, axis, owned=True)
        # Copies along these axes have the same values.
        copies = [each.num_copies // self._mesh.shape.data for each in unit]
        return [part / num for part, num in zip(torch.split(flat, sizes), copies, strict=True)]


def _wide(parameter: LocalParameter) -> torch.dtype:
    return torch.promote_types(parameter.local.dtype, torch.float32)


def _zeros(parameter: LocalParameter, size: int) -> Tensor:
    return torch.zeros(size, dtype=_wide(parameter), device=parameter.local.device)


def _count(parameter: LocalParameter) -> list[int]:
    *rows, num_columns = parameter.source.shape
    return [math.prod(rows), num_columns]
