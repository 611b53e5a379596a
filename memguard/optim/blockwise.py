"""AdamW in fp32 on parts of tensors of any dtype, with moments in fp32 or in 8 bits.

    moment [N, K]  ->  codes [N, K] uint8          index into 256 values from -1, or 0, to 1
                       scales [N, K / 64] fp32     largest absolute value of each block

The values are those of bitsandbytes, whose optimizer has blocks of 256, which do not divide many
hidden sizes. Its quantisation takes numbers below 2e-5 of a scale for that on CPUs, and small
second moments for zero on GPUs: by the root of zero an update can be hundreds of times the learning
rate. Here codes are of the nearest value on every device, of second moments a positive one.

Each element is updated by single operations, which round the same in vectors and in the rest of a
vector; a multiplication and an addition in one may not.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from memguard.config import OptimConfig
from memguard.config.optimizers import BLOCK, is_quantised
from memguard.errors import ConfigError, shorten
from memguard.optim.base import Optimizer
from memguard.optim.noise import as_rows
from memguard.optim.weights import Weights
from memguard.parallel.local_parameters import LocalParameter

_MOMENTS = ("exp_avg", "exp_avg_sq")
# Lower bits of an fp32 number that its code does not depend on; numbers below 0, and to 1.
_SHIFT, _ZERO, _ONE = 12, 1 << 19, 0x3F800000 >> 12


class BlockwiseAdamW(Optimizer):
    """AdamW with weight decay on matrices only, whose arithmetic is fp32."""

    blocks = MappingProxyType({f"{field}_scales": BLOCK for field in _MOMENTS})

    def __init__(
        self, parameters: Sequence[LocalParameter], config: OptimConfig, weights: Weights
    ) -> None:
        """Build the optimizer; of adamw_8bit large matrices have moments in 8 bits.

        Raises:
            ConfigError: the mesh cuts a block.
        """
        super().__init__(parameters)
        self._config, self._weights = config, weights
        self._state: dict[str, dict[str, Tensor]] = {}
        self._maps: dict[str, tuple[Tensor, Tensor]] = {}
        self._quantised: set[str] = set()
        if config.name != "adamw_8bit":
            return
        from bitsandbytes.functional import create_dynamic_map  # Takes seconds to import.

        for field, is_signed in zip(_MOMENTS, (True, False), strict=True):
            values, device = create_dynamic_map(is_signed), parameters[0].local.device
            table = build_table(values, least=0 if is_signed else 1)
            self._maps[field] = values.to(device), table.to(device)
        for each in parameters:
            if is_quantised(each.source.shape, is_embedding=each.is_embedding):
                _check_uncut(each)
                self._quantised.add(each.name)

    @torch.no_grad()
    def update(self) -> None:
        """Update all parameters that have a gradient."""
        for parameter in self.parameters:
            if parameter.local.grad is None:
                continue
            if parameter.name not in self._state:
                self.make_room(parameter)
            self._state[parameter.name]["step"] += 1
            for rows in self._weights.parts(parameter):
                self._update_rows(parameter, rows)

    def _update_rows(self, parameter: LocalParameter, rows: slice) -> None:
        config, state = self._config, self._state[parameter.name]
        assert parameter.local.grad is not None, "only parameters with a gradient are updated"
        gradient = as_rows(parameter.local.grad)[rows].to(torch.float32)
        (decay, decay_sq), number = config.betas, int(state["step"])
        mean = self._read(state, "exp_avg", rows).mul_(decay).add_(gradient * (1 - decay))
        squared = gradient.square().mul_(1 - decay_sq)
        mean_sq = self._read(state, "exp_avg_sq", rows).mul_(decay_sq).add_(squared)
        self._write(state, "exp_avg", rows, mean)
        self._write(state, "exp_avg_sq", rows, mean_sq)
        size = self._lr / (1 - decay**number)
        denominator = mean_sq.sqrt().mul_((1 - decay_sq**number) ** -0.5).add_(config.eps)
        weights = self._weights.read(parameter, rows)
        if parameter.source.ndim >= 2:
            weights.mul_(1 - self._lr * config.weight_decay)
        weights.sub_(torch.div(mean, denominator, out=denominator).mul_(size))
        self._weights.write(parameter, rows, weights, step=self._step)

    def _read(self, state: dict[str, Tensor], field: str, rows: slice) -> Tensor:
        """Return some rows of a moment in fp32, which the caller may change."""
        if field in state:
            return as_rows(state[field])[rows]
        codes, scales = (as_rows(state[f"{field}_{part}"])[rows] for part in ("codes", "scales"))
        moment: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
            codes, scales.flatten(), self._maps[field][0], BLOCK, torch.float32
        )
        return moment

    def _write(self, state: dict[str, Tensor], field: str, rows: slice, moment: Tensor) -> None:
        """Store rows that `_read` returned."""
        if field in state:
            return  # They are the state itself.
        blocks = moment.view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True)
        shares = blocks / scales.clamp(min=torch.finfo(scales.dtype).tiny)
        index = (shares.view(torch.int32) >> _SHIFT).add_(_ZERO)
        codes = self._maps[field][1].index_select(0, index.flatten())
        for part, value in (("codes", codes), ("scales", scales)):
            stored = as_rows(state[f"{field}_{part}"])[rows]
            stored.copy_(value.view(stored.shape))

    def state_of(self, parameter: LocalParameter) -> Mapping[str, Tensor]:
        """Return the step count and both moments of a parameter."""
        return self._state.get(parameter.name, {})

    def make_room(self, parameter: LocalParameter) -> None:
        """Allocate the step count and both moments of a parameter: zeros."""
        local = parameter.local
        state = {"step": torch.zeros((), dtype=torch.int64)}
        for field in _MOMENTS:
            if parameter.name not in self._quantised:
                state[field] = torch.zeros(local.shape, device=local.device)
                continue
            shape = (*local.shape[:-1], local.shape[-1] // BLOCK)
            state[f"{field}_scales"] = torch.zeros(shape, device=local.device)
            state[f"{field}_codes"] = torch.zeros_like(local, dtype=torch.uint8)
        self._state[parameter.name] = state


def build_table(values: Tensor, *, least: int) -> Tensor:
    """Return the code, at least ``least``, of each number from -1 to 1, by its upper bits."""
    number = (torch.arange(-_ZERO, _ONE + 1, dtype=torch.int32) << _SHIFT) + (1 << (_SHIFT - 1))
    codes = torch.bucketize(number.view(torch.float32), (values[1:] + values[:-1]) / 2)
    return codes.clamp_(min=least).to(torch.uint8)


def _check_uncut(parameter: LocalParameter) -> None:
    """Refuse a mesh that cuts blocks of a parameter; every rank decides the same.

    The rules of `parallel.mesh_shape` refuse most of them before a model is loaded.
    """
    order, lengths = parameter.order, {parameter.local.shape[-1]}
    if order is not None and order.dim == parameter.source.ndim - 1:
        lengths = {length for _, length in order.runs}  # Every rank has a run of each projection.
    if cut := [length for length in lengths if length % BLOCK]:
        raise ConfigError(
            f"the mesh must not cut blocks of {BLOCK} of '{shorten(parameter.name, 40)}' "
            f"(optim.name: adamw_8bit); got parts of {cut[0]}: split fewer ways, or use adamw"
        )
