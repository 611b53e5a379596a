"""The loop: steps, metrics, checkpoints, clean interruption.

    rows of a step   split into equal parts, one for each batch group of the mesh
    each rank        builds its own rows, takes the step, saves its part of a checkpoint
    rank 0           writes metrics and messages; all ranks stop after the same step

See `step` for a single step.
"""

import math
import time
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from memguard.config import RunConfig
from memguard.errors import ConfigError, Interrupted
from memguard.model.causal_lm import CausalLM
from memguard.optim.schedule import learning_rate
from memguard.runtime import Advance, fast_matmuls
from memguard.train.audit_callback import MemorizationMonitor
from memguard.train.base_nll import find_reference
from memguard.train.divergence import explained
from memguard.train.dp_sgd import RowClipping, compute_privacy
from memguard.train.heldout import HeldoutLoss
from memguard.train.metrics import EndMetrics, MetricsLog, StepMetrics, hash_tally, parse_metrics
from memguard.train.prefetch import Prefetcher
from memguard.train.profile import StepProfile
from memguard.train.resume import Checkpoints, Totals
from memguard.train.run_state import RunState, TrainingData
from memguard.train.step import TrainStep, build_own_batch
from memguard.train.step_cost import measure_cost
from memguard.train.stop_request import StopRequest

FIRST_SAVE = 2
"""Step after which a run that saves does so first, while nothing is lost if that fails."""


class Trainer:
    """Trains a model on a loader's rows, with checkpoints, metrics and clean interruption."""

    def __init__(
        self,
        lm: CausalLM,
        data: TrainingData,
        config: RunConfig,
        run: RunState,
        *,
        monitor: MemorizationMonitor | None = None,
        row_clipping: RowClipping | None = None,
    ) -> None:
        """Set up the components of a run, whose settings have no `auto`.

        Raises:
            ConfigError: the budget's first audit would come after the last step, or no document is
                held out for the losses that the settings need.
        """
        self.lm, self.config, self.folder = lm, config, run.folder
        self.loader, self.monitor, self._run = data.loader, monitor, run
        self.runtime, self.console = run.runtime, run.console
        self.num_steps = min(self.loader.num_steps, config.train.max_steps or self.loader.num_steps)
        if monitor and monitor.budget and monitor.every_steps >= self.num_steps:
            raise ConfigError(
                f"'train.audit_every_steps' is {monitor.every_steps:,}, and the run has "
                f"{self.num_steps:,} steps: the first audit that 'budget' could act on would come "
                "after the last step. Lower it"
            )
        self.step = TrainStep(
            lm=lm,
            mitigations=data.k_schedule.levels[0],
            train=config.train,
            optim=config.optim,
            seed=config.seed,
            runtime=run.runtime,
            row_clipping=row_clipping,
        )
        self._heldout = HeldoutLoss(
            lm=lm,
            corpus=data.corpus,
            seq_len=config.data.seq_len,
            runtime=run.runtime,
            precision=self.step.precision,
            console=run.console,
        )
        if config.train.heldout_every_steps is not None:
            self._heldout.require_documents()
        self._profile = StepProfile(config.train.profile, run, lm.mesh)
        self.totals = Totals()
        self.checkpoints = Checkpoints(
            run,
            step=self.step,
            loader=self.loader,
            monitor=monitor,
            keep=config.train.keep_checkpoints,
            timeout=timedelta(minutes=config.parallel.timeout_minutes),
        )
        self._reference_nll: NDArray[np.float32] | None = None
        self.stop_request = StopRequest(run.console)
        self._batches = Prefetcher(
            lambda step: build_own_batch(self.loader, step, lm, self._reference_nll)
        )
        self._signal_number = 0
        """Signal that any rank had received in the last step; 0 for none."""
        self._is_save_due = self._has_save_failed = False
        """On any rank, in the last step: by the clock; the save in flight."""
        self._labels: tuple[float, float] | None = None
        """Labels of all ranks in the next step, before and after mitigations; None: not known."""
        self._stopped_by: Literal["budget", "heldout"] | None = None
        self.is_in_step = False
        """Whether a step was begun and not completed, after an error as well."""
        self._has_warned_of_memory = False

    def run(self) -> None:
        """Train from the newest checkpoint, or from the start, to the last step.

        Raises:
            ConfigError: the budget was already exceeded at the first audit; or a resumed run would
                audit other tokens than before.
            Interrupted: SIGINT or SIGTERM was received; the state was saved.
            Diverged: the loss or the gradient norm of a step is not finite.
            OSError: the first, the last or two checkpoints in a row could not be written.
            RecordError: a checkpoint is from another run, or the last weights within the budget
                are missing.
        """
        path = self.folder / "metrics.jsonl"
        self.runtime.progress.limit_s = self.config.train.stall_minutes * 60
        self.runtime.progress.spins = self.runtime.device.type == "cuda"
        if "reference_nll" in self.step.mitigations.needs:
            # Before a checkpoint is loaded: it must be measured with the initial weights.
            self._reference_nll = find_reference(
                self.step, self.loader, self._run, num_steps=self.num_steps
            )
        self._resume(path)
        log = MetricsLog(
            path,
            kept=self.checkpoints.log,
            step=self.totals.step,
            is_writer=self.runtime.is_main,
        )
        if not log.is_whole:
            self.console.warn(
                f"'{path}' is damaged, truncated or cannot be read: its lines up to step "
                f"{self.totals.step} are restored from the checkpoint"
            )
        if self._run.track is not None:
            self._run.track(log)
        self.lm.model.train()
        devices = [self.runtime.device] if self.runtime.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), self.stop_request.listen(), self._batches:
                if self.totals.step == 0:
                    self._heldout.record(self.totals.step, log)
                    if self.monitor is not None:
                        log.write(self.monitor.audit(0))
                with self.console.progress("train", self.num_steps, "steps") as advance:
                    advance(self.totals.step, "")
                    self._stop_if_worse()
                    while self.totals.step < self.num_steps and self._stopped_by is None:
                        profiled = self._profile.step(self.totals.step + 1)
                        with fast_matmuls(self.runtime.device), profiled:
                            line = self._timed_step()
                        log.write(line)
                        self._show(line, advance)
                        self._profile.write_after(line.step)
                        self._measure_heldout_if_due(log)
                        self._audit_if_due(log)
                        if self._stopped_by != "budget":
                            self._save_if_due()
                self._profile.write_after(math.inf)
                self._finish(log)
                self._stop_if(self.stop_request.agree(self.runtime))
        except Exception:
            self.checkpoints.saves.end()
            raise
        finally:
            self._profile.stop()
            self.runtime.progress.step = 0
            log.close()
            self.lm.model.eval()

    def _timed_step(self) -> StepMetrics:
        started = time.perf_counter()
        self.runtime.progress.step += self.runtime.progress.step > 0
        number, monitor = self.totals.step, self.monitor
        self.is_in_step = True
        samples = self.loader.samples(number)
        lr = learning_rate(number, self.num_steps, self.config.optim)
        batch = self._batches.take(number)
        is_last = number + 1 == self.num_steps
        # An audit after this step may change the labels of the next one.
        changes = monitor and monitor.tightens and monitor.is_due(number + 1, is_last=is_last)
        if not (is_last or changes):
            self._batches.start(number + 1)

        def share() -> list[float]:
            following = self._batches.peek()
            labels = (0, 0) if following is None else (following.num_supervised, following.num_kept)
            minutes = self.config.train.checkpoint_every_minutes or math.inf
            is_due = time.monotonic() - self.checkpoints.newest_s >= minutes * 60
            waits = [0.0] * self.lm.num_batch_ways
            waits[self.lm.batch_rank] = self._batches.waited_s
            has_failed = self.checkpoints.saves.has_failed
            return [*waits, *labels, is_due, has_failed, *self.stop_request.count()]

        with explained(self._run, self.loader, self.step):
            result = self.step.run(
                batch,
                lr=lr,
                step=number + 1,
                first_sample=samples[0],
                labels=self._labels,
                share=share,
            )
        *waits, supervised, kept, is_due, has_failed, interrupts, terminations = result.shared
        self._is_save_due, self._has_save_failed = is_due > 0, has_failed > 0
        self._labels = None if is_last or changes else (supervised, kept)
        self._signal_number = self.stop_request.find((interrupts, terminations))
        self.loader.record(samples)
        took = time.perf_counter() - started
        totals = self.totals
        self.runtime.progress.step = totals.step = totals.step + 1
        totals.num_rows += len(samples)
        totals.num_supervised_tokens += result.num_supervised
        totals.num_kept_tokens += result.num_kept
        totals.train_s += took
        self.is_in_step = False
        save_s, self.checkpoints.saves.waited_s = self.checkpoints.saves.waited_s, 0.0
        return StepMetrics(
            step=totals.step,
            num_steps=self.num_steps,
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            num_rows=len(samples),
            num_supervised_tokens=result.num_supervised,
            num_kept_tokens=result.num_kept,
            wait_data_s=round(max(waits), 4),
            wait_save_s=round(save_s, 4),
            elapsed_s=round(totals.train_s, 3),
            penalised_share=result.penalised_share,
            router_loss=result.router_loss,
            slope=result.slope,
            **measure_cost(self.step, self.loader, self._run, samples, result.num_kept, took),
        )

    def _measure_heldout_if_due(self, log: MetricsLog) -> None:
        """Measure the held-out loss if due, which may end the run."""
        every, step = self.config.train.heldout_every_steps, self.totals.step
        if every is None or step % every:
            return
        self._heldout.record(step, log)
        # Measurements take long, and the step's own agreement came before.
        self._signal_number = self.stop_request.agree(self.runtime)
        self._stop_if_worse()

    def _stop_if_worse(self) -> None:
        most, losses = self.config.train.stop_after_worse, self._heldout
        if most is None or losses.num_worse < most:
            return
        self._stopped_by = "heldout"
        self.console.info(
            f"the run ends after step {self.totals.step}: held-out loss was lowest after step "
            f"{losses.best_step} ('train.stop_after_worse' is {most})"
        )

    def _audit_if_due(self, log: MetricsLog) -> None:
        """Audit the sample if due; exceeding the limit may end the run with earlier weights."""
        monitor, step = self.monitor, self.totals.step
        is_last = step == self.num_steps or self._stopped_by is not None
        if monitor is None or not monitor.is_due(step, is_last=is_last):
            return
        audit = monitor.audit(step, is_last=is_last)
        # Audits take long, and the step's own agreement came before.
        self._signal_number = self.stop_request.agree(self.runtime)
        log.write(audit)
        self.console.info(audit.describe())
        if not monitor.stops:
            return
        if not audit.over_limit:
            # The weights that the run would return to.
            self._save(is_vital=True)
            return
        last_good_step = monitor.last_good_step
        if not last_good_step:
            raise ConfigError(
                f"'train.audit_every_steps' must be below {step}: at that step "
                f"{audit.over_limit[0]} was over the limit of 'budget', and no earlier weights "
                "within the limit had been saved"
            )
        self._stopped_by = "budget"
        self.console.warn(
            f"{', '.join(audit.over_limit)} exceeded the limit of 'budget' after step {step}: the "
            f"last weights within it are those of step {last_good_step}"
        )

    def _show(self, line: StepMetrics, advance: Advance) -> None:
        tokens_per_s = self.totals.num_kept_tokens / max(self.totals.train_s, 1e-9)
        shown: dict[str, Any] = {"width": self.console.width}
        if self.config.train.heldout_every_steps is not None:
            shown["heldout"] = next(reversed(self._heldout.nll_by_step.values()), None)
        if self.console.live:
            advance(1, line.describe_briefly(tokens_per_s, **shown))
        if line.step % self.config.train.log_every_steps == 0 or line.step == self.num_steps:
            self.console.info(line.describe(tokens_per_s, **shown))
        if line.num_alloc_retries and not self._has_warned_of_memory:
            self._has_warned_of_memory = True
            self.console.warn(
                "memory is short: to find room, CUDA's allocator freed what it kept for the next "
                "steps, which slows them ('num_alloc_retries' in metrics.jsonl). A smaller "
                "'train.micro_batch_size' avoids it"
            )

    def _finish(self, log: MetricsLog) -> None:
        last_step, train = self.totals.step, self.config.train
        # Of all steps: which one is exported was chosen with the weights of later ones.
        clipping, trained = self.step.row_clipping, self.loader.schedule[: self.totals.num_rows]
        exceeded = self._stopped_by == "budget"
        if train.export == "best" and not exceeded:
            self._heldout.record(self.totals.step, log)
        good = self.monitor.last_good_step if self.monitor is not None and exceeded else None
        step, kept_by = self._heldout.choose_step(
            last_step, export=train.export, last_good_step=good
        )
        if step != last_step:
            self.wait_for_save()
            self.totals = self.checkpoints.return_to(step)
            self.console.info(f"the run ends with the weights of step {step}")
        self._heldout.record(self.totals.step, log)
        privacy = None
        if clipping is not None:
            privacy = compute_privacy(clipping.config, trained, batch_size=self.loader.batch_size)
        log.write(
            EndMetrics(
                **asdict(replace(self.totals, train_s=round(self.totals.train_s, 3))),
                **({} if privacy is None else asdict(privacy)),
                tally_sha256=hash_tally(
                    self.loader.realised_repetitions(), self.loader.count_fed_tokens()
                ),
                last_step=last_step,
                kept_by=kept_by,
                stopped_by=self._stopped_by,
            )
        )
        if privacy is not None:
            self.console.info(f"dp_sgd: {privacy.describe()}")

    def _resume(self, log_path: Path) -> None:
        totals = self.checkpoints.load()
        if totals is not None:
            self.totals = totals
            lines = parse_metrics(self.runtime.broadcast_object(self.checkpoints.log), log_path)
            self._heldout.read(lines)
            self.console.info(f"resuming after step {self.totals.step} of {self.num_steps}")

    def wait_for_save(self) -> None:
        """Wait for the save in flight, if there is one; a failure is a warning or an error."""
        self.checkpoints.saves.wait()

    def _save(self, *, is_vital: bool) -> None:
        self.wait_for_save()
        best = self._heldout.best_step if self.config.train.keep == "best" else None
        self.checkpoints.save(self.totals, best_step=best, is_vital=is_vital)
        if not self.checkpoints.saves.has_room:
            self.wait_for_save()

    def _save_if_due(self) -> None:
        train, step = self.config.train, self.totals.step
        every = train.checkpoint_every_steps
        # One process need not agree with others, and sees a signal of this moment.
        is_alone = self.runtime.world_size == 1
        signal_number = self.stop_request.agree(self.runtime) if is_alone else self._signal_number
        is_first = step == FIRST_SAVE and bool(every or train.checkpoint_every_minutes)
        is_best = train.keep == "best" and step == self._heldout.best_step
        # A mesh exports from the checkpoint of the step.
        is_end = step == self.num_steps or bool(self._stopped_by and train.export == "last")
        is_vital = is_first or is_end or bool(signal_number)
        due = is_vital or is_best or self._is_save_due
        due = due or (every is not None and step % every == 0)
        if self._has_save_failed:
            self.wait_for_save()
        if due and step != self.checkpoints.newest_step:
            # The run may return to the best step.
            self._save(is_vital=is_vital or is_best)
        if is_vital:
            self.wait_for_save()
        self._stop_if(signal_number)

    def _stop_if(self, signal_number: int) -> None:
        if signal_number:
            raise Interrupted(
                signal_number,
                f"stopped after step {self.totals.step} of {self.num_steps} and saved; run the "
                "same command again to resume",
            )
