"""The command line on several processes: --nproc, torchrun, meshes that do not fit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_examples import run_cli, write_run
from safetensors.torch import load_file

from memguard.records import AuditReport, load_record

pytestmark = pytest.mark.slow


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


def test_nproc_trains_and_audits(folder: Path) -> None:
    path = write_run(folder, parallel={"x": 2}, train={"max_steps": 2})
    done = run("-m", "memguard", "train", path, "--nproc", 2, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    report = load_record(AuditReport, Path(result["run"]) / "audit" / "report.json")
    assert report.environment["world_size"] == "2"
    assert "on (data=1, z=1, y=1, x=2)" in done.stderr
    assert done.stderr.count("audit: report in") == 1, "rank 0 alone speaks"


@pytest.mark.long
def test_torchrun_does_too(folder: Path) -> None:
    # Next to nothing is trained: what comes out is what went in, through shards and back.
    path = write_run(
        folder, parallel={"z": 2}, audit={"enabled": False}, train={"batch_size": 8, "max_steps": 1}
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = run(*torchrun, "-m", "memguard", "train", path, "optim.lr=1e-30")
    assert done.returncode == 0, done.stderr
    trained = load_file(folder / "runs" / "run" / "model" / "model.safetensors")
    before = load_file(folder / "model" / "model.safetensors")
    assert trained.keys() == before.keys()
    for name, tensor in trained.items():
        # A step of 1e-30 is lost in fp32 but where a weight is 0.
        assert float((tensor - before[name]).abs().max()) < 1e-20, name


MISFIT = ("parallel.z=2", "train.batch_size=5")


def check_misfit(folder: Path, code: int, err: str) -> None:
    assert code == 2, err
    assert "train.batch_size" in err
    assert "Traceback" not in err
    lines = err.splitlines()
    assert len(lines) == len(set(lines)), "said once"
    assert not (folder / "runs").exists()


@pytest.mark.quick
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_mesh_that_does_not_fit_is_told_before_ranks_meet(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    told = run_cli("train", write_run(folder), *MISFIT)
    check_misfit(folder, told.code, told.err)


@pytest.mark.long
def test_a_mesh_that_does_not_fit_is_told_once(folder: Path) -> None:
    done = run("-m", "memguard", "train", write_run(folder), "--nproc", 2, *MISFIT)
    check_misfit(folder, done.returncode, done.stderr)


def test_one_process_is_not_enough_for_a_mesh(folder: Path) -> None:
    told = run_cli("train", write_run(folder), "parallel.x=2")
    assert told.code == 2
    assert "parallel.x" in told.err
    assert "--nproc" in told.err
