"""Counts how often a `Trainer` really trains each document, by the rows that its model receives.

    forward of a step   a hook keeps input_ids, position_ids and attention_mask   not counted yet
    end of the step     their runs are looked up among the documents              counted
    checkpoint          the counts are saved beside it, and restored from it

What the model receives is what is trained: batches that workers prepared in advance, or that a
killed step left behind, are never counted. Each process counts its own rows; `counts` adds them.
"""

import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from memguard.integrations.token_runs import RowFormat, RunIndex, cut_runs
from memguard.records import write_atomically
from memguard.runtime import Runtime
from memguard.workflows.auditing.trained_counts import (
    TrainedCounts,
    describe_unmatched,
)

_NUMBERS = ("counts", "runs")
_TALLY = re.compile(r"memguard-tally-(\d+)-of-(\d+)\.npz")


_Fed = tuple[Tensor, Tensor | None, Tensor | None]
"""Token ids, position ids and attention mask of one forward of training."""


class TrainedRows:
    """Counts on one process how often each document is trained.

    Call `watch` before training, `end_step` after each optimizer step, `save` with each checkpoint
    and `load` where training resumes from one.
    """

    def __init__(self, documents: Iterable[tuple[str, ArrayLike]], rows: RowFormat) -> None:
        """Build the index of the documents, which are given as to `RunIndex`."""
        self._index, self._rows = RunIndex(documents, rows), rows
        self._handle: RemovableHandle | None = None
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: a copy of a watched model shares its hook, and is not trained."""
        return self

    def reset(self) -> None:
        """Forget all counts, as where training begins again from its start."""
        self._counts = np.zeros(len(self._index), dtype=np.int64)
        self._runs = np.zeros(2, dtype=np.int64)
        """Number of runs, and of those that no document leaves."""
        self._reason = ""
        self._pending: list[_Fed | None] = []

    def go_on(self, before: "TrainedRows") -> None:
        """Add what the same model was trained on before, as where training begins again."""
        if before._index.digest != self._index.digest:
            self._reason = "training began again with another packing"
            return
        self._counts += before._counts
        self._runs += before._runs
        self._reason = before._reason

    def watch(self, model: nn.Module) -> None:
        """Record the batches of a model's forwards in training.

        It is the model that the trainer calls, or the one that its wrappers call. A compiled model
        must not have been trained before.
        """
        self.unwatch()
        self._handle = model.register_forward_pre_hook(self._record, with_kwargs=True)

    def unwatch(self) -> None:
        """Stop recording."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    # A break in the graph of a compiled model: what the hook stores must not be traced.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._handle is None or not (module.training and torch.is_grad_enabled()):
            return
        given = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(given, Tensor) or given.is_floating_point() or given.ndim not in (1, 2):
            self._pending.append(None)
            return
        # TRL calls the model a second time with the same batch for its metrics.
        kept = [(fed[0].data_ptr(), fed[0].shape) for fed in self._pending if fed is not None]
        if (given.data_ptr(), given.shape) not in kept:
            self._pending.append((given, kwargs.get("position_ids"), kwargs.get("attention_mask")))

    def end_step(self, *, was_skipped: bool = False) -> None:
        """Count the batches since the last call, unless the step was skipped, as by an overflow."""
        pending, self._pending = self._pending, []
        if was_skipped:
            return
        if not pending:
            self._reason = self._reason or "a step ended of which no batch was recorded"
        for fed in pending:
            if fed is None:
                self._runs += 1
            else:
                self._count(fed)

    def _count(self, fed: _Fed) -> None:
        input_ids, position_ids, attention_mask = map(_to_rows, fed)
        assert input_ids is not None, "checked by the hook"
        for run in cut_runs(input_ids, position_ids, attention_mask):
            number = self._index.find(run)
            if number is None and len(run) == 1:
                # Padding of padding-free rows; a token alone predicts nothing and is not trained.
                continue
            self._runs += (1, number is None)
            if number is not None:
                self._counts[number] += 1

    def counts(self, runtime: Runtime) -> TrainedCounts:
        """Return the repetitions of documents in steps that have ended; all processes call this."""
        values = [*self._counts.tolist(), *self._runs.tolist()]
        # Sums of counts below 2^53 are exact.
        *sums, num_runs, num_unmatched = map(int, runtime.agree_sum(values))
        reasons = [reason for reason in runtime.gather_objects(self._reason) if reason]
        is_in_order = self._rows.packing == "wrapped"
        reasons.append(describe_unmatched(num_unmatched, num_runs, is_in_order=is_in_order))
        return self._index.count(
            np.array(sums, dtype=np.int64),
            num_runs=num_runs,
            num_unmatched=num_unmatched,
            reason=reasons[0],
        )

    # -- checkpoints -------------------------------------------------------------------------------

    def save(self, folder: Path, rank: int, world_size: int) -> None:
        """Write this process's counts beside a checkpoint of the trainer."""
        content = io.BytesIO()
        np.savez(
            content,
            counts=self._counts,
            runs=self._runs,
            documents=np.array(self._index.digest),
            reason=np.array(self._reason),
        )
        tally = folder / f"memguard-tally-{rank}-of-{world_size}.npz"
        write_atomically(tally, content.getvalue())
        if rank == 0:
            for (_, size), path in _list_tallies(folder).items():
                if size != world_size:  # Of a training before, with other processes.
                    path.unlink(missing_ok=True)

    def load(self, folder: Path | None, rank: int, world_size: int) -> None:
        """Continue with the counts saved beside a checkpoint; folder None: it was not found.

        If there were another number of processes, process 0 continues with all of them. Counts that
        cannot be restored are not an error: `counts` then has the reason.
        """
        self.reset()
        if folder is None:
            self._reason = (
                "training was resumed from a checkpoint whose folder is not known; name it in "
                "'resume_from_checkpoint' of the trainer's arguments"
            )
            return
        found = _list_tallies(folder)
        sizes = {size for _, size in found}
        size = world_size if world_size in sizes else min(sizes, default=0)
        ranks = [rank] if size == world_size else range(size) if rank == 0 else []
        if not size or any((each, size) not in found for each in ranks):
            self._reason = (
                f"training was resumed from '{folder.name}', which has no memguard-tally files of "
                "all its processes"
            )
            return
        for each in ranks:
            try:
                self._add(found[each, size])
            except Exception:  # Whatever numpy, zipfile and zlib raise of a damaged file.
                self._reason = f"'{folder.name}/{found[each, size].name}' is damaged"

    def _add(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as tally:
            digest, reason = str(tally["documents"]), str(tally["reason"])
            counts, runs = (tally[name].astype(np.int64, casting="safe") for name in _NUMBERS)
        if digest != self._index.digest:
            self._reason = (
                f"training was resumed from '{path.parent.name}', whose tally is of other "
                "documents or another packing"
            )
            return
        if counts.shape != self._counts.shape or runs.shape != (2,):
            raise ValueError("it has another number of counts")
        self._counts += counts
        self._runs += runs
        self._reason = self._reason or reason


def find_resumed(arguments: Any, global_step: int) -> Path | None:
    """Return the folder of the checkpoint from which a trainer resumed; None if it is not found.

    ``global_step`` is that of its state when training begins, above 0 if it resumed.
    """
    named = getattr(arguments, "resume_from_checkpoint", None)
    folders = [Path(named)] if isinstance(named, str) else []
    folders.append(Path(arguments.output_dir) / f"checkpoint-{global_step}")
    return next((folder for folder in folders if _read_step(folder) == global_step), None)


def _read_step(folder: Path) -> int | None:
    try:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if isinstance(step, int) else None


def _to_rows(given: Any) -> NDArray[np.int64] | None:
    """Return ``[B, T]`` on the CPU; None if it is not a tensor of rows."""
    if not isinstance(given, Tensor) or given.ndim not in (1, 2):
        return None
    rows: NDArray[np.int64] = np.atleast_2d(given.detach().cpu().numpy().astype(np.int64))
    return rows


def _list_tallies(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the tallies of a checkpoint by rank and number of processes."""
    matches = [(_TALLY.fullmatch(path.name), path) for path in folder.glob("memguard-tally-*.npz")]
    return {(int(match[1]), int(match[2])): path for match, path in matches if match}
