"""Micro-batch and checkpointing: free when a run resumes, less if memory runs out."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_examples import run_cli, write_run
from memory_errors import OUT_OF_MEMORY
from ranks import RankPool
from run_examples import QUIET, kill_after, make_run, read_lines, run_folder, train_checked

from memguard.config import RunConfig, dump_yaml, load_yaml
from memguard.errors import OutOfMemory, StepTooLarge
from memguard.records.folders import RunFiles
from memguard.runtime import detect_runtime
from memguard.runtime.environment import MemoryPeak
from memguard.train import step_cost
from memguard.train import trainer as trainer_module
from memguard.train.heldout import HeldoutLoss
from memguard.train.metrics import StepMetrics, read_metrics
from memguard.train.step import TrainStep
from memguard.workflows.common import launch as launch_module
from memguard.workflows.common.launch import LESS_MEMORY
from memguard.workflows.training import train as train_module

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("run_out_of_memory.py")


def read_losses(config: RunConfig) -> list[float]:
    lines = read_metrics(run_folder(config) / "metrics.jsonl")
    return [line.loss for line in lines if isinstance(line, StepMetrics) and line.loss is not None]


def read_train(folder: Path) -> dict[str, Any]:
    """Return the section 'train' of a run's config.yaml, which must be whole."""
    assert RunFiles(folder).find_damage("config") == []
    train: dict[str, Any] = load_yaml(folder / "config.yaml").values["train"]
    return train


def make_short(folder: Path, **train: Any) -> RunConfig:
    """Return a run of 7 steps with checkpoints after 4 and 7."""
    return make_run(folder, train={"max_steps": 7, "checkpoint_every_steps": 4, **train}, **QUIET)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run that has memory enough and is not stopped."""
    config = make_short(tmp_path_factory.mktemp("whole"))
    train_checked(config)
    losses = read_losses(config)
    assert len(losses) == 7
    return losses


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run that began with half the rows at a time."""
    config = make_short(tmp_path_factory.mktemp("halved"), micro_batch_size=4)
    train_checked(config)
    return read_losses(config)


def test_a_run_resumes_with_another_micro_batch_and_checkpointing(
    tmp_path: Path, whole: list[float]
) -> None:
    kill_after(5, make_short(tmp_path, micro_batch_size=8))
    config = make_short(tmp_path, micro_batch_size=2, activation_checkpointing="full")
    train_checked(config)
    # fp32 sums in another order, and AdamW's division by small second moments.
    np.testing.assert_allclose(read_losses(config), whole, rtol=2e-4)
    stored = read_train(tmp_path / "runs" / "run")
    assert (stored["micro_batch_size"], stored["activation_checkpointing"]) == (2, "full")


FULL = {"activation_checkpointing": "full"}
MODES = ("none", "selective", "full")


def limit_rows(
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    *,
    from_step: int = 1,
    mode: str = "full",
    error: Exception = OUT_OF_MEMORY["torch"],
) -> list[int]:
    """Have memory for few rows at a time; return the rows of each forward pass.

    Steps that recompute as much as ``mode`` have memory enough for a row.
    """
    original: Callable[..., Any] = TrainStep._sum_loss
    steps = TrainStep.run
    seen: list[int] = []
    now = [0]

    def run(self: TrainStep, *arguments: Any, **options: Any) -> Any:
        now[0] = options["step"]
        return steps(self, *arguments, **options)

    def sum_loss(self: TrainStep, batch: Any, rows: slice) -> Any:
        seen.append(rows.stop - rows.start)
        is_short = MODES.index(self.train.checkpointing) < MODES.index(mode)
        if now[0] >= from_step and (seen[-1] > most or (is_short and mode != "full")):
            raise error
        return original(self, batch, rows)

    monkeypatch.setattr(TrainStep, "run", run)
    monkeypatch.setattr(TrainStep, "_sum_loss", sum_loss)
    return seen


@pytest.mark.parametrize("from_step", [1, 3])
@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_one_process_starts_again_with_half(
    tmp_path: Path,
    halved: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    from_step: int,
) -> None:
    seen = limit_rows(monkeypatch, 4, from_step=from_step, error=OUT_OF_MEMORY[kind])
    # Without a checkpoint it starts again at step 1.
    config = make_short(tmp_path, checkpoint_every_steps=None)
    train_checked(config)
    assert seen[: from_step + 1] == [*[8] * from_step, 4]
    assert max(seen[from_step:]) == 4
    assert read_losses(config) == halved
    assert read_train(tmp_path / "runs" / "run")["micro_batch_size"] == 4
    message = " ".join(capsys.readouterr().err.split())
    assert "'train.micro_batch_size' must be 4 or less. Training starts again with that" in message


@pytest.mark.quick
def test_one_row_is_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its losses are those of a run that began with what it ends with."""
    # Without a checkpoint it starts again at step 1.
    few = {"batch_size": 2, "max_steps": 3, "checkpoint_every_steps": None}
    begun = make_run(tmp_path, name="begun", **QUIET, train={**few, "micro_batch_size": 1, **FULL})
    train_checked(begun)
    error = OUT_OF_MEMORY["cublas"]
    limit_rows(monkeypatch, 1, from_step=3, mode="selective", error=error)
    config = make_run(tmp_path, train=few, **QUIET)
    train_checked(config)
    stored = read_train(run_folder(config))
    assert (stored["micro_batch_size"], stored["activation_checkpointing"]) == (1, "selective")
    assert read_losses(config) == read_losses(begun)
    message = " ".join(capsys.readouterr().err.split())
    assert "'train.activation_checkpointing' must be selective. Training starts again" in message


@pytest.mark.quick
@pytest.mark.parametrize(
    ("most", "train", "passes"),
    [
        # What `auto` may change is used up.
        (0, {"batch_size": 2}, [2, 1, 1, 1]),
        # The user's own micro-batch and recomputation.
        (4, {"micro_batch_size": 8, "activation_checkpointing": "none"}, [8]),
    ],
    ids=["all", "given"],
)
def test_it_ends_where_nothing_is_left_to_auto(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    train: dict[str, Any],
    passes: list[int],
) -> None:
    seen = limit_rows(monkeypatch, most)
    with pytest.raises(
        OutOfMemory, match=r"out of memory with .* of 128 tokens at a time"
    ) as error:
        train_checked(make_run(tmp_path, train=train, **QUIET))
    assert not isinstance(error.value, StepTooLarge)
    assert seen == passes


def test_a_later_step_starts_again_from_the_checkpoint(
    tmp_path: Path, whole: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = limit_rows(monkeypatch, 4, from_step=6)
    config = make_short(tmp_path)
    train_checked(config)
    # Steps 1 to 6, and 5 to 7 of two passes each.
    assert seen == [8] * 6 + [4] * 6
    np.testing.assert_allclose(read_losses(config), whole, rtol=2e-4)


def test_memory_that_runs_out_outside_of_steps_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller steps would not help."""

    def export(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(train_module, "_export", export)
    with pytest.raises(OutOfMemory) as error:
        train_checked(make_run(tmp_path, train={"max_steps": 1}, **QUIET))
    assert not isinstance(error.value, StepTooLarge)


def test_the_command_names_what_helps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_rows(monkeypatch, 4)
    own = {"micro_batch_size": 8, "activation_checkpointing": "none"}
    outcome = run_cli("train", write_run(folder, train=own))
    assert outcome.code == 1
    line = outcome.err.splitlines()[-1]
    assert line.startswith(
        "memguard: out of memory with 8 rows of 128 tokens at a time: set 'train"
    )
    assert "Traceback" not in outcome.err


def train_short_of_memory(config: RunConfig, *, is_second: bool) -> None:
    """Train as a rank; rank 1 has memory for two rows at a time."""
    most = 2 if detect_runtime().rank == 1 else 8
    with pytest.MonkeyPatch.context() as patched:
        if is_second:
            patched.setenv(LESS_MEMORY, '{"micro_batch_size": 2}')
        limit_rows(patched, most)
        train_checked(config)


def test_ranks_agree_on_half(tmp_path: Path, ranks: RankPool) -> None:
    config = make_run(tmp_path, train={"max_steps": 3}, parallel={"z": 2}, **QUIET)
    # A rank that waits for another in a collective cannot be told: all of them end.
    with pytest.raises(StepTooLarge, match=r"with 4 rows .* must be 2 or less"):
        ranks(partial(train_short_of_memory, is_second=False), 2, config)
    ranks(partial(train_short_of_memory, is_second=True), 2, config)
    assert len(read_losses(config)) == 3
    assert read_train(tmp_path / "runs" / "run")["micro_batch_size"] == 2


@pytest.mark.long
def test_two_processes_are_started_again_with_half(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 runs out of memory in a forward pass; rank 0 waits in a collective."""
    config = make_run(tmp_path, train={"max_steps": 3}, parallel={"z": 2}, **QUIET)
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(config))
    monkeypatch.setenv("PYTHONPATH", str(PROGRAM.parents[2]))
    monkeypatch.setattr(launch_module, "_GRACE_S", 0.3)
    command = [sys.executable, str(PROGRAM), "2", "train", str(path)]
    assert launch_module.launch(command, 2) == 0
    err = " ".join(capfd.readouterr().err.split())
    assert err.count("rank 1: memguard: out of memory with 4 rows of 128 tokens at a time") == 1
    assert "must be 2 or less. Training starts again with that" in err
    assert len(read_losses(config)) == 3
    assert read_train(tmp_path / "runs" / "run")["micro_batch_size"] == 2
    assert (tmp_path / "runs" / "run" / "trained.json").exists()


def test_processes_are_started_again_as_often_as_settings_are_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "fail.py"
    program.write_text(
        "import json, os, sys\n"
        "from memguard.cli.errors import _explain\n"
        "from memguard.errors import StepTooLarge\n"
        "from memguard.runtime.children import report_exit\n"
        f"rows = json.loads(os.environ.get('{LESS_MEMORY}', '{{}}')).get('micro_batch_size', 4)\n"
        "less = {'micro_batch_size': rows // 2} if rows > 1 else {}\n"
        "report_exit(_explain(StepTooLarge(f'no {rows}', less)))\n"
        "sys.exit(1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(PROGRAM.parents[2]))
    assert launch_module.launch([sys.executable, str(program)], 2) == 1
    assert capfd.readouterr().err.splitlines() == [
        "memguard: no 4. Training starts again with that",
        "memguard: no 2. Training starts again with that",
        "memguard: no 1",
    ]


@pytest.mark.long
def test_under_torchrun_the_setting_is_named(tmp_path: Path) -> None:
    config = make_run(tmp_path, train={"max_steps": 3}, parallel={"z": 2}, **QUIET)
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(config))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = subprocess.run(
        [sys.executable, *torchrun, str(PROGRAM), "2", "train", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode != 0
    assert (
        "[rank 1] memguard: out of memory with 4 rows of 128 tokens at a time, which 'auto' chose: "
        "'train.micro_batch_size' must be 2 or less\n"
    ) in ended.stderr


def test_tf32_is_for_training_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out losses, audits during training and the audit afterwards are exact."""
    events: list[str] = []
    inside = [False]

    @contextmanager
    def spy(device: torch.device) -> Any:
        assert device.type == "cpu"
        inside[0] = True
        yield
        inside[0] = False

    def note(target: Any, name: str) -> None:
        original = getattr(target, name)

        def call(*arguments: Any, **options: Any) -> Any:
            events.append(f"{name} {'fast' if inside[0] else 'exact'}")
            return original(*arguments, **options)

        monkeypatch.setattr(target, name, call)

    monkeypatch.setattr(trainer_module, "fast_matmuls", spy)
    note(TrainStep, "run")
    note(HeldoutLoss, "measure")
    note(trainer_module.MemorizationMonitor, "audit")
    note(train_module, "audit_on_ranks")
    train_checked(make_run(tmp_path, train={"max_steps": 4, "audit_every_steps": 2}))
    assert set(events) == {
        "run fast",
        "measure exact",
        "audit exact",
        "audit_on_ranks exact",
    }
    assert events.count("run fast") == 4


def test_an_allocator_that_is_short_of_memory_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    retries = iter([0, 0, 1, 2])

    def measure(_: torch.device) -> MemoryPeak:
        number = next(retries)
        return MemoryPeak(allocated_bytes=5, reserved_bytes=7, num_alloc_retries=number)

    monkeypatch.setattr(step_cost, "measure_memory", measure)
    config = make_run(tmp_path, train={"max_steps": 4}, **QUIET)
    train_checked(config)
    steps = read_lines(config, StepMetrics)
    assert [line.num_alloc_retries for line in steps] == [0, 0, 1, 2]
    assert {(line.peak_memory_bytes, line.peak_reserved_bytes) for line in steps} == {(5, 7)}
    assert "".join(capsys.readouterr()).count("memory is short") == 1
