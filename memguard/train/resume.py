"""Saves and restores the progress of a run.

every rank   saves its part of weights, optimizer and tallies
every rank   hashes its share of the files of the newest complete checkpoint, see `shared_sums`
rank 0       compares them, and checks that the checkpoint belongs to this run

It is saved while training goes on:

    start    copies this rank's state into CPU memory that is reused, and starts a thread
    thread   the save itself, of the copy, over a gloo group of its own
    wait     returns once the thread has ended on every rank, and says whether the save failed

The thread reads nothing that training changes. It cannot hold a process whose other ranks are dead:
its group has a time limit, and a process does not wait for it at its end. One failed save is a
warning, as the next one saves more; two in a row are an error, and so is one that is vital.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from memguard.data.loader import Loader
from memguard.errors import OtherRankFailed, RecordError, describe_foreign, is_out_of_memory
from memguard.records.run_files import CheckpointManifest
from memguard.runtime import Console, Runtime
from memguard.runtime.stalls import SAVE_THREAD
from memguard.train.audit_callback import MemorizationMonitor
from memguard.train.checkpoint import (
    LOG,
    StatePart,
    TrainState,
    check_belongs,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    to_stored,
)
from memguard.train.run_state import RunState
from memguard.train.step import TrainStep

Save = Callable[[Mapping[str, Tensor], Runtime], object]
"""Saves tensors of the state; every rank calls it with its own."""


class BackgroundSave:
    """Runs one save at a time; all ranks call its methods, except `end`, in the same order."""

    def __init__(self, runtime: Runtime, console: Console, *, timeout: timedelta) -> None:
        """Create the group of the saves; ``timeout`` is the longest that a rank waits in one."""
        self._runtime, self._console, self._own = runtime, console, runtime
        if runtime.world_size > 1:
            group = dist.new_group(backend="gloo", timeout=timeout)
            self._own = replace(runtime, control=group)
        self._buffers: dict[str, Tensor] = {}
        self.has_room = True
        """Whether this machine has memory for a copy; otherwise wait before the next step."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_vital = False
        self.waited_s = 0.0
        """Seconds in which training waited or copied its state; the caller may set it to 0."""
        self._num_failed = 0
        """Saves in a row, up to the last that was waited for."""

    @property
    def has_failed(self) -> bool:
        """Whether the save in flight has failed on this rank."""
        return self._error is not None

    def start(self, state: TrainState, save: Save, *, is_vital: bool = False) -> None:
        """Copy the state and begin to save it; a failure of a ``is_vital`` save is an error."""
        assert self._thread is None, "the save before was not waited for"
        started = time.perf_counter()
        parts = self._copy(list(state.parts()))
        self._is_vital = is_vital
        self._thread = threading.Thread(
            target=self._run, args=(parts, save), name=SAVE_THREAD, daemon=True
        )
        self._thread.start()
        self.waited_s += time.perf_counter() - started

    def wait(self) -> None:
        """Wait for the save in flight, if there is one; warn if it failed and the next may do.

        Raises:
            OSError: it could not be written, and was vital or the second in a row.
            OtherRankFailed: the same, and only other ranks know why.
        """
        if self._thread is None:
            return
        started = time.perf_counter()
        error = self._join()
        follows, rank = isinstance(error, OtherRankFailed), self._runtime.rank
        own = None if error is None else (follows, rank, describe_foreign(error))
        failed = [one for one in self._runtime.gather_objects(own) if one is not None]
        self.waited_s += time.perf_counter() - started
        self._num_failed = self._num_failed + 1 if failed else 0
        if not failed:
            return
        # The first rank that failed by itself.
        _, rank, cause = min(failed)
        if self._is_vital or self._num_failed > 1:
            raise error or OtherRankFailed(rank, 1)
        self._console.warn(f"a save failed on rank {rank} ({cause}); the next one tries again")

    def end(self) -> None:
        """Wait for this rank's part of the save in flight, after an error on any rank."""
        if (error := self._join()) is not None:
            self._console.warn(f"the last save failed ({describe_foreign(error)})")

    def _join(self) -> BaseException | None:
        if self._thread is not None:
            self._thread.join()
        error, self._error, self._thread = self._error, None, None
        return error

    def _run(self, parts: Sequence[StatePart], save: Save) -> None:
        try:
            if self._own.device.type == "cuda":
                torch.cuda.set_device(self._own.device)  # A new thread has the first GPU.
            save(to_stored(parts), self._own)
        except BaseException as error:  # Raised by `wait`.
            self._error = error

    def _copy(self, parts: Sequence[StatePart]) -> Sequence[StatePart]:
        """Return the parts in this object's own memory; as they are if there is no room."""
        if self.has_room and self._runtime.agree_any(not self._find_room(parts)):
            self.has_room = False
            self._buffers.clear()
            self._console.warn(
                "no memory is left for a copy of the state: training waits for each save"
            )
        if not self.has_room:
            return parts
        copies = [
            replace(part, value=self._buffers[part.name].copy_(part.value, non_blocking=True))
            for part in parts
        ]
        if self._runtime.device.type == "cuda":
            torch.cuda.current_stream(self._runtime.device).synchronize()
        return copies

    def _find_room(self, parts: Sequence[StatePart]) -> bool:
        """Allocate what is not yet; a parameter has no moments before its first gradient."""
        try:
            for part in parts:
                if part.name not in self._buffers:
                    self._buffers[part.name] = torch.empty_like(
                        part.value, device="cpu", pin_memory=part.value.is_cuda
                    )
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True


@dataclass(slots=True)
class Totals:
    """Totals of the run so far; fields of every checkpoint's manifest."""

    step: int = 0
    num_supervised_tokens: int = 0
    num_kept_tokens: int = 0
    num_rows: int = 0
    train_s: float = 0.0


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        run: RunState,
        *,
        step: TrainStep,
        loader: Loader,
        monitor: MemorizationMonitor | None,
        keep: int,
        timeout: timedelta,
    ) -> None:
        """Set the objects whose state is saved and restored; every rank calls this."""
        self.folder = run.folder / "checkpoints"
        self.log = b""
        """Log of the checkpoint that was loaded, on rank 0."""
        self.newest_step: int | None = None
        """Step whose state was last saved or loaded; a save may be in flight."""
        self.newest_s = time.monotonic()
        """When that was, or this object was made."""
        self.saves = BackgroundSave(run.runtime, run.console, timeout=timeout)
        self._run, self._step, self._loader, self._watch = run, step, loader, monitor
        self._runtime, self._keep = run.runtime, keep

    def load(self, until_step: int | None = None) -> Totals | None:
        """Restore the newest checkpoint, up to ``until_step``; return None if there is none.

        Raises:
            RecordError: it is from another run or base model, or missing where one is needed.
            ConfigError: the checkpoint's run audited another sample during training.
        """
        checkpoint = find_checkpoint(
            self.folder, console=self._run.console, until_step=until_step, runtime=self._runtime
        )
        if checkpoint is None:
            if (damage := self._run.must_resume) is not None and until_step is None:
                raise RecordError(
                    f"{damage}, and '{self.folder}' has no intact checkpoint to resume from: "
                    f"restore one, delete '{self._run.folder}' to start over, or choose another "
                    "'name'"
                )
            return None
        path, manifest, stored = checkpoint
        self._runtime.only_on_main(lambda: self._accept(path, manifest))
        load_checkpoint(path, self._state(), stored=stored, runtime=self._runtime)
        self.newest_step = manifest.step
        return Totals(**{field.name: getattr(manifest, field.name) for field in fields(Totals)})

    def return_to(self, step: int) -> Totals:
        """Restore the checkpoint of an earlier step, which must be there."""
        kept = self.load(step)
        if kept is None or kept.step != step:
            raise RecordError(
                f"the weights of step {step}, with which the run must end, are missing or damaged "
                f"in '{self.folder}': restore them, or delete that folder to start over"
            )
        return kept

    def _accept(self, path: Path, manifest: CheckpointManifest) -> None:
        """Refuse a checkpoint of another run, and read its log."""
        check_belongs(
            path,
            manifest,
            run_key=self._run.key,
            sample_sha256=self._sample_sha256,
            base=self._run.base,
        )
        self.log = (path / LOG).read_bytes()

    def save(self, totals: Totals, *, best_step: int | None = None, is_vital: bool = False) -> None:
        """Begin to save the current state; no save is in flight. See `BackgroundSave.wait`.

        The checkpoint of ``best_step`` is kept besides the newest ones.

        Raises:
            RecordError: the run's folder was deleted, renamed or replaced during training.
        """
        monitor = self._watch
        # Without this check, a deleted folder would be created again with only this checkpoint.
        self._run.check_folder()
        log = self._run.folder / LOG
        save = partial(
            save_checkpoint,
            self.folder,
            progress=CheckpointManifest(
                **asdict(totals),
                run_key=self._run.key,
                sample_sha256=self._sample_sha256,
                torch_version=torch.__version__,
                base=dict(self._run.base),
                files={},
            ),
            log=log,
            log_bytes=self._runtime.only_on_main(lambda: log.stat().st_size) or 0,
            keep=self._keep,
            keep_steps={best_step, monitor.last_good_step if monitor and monitor.stops else None},
        )
        self.saves.start(self._state(), save, is_vital=is_vital)
        self.newest_step, self.newest_s = totals.step, time.monotonic()

    @property
    def _sample_sha256(self) -> str | None:
        return None if self._watch is None else self._watch.sample_sha256

    def _state(self) -> TrainState:
        model = self._step.lm.model
        stored = model.state_dict(keep_vars=True)
        return TrainState(
            buffers={name: each for name, each in model.named_buffers() if name in stored},
            parameters=self._step.parameters,
            optimizer=self._step.optimizer,
            arrays={
                "piece_tally": self._loader.piece_tally,
                **({} if self._watch is None else self._watch.arrays),
            },
        )
