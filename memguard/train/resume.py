"""Saves and restores the progress of a run.

every rank   saves its part of weights, optimizer and tallies, see `background_save`
every rank   hashes its share of the files of the newest complete checkpoint, see `shared_sums`
rank 0       compares them, and checks that the checkpoint belongs to this run
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from memguard.data.loader import Loader
from memguard.records.run_files import CheckpointManifest
from memguard.train.audit_callback import MemorizationMonitor
from memguard.train.background_save import BackgroundSave
from memguard.train.checkpoint import (
    LOG,
    TrainState,
    check_belongs,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from memguard.train.run_state import RunState
from memguard.train.step import TrainStep


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
            RecordError: the checkpoint is from another run, or of another base model.
            ConfigError: the checkpoint's run audited another sample during training.
        """
        checkpoint = find_checkpoint(
            self.folder, console=self._run.console, until_step=until_step, runtime=self._runtime
        )
        if checkpoint is None:
            return None
        path, manifest, stored = checkpoint
        self._runtime.only_on_main(lambda: self._accept(path, manifest))
        load_checkpoint(path, self._state(), stored=stored, runtime=self._runtime)
        self.newest_step = manifest.step
        return Totals(**{field.name: getattr(manifest, field.name) for field in fields(Totals)})

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
        return TrainState(
            buffers=dict(self._stored_buffers()),
            parameters=self._step.parameters,
            optimizer=self._step.optimizer,
            arrays={
                "piece_tally": self._loader.piece_tally,
                **({} if self._watch is None else self._watch.arrays),
            },
        )

    def _stored_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self._step.lm.model
        stored = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            if name in stored:
                yield name, buffer
