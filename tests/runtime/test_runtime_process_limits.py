"""How many processes are started is bounded by GPUs and cores, before any is."""

import os
from pathlib import Path
from typing import Any

import pytest
from cli_examples import run_cli, write_jsonl, write_run

from memguard.errors import ConfigError
from memguard.runtime import environment
from memguard.runtime.environment import check_num_processes, count_gpus
from memguard.workflows import launch as launch_module


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a machine of some cores and GPUs; `visible` is CUDA_VISIBLE_DEVICES."""

    def make(*, cores: int, gpus: int = 0, visible: str | None = None) -> None:
        devices = tmp_path / f"dev-{cores}-{gpus}"
        devices.mkdir(exist_ok=True)
        for name in (*range(gpus), "ctl", "-uvm"):
            (devices / f"nvidia{name}").touch()
        monkeypatch.setattr(environment, "_DEVICES", devices)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


def check(count: int) -> None:
    check_num_processes(count, option="--nproc", way_out="use more machines")


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("", 0), ("-1", 0), ("0", 1), ("2,3", 2), ("GPU-1,GPU-2,GPU-3", 3), ("0,-1,1", 1)],
)
def test_gpus_are_counted_as_cuda_shows_them(machine: Any, visible: str | None, count: int) -> None:
    machine(cores=8, gpus=4, visible=visible)
    assert count_gpus() == count


def test_a_list_of_gpus_that_are_not_there(machine: Any) -> None:
    machine(cores=8, gpus=0, visible="0,1,2,3")
    assert count_gpus() == 0


def test_each_process_has_a_gpu_of_its_own(machine: Any, capfd: pytest.CaptureFixture[str]) -> None:
    machine(cores=1, gpus=4)
    check(4)
    with pytest.raises(
        ConfigError, match="'--nproc' must be at most 4, the number of visible GPUs"
    ):
        check(5)
    machine(cores=8, gpus=4, visible="1")
    with pytest.raises(ConfigError, match=r"at most 1, .* got 2\. To train on the CPU set CUDA_VI"):
        check(2)
    assert capfd.readouterr().err == ""


def test_without_gpus_four_processes_share_a_core_at_most(
    machine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    machine(cores=2)
    check(2)
    assert capfd.readouterr().err == ""
    check(8)
    said = "warning: '--nproc' 8 on 2 cores: the processes take turns; 2 would be as fast\n"
    assert capfd.readouterr().err == said
    with pytest.raises(ConfigError, match=r"must be at most 8, 4 for each core, .* got 9\. Use 2"):
        check(9)


def test_no_command_starts_more(
    folder: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "launch", lambda *_: pytest.fail("processes were started"))
    machine(cores=2)
    run = write_run(folder)
    sweep = write_jsonl(folder / "sweep.yaml", [{"name": "s", "run": {}, "settings": []}])
    given = ("--model", folder / "model", "--members", folder / "documents.jsonl", "--out", "o")
    (folder / "finished").mkdir()
    (folder / "finished" / "config.yaml").write_text("name: x\n")
    for option, *arguments in (
        ("--nproc", "train", run),
        ("--nproc", "audit", *given),
        ("--nproc", "compare", "--fix", folder / "finished"),
        ("--jobs", "compare", sweep),
    ):
        outcome = run_cli(*arguments, option, 100_000)
        assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome.err
        assert f"'{option}' must be at most 8, 4 for each core" in outcome.err
