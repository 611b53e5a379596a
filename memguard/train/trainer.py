"""The loop; one step reads top to bottom.

batch   rows of the step                           the same whatever the micro-batches
loss    sum over micro-batches of  mitigations.reduce(terms) / kept labels of the WHOLE step
update  clip, learning rate of the step, AdamW
"""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from memguard.config import OptimConfig, TrainConfig
from memguard.data.corpus import Corpus
from memguard.data.loader import Batch, Loader
from memguard.errors import Interrupted, ModelError
from memguard.mitigation import Mitigations, TokenTerms
from memguard.parallel.vocab import VocabLayer
from memguard.records import IGNORE_LABEL
from memguard.runtime import Advance, Console, Runtime, peak_memory_bytes
from memguard.seeds import derive_seed
from memguard.train.checkpoint import (
    CheckpointManifest,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from memguard.train.heldout import measure_heldout
from memguard.train.metrics import (
    EndMetrics,
    HeldoutMetrics,
    MetricsLog,
    StepMetrics,
    hash_tally,
)
from memguard.train.optim import build_optimizer, clip_gradients, learning_rate

_MIN_LABELS_FOR_DROP_CHECK = 10_000
_DROP_RATE_TOLERANCE = 0.1
# A launcher passes on the Ctrl-C that the terminal has sent already.
_SAME_SIGNAL_S = 1.0


@dataclass(slots=True)
class _Totals:
    """What the run has done so far; part of every checkpoint."""

    step: int = 0
    num_supervised_tokens: int = 0
    num_kept_tokens: int = 0
    num_rows: int = 0
    train_s: float = 0.0


class Trainer:
    """Trains a model on a loader's rows, with checkpoints, metrics and clean interruption."""

    def __init__(
        self,
        *,
        vocab: VocabLayer,
        corpus: Corpus,
        loader: Loader,
        mitigations: Mitigations,
        train: TrainConfig,
        optim: OptimConfig,
        seq_len: int,
        seed: int,
        run_key: str,
        run_folder: Path,
        runtime: Runtime,
        console: Console,
    ) -> None:
        """Take everything a run consists of.

        Args:
            vocab: the model.
            corpus: documents, for the held-out loss.
            loader: rows of each step.
            mitigations: how losses are reduced and how many labels should be dropped.
            train: length, portions, precision.
            optim: AdamW and its schedule.
            seq_len: length of a row (tokens).
            seed: the run's.
            run_key: hash of settings and documents; a checkpoint with another one is refused.
            run_folder: where checkpoints and metrics go.
            runtime: device and ranks.
            console: progress.
        """
        self.vocab, self.model = vocab, vocab.model
        self.corpus, self.loader, self.mitigations = corpus, loader, mitigations
        self.config, self.optim = train, optim
        self.seq_len, self.seed, self.run_key = seq_len, seed, run_key
        self.folder, self.runtime, self.console = run_folder, runtime, console
        self.num_steps = min(loader.num_steps, train.max_steps or loader.num_steps)
        self.optimizer = build_optimizer(self.model, optim)
        self.totals = _Totals()
        self._stop_signal: int | None = None

    def run(self) -> None:
        """Train from the newest checkpoint, or from the start, to the last step.

        Raises:
            Interrupted: SIGINT or SIGTERM; the state was saved.
            ModelError: the loss is no longer finite.
            OSError: a checkpoint could not be written.
        """
        self._resume()
        log = MetricsLog(self.folder / "metrics.jsonl", keep_until_step=self.totals.step)
        if self.config.activation_checkpointing == "full":
            enable_activation_checkpointing(self.model)
        self.model.train()
        devices = [self.runtime.device] if self.runtime.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), self._signals():
                if not any(isinstance(line, HeldoutMetrics) for line in log.lines):
                    self._measure_heldout(log)
                with self.console.progress("train", self.num_steps, "steps") as advance:
                    advance(self.totals.step, "")
                    while self.totals.step < self.num_steps:
                        line = self._timed_step()
                        log.write(line)
                        self._show(line, advance)
                        self._save_if_due()
                if not any(isinstance(line, EndMetrics) for line in log.lines):
                    self._finish(log)
                self._stop_if_asked()
        finally:
            log.close()
            self.model.eval()

    def _timed_step(self) -> StepMetrics:
        started = time.perf_counter()
        samples = self.loader.samples(self.totals.step)
        batch = self.loader.batch(samples)
        lr = learning_rate(self.totals.step, self.num_steps, self.optim)
        loss, grad_norm = self.train_step(batch, samples[0], lr)
        self.loader.record(samples)
        took = time.perf_counter() - started
        totals = self.totals
        totals.step += 1
        totals.num_rows += len(samples)
        totals.num_supervised_tokens += batch.num_supervised
        totals.num_kept_tokens += batch.num_kept
        totals.train_s += took
        return StepMetrics(
            step=totals.step,
            num_steps=self.num_steps,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            num_rows=len(samples),
            num_supervised_tokens=batch.num_supervised,
            num_kept_tokens=batch.num_kept,
            tokens_per_s=round(batch.num_kept / took, 1),
            peak_memory_bytes=peak_memory_bytes(self.runtime.device),
            elapsed_s=round(totals.train_s, 3),
        )

    def train_step(
        self, batch: Batch, first_sample: int, lr: float
    ) -> tuple[float | None, float | None]:
        """Take one optimizer step.

        Args:
            batch: all rows of the step.
            first_sample: global sample index of its first row; seeds dropout.
            lr: learning rate.

        Returns:
            Mean loss of the labels that received loss (nats) and the gradient norm before
            clipping; None for a step in which no label is left.
        """
        if batch.num_kept == 0:
            return None, None
        num_rows = len(batch.input_ids)
        micro = self.config.micro_batch_size or num_rows
        total = 0.0
        for first in range(0, num_rows, micro):
            torch.manual_seed(derive_seed(self.seed, "dropout", first_sample + first))
            rows = slice(first, first + micro)
            input_ids_BT = self._to_device(batch.input_ids[rows])
            position_ids_BT = self._to_device(batch.position_ids[rows])
            labels_next = self._to_device(batch.labels[rows])[:, 1:]
            keep = labels_next != IGNORE_LABEL
            with self._precision():
                hidden_BTD = self.vocab.hidden_states(input_ids_BT, position_ids_BT)
                # Ignored positions never reach the head's matmul.
                nll_N = self.vocab.token_nll(hidden_BTD[:, :-1][keep], labels_next[keep])
            loss = self.mitigations.reduce(TokenTerms(nll_N=nll_N)) / batch.num_kept
            torch.autograd.backward(loss)
            total += float(loss.detach())
        grad_norm = clip_gradients(self.model, self.optim.max_grad_norm)
        if not (math.isfinite(total) and math.isfinite(grad_norm)):
            raise ModelError(
                f"training diverged at step {self.totals.step + 1}: loss {total}, gradient norm "
                f"{grad_norm}. Lower 'optim.lr' (now {self.optim.lr:g}) and start again."
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, grad_norm

    def _to_device(self, array: object) -> Tensor:
        return torch.as_tensor(array, device=self.runtime.device)

    def _precision(self) -> AbstractContextManager[None]:
        if self.config.precision == "bf16":
            return torch.autocast(self.runtime.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _measure_heldout(self, log: MetricsLog) -> None:
        line = measure_heldout(
            self.vocab,
            self.corpus,
            seq_len=self.seq_len,
            batch_tokens=max(self.seq_len, self.config.nll_chunk_tokens),
            step=self.totals.step,
        )
        if line is not None:
            log.write(line)
            self.console.info(f"held-out loss {line.nll:.4f} nats a token ({line.bucket})")

    def _show(self, line: StepMetrics, advance: Advance) -> None:
        if self.console.live:
            advance(1, line.describe_briefly())
        elif line.step % self.config.log_every_steps == 0 or line.step == self.num_steps:
            self.console.info(line.describe())

    def _finish(self, log: MetricsLog) -> None:
        self._measure_heldout(log)
        totals = self.totals
        log.write(
            EndMetrics(
                step=totals.step,
                num_rows=totals.num_rows,
                num_supervised_tokens=totals.num_supervised_tokens,
                num_kept_tokens=totals.num_kept_tokens,
                train_s=round(totals.train_s, 3),
                tally_sha256=hash_tally(self.loader.realised_repetitions()),
            )
        )
        target = self.mitigations.target_drop_rate
        if not target or totals.num_supervised_tokens < _MIN_LABELS_FOR_DROP_CHECK:
            return
        realised = 1 - totals.num_kept_tokens / totals.num_supervised_tokens
        self.console.info(f"dropped {realised:.2%} of the labels (meant: {target:.2%})")
        if abs(realised - target) > _DROP_RATE_TOLERANCE * target:
            self.console.warn(
                f"the mitigations dropped {realised:.2%} of the labels, not {target:.2%}: many "
                "repeated or special tokens, or a mask that fits these texts badly"
            )

    # -- resume and interruption ---------------------------------------------------------------

    def _resume(self) -> None:
        found = find_checkpoint(self.folder / "checkpoints", console=self.console)
        if found is None:
            return
        manifest = load_checkpoint(
            found,
            model=self.model,
            optimizer=self.optimizer,
            piece_tally=self.loader.piece_tally,
        )
        assert manifest.run_key == self.run_key, "the caller compares the run's settings first"
        self.totals = _Totals(
            step=manifest.step,
            num_supervised_tokens=manifest.num_supervised_tokens,
            num_kept_tokens=manifest.num_kept_tokens,
            num_rows=manifest.num_rows,
            train_s=manifest.train_s,
        )
        self.console.info(f"resuming after step {manifest.step} of {self.num_steps}")

    def _save(self) -> None:
        totals = self.totals
        save_checkpoint(
            self.folder / "checkpoints",
            model=self.model,
            optimizer=self.optimizer,
            piece_tally=self.loader.piece_tally,
            progress=CheckpointManifest(
                step=totals.step,
                run_key=self.run_key,
                num_supervised_tokens=totals.num_supervised_tokens,
                num_kept_tokens=totals.num_kept_tokens,
                num_rows=totals.num_rows,
                train_s=totals.train_s,
                torch_version=torch.__version__,
                files={},
            ),
            keep=self.config.keep_checkpoints,
        )

    def _save_if_due(self) -> None:
        every = self.config.checkpoint_every_steps
        step = self.totals.step
        asked = self._stop_signal is not None
        if asked or step == self.num_steps or (every is not None and step % every == 0):
            self._save()
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self._stop_signal is not None:
            raise Interrupted(
                self._stop_signal,
                f"stopped after step {self.totals.step} of {self.num_steps} and saved; run the "
                "same command again to go on",
            )

    @contextmanager
    def _signals(self) -> Iterator[None]:
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
            if self._stop_signal is not None:
                for each, handler in before.items():
                    signal.signal(each, handler)
                signal.raise_signal(number)
            self._stop_signal, asked_s = number, time.monotonic()
            self.console.info("stopping after this step; once more to stop at once")

        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def enable_activation_checkpointing(model: Any) -> None:
    """Make each decoder block keep its input only and run again in backward."""
    # transformers renamed it in 5.2x and warns of the old name, the only one before.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
