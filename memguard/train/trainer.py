"""The loop: steps, metrics, checkpoints, clean interruption.

    rows of a step   cut into as many equal parts as the mesh splits the batch
    each rank        builds its own rows, takes the step, saves its part of a checkpoint
    rank 0           writes metrics and speaks; all stop after the same step

What one step does is in `step`.
"""

import io
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from numpy.typing import NDArray

from memguard.config import OptimConfig, TrainConfig
from memguard.data.corpus import Corpus
from memguard.data.loader import Loader
from memguard.errors import ConfigError, Interrupted, RecordError
from memguard.mitigation.k_schedule import Ladder
from memguard.model.causal_lm import VocabLayer
from memguard.runtime import Advance, Console, Runtime, peak_memory_bytes
from memguard.train.audit_callback import Watch
from memguard.train.base_nll import find_reference
from memguard.train.dp_sgd import RowClipping, compute_privacy
from memguard.train.heldout import choose_heldout, measure_heldout
from memguard.train.metrics import (
    EndMetrics,
    MetricsLog,
    StepMetrics,
    hash_tally,
)
from memguard.train.optim import learning_rate
from memguard.train.resume import Checkpoints, Totals
from memguard.train.step import TrainStep

# Ctrl-C and SIGTERM: the run ends after the step in hand, on all ranks alike.

# A launcher passes on the Ctrl-C that the terminal has sent already.
_SAME_SIGNAL_S = 1.0


class StopRequest:
    """Remembers that this process was asked to stop."""

    def __init__(self, console: Console) -> None:
        """Nobody has asked yet; ``console`` tells whoever does what happens."""
        self.signal_number: int | None = None
        self._console = console

    def agree(self, runtime: Runtime) -> int:
        """Return the signal that any rank was sent, 0 for none: it may reach some ranks only."""
        return runtime.agree_max(self.signal_number or 0)

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM end the run after the step in hand; a second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        asked_s = -math.inf

        def stop(number: int, _frame: FrameType | None) -> None:
            nonlocal asked_s
            if time.monotonic() - asked_s < _SAME_SIGNAL_S:
                return
            if self.signal_number is not None:
                for each, handler in before.items():
                    signal.signal(each, handler)
                signal.raise_signal(number)
            self.signal_number, asked_s = number, time.monotonic()
            self._console.info("stopping after this step; once more to stop at once")

        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


_HELDOUT_BATCH_TOKENS = 4096
_MIN_LABELS_FOR_DROP_CHECK = 10_000
_DROP_RATE_TOLERANCE = 0.1


class Trainer:
    """Trains a model on a loader's rows, with checkpoints, metrics and clean interruption."""

    def __init__(
        self,
        *,
        vocab: VocabLayer,
        corpus: Corpus,
        loader: Loader,
        ladder: Ladder,
        watch: Watch | None,
        train: TrainConfig,
        optim: OptimConfig,
        seq_len: int,
        seed: int,
        run_key: str,
        run_folder: Path,
        runtime: Runtime,
        console: Console,
        check_folder: Callable[[], None],
        must_resume: str | None = None,
        row_clipping: RowClipping | None = None,
    ) -> None:
        """Take everything a run consists of.

        Args:
            vocab: the model.
            corpus: documents, for the held-out loss.
            loader: rows of each step.
            ladder: how losses are reduced and how many labels should be dropped.
            watch: audits during training; None where there are none.
            train: length, portions, precision.
            optim: AdamW and its schedule.
            seq_len: length of a row (tokens).
            seed: the run's.
            run_key: hash of settings and documents; a checkpoint with another one is refused.
            run_folder: where checkpoints and metrics go.
            runtime: device and ranks.
            console: progress.
            check_folder: raises, on every rank, where the run's folder is no longer the one that
                is locked.
            must_resume: why the run may not begin at its first step; None where it may.
            row_clipping: makes the gradients private; None leaves them.

        Raises:
            ConfigError: a budget whose first audit would come too late.
        """
        self.vocab = vocab
        self.corpus, self.loader, self.ladder, self.watch = corpus, loader, ladder, watch
        self.config, self.optim = train, optim
        self.seq_len, self.seed, self.run_key = seq_len, seed, run_key
        self.folder, self.runtime, self.console = run_folder, runtime, console
        self.must_resume = must_resume
        self.num_steps = min(loader.num_steps, train.max_steps or loader.num_steps)
        if watch is not None and watch.budget is not None and watch.every_steps >= self.num_steps:
            raise ConfigError(
                f"'train.audit_every_steps' is {watch.every_steps:,}, and the run has "
                f"{self.num_steps:,} steps: the first audit that 'budget' could act on would come "
                "when they have been taken. Lower it"
            )
        self.step = TrainStep(
            vocab=vocab,
            mitigations=ladder.rungs[0],
            train=train,
            optim=optim,
            seed=seed,
            runtime=runtime,
            row_clipping=row_clipping,
        )
        self.totals = Totals()
        self.checkpoints = Checkpoints(
            run_folder,
            step=self.step,
            loader=loader,
            watch=watch,
            run_key=run_key,
            keep=train.keep_checkpoints,
            check_folder=check_folder,
            runtime=runtime,
            console=console,
        )
        self._reference_nll: NDArray[np.float32] | None = None
        self.stop_request = StopRequest(console)
        self._stopped_by_budget = False

    def run(self) -> None:
        """Train from the newest checkpoint, or from the start, to the last step.

        Raises:
            ConfigError: more was learnt by heart before the first audit than the budget allows; or
                a run that goes on would audit other tokens than before.
            Interrupted: SIGINT or SIGTERM; the state was saved.
            ModelError: the loss is no longer finite.
            OSError: a checkpoint could not be written.
            RecordError: a checkpoint is not of this run, or the last weights within the budget are
                lost.
        """
        path = self.folder / "metrics.jsonl"
        if "reference_nll" in self.step.mitigations.needs:
            # While the weights are those that the run starts from.
            self._reference_nll = find_reference(
                self.step,
                self.loader,
                num_steps=self.num_steps,
                run_key=self.run_key,
                run_folder=self.folder,
                console=self.console,
            )
        self._resume(path)
        log = MetricsLog(path, kept=self.checkpoints.log, is_writer=self.runtime.is_main)
        self.vocab.model.train()
        devices = [self.runtime.device] if self.runtime.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), self.stop_request.listen():
                if self.totals.step == 0:
                    self._measure_heldout(log)
                    if self.watch is not None:
                        log.write(self.watch.look(0))
                with self.console.progress("train", self.num_steps, "steps") as advance:
                    advance(self.totals.step, "")
                    while self.totals.step < self.num_steps and not self._stopped_by_budget:
                        line = self._timed_step()
                        log.write(line)
                        self._show(line, advance)
                        self._look_if_due(log)
                        self._save_if_due()
                self._finish(log)
                self._stop_if(self.stop_request.agree(self.runtime))
        finally:
            log.close()
            self.vocab.model.eval()

    def _timed_step(self) -> StepMetrics:
        started = time.perf_counter()
        samples = self.loader.samples(self.totals.step)
        num_rows = -(-len(samples) // self.vocab.num_batch_ways)
        mine = samples[self.vocab.batch_rank * num_rows :][:num_rows]
        lr = learning_rate(self.totals.step, self.num_steps, self.optim)
        result = self.step.run(
            self.loader.batch(mine, num_rows=num_rows, reference_nll=self._reference_nll),
            lr=lr,
            step=self.totals.step + 1,
            first_sample=samples[0],
        )
        self.loader.record(samples)
        took = time.perf_counter() - started
        totals = self.totals
        totals.step += 1
        totals.num_rows += len(samples)
        totals.num_supervised_tokens += result.num_supervised
        totals.num_kept_tokens += result.num_kept
        totals.train_s += took
        return StepMetrics(
            step=totals.step,
            num_steps=self.num_steps,
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            num_rows=len(samples),
            num_supervised_tokens=result.num_supervised,
            num_kept_tokens=result.num_kept,
            tokens_per_s=round(result.num_kept / took, 1),
            peak_memory_bytes=peak_memory_bytes(self.runtime.device),
            elapsed_s=round(totals.train_s, 3),
            penalised_share=result.penalised_share,
        )

    def _measure_heldout(self, log: MetricsLog) -> None:
        bucket, documents = choose_heldout(self.corpus)
        if documents:
            self.console.info(
                f"held-out loss: measuring on {len(documents):,} documents ({bucket})"
            )
        line = measure_heldout(
            self.vocab,
            self.corpus,
            seq_len=self.seq_len,
            batch_tokens=max(self.seq_len, _HELDOUT_BATCH_TOKENS),
            step=self.totals.step,
            runtime=self.runtime,
        )
        if line is not None:
            log.write(line)
            self.console.info(f"held-out loss {line.nll:.4f} nats a token ({line.bucket})")

    def _look_if_due(self, log: MetricsLog) -> None:
        """Audit the sample; a limit that is broken may end the run with earlier weights."""
        watch, step = self.watch, self.totals.step
        is_last = step == self.num_steps
        if watch is None or not watch.is_due(step, is_last=is_last):
            return
        found = watch.look(step, is_last=is_last)
        log.write(found)
        self.console.info(found.describe())
        if not watch.stops:
            return
        if not found.over_limit:
            self.checkpoints.save(self.totals)
            return
        last_good_step = watch.last_good_step
        if not last_good_step:
            raise ConfigError(
                f"'train.audit_every_steps' must be below {step}: by then {found.over_limit[0]} "
                "was over the limit of 'budget', and no weights within it had been kept"
            )
        kept = self.checkpoints.load(last_good_step)
        if kept is None or kept.step != last_good_step:
            folder = self.checkpoints.folder
            raise RecordError(
                f"{', '.join(found.over_limit)} went over the limit of 'budget' after step {step}, "
                f"and the weights of step {last_good_step}, the last ones within it, are missing "
                f"or damaged in '{folder}': bring them back, or delete that folder to begin again"
            )
        self.totals, self._stopped_by_budget = kept, True
        self.console.warn(
            f"{', '.join(found.over_limit)} went over the limit of 'budget' after step {step}: the "
            f"run ends with the weights of step {self.totals.step}"
        )

    def _show(self, line: StepMetrics, advance: Advance) -> None:
        if self.console.live:
            advance(1, line.describe_briefly())
        elif line.step % self.config.log_every_steps == 0 or line.step == self.num_steps:
            self.console.info(line.describe())

    def _finish(self, log: MetricsLog) -> None:
        totals = self.totals
        self._measure_heldout(log)
        clipping, fed = self.step.row_clipping, self.loader.schedule[: totals.num_rows]
        privacy = None
        if clipping is not None:
            privacy = compute_privacy(clipping.config, fed, batch_size=self.loader.batch_size)
        log.write(
            EndMetrics(
                step=totals.step,
                num_rows=totals.num_rows,
                num_supervised_tokens=totals.num_supervised_tokens,
                num_kept_tokens=totals.num_kept_tokens,
                train_s=round(totals.train_s, 3),
                **({} if privacy is None else asdict(privacy)),
                tally_sha256=hash_tally(
                    self.loader.realised_repetitions(), self.loader.count_fed_tokens()
                ),
                stopped_by_budget=self._stopped_by_budget,
            )
        )
        if privacy is not None:
            self.console.info(f"dp_sgd: {privacy.describe()}")
        target = self.ladder.target_drop_rate
        # Of what is to be forgotten no label is dropped, so the share is meant to be another.
        forgets = any(entry.role == "forget" for entry in self.corpus.manifest)
        if not target or forgets or totals.num_supervised_tokens < _MIN_LABELS_FOR_DROP_CHECK:
            return
        realised = 1 - totals.num_kept_tokens / totals.num_supervised_tokens
        self.console.info(f"dropped {realised:.2%} of the labels (meant: {target:.2%})")
        if abs(realised - target) > _DROP_RATE_TOLERANCE * target:
            self.console.warn(
                f"the mitigations dropped {realised:.2%} of the labels, not {target:.2%}: many "
                "repeated or special tokens, or a mask that fits these texts badly"
            )

    # -- resume and interruption ---------------------------------------------------------------

    def _resume(self, log_path: Path) -> None:
        found = self.checkpoints.load()
        if found is not None:
            self.totals = found
            self.runtime.only_on_main(lambda: self._check_log(log_path))
            self.console.info(f"resuming after step {self.totals.step} of {self.num_steps}")
        elif self.must_resume is not None:
            raise RecordError(
                f"{self.must_resume}, and '{self.checkpoints.folder}' holds no whole checkpoint to "
                f"make it again from: bring that back, delete '{self.folder}' to begin again, or "
                "choose another 'name'"
            )

    def _check_log(self, path: Path) -> None:
        kept = self.checkpoints.log
        with path.open("rb") if path.exists() else io.BytesIO() as log:
            is_whole = log.read(len(kept)) == kept
        if not is_whole:
            self.console.warn(
                f"'{path}' is damaged or cut off: what it held up to step {self.totals.step} is "
                "restored from the checkpoint"
            )

    def _save_if_due(self) -> None:
        every = self.config.checkpoint_every_steps
        step = self.totals.step
        asked = self.stop_request.agree(self.runtime)
        due = step == self.num_steps or (every is not None and step % every == 0)
        if (asked or due) and step != self.checkpoints.newest_step:
            self.checkpoints.save(self.totals)
        self._stop_if(asked)

    def _stop_if(self, asked: int) -> None:
        if asked:
            raise Interrupted(
                asked,
                f"stopped after step {self.totals.step} of {self.num_steps} and saved; run the "
                "same command again to go on",
            )
