"""The load-balancing loss of a mixture of experts, over the tokens of all ranks.

    logits_ME  [M, E]  router logits of a layer, of this rank's M positions for E experts
    mask_M     [M]     1 for a token, 0 for padding
    p_ME       [M, E]  softmax(logits_ME)
    rows       layers x tokens, of all ranks that split the batch
    f_E        choices of an expert among the k most probable ones / rows        no gradient
    P_E        sum of p_ME over layers, tokens and ranks / rows

    loss = E sum over experts (f_E P_E)

as in transformers, whose models compute it if their configuration has ``output_router_logits``.
The one process that a mesh is compared with has the rows of all data x z ranks of a micro-batch.

    forward    f_E rows, rows   all-reduce over data and z, E + 1 numbers
               `share`          E sum over experts (f_E, this rank's part of P_E)
    backward   dshare / dp_ME = E f_E / rows, no collective: the sum of the shares is the loss

Ranks along y and x have the same logits and compute the same share; the gradients of a router and
of its input are sums over these ranks (`parallel.experts`), so each contributes 1/(y x) of it.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memguard.errors import ModelError
from memguard.parallel.collectives import all_reduce
from memguard.parallel.mesh import Mesh4D, world_axis

FLAG = "output_router_logits"
"""Field of a configuration that makes the loss part of training."""
_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLoss:
    """What the load-balancing loss of a model depends on."""

    num_experts: int
    top_k: int
    coefficient: float
    """Weight of the loss in the training loss."""

    def share(self, logits: Sequence[Tensor], mask_M: Tensor, mesh: Mesh4D | None = None) -> Tensor:
        """Return this rank's share of the loss; the shares of ranks that split the batch add up.

        ``logits`` are those of each layer with experts, ``[M, E]``; ``mask_M`` is True for tokens.
        All ranks of the mesh call this.
        """
        wide = torch.promote_types(logits[0].dtype, torch.float32)
        mask_M1 = mask_M.to(wide)[:, None]
        choices_E, mass_E = logits[0].new_zeros(2, self.num_experts, dtype=wide)
        for logits_ME in logits:
            p_ME = logits_ME.softmax(-1)
            best_Mk = p_ME.detach().topk(self.top_k, -1).indices
            chosen_ME = torch.zeros_like(p_ME, dtype=wide).scatter_(1, best_Mk, 1)
            choices_E = choices_E + (chosen_ME * mask_M1).sum(0)
            mass_E = mass_E + (p_ME.to(wide) * mask_M1).sum(0)
        # Whole numbers, of which float64 has the exact sum in any order.
        counts = torch.cat([choices_E, mask_M1.sum()[None] * len(logits)]).double()
        if mesh is not None:
            counts = all_reduce(counts, world_axis()) / (mesh.shape.y * mesh.shape.x)
        rows = counts[-1]
        # float32 divisions and products of float32 numbers, as in transformers.
        f_E = (counts[:-1] / rows).to(wide)
        loss: Tensor = self.num_experts * (f_E * (mass_E / rows.to(wide))).sum()
        return loss


def has_flag(model: Any) -> bool:
    """Whether a model's configuration makes the load-balancing loss part of training."""
    return bool(getattr(model.config.get_text_config(), FLAG, False))


def takes_flag(model: Any) -> bool:
    """Whether a model's forward has an argument that says if router logits are recorded."""
    return FLAG in inspect.signature(inspect.unwrap(type(model).forward)).parameters


def find_router_loss(model: Any) -> RouterLoss | None:
    """Return the load-balancing loss that a model's configuration makes part of training.

    None if it does not, or if transformers computes another loss, or none, for this model; see
    `explain_missing`.
    """
    function = _find_function(model)
    if not has_flag(model) or function is None:
        return None
    num_experts = getattr(model, "num_experts", None)
    top_k = getattr(model, "num_experts_per_tok", None)
    coefficients = [getattr(model, name) for name in _COEFFICIENTS if hasattr(model, name)]
    if num_experts is None or top_k is None or not coefficients:
        return None
    loss = RouterLoss(num_experts=num_experts, top_k=top_k, coefficient=coefficients[0])
    return loss if _is_equal(loss, function) else None


def explain_missing(model: Any) -> str:
    """Return why a model whose configuration has the field trains without the loss."""
    why = (
        "transformers has no load-balancing loss for this model"
        if _find_function(model) is None
        else "memguard does not support the load-balancing loss of this model, which is not part "
        "of the training loss"
    )
    return f"{type(model).__name__}: '{FLAG}' in its configuration has no effect: {why}"


def check_recorded(model: Any, logits: Sequence[Tensor] | None) -> Sequence[Tensor]:
    """Return the router logits that a model recorded.

    Raises:
        ModelError: it recorded none.
    """
    if not logits:
        raise ModelError(
            f"{type(model).__name__} has '{FLAG}' in its configuration, but none of its layers "
            f"returns router logits. Set '{FLAG}' to false"
        )
    return logits


def _find_function(model: Any) -> Any:
    """Return the function of transformers that a model's forward computes the loss with."""
    code = inspect.unwrap(type(model).forward)
    return code.__globals__.get("load_balancing_loss_func")


def _is_equal(loss: RouterLoss, function: Any) -> bool:
    """Whether a function of transformers computes this loss, on random logits."""
    if list(inspect.signature(function).parameters) != _PARAMETERS:
        return False
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(2, 8, loss.num_experts, generator=generator)
    mask_M = torch.arange(8) < 5
    theirs = function(tuple(draw), loss.num_experts, loss.top_k, mask_M.view(2, 4).long())
    return math.isclose(loss.share(tuple(draw), mask_M), theirs, rel_tol=1e-4)
