"""Trackers get the lines of metrics.jsonl: after a kill too, and without a text, id or path."""

import importlib.util
import json
import os
import socket
import struct
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_examples import make_run, run_folder, train_checked, write_documents

from memguard.errors import OPTIONAL
from memguard.records import AuditReport, load_record
from memguard.train.metrics import read_metrics
from memguard.train.tracking import Tracking, build_event

QUICK = {"max_steps": 20, "epochs": 20, "checkpoint_every_steps": 10, "audit_every_steps": 7}
KINDS = ("tensorboard", "wandb", "trackio")


class StandIn(types.ModuleType):
    """A module with wandb's init, log and finish, which keeps what it gets."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        super().__init__("wandb")
        self.given: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.num_finished, self.fails_at, self.url = 0, fails_at, "https://example.org/run"

    def init(self, **given: Any) -> "StandIn":
        self.given.append(given)
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, Any]) -> None:
        if values["step"] == self.fails_at:
            raise OSError(28, "No space left on device")
        self.logged.append(values)

    def finish(self) -> None:
        self.num_finished += 1


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return module


def write_log(folder: Path, num_steps: int = 3) -> None:
    folder.mkdir(exist_ok=True)
    common = {"num_steps": 3, "lr": 0.1, "grad_norm": None, "num_rows": 2, "elapsed_s": 1.0}
    counts = {"num_supervised_tokens": 9, "num_kept_tokens": 9, "tokens_per_s": 5.0}
    start = {"event": "start", "why": "planted", "step": 0, "num_lost_steps": 0, "first_step_s": 1}
    lines = [start] + [
        {
            "event": "step",
            "step": step,
            "loss": 1 / step,
            "peak_memory_bytes": 7,
            **common,
            **counts,
        }
        for step in range(1, num_steps + 1)
    ]
    text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)


def test_lines_become_events_of_a_module_with_init_log_and_finish(
    stand_in: StandIn, tmp_path: Path
) -> None:
    write_log(tmp_path / "secret-run")
    said: list[str] = []
    tracking = Tracking(["wandb"], tmp_path / "secret-run", said.append)
    tracking.start()
    assert [values["step"] for values in stand_in.logged] == [0, 1, 2, 3]
    assert stand_in.logged[0].keys() == {"step", "start/num_lost_steps", "start/first_step_s"}
    assert stand_in.logged[2]["train/loss"] == 0.5
    assert "train/grad_norm" not in stand_in.logged[2]
    assert all(
        isinstance(value, float | int) for line in stand_in.logged for value in line.values()
    )
    # Started again, as after a kill: the same id, and of a server only what it lacks.
    stand_in.logged.clear()
    stand_in.summary["step"] = 2
    tracking.start()
    assert [values["step"] for values in stand_in.logged] == [2, 3]
    first, second = stand_in.given
    assert first["id"] == second["id"]
    assert first["mode"] == "offline"
    assert first["settings"]["console"] == "off"
    stand_in.fails_at = 3
    for line in read_metrics(tmp_path / "secret-run" / "metrics.jsonl"):
        tracking.send(line)
    tracking.close()
    assert len(tracking.failed) == 1
    assert "No space left" in tracking.failed[0]
    assert len([line for line in said if line.startswith("warning: ")]) == 1
    assert said[-1].endswith(" --to wandb' sends all")
    assert len(said[-1]) <= 160


def test_a_tracker_that_is_missing_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path / "run")
    for name in KINDS:
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, f"{name}.compat.proto.event_pb2", None)
    said: list[str] = []
    tracking = Tracking(KINDS, tmp_path / "run", said.append)
    tracking.start()
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        tracking.send(line)
    tracking.close()
    assert len(said) == len(KINDS)
    for name, line in zip(KINDS, said, strict=True):
        assert f"track: {name}: pip install '{OPTIONAL[name]}'" in line


# -- real trackers -------------------------------------------------------------------------------


def require(*names: str) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (extra 'track')")


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in tags}


def read_wandb(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the history of offline files: records of a leveldb log, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(content):
            if (left := 2**15 - at % 2**15) < 7:
                at += left
                continue
            _, length, kind = struct.unpack("<IHB", content[at : at + 7])
            record += content[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                parsed, record = Record.FromString(record), b""
                if parsed.WhichOneof("record_type") == "history":
                    items = parsed.history.item
                    yield {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in items
                    }


def check_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Compare what both readers find with the log; return TensorBoard's events."""
    lines = list(read_metrics(folder / "metrics.jsonl"))
    losses = [(line.step, line.loss) for line in lines if line.event == "step"]
    events = read_tensorboard(folder / "track" / "tensorboard")
    assert [step for step, _ in events["train/loss"]] == list(range(1, 21))
    assert events["train/loss"] == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses]
    history = list(read_wandb(folder / "track"))
    found = [(values["step"], values["train/loss"]) for values in history if "train/loss" in values]
    assert found == losses
    expected = [build_event(line) for line in lines]
    expected.append(build_event(load_record(AuditReport, folder / "audit" / "report.json")))
    for number, values in enumerate(expected):
        assert values.items() <= history[number].items()
    assert len(history) == len(expected)
    return events


@pytest.mark.slow
def test_after_a_kill_each_step_is_found_once_and_afterwards_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("tensorboard", "wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    texts = [f"planted{number:03d}text" for number in range(200)]
    documents = tmp_path / "documents.jsonl"
    write_documents(documents, 200)
    rows = [json.loads(line) for line in documents.read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"id": f"planted{number:03d}id", "text": f"{texts[number]} {row['text']}"}
    documents.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = make_run(tmp_path, train=QUICK, track=["tensorboard", "wandb"])
    folder = run_folder(config)
    program = Path(__file__).parent / "killed_run.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for kill_at in ("13", "0"):
        command = [sys.executable, str(program), config.model_dump_json(), kill_at]
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment
        )
        assert ended.returncode == (-9 if kill_at == "13" else 0), ended.stderr
    assert "resuming after step 10" in ended.stderr
    events = check_events(folder)
    from memguard.cli import main

    monkeypatch.setattr(
        sys, "argv", ["memguard", "track", str(folder), "--to", "tensorboard,wandb"]
    )
    with pytest.raises(SystemExit) as ended_by:
        main()
    assert not ended_by.value.code
    assert check_events(folder) == events
    planted = ["planted", str(tmp_path), str(Path.home()), socket.gethostname(), str(os.getcwd())]
    files = [*folder.glob("track/tensorboard/*"), *folder.glob("track/wandb/offline-run-*/*.wandb")]
    assert len(files) == 2
    for path in files:
        content = path.read_bytes() + path.name.encode()
        assert [text for text in planted if text.encode() in content] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_no_login_is_one_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    require(name)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    for key in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "nobody/nothing")
    config = make_run(tmp_path, train={"max_steps": 2}, track=[name], audit={"enabled": False})
    train_checked(config)
    warned = [line for line in capfd.readouterr().err.splitlines() if "track: " in line]
    assert len(warned) == 1
    assert warned[0].startswith("warning: ") == (name != "tensorboard")
    assert (run_folder(config) / "model" / "config.json").exists()
