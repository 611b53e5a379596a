"""What a run has done so far, saved and taken up again.

every rank   saves its part of weights, optimizer and tallies; all of them before the next step
rank 0       finds the newest complete checkpoint, and whether it is of this run
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from memguard.data.loader import Loader
from memguard.runtime import Console, Runtime
from memguard.train.audit_callback import Watch
from memguard.train.checkpoint import (
    CheckpointManifest,
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
        folder: Path,
        *,
        step: TrainStep,
        loader: Loader,
        watch: Watch | None,
        run_key: str,
        keep: int,
        runtime: Runtime,
        console: Console,
    ) -> None:
        """Take what has a state.

        Args:
            folder: where they are.
            step: model and optimizer.
            loader: has counted what was fed.
            watch: audits during training; None where there are none.
            run_key: hash of settings and documents; a checkpoint with another one is refused.
            keep: newest ones that are kept (checkpoints).
            runtime: device and ranks.
            console: says which are damaged.
        """
        self.folder = folder
        self.newest_step: int | None = None
        """After which the state was last saved or loaded."""
        self._step, self._loader, self._watch = step, loader, watch
        self._run_key, self._keep = run_key, keep
        self._runtime, self._console = runtime, console

    def load(self, until_step: int | None) -> Totals | None:
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
        load_checkpoint(path, self._state(), runtime=self._runtime)
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
        return found

    def save(self, totals: Totals) -> None:
        """Save the state that this much training has led to.

        Raises:
            OSError: it could not be written.
        """
        watch = self._watch
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
