"""What a run has done so far, saved and taken up again.

every rank   saves its part of weights, optimizer and tallies; all of them before the next step
rank 0       finds the newest complete checkpoint, and whether it is of this run
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from memguard.data.loader import Loader
from memguard.records.run_files import CheckpointManifest
from memguard.runtime import Console, Runtime
from memguard.train.audit_callback import Watch
from memguard.train.checkpoint import (
    LOG,
    TrainState,
    check_belongs,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from memguard.train.step import TrainStep


@dataclass(slots=True)
class Totals:
    """What the run has done so far; part of every checkpoint."""

    step: int = 0
    num_supervised_tokens: int = 0
    num_kept_tokens: int = 0
    num_rows: int = 0
    train_s: float = 0.0


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        run_folder: Path,
        *,
        step: TrainStep,
        loader: Loader,
        watch: Watch | None,
        run_key: str,
        keep: int,
        check_folder: Callable[[], None],
        runtime: Runtime,
        console: Console,
    ) -> None:
        """Take what has a state.

        Args:
            run_folder: they are in its `checkpoints/`, and hold copies of its log.
            step: model and optimizer.
            loader: has counted what was fed.
            watch: audits during training; None where there are none.
            run_key: hash of settings and documents; a checkpoint with another one is refused.
            keep: newest ones that are kept (checkpoints).
            check_folder: raises, on every rank, where the run's folder is no longer the one that
                is locked.
            runtime: device and ranks.
            console: says which are damaged.
        """
        self.folder = run_folder / "checkpoints"
        self.log = b""
        """Of the checkpoint that was loaded, on rank 0."""
        self.newest_step: int | None = None
        """After which the state was last saved or loaded."""
        self._step, self._loader, self._watch = step, loader, watch
        self._run_key, self._keep = run_key, keep
        self._log_path, self._check_folder = run_folder / LOG, check_folder
        self._runtime, self._console = runtime, console

    def load(self, until_step: int | None = None) -> Totals | None:
        """Take the state of the newest checkpoint, up to a step; None where there is none.

        Raises:
            RecordError: it is not of this run.
            ConfigError: it was watched with another sample.
        """
        found = self._runtime.broadcast_object(
            self._runtime.only_on_main(lambda: self._find(until_step))
        )
        if found is None:
            return None
        path, manifest = found
        load_checkpoint(path, self._state(), files=manifest.files, runtime=self._runtime)
        self.newest_step = manifest.step
        return Totals(
            step=manifest.step,
            num_supervised_tokens=manifest.num_supervised_tokens,
            num_kept_tokens=manifest.num_kept_tokens,
            num_rows=manifest.num_rows,
            train_s=manifest.train_s,
        )

    def _find(self, until_step: int | None) -> tuple[Path, CheckpointManifest] | None:
        found = find_checkpoint(self.folder, console=self._console, until_step=until_step)
        if found is not None:
            check_belongs(*found, run_key=self._run_key, sample_sha256=self._sample_sha256)
            self.log = (found[0] / LOG).read_bytes()
        return found

    def save(self, totals: Totals) -> None:
        """Save the state that this much training has led to.

        Raises:
            OSError: it could not be written.
            RecordError: the run's folder was deleted, renamed or replaced meanwhile.
        """
        watch = self._watch
        # Or its folder would be made again, with this checkpoint alone in it.
        self._check_folder()
        save_checkpoint(
            self.folder,
            self._state(),
            progress=CheckpointManifest(
                step=totals.step,
                run_key=self._run_key,
                sample_sha256=self._sample_sha256,
                num_supervised_tokens=totals.num_supervised_tokens,
                num_kept_tokens=totals.num_kept_tokens,
                num_rows=totals.num_rows,
                train_s=totals.train_s,
                torch_version=torch.__version__,
                files={},
            ),
            log=self._log_path,
            keep=self._keep,
            keep_step=watch.last_good_step if watch and watch.stops else None,
            runtime=self._runtime,
        )
        self.newest_step = totals.step

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
        model = self._step.vocab.model
        stored = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            if name in stored:
                yield name, buffer
