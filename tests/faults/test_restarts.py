"""A run that fails is started again, and ends as if nothing had happened, or is given up."""

import json
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_runs import (
    RUN,
    Result,
    check_ended,
    environment,
    read_result,
    start_command,
    write_settings,
)
from kills import Undisturbed, measure
from ranks import RankPool
from restarts import kill_at, make_nan

from memguard.data.corpus import load_corpus
from memguard.records import StartLine
from memguard.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]


def train(count: int, restarts: int) -> tuple[object, ...]:
    return ("train", "run.yaml", "--nproc", count, "--max-restarts", restarts)


Reference = tuple[Undisturbed, Result]


@pytest.fixture(scope="module")
def undisturbed(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Reference]:
    """The run that nothing happens to, on so many processes."""
    made: dict[int, Reference] = {}

    def make(count: int) -> Reference:
        if count not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            write_settings(folder)
            usual = measure(ranks, folder, train(count, 3))
            made[count] = usual, read_result(folder / RUN)
        return made[count]

    return make


def run(
    ranks: RankPool, folder: Path, count: int, restarts: int, *prepare: Any
) -> tuple[int | None, str]:
    """Train to the end; return exit code and what was said."""
    write_settings(folder)
    log = folder / "log"
    process = start_command(ranks, folder, log, train(count, restarts), *prepare)
    process.join()
    return process.exitcode, log.read_text()


def read_starts(folder: Path) -> list[StartLine]:
    lines = read_metrics(folder / RUN / "metrics.jsonl")
    return [line for line in lines if isinstance(line, StartLine)]


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(20))
def test_a_killed_rank_costs_a_restart(
    seed: int, ranks: RankPool, undisturbed: Callable[[int], Reference], tmp_path: Path
) -> None:
    usual, expected = undisturbed(4)
    draw = random.Random(f"restarts {seed}")
    write_settings(tmp_path)
    log = tmp_path / "log"
    process = start_command(ranks, tmp_path, log, train(4, 3))
    process.join(draw.random() * usual.wall_s)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if process.is_alive() and (found := children.read_text().split()):
        os.kill(int(draw.choice(found)), signal.SIGKILL)
    process.join()
    assert process.exitcode == 0, log.read_text()
    check_ended(tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "count"),
    [
        (kill_at, 1),
        pytest.param(kill_at, 4, marks=pytest.mark.faults),
        pytest.param(make_nan, 4, marks=pytest.mark.faults),
    ],
)
def test_a_failure_that_comes_once_is_survived(
    fault: Callable[..., None],
    count: int,
    ranks: RankPool,
    undisturbed: Callable[[int], Reference],
    tmp_path: Path,
) -> None:
    _, expected = undisturbed(count)
    code, said = run(ranks, tmp_path, count, 1, fault, 4, count // 2, tmp_path / "done")
    assert code == 0, said
    assert "memguard: starting again\n" in said
    first, second = read_starts(tmp_path)
    assert (first.why, first.step, first.num_lost_steps) == ("first start", 0, 0)
    assert (second.step, second.num_lost_steps) == (2, 1)
    assert second.why.startswith("exit code 4, Diverged" if fault is make_nan else "exit code 1")
    assert "from step 2 (exit code" in (tmp_path / RUN / "audit" / "report.html").read_text()
    check_ended(tmp_path, expected)


@pytest.mark.faults
@pytest.mark.parametrize("step", [1, 5])
def test_a_run_that_dies_at_one_step_is_given_up(
    step: int, ranks: RankPool, tmp_path: Path
) -> None:
    code, said = run(ranks, tmp_path, 4, 5, kill_at, step, 1, None)
    assert code == 1, said
    # The save after step 4 may still be written when a rank dies in step 5.
    place = "step [24]" if step == 5 else "the start"
    last = f"memguard: not started again: 2 attempts in a row made no checkpoint after {place}"
    assert re.fullmatch(last, said.splitlines()[-1])
    assert said.count("rank 1 was killed by SIGKILL") in ((3, 4) if step == 5 else (2,))


@pytest.mark.faults
def test_a_run_that_diverges_twice_is_given_up_and_names_documents(
    ranks: RankPool, tmp_path: Path
) -> None:
    code, said = run(ranks, tmp_path, 4, 5, make_nan, 4, 2, None)
    assert code == 4, said
    line, last = said.splitlines()[-2:]
    assert line.startswith(
        "memguard: training diverged at step 4: loss nan on rank 2, whose rows have"
    )
    assert "diverged.json" in line
    assert len(line) <= 160
    again = "training diverged at step 4 again, restarted from step 2"
    assert last == f"memguard: not started again: {again}"
    path = tmp_path / RUN / "diverged.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    told = json.loads(path.read_text())
    assert (told["step"], told["ranks"]) == (4, [2])
    assert set(told["documents"]) == find_ids(tmp_path)
    assert not any(name in said for name in told["documents"])


def find_ids(folder: Path) -> set[str]:
    """Return the ids of the documents that rank 2 was given in the step that it spoiled."""
    corpus, batch = load_corpus(folder / RUN), np.load(folder / "spoiled.npz")
    pieces = [
        row[numbers == number].astype(np.int32).tobytes()
        for row, numbers in zip(batch["input_ids"], batch["document_ids"], strict=True)
        for number in range(numbers.max() + 1)
    ]
    return {
        entry.id
        for index, entry in enumerate(corpus.manifest)
        if any(piece in corpus.document(index).input_ids.tobytes() for piece in pieces)
    }


@pytest.mark.faults
def test_wrong_settings_are_no_accident(ranks: RankPool, tmp_path: Path) -> None:
    write_settings(tmp_path)
    log = tmp_path / "log"
    for wrong, code in (("optim.lr=-1", 2), ("data.train=nothing.jsonl", 2)):
        process = start_command(ranks, tmp_path, log, (*train(2, 3), wrong))
        process.join()
        assert process.exitcode in (code, 3), log.read_text()
        assert "starting again" not in log.read_text()


# -- torchrun and Slurm ----------------------------------------------------------------------------

KILLER = """
import os, threading, time
def watch():
    has_begun = False
    while True:
        try:
            lines = open("runs/run/metrics.jsonl").read().count('"event":"step"')
        except OSError:
            lines = 0
        # The file may be that of the attempt before.
        has_begun = has_begun or lines < 3
        if has_begun and lines >= 3 and os.path.exists("kill"):
            if os.environ["KILL"] == "once":
                os.remove("kill")
            os.kill(os.getpid(), 9)
        time.sleep(0.002)
if os.environ.get("RANK") == "1":
    threading.Thread(target=watch, daemon=True).start()
"""
"""`sitecustomize` of rank 1, which kills itself after the third step if there is a file `kill`."""

LONG = ("train.epochs=30", "audit.enabled=false")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with settings, and programs that stand in for those of a cluster."""
    write_settings(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(KILLER)
    return tmp_path


def make_environment(place: Path, kill: str) -> dict[str, str]:
    return {
        **{key: value for key, value in os.environ.items() if "SLURM" not in key},
        **environment(place),
        "PYTHONPATH": f"{place / 'site'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "KILL": kill,
    }


def read_weights(place: Path, run: Path = RUN) -> bytes:
    return (place / run / "model" / "model.safetensors").read_bytes()


@pytest.mark.faults
def test_two_agents_of_torchrun_go_on_after_a_kill(place: Path, ranks: RankPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (place / "kill").touch()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("--max-restarts=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
        *("--rdzv-id=test", "-m", "memguard", "train", "run.yaml", *LONG),
    ]
    given = {"cwd": place, "env": make_environment(place, "once")}
    with (place / "agents").open("w") as log:
        agents = [subprocess.Popen(command, stdout=log, stderr=log, **given) for _ in range(2)]
        codes = [agent.wait(300) for agent in agents]
    assert codes == [0, 0], (place / "agents").read_text()
    assert not (place / "kill").exists()
    assert len(read_starts(place)) == 2
    process = start_command(
        ranks, place, place / "log", ("train", "run.yaml", "--nproc", 2, *LONG, "name=undisturbed")
    )
    process.join()
    assert process.exitcode == 0
    assert read_weights(place) == read_weights(place, Path("runs") / "undisturbed")


STUBS = {
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$*" >> requests; fi',
    # The network interfaces and GPUs of the cluster are not here.
    "srun": """shift; export GLOO_SOCKET_IFNAME=lo; arguments=()
        for each; do case $each in
            --nproc-per-node=*) each=--nproc-per-node=2;;
            --rdzv-endpoint=*) each=--rdzv-endpoint=127.0.0.1:$PORT;;
        esac; arguments+=("$each"); done
        exec "${arguments[@]}\"""",
    "torchrun": 'exec python -m torch.distributed.run "$@"',
    "python": f'exec {sys.executable} "$@"',
}


def submit(place: Path, count: int, kill: str, *settings: str) -> tuple[int, bool]:
    """Be one start of a job; return its exit code and whether it is requeued."""
    requests = place / "requests"
    requests.unlink(missing_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {
        **make_environment(place, kill),
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_RESTART_COUNT": str(count),
        "HOME": str(place),
        "CONFIG": "run.yaml",
        "PORT": str(port),
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
    }
    with (place / "job").open("a") as log:
        job = subprocess.run(
            ["bash", "scripts/slurm/perlmutter.sh", *LONG, *settings],
            cwd=place, env=variables, stdout=log, stderr=log, timeout=300,
        )  # fmt: skip
    return job.returncode, requests.exists() and requests.read_text() == "requeue 7\n"


@pytest.mark.faults
def test_a_slurm_job_is_requeued_by_the_same_rule(place: Path) -> None:
    for name, text in STUBS.items():
        path = place / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    (place / "scripts").symlink_to(ROOT / "scripts")
    (place / ".venv" / "bin").mkdir(parents=True)
    (place / ".venv" / "bin" / "activate").touch()
    (place / "kill").touch()
    said = place / "job"
    assert submit(place, 0, "once") == (1, True), said.read_text()
    assert submit(place, 1, "once") == (0, False), said.read_text()
    # torchrun may have ended the other rank before it could tell.
    (why,) = (start.why for start in read_starts(place)[1:])
    assert why in ("exit code 1, lost a rank", "exit code 1, no message")
    # Without a checkpoint, two attempts are enough.
    (place / "kill").touch()
    never = ("name=never", "train.checkpoint_every_steps=null")
    (place / "site" / "sitecustomize.py").write_text(KILLER.replace("runs/run", "runs/never"))
    assert submit(place, 0, "always", *never) == (1, True), said.read_text()
    assert submit(place, 1, "always", *never) == (1, False), said.read_text()
    assert "2 attempts in a row made no checkpoint after the start" in said.read_text()
    # Settings and inputs, before and after the run has begun.
    assert submit(place, 0, "once", "name=wrong", "optim.lr=-1") == (1, False)
    (place / "empty.jsonl").write_text("")
    assert submit(place, 0, "once", "name=empty", "data.train=empty.jsonl") == (1, False)
    assert json.loads((place / "runs" / "empty" / "ended.json").read_text())["exit_code"] == 3
