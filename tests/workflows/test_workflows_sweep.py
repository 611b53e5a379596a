"""Runs of a sweep as child processes, several at a time: here a shell script stands for a run."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import yaml
from cli_examples import run_cli

from memguard.compare import Sweep, is_finished, load_sweep
from memguard.errors import ConfigError, Interrupted
from memguard.records.audit_files import save_audit_files
from memguard.records.run_files import sum_trained
from memguard.records.sealed import save_sealed
from memguard.runtime import Console
from memguard.runtime import console as console_module
from memguard.runtime.children import end_children
from memguard.workflows import sweep as sweep_module
from memguard.workflows.sweep import ChildFailed, train_runs

# Leaves the least that a finished run leaves. `waits` ends when it is told to, or asked to stop.
CHILD = """\
#!/bin/sh
folder=$(dirname "$4")
echo "threads $OMP_NUM_THREADS" >&2
trap 'rm "$folder/at-work"; exit 143' TERM
touch "$folder/at-work"
ls -d "$folder"/../*/at-work | wc -l > "$folder/counted"
mv "$folder/counted" "$folder/num-at-work"
case $(basename "$folder") in
fails) rm "$folder/at-work"; exit 3 ;;
waits*) while [ ! -e "$folder/../go" ]; do sleep 0.02; done ;;
*) sleep 0.05 ;;
esac
cp -r "$(dirname "$0")/left/." "$folder"
rm "$folder/at-work"
"""


@pytest.fixture(autouse=True)
def _child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = tmp_path / "child.sh"
    path.write_text(CHILD)
    path.chmod(0o755)
    write_left(tmp_path / "left")
    with mock.patch.object(sweep_module.sys, "executable", str(path)):
        yield


def write_left(folder: Path) -> None:
    """Write the least that is whole of what training and its audit leave."""
    for name in ("audit", "model"):
        (folder / name).mkdir(parents=True)
    for name in (
        "report.json",
        "records.parquet",
        "results.parquet",
        "findings.csv",
        "report.html",
    ):
        (folder / "audit" / name).touch()
    for name in ("model/config.json", "manifest.jsonl", "metrics.jsonl"):
        (folder / name).touch()
    save_audit_files(folder / "audit", has_card=False)
    save_sealed(sum_trained(folder, run_key="", step=1), folder / "trained.json")


def make_sweep(*names: str, pretrain: bool = False) -> Sweep:
    data = {"train": "a.jsonl", "heldout_documents": 5}
    values = {
        "name": "sweep",
        "output_dir": "runs",
        "run": {"data": data} | ({} if pretrain else {"model": {"path": "m"}}),
        "settings": [{"name": name} for name in names],
    }
    if pretrain:
        model = {"scratch": {"config": {"model_type": "llama"}}}
        values["pretrain"] = {"model": model, "data": data}
    Path("sweep.yaml").write_text(yaml.safe_dump(values))
    return load_sweep("sweep.yaml")


def train(sweep: Sweep, num_jobs: int) -> None:
    left = [run for run in sweep.runs if not is_finished(run)]
    train_runs(sweep, left, num_jobs=num_jobs, console=Console())


def read_num_at_work(sweep: Sweep) -> list[int]:
    return [int((run.folder / "num-at-work").read_text()) for run in sweep.runs]


def when_at_work(names: Sequence[str], act: Callable[[], object]) -> threading.Thread:
    """Let ``act`` happen as soon as all of these runs are at work."""

    def monitor() -> None:
        for _ in range(2000):
            if all(Path(f"runs/sweep/{name}/num-at-work").exists() for name in names):
                act()
                return
            time.sleep(0.01)

    watcher = threading.Thread(target=monitor)
    watcher.start()
    return watcher


def go_on() -> None:
    Path("runs/sweep/go").touch()


def test_at_most_so_many_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = make_sweep("waits-1", "waits-2", "c", "d", "e")
    both = when_at_work(["waits-1", "waits-2"], go_on)
    train(sweep, 2)
    both.join()
    assert all(is_finished(run) for run in sweep.runs)
    assert max(read_num_at_work(sweep)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "-- 1 of 5: waits-1 (runs/sweep/waits-1/train.log)",
        "-- 2 of 5: waits-2 (runs/sweep/waits-2/train.log)",
    ]
    assert sum("is finished (" in line for line in lines) == 5
    assert not any("threads" in line for line in lines), "a run speaks in its own file"


def test_each_run_shows_what_it_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "_SHOW_EVERY_S", 0)
    monkeypatch.setattr(console_module, "_ROW_LINE_EVERY_S", 0)
    sweep = make_sweep("waits-1", "waits-2")
    both = when_at_work(["waits-1", "waits-2"], lambda: (time.sleep(0.5), go_on()))
    train(sweep, 2)
    both.join()
    lines = capsys.readouterr().err.splitlines()
    threads = Path("runs/sweep/waits-1/train.log").read_text().strip()
    assert [line for line in lines if "threads" in line] == [
        f"waits-1: {threads}",
        f"waits-2: {threads}",
    ], "each once, as it does not change"


def test_one_at_a_time_has_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    sweep = make_sweep("a", "b")
    train(sweep, 1)
    assert read_num_at_work(sweep) == [1, 1]
    assert capfd.readouterr().err.splitlines() == [
        "-- 1 of 2: a (runs/sweep/a)",
        "threads ",
        "-- 2 of 2: b (runs/sweep/b)",
        "threads ",
    ]
    assert not list(Path("runs").rglob("train.log"))


def test_cores_are_shared_out_unless_the_user_has_said_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7))
    train(make_sweep("a", "b", "c"), 3)
    assert Path("runs/sweep/a/train.log").read_text() == "threads 2\n"
    # More jobs than runs take no threads away.
    train(make_sweep("d", "e"), 7)
    assert Path("runs/sweep/d/train.log").read_text() == "threads 3\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    train(make_sweep("f", "g"), 2)
    assert Path("runs/sweep/g/train.log").read_text() == "threads 5\n"


def test_the_model_they_start_from_is_trained_alone() -> None:
    sweep = make_sweep("waits-1", "waits-2", pretrain=True)
    both = when_at_work(["waits-1", "waits-2"], go_on)
    with (
        mock.patch.object(sweep_module, "compare_runs"),
        mock.patch.object(sweep_module, "list_finished"),
        mock.patch.object(sweep_module, "publish"),
    ):
        sweep_module.run_sweep(sweep, num_jobs=2)
    both.join()
    assert int(Path("runs/sweep/base/num-at-work").read_text()) == 1
    assert not Path("runs/sweep/base/train.log").exists()
    assert max(read_num_at_work(sweep)) == 2


def test_one_that_fails_is_told_and_those_in_flight_end() -> None:
    sweep = make_sweep("waits", "fails", "never")
    console = mock.MagicMock()
    console.warn.side_effect = lambda _: go_on()
    with pytest.raises(
        ChildFailed, match=r"fails failed with exit code 3; see '.*train.log' for the reason"
    ):
        train_runs(sweep, sweep.runs, num_jobs=2, console=console)
    assert [is_finished(run) for run in sweep.runs] == [True, False, False]
    assert not Path("runs/sweep/never").exists()
    ((told,), _) = console.warn.call_args
    assert told.startswith("2 of 3: fails has failed (")
    with pytest.raises(
        ChildFailed, match="fails failed with exit code 3; see the lines above"
    ) as alone:
        train(sweep, 1)
    assert alone.value.exit_code == 3
    assert not Path("runs/sweep/never").exists()


def test_a_signal_ends_all_and_the_next_call_goes_on() -> None:
    sweep = make_sweep("waits-1", "waits-2", "never")
    stop = when_at_work(["waits-1", "waits-2"], lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="stopped in waits-1, waits-2; run the same") as caught:
        train(sweep, 2)
    stop.join()
    assert caught.value.exit_code == 143
    assert not list(Path("runs").rglob("at-work")), "both were given the time to end"
    assert not Path("runs/sweep/never").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    go_on()
    train(sweep, 2)
    assert all(is_finished(run) for run in sweep.runs)
    assert Path("runs/sweep/waits-1/train.log").read_text().count("threads") == 2


def test_those_in_flight_may_save_when_this_process_fails() -> None:
    sweep = make_sweep("waits-1", "waits-2")

    def fail(_: float) -> None:
        if all((run.folder / "num-at-work").exists() for run in sweep.runs):
            raise OSError("no space left")
        time.sleep(0.01)

    with (
        mock.patch.object(sweep_module, "time", mock.Mock(wraps=time, sleep=fail)),
        pytest.raises(OSError, match="no space left"),
    ):
        train(sweep, 2)
    # The trap, which stands for saving, has removed it.
    assert not list(Path("runs").rglob("at-work"))


def test_who_does_not_end_is_killed_and_who_was_asked_is_not_asked_again() -> None:
    saves, hangs = mock.Mock(), mock.Mock()
    hangs.wait.side_effect = [subprocess.TimeoutExpired("memguard", 120), -9]
    end_children([hangs, saves], terminate=True, within_s=120)
    assert [each.terminate.call_count for each in (hangs, saves)] == [1, 1]
    assert [each.kill.call_count for each in (hangs, saves)] == [1, 0]
    requested = mock.Mock()
    end_children([requested], within_s=120)
    requested.terminate.assert_not_called()
    requested.wait.assert_called_once()


def test_a_gpu_is_not_shared() -> None:
    runtime = mock.Mock()
    runtime.device.type = "cuda"
    with (
        mock.patch.object(sweep_module, "detect_runtime", return_value=runtime),
        pytest.raises(ConfigError, match="'--jobs' must be 1 on a machine with a GPU"),
    ):
        sweep_module.run_sweep(make_sweep("a"), num_jobs=2)


def test_finished_runs_have_no_jobs() -> None:
    Path("config.yaml").touch()
    done = run_cli("compare", ".", "--jobs", 2)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "--jobs needs a sweep" in done.err
