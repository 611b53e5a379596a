"""Number of processes: chosen without `--nproc`, and bounded by GPUs and cores."""

import contextlib
import importlib.metadata
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_examples import run_cli, write_jsonl, write_run
from published_sizes import CONFIG_FIELDS
from unusable_gpus import LINE, pretend_old_driver

from memguard import api
from memguard.config import RunConfig
from memguard.errors import ConfigError
from memguard.runtime import environment
from memguard.runtime.environment import check_num_processes, count_gpus
from memguard.workflows.auditing import audit as audit_module
from memguard.workflows.common import checks
from memguard.workflows.common import launch as launch_module
from memguard.workflows.training import train as train_module
from memguard.workflows.training.checks import choose_num_processes, read_local_sizes

pytestmark = pytest.mark.slow


@pytest.fixture
def _gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 8 GPUs, with a torch that may use them."""
    devices = tmp_path / "dev"
    devices.mkdir()
    for number in range(8):
        (devices / f"nvidia{number}").touch()
    monkeypatch.setattr(environment, "_DEVICES", devices)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def make(folder: Path, family: str = "llama", **changes: Any) -> RunConfig:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    fields = CONFIG_FIELDS["Llama-3.1-8B"] | {"model_type": family}
    (model / "config.json").write_text(json.dumps(fields))
    return RunConfig.model_validate_json(write_run(folder, **changes).read_text())


def choose(config: RunConfig, nproc: int | None) -> tuple[int, str]:
    return choose_num_processes(config, nproc, read_local_sizes(config))


@pytest.mark.quick
@pytest.mark.usefixtures("_gpus")
@pytest.mark.parametrize(
    ("changes", "count", "why"),
    [
        ({}, 8, ""),
        ({"parallel": {"x": 2}}, 8, ""),
        ({"parallel": {"data": -1}}, 8, ""),
        ({"parallel": {"z": 2, "x": 2}}, 4, "4 of 8 visible GPUs are used: 'parallel.data' × "),
        ({"train": {"batch_size": 12}}, 6, "6 of 8 visible GPUs are used: 'parallel.data' × "),
        # Storage is shared over z, whatever the family.
        ({"family": "gemma2"}, 8, ""),
        ({"mitigations": [{"name": "dp_sgd"}]}, 1, "is used: 'mitigations': dp_sgd clips row"),
        ({"train": {"dropout": 0.1}}, 1, "is used: 'train.dropout' 0.1 needs one process"),
        ({"adapter": {"name": "lora", "quantization": "nf4"}}, 8, ""),
        ({"audit": {"device_map": "auto"}}, 1, "is used: 'audit.device_map' needs one process"),
        # No number of processes up to 8 works: the mesh's own error tells.
        ({"parallel": {"z": 16}}, 8, ""),
    ],
    ids=str,
)
def test_as_many_as_the_settings_allow(
    tmp_path: Path, changes: dict[str, Any], count: int, why: str
) -> None:
    number, text = choose(make(tmp_path, **changes), None)
    assert number == count
    assert (why in text) if why else text == ""


@pytest.mark.usefixtures("_gpus")
def test_what_was_started_or_named_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(tmp_path)
    assert choose(config, 3) == (3, "")
    with monkeypatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "0,5")
        assert choose(config, None) == (2, "")
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        assert choose(config, None) == (1, "")
    with monkeypatch.context() as patched:
        patched.setenv("LOCAL_RANK", "0")
        assert choose(config, None) == (1, "")
    monkeypatch.setattr(checks, "is_cpu_build", lambda: True)
    assert choose(config, None) == (1, "")


@pytest.mark.usefixtures("_gpus")
def test_the_command_starts_them_and_says_why_not_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def launch(command: list[str], count: int, *, restarts: None) -> int:
        started.append(count)
        return 12

    monkeypatch.setattr(launch_module, "launch", launch)
    path = write_run(folder, train={"batch_size": 4})
    outcome = run_cli("train", path)
    assert (outcome.code, started) == (12, [4])
    (line,) = outcome.err.splitlines()
    assert line.startswith("train: 4 of 8 visible GPUs are used: ")
    assert run_cli("train", path, "--nproc", 2).code == 12
    assert started[1:] == [2]


@pytest.mark.usefixtures("_gpus")
def test_what_runs_on_one_gpu_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Exception):
        pass

    def end(*_: object) -> None:
        raise Ended

    monkeypatch.setattr(audit_module, "audit", end)
    arguments = ("--members", folder / "documents.jsonl", "--out", folder / "out")
    audited = run_cli("audit", "--model", folder / "model", *arguments)
    assert "audit: 1 of 8 visible GPUs is used; --nproc splits the model over more\n" in audited.err
    audited = run_cli("audit", "--model", folder / "model", *arguments, "--nproc", 1)
    assert "visible" not in audited.err
    monkeypatch.setattr(train_module, "train_run", end)
    with pytest.raises(Ended), contextlib.redirect_stderr(io.StringIO()) as err:
        api.train(write_run(folder))
    assert "train: 1 of 8 visible GPUs is used; `memguard train` uses more" in err.getvalue()


# -- GPUs that torch cannot use --------------------------------------------------------------------


@pytest.fixture
def _unusable(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    pretend_old_driver(monkeypatch, devices)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    run = json.loads(write_run(folder).read_text())
    sweep = {
        "name": "small",
        "output_dir": run.pop("output_dir"),
        "run": {key: value for key, value in run.items() if key != "name"},
        "settings": [{"name": "a"}, {"name": "b"}],
    }
    (folder / "sweep.yaml").write_text(json.dumps(sweep))


@pytest.mark.usefixtures("_unusable")
@pytest.mark.parametrize(
    "command",
    [
        "train run.yaml --nproc 1",
        "prepare run.yaml",
        "audit --model model --members documents.jsonl --out out",
        "compare sweep.yaml --jobs 2",
    ],
)
def test_commands_that_use_a_device_refuse_gpus_that_torch_cannot_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(folder)
    outcome = run_cli(*command.split())
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines()[-1] == LINE
    assert outcome.err.count("driver") == LINE.count("driver")
    assert not [*folder.glob("runs/*/*"), *folder.glob("out/*")]


@pytest.mark.usefixtures("_unusable")
@pytest.mark.parametrize(
    "call",
    [
        lambda: api.train("run.yaml"),
        lambda: api.audit(model="model", members="documents.jsonl"),
        lambda: api.compare("sweep.yaml", jobs=2),
    ],
    ids=["train", "audit", "compare"],
)
def test_functions_that_use_a_device_refuse_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError) as caught, contextlib.redirect_stderr(io.StringIO()):
        call()
    assert caught.value.problems == (LINE,)


@pytest.mark.usefixtures("_unusable")
def test_what_uses_no_device_goes_on(folder: Path) -> None:
    planned = run_cli("plan", "--model", folder / "model", "--machine", "h200")
    assert (planned.code, planned.err) == (0, "")


PROGRAM = """\
import sys
from pathlib import Path

import pytest
from unusable_gpus import pretend_old_driver

from memguard.cli import app, main
from memguard.runtime import start_runtime


def run(**_):
    with start_runtime():
        pass


pretend_old_driver(pytest.MonkeyPatch(), Path(sys.argv[1]))
app.app = run
main()
"""


def test_ranks_say_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = [str(Path(checks.__file__).parents[2]), str(Path(__file__).parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    assert launch_module.launch(command, 2) == 2
    assert capfd.readouterr().err == f"{LINE}\n"


# -- limits ----------------------------------------------------------------------------------------


def test_the_processes_of_torchrun_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.count_processes(3) == 3
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert checks.count_processes(1) == 1
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert checks.count_processes(1) == 8


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
    monkeypatch.setattr(
        launch_module, "launch", lambda *_, **__: pytest.fail("processes were started")
    )
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
