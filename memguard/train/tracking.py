"""Sends the lines of metrics.jsonl, and the verdict, to trackers: tensorboard, wandb, trackio.

metrics.jsonl is the truth. A run that starts, resumes or is sent afterwards first sends the lines
that the log has by then, in place of what files of a tracker had; trackio, and a wandb server, get
those that they lack, and repeated steps again.

Events are numbers under names of fields, metrics and buckets, and names of levels: no other text,
no id, no path. What a tracker collects by itself is switched off.
"""

import contextlib
import errno
import importlib
import io
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memguard.errors import advise_install, is_foreign, shorten, spell_controls
from memguard.records import AuditReport, WatchedLine, write_atomically
from memguard.train.metrics import MetricsLine, MetricsLog, read_metrics

Values = dict[str, float | str]
_Opened = tuple[Callable[[Values, int], None], Callable[[], None], str, int]
"""Sends an event, ends the run, where the events are, a step: it has those of earlier ones."""


def build_event(line: MetricsLine | AuditReport) -> Values:
    """Return the numbers of a line by name (``train/loss``), or the verdict with its counts."""
    if isinstance(line, AuditReport):
        verdict, risks = line.verdict, line.tables.risks
        names = [bucket.bucket for bucket in line.tables.buckets]
        rates = {b: {risk: row.value for risk, row in risks(b).items()} for b in names}
        counts = {key: {"num_documents", "num_matched"} for key in ("trained", "control", "base")}
        numbers = verdict.model_dump(include={**counts, "membership": {"auc": {"value"}}})
        states = {f"verdict/{badge.title}": badge.state for badge in verdict.badges}
        return {**states, **_flatten("verdict", numbers), **_flatten("risk", rates)}
    if isinstance(line, WatchedLine):
        rows = {f"{row.metric}/{row.bucket}": row.value for row in line.results}
        return {**_flatten("audit", rows)}
    values = line.model_dump(exclude={"event", "step", "num_steps"})
    return {**_flatten("train" if line.event == "step" else line.event, values)}


def _flatten(name: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of nested values; texts, lists and nulls are left out."""
    numbers: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            numbers |= _flatten(f"{name}/{key}", value)
        elif isinstance(value, int | float):
            numbers[f"{name}/{key}"] = float(value)
    return numbers


class Tracking:
    """The trackers of a run; one that fails gets nothing more."""

    def __init__(self, names: Sequence[str], folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._names, self._say = folder, names, say
        self.open: dict[str, _Opened] = {}
        self._step = 0
        self.failed: list[str] = []

    def start(self, log: MetricsLog | None = None) -> None:
        """Open each tracker, send the lines that metrics.jsonl has, then those written to it."""
        self.close()
        if log is not None:
            log.on_line = self.send
        lines = list(read_metrics(self._folder / "metrics.jsonl")) if self._names else []
        self._step = lines[-1].step if lines else 0
        for name in self._names:
            with self._contained(name):
                send, *_, place, first_step = self.open[name] = _open(name, self._folder / "track")
                for line in lines:
                    if line.step >= first_step:
                        send(build_event(line), line.step)
                self._say(f"track: {name}: {place}")

    def send(self, line: MetricsLine | AuditReport) -> None:
        """Send one line, or the verdict after all lines."""
        if isinstance(line, AuditReport) and not (self.open or self.failed):
            self.start()
        self._step = self._step if isinstance(line, AuditReport) else line.step
        for name, (send, *_) in tuple(self.open.items()):
            with self._contained(name):
                send(build_event(line), self._step)

    def close(self) -> None:
        """End the run of each tracker."""
        for name, (_, finish, *_) in tuple(self.open.items()):
            with self._contained(name):
                finish()
                # wandb says nothing where its file could not be written.
                if name == "wandb" and shutil.disk_usage(self._folder / "track").free < 2**16:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.open.clear()

    @contextlib.contextmanager
    def _contained(self, name: str) -> Iterator[None]:
        shows_errors, logging.raiseExceptions = logging.raiseExceptions, False
        try:
            # trackio reports on standard output, which is for results. wandb has a log, of which
            # each line would be a traceback where the disk is full.
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        except BaseException as error:
            if not is_foreign(error):
                raise
            self.open.pop(name, None)
            why = spell_controls(f"{type(error).__name__}: {error}".partition("\n")[0])
            missing = isinstance(error, ImportError)
            self.failed.append(f"{name}: {advise_install(name) if missing else shorten(why, 50)}")
            again = f"'memguard track RUN --to {name}' sends all"
            self._say(f"warning: track: {self.failed[-1]}; {again}")
        finally:
            logging.raiseExceptions = shows_errors


def _open_tensorboard(folder: Path) -> _Opened:
    # torch's writer names the file after the machine, and prints a traceback if the disk is full.
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.record_writer import RecordWriter

    old = list(folder.glob("events.out.tfevents.*"))
    # Unbuffered: after an error nothing is left to be written.
    file = (folder / f"events.out.tfevents.{time.time_ns()}").open("xb", buffering=0)
    writer = RecordWriter(file)

    def write(**fields: Any) -> None:
        writer.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def send(values: Values, step: int) -> None:
        summary = Summary()
        for name, value in values.items():
            if isinstance(value, str):
                summary.MergeFrom(text_pb(name, value))
            else:
                summary.value.add(tag=name, simple_value=value)
        write(step=step, summary=summary)

    write(file_version="brain.Event:2")
    # Readers that have the older files drop what they had.
    write(step=0, session_log=SessionLog(status=SessionLog.START))
    for one in old:
        one.unlink()
    return send, writer.close, f"tensorboard --logdir {folder}", 0


_ON = "disable_code disable_git silent x_disable_machine_info x_disable_meta x_disable_stats"
_OFF = {"save_code": False, "x_save_requirements": False, "console": "off", "host": "machine"}
_LIMITS = {"program": "memguard", "reinit": "create_new", "login_timeout": 9, "finish_timeout": 60}


def _open(name: str, folder: Path) -> _Opened:
    """Start or resume a run of tensorboard, or of a module with wandb's init, log and finish."""
    (folder / "tensorboard").mkdir(parents=True, exist_ok=True)
    if name == "tensorboard":
        return _open_tensorboard(folder / name)
    if not (folder / "id").exists():
        write_atomically(folder / "id", secrets.token_hex(4).encode())
    run_name = f"{folder.parent.name}-{(folder / 'id').read_text()}"
    given: dict[str, Any] = {"project": "memguard", "name": run_name, "resume": "allow"}
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    module: Any = importlib.import_module(name)
    if name == "trackio":
        run = module.init(**given, embed=False, auto_log_gpu=False, auto_log_cpu=False)
        run.config["_Username"] = None
        return run.log, module.finish, "trackio show", run._initial_last_step or 0
    for path in folder.glob(f"wandb/offline-run-*-{run_name}"):
        shutil.rmtree(path, ignore_errors=True)
    mode, on = os.environ.get("WANDB_MODE", "offline"), dict.fromkeys(_ON.split(), True)
    given |= {"id": run_name, "dir": str(folder), "mode": mode, "settings": on | _OFF | _LIMITS}
    run = module.init(**given)
    run.define_metric("*", step_metric="step")
    place = (mode == "online" and run.url) or f"wandb sync {folder}/wandb/offline-run-*"
    last = int(run.summary.get("step") or 0)
    # wandb's own steps only grow: those of the run are one of the values.
    return lambda values, step: run.log({**values, "step": step}), run.finish, place, last
