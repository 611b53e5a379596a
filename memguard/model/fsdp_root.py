"""A model that another program has sharded by FSDP2, run where it is.

    root unit     embeddings, last norm and head     gathered while ``work()`` runs
    each block    a unit of its own                  gathered for its own forward

FSDP2 gathers weights in the hooks of a module's call. Hidden states and head are read by functions
that are not part of the model's forward; they run in place of the root's forward, within its hooks.

Every rank makes the same forwards, since each gathers weights from all. A rank that fails in the
middle of one gathers the remaining units before it raises its error, so that the others, which wait
for its shards, reach the end of the same forward and learn of the error there.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from memguard.errors import ModelError
from memguard.runtime import Runtime

Result = TypeVar("Result")


class FsdpRoot:
    """The outermost module of a model that FSDP2 shards, until `close`."""

    def __init__(self, root: Any, runtime: Runtime) -> None:
        """Watch which units gather their weights; `fully_shard` was applied to ``root`` last."""
        self._root, self._runtime = root, runtime
        modules: list[Any] = [module for module in root.modules() if isinstance(module, FSDPModule)]
        # Modules that one call has sharded are one unit: Accelerate shards norm and head together.
        first = {id(module._get_fsdp_state()): module for module in reversed(modules)}
        self._unit_of = {module: first[id(module._get_fsdp_state())] for module in modules}
        self._units: list[Any] = list(dict.fromkeys(self._unit_of.values()))
        self._gathered: set[nn.Module] = set()
        self._needed: set[nn.Module] = set(self._units)
        """Units of a forward: after the first one those that it gathered."""
        self._has_run = False
        # After the hook of FSDP2 itself, which comes first.
        self._hooks = [module.register_forward_pre_hook(self._note) for module in modules]

    def _note(self, module: nn.Module, _: Any) -> None:
        self._gathered.add(self._unit_of[module])

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype to which gathered weights are cast; None: that of the shards."""
        dtype: torch.dtype | None = self._root._get_fsdp_state()._mp_policy.param_dtype
        return dtype

    def run(self, work: Callable[[], Result]) -> Result:
        """Return ``work()``; the weights of the root unit are gathered while it runs.

        Raises:
            OtherRankFailed: another rank has failed since the last forward.
        """
        self._runtime.check_peers()
        self._gathered.clear()
        self._has_run = True
        results: list[Result] = []
        before = vars(self._root).get("forward")

        def restore() -> None:
            vars(self._root).pop("forward", None)
            if before is not None:
                self._root.forward = before

        def forward() -> None:
            # The work may call the root itself, with its own forward. Its result is not returned
            # here, because FSDP2 casts what a module returns.
            restore()
            results.append(work())

        self._root.forward = forward
        try:
            self._root()
        except BaseException:
            self._complete()
            raise
        finally:
            restore()
        self._needed = set(self._gathered)
        return results[0]

    def _complete(self) -> None:
        """Gather what this rank has not gathered in a forward that failed, then free everything."""
        # After a failure of a collective the others have failed too.
        with suppress(RuntimeError):
            for unit in self._units:
                if unit in self._needed - self._gathered:
                    unit.unshard()
                    unit.reshard()
        self._forget_forwards()

    def _forget_forwards(self) -> None:
        """Free all gathered weights, and what FSDP2 has noted of the forwards for a backward.

        The next backward prefetches weights in the order of these notes: on all ranks the same.
        """
        if hasattr(self._root, "reset_iter_state"):
            self._root.reset_iter_state()
        else:
            # torch 2.11, which has no function for it.
            for unit in self._units:
                state = unit._get_fsdp_state()
                state._comm_ctx.post_forward_order.clear()
                state._fsdp_param_group._post_forward_indices.clear()
        self.reshard()

    def reshard(self) -> None:
        """Free all gathered weights.

        FSDP2 keeps the root unit gathered after a forward, since backward needs it first.
        """
        for unit in self._units:
            unit.reshard()

    def close(self) -> None:
        """Free all gathered weights, remove the hooks, and leave no trace of the forwards."""
        for hook in self._hooks:
            hook.remove()
        if self._has_run:
            self._forget_forwards()


def find_root(*modules: Any) -> Any:
    """Return the first of some nested modules that FSDP2 shards; None if it shards none of them.

    Raises:
        ModelError: FSDP2 shards parts of the last one only.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            return module
    if any(isinstance(unit, FSDPModule) for unit in modules[-1].modules()):
        raise ModelError(
            "'model' is a part of a model that FSDP2 shards; pass the module to which fully_shard "
            "was applied last"
        )
    return None
