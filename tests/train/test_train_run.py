"""Whole runs: equivalent settings agree, interruptions leave no trace."""

import fcntl
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from ranks import RankPool
from run_examples import (
    QUIET,
    assert_same_weights,
    make_run,
    read_weights,
    run_folder,
    train_checked,
)

from memguard.cli import main
from memguard.config import RunConfig, dump_yaml
from memguard.data.corpus import load_corpus
from memguard.data.packing import plan_rows
from memguard.errors import ConfigError, RecordError
from memguard.optim import build_optimizer
from memguard.parallel.local_parameters import find_local_parameters
from memguard.records import AuditReport, load_manifest, load_record
from memguard.records.run_files import load_checkpoint_manifest
from memguard.records.sealed import save_sealed
from memguard.runtime import Console, Runtime
from memguard.train.checkpoint import TrainState, load_checkpoint
from memguard.train.checkpoint_storage import load_metadata
from memguard.train.metrics import EndMetrics, HeldoutMetrics, StepMetrics, read_metrics
from memguard.train.step import StepResult, TrainStep
from memguard.train.trainer import FIRST_SAVE, Trainer
from memguard.workflows.training.checks import check_run
from memguard.workflows.training.data import prepare_run

pytestmark = pytest.mark.slow

GOLDFISH = [{"name": "goldfish", "k": 3, "context_width": 3}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def finished(folder: Path) -> RunConfig:
    return train_checked(make_run(folder, name="finished", mitigations=GOLDFISH))


@pytest.mark.quick
def test_a_run_leaves_everything_the_design_names(finished: RunConfig) -> None:
    run = run_folder(finished)
    expected = {
        "config.yaml", "environment.json", "manifest.jsonl", "metrics.jsonl", "checkpoints",
        "model", "audit", "prepared", "trained.json", "ended.json",
    }  # fmt: skip
    assert {path.name for path in run.iterdir()} == {*expected, ".lock"}
    assert {path.name for path in (run / "audit").iterdir()} == {
        "report.json", "report.html", "records.parquet", "results.parquet",
        "findings.csv", "audit.json",
    }  # fmt: skip
    report = load_record(AuditReport, run / "audit" / "report.json")
    assert report.dose_response
    assert {bucket.role for bucket in report.tables.buckets} == {"trained", "control"}
    assert "Memorization audit" in (run / "model" / "README.md").read_text()


def test_the_manifest_tells_what_was_fed(finished: RunConfig) -> None:
    run = run_folder(finished)
    entries = load_manifest(run / "manifest.jsonl")
    assert {(e.role, e.num_repetitions) for e in entries} == {("trained", 2), ("control", 0)}
    # A fifth of 60 documents.
    assert sum(entry.role == "control" for entry in entries) == 12
    lines = list(read_metrics(run / "metrics.jsonl"))
    end = next(line for line in lines if isinstance(line, EndMetrics))
    steps = [line for line in lines if isinstance(line, StepMetrics)]
    trained = [entry for entry in entries if entry.role == "trained"]
    # Every document fits a row: its labels are its tokens but the first, twice.
    assert end.num_supervised_tokens == 2 * sum(entry.num_tokens - 1 for entry in trained)
    assert end.num_kept_tokens == sum(line.num_kept_tokens for line in steps)
    dropped = 1 - end.num_kept_tokens / end.num_supervised_tokens
    assert 0.25 < dropped < 0.42  # about 1 in 3; some 5,000 labels of 300 repeating words


def test_the_exported_model_gives_the_same_logits_in_plain_transformers(
    finished: RunConfig,
) -> None:
    run = run_folder(finished)
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    ids = torch.tensor([tokenizer("abcd efgh abcd")["input_ids"]])
    step = max((run / "checkpoints").iterdir())
    trained = transformers.AutoModelForCausalLM.from_config(model.config).eval()
    rows = plan_rows(load_corpus(run).manifest, seq_len=128, background_ratio=1.0, seed=3)[0]
    parameters = find_local_parameters(trained)
    state = TrainState(
        parameters=parameters,
        optimizer=build_optimizer(parameters, finished.optim),
        buffers={},
        arrays={"piece_tally": np.zeros(len(rows.document), dtype=np.int64)},
    )
    stored = load_metadata(step, load_checkpoint_manifest(step).files)
    load_checkpoint(step, state, stored=stored, runtime=Runtime(device=torch.device("cpu")))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trained(ids).logits)


@pytest.mark.parametrize(
    "train",
    [{"micro_batch_size": 2}, {"nll_chunk_tokens": 37, "activation_checkpointing": "full"}],
    ids=["accumulated", "frugal"],
)
def test_what_saves_memory_changes_only_the_order_of_sums(
    tmp_path: Path, finished: RunConfig, train: dict[str, Any]
) -> None:
    config = train_checked(make_run(tmp_path, mitigations=GOLDFISH, train=train, **QUIET))
    for name, tensor in read_weights(config).items():
        # fp32 sums in another order differ by 1e-7; AdamW divides by sqrt(v), which magnifies
        # them where gradients are nearly zero.
        torch.testing.assert_close(tensor, read_weights(finished)[name], rtol=0, atol=2e-4)


@pytest.mark.quick
def test_a_run_equals_a_plain_loop_over_documents(folder: Path) -> None:
    """The same run, written with nothing but transformers and torch, one document a row."""
    config = make_run(
        folder,
        name="reference",
        train={"epochs": 1, "batch_size": 4, "max_steps": 5},
        data={"train": str(folder / "documents.jsonl"), "control_fraction": 0},
        optim={"lr": 1e-3, "warmup_fraction": 0, "min_lr_fraction": 1.0, "max_grad_norm": None},
        audit={"enabled": False},
    )
    prepared = prepare_run(check_run(config))
    start = make_run(folder, name="start", train={"max_steps": 1}, optim={"lr": 1e-30},
                     data={"train": str(folder / "documents.jsonl"), "control_fraction": 0},
                     audit={"enabled": False})  # fmt: skip
    train_checked(start)
    train_checked(config)

    rows, schedule = plan_rows(
        prepared.corpus.manifest, seq_len=128, background_ratio=1.0, seed=config.seed
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        Path(start.output_dir) / "start" / "model"
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(5):
        losses, count = torch.zeros(()), 0
        for row in schedule[4 * step : 4 * step + 4]:
            for piece in range(rows.row_start[row], rows.row_start[row + 1]):
                document = prepared.corpus.document(int(rows.document[piece]))
                ids = torch.tensor(document.input_ids[None].astype("int64"))
                logits = model(ids, use_cache=False).logits[0, :-1]
                losses = losses + torch.nn.functional.cross_entropy(
                    logits, ids[0, 1:], reduction="sum"
                )
                count += ids.shape[1] - 1
        (losses / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in read_weights(config).items():
        # As above: the order of sums, through AdamW.
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=2e-4)


def test_heldout_loss_equals_transformers_own(finished: RunConfig) -> None:
    run = run_folder(finished)
    prepared = prepare_run(check_run(finished))
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    total, count = 0.0, 0
    for index, entry in enumerate(prepared.corpus.manifest):
        if entry.role == "control":
            ids = torch.tensor(prepared.corpus.document(index).input_ids[None].astype("int64"))
            with torch.no_grad():
                total += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    lines = [m for m in read_metrics(run / "metrics.jsonl") if isinstance(m, HeldoutMetrics)]
    assert [line.bucket for line in lines] == ["control", "control"]
    assert lines[-1].num_tokens == count
    # Means of fp32 terms, summed in another order.
    assert lines[-1].nll == pytest.approx(total / count, rel=1e-5)
    assert lines[-1].nll < lines[0].nll


# -- interruption ---------------------------------------------------------------------------------

_STOP_STEP = 10
"""Between two checkpoints, before the last."""


def train_until_stopped(requested: Path, message: Path) -> None:
    """`memguard train` in a process of its own: it waits in mid-run until it is sent a signal."""
    os.dup2(os.open(message, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    original = Trainer._timed_step

    def timed_step(self: Trainer) -> StepMetrics:
        line = original(self)
        while line.step == _STOP_STEP and self.stop_request.signal_number is None:
            message.with_suffix(".waits").touch()
            time.sleep(0.01)
        return line

    # For this process only, which ends with the test.
    Trainer._timed_step = timed_step  # type: ignore[method-assign]
    sys.argv = ["memguard", "train", str(requested)]
    main()


def stop_in_mid_run(ranks: RankPool, config: RunConfig, number: signal.Signals) -> tuple[int, str]:
    """Send a signal to a process that trains; return its exit code and what it has said."""
    run = run_folder(config)
    requested, message = run.with_suffix(".yaml"), run.with_suffix(".txt")
    requested.parent.mkdir(parents=True, exist_ok=True)
    requested.write_text(dump_yaml(config))
    child = ranks.start(train_until_stopped, requested, message)
    while not message.with_suffix(".waits").exists():
        assert child.is_alive(), message.read_text()
        time.sleep(0.05)
    assert child.pid is not None
    os.kill(child.pid, number)
    child.join(timeout=60)
    assert child.exitcode is not None
    return child.exitcode, message.read_text()


def long_run(folder: Path, name: str, **train: Any) -> RunConfig:
    """14 steps, checkpoints after 2, 4, 8, 12 and the last."""
    saves = {"checkpoint_every_steps": 4, "keep_checkpoints": 2, **train}
    return make_run(
        folder,
        name=name,
        mitigations=[{"name": "goldfish", "k": 3, "mode": "random"}],
        train={"epochs": 4, "max_steps": 14, **saves},
        audit={"enabled": False},
    )


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> RunConfig:
    return train_checked(long_run(folder, "uninterrupted"))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.long),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_stopped_and_resumed_ends_with_the_same_bits(
    folder: Path, uninterrupted: RunConfig, ranks: RankPool, number: signal.Signals, code: int
) -> None:
    config = long_run(folder, f"stopped-by-{number.name}")
    returned, message = stop_in_mid_run(ranks, config, number)
    assert returned == code, message
    run = run_folder(config)
    assert not (run / "model").exists(), "stopped in mid-run"
    if number != signal.SIGKILL:
        assert "run the same command again to resume" in message
    train_checked(config)
    assert_same_steps_and_weights(config, uninterrupted)
    assert len(list((run / "checkpoints").iterdir())) <= 2


def assert_same_steps_and_weights(config: RunConfig, uninterrupted: RunConfig) -> None:
    ours, theirs = (
        [line for line in read_metrics(run / "metrics.jsonl") if isinstance(line, StepMetrics)]
        for run in (run_folder(each) for each in (config, uninterrupted))
    )
    assert [line.step for line in ours] == list(range(1, len(theirs) + 1)), "each step once"
    assert [line.loss for line in ours] == [line.loss for line in theirs]
    assert_same_weights(config, uninterrupted)


# Saves come after steps 2, 4, 8, 12 and the last, 14; two are kept.
@pytest.mark.parametrize(
    ("failing", "kept", "num_warnings"),
    [
        ({3}, (12, 14), 1),
        ({2, 4}, (8, 14), 2),
        ({3, 4}, (2, 4), 1),
        ({1}, (), 0),
        ({5}, (8, 12), 0),
    ],
    ids=["once", "now and then", "twice", "at the first", "at the last"],
)
def test_a_full_disk_costs_one_save_or_ends_the_run(
    folder: Path,
    uninterrupted: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    failing: set[int],
    kept: tuple[int, ...],
    num_warnings: int,
) -> None:
    config = long_run(folder, f"full-disk-{'-'.join(map(str, failing))}")
    from memguard.train import checkpoint

    written: list[int] = []
    warned: list[str] = []
    real = checkpoint.save

    def save(*args: object, **kwargs: object) -> object:
        written.append(1)
        if len(written) in failing:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(Console, "warn", lambda _, text: warned.append(text))
    if 14 in kept:
        train_checked(config)
    else:
        with pytest.raises(OSError, match="No space left"):
            train_checked(config)
    checkpoints = run_folder(config) / "checkpoints"
    names = [f"step-{step:08}" for step in kept]
    assert [path.name for path in sorted(checkpoints.glob("*"))] == names
    said = [text for text in warned if text.startswith("a save failed on rank 0 (OSError (No spa")]
    assert len(said) == num_warnings
    if failing == {1}:
        lines = read_metrics(run_folder(config) / "metrics.jsonl")
        assert sum(isinstance(line, StepMetrics) for line in lines) == FIRST_SAVE
    monkeypatch.undo()
    train_checked(config)
    assert_same_weights(config, uninterrupted)


def test_checkpoints_are_saved_by_the_clock(folder: Path, uninterrupted: RunConfig) -> None:
    config = long_run(folder, "clock", checkpoint_every_steps=None, checkpoint_every_minutes=1e-9)
    train_checked(config)
    names = [path.name for path in sorted((run_folder(config) / "checkpoints").iterdir())]
    assert names == ["step-00000013", "step-00000014"]
    assert_same_weights(config, uninterrupted)


# -- refusals -------------------------------------------------------------------------------------


def test_a_folder_with_other_settings_is_refused(folder: Path, finished: RunConfig) -> None:
    other = make_run(folder, name="finished", mitigations=GOLDFISH, optim={"lr": 1e-3})
    with pytest.raises(ConfigError, match=r"optim\.lr \(0\.003 there, 0\.001 here\)"):
        train_checked(other)


@pytest.mark.quick
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    config = make_run(tmp_path, train={"max_steps": 2}, **QUIET)
    train_checked(config)
    run = run_folder(config)
    checkpoint = run / "checkpoints" / "step-00000002"
    manifest = load_checkpoint_manifest(checkpoint)
    another = manifest.model_copy(update={"run_key": "another"})
    save_sealed(another, checkpoint / "manifest.json")
    (run / "model" / "config.json").unlink()
    with pytest.raises(
        RecordError, match=r"step-00000002' is from a run with other settings.*delete"
    ):
        train_checked(config)


def test_a_second_process_is_kept_out(folder: Path, finished: RunConfig) -> None:
    lock = os.open(Path(finished.output_dir) / "finished" / ".lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConfigError, match="another process is using"):
            train_checked(finished)
    finally:
        os.close(lock)


def test_other_settings_of_audit_and_log_audit_again_but_do_not_train(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    train_checked(config)
    page = tmp_path / "runs" / "run" / "audit" / "report.html"
    model = tmp_path / "runs" / "run" / "model" / "model.safetensors"
    before = page.stat().st_mtime_ns, model.stat().st_mtime_ns
    train_checked(config)
    assert before == (page.stat().st_mtime_ns, model.stat().st_mtime_ns), "nothing to do"
    train_checked(
        make_run(tmp_path, audit={"continuation_tokens": 5}, train={"log_every_steps": 1})
    )
    assert before[1] == model.stat().st_mtime_ns
    report = load_record(AuditReport, page.with_suffix(".json"))
    assert report.method.continuation_tokens == 5


def test_a_deterministic_run_trains_with_deterministic_algorithms(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU they are the same ones; what a GPU does is torch's promise."""
    original, seen = TrainStep.run, []

    def run(self: TrainStep, *args: Any, **settings: Any) -> StepResult:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return original(self, *args, **settings)

    monkeypatch.setattr(TrainStep, "run", run)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for deterministic in (True, False):
        train = {"deterministic": deterministic, "max_steps": 1}
        name = f"deterministic-{deterministic}"
        train_checked(make_run(folder, name=name, train=train, audit={"enabled": False}))
    assert seen == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()
