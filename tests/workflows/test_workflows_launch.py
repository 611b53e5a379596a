"""`--nproc`: ranks end as one, in one line, and have time to save; Slurm files."""

import fcntl
import json
import os
import pty
import runpy
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cli_examples import run_cli, write_run
from ranks import RankPool

from memguard.runtime.children import ExitReport
from memguard.workflows.common import launch as launch_module

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("launched.py")
ROOT = PROGRAM.parents[2]
SLURM = sorted(set((ROOT / "scripts" / "slurm").glob("*.sh")) - {ROOT / "scripts/slurm/job.sh"})


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


Launch = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def launched(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Launch:
    """Runs work on ranks from this process; returns exit code and lines on standard error."""

    def run(work: str, count: int = 2, *, grace_s: float = 0.3) -> tuple[int, list[str]]:
        monkeypatch.setattr(launch_module, "_GRACE_S", grace_s)
        command = [sys.executable, str(PROGRAM), work, str(tmp_path)]
        code = launch_module.launch(command, count)
        return code, capfd.readouterr().err.splitlines()

    return run


# -- one line, one code ---------------------------------------------------------------------------


def test_the_same_error_on_all_ranks_is_told_once(launched: Launch) -> None:
    problems = ["run.yaml:1:1 'a' is wrong", "run.yaml:2:1 'b' is wrong"]
    assert launched("same_error", grace_s=5) == (2, problems)


def test_ranks_meet_and_rank_0_alone_prints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch_module.launch([sys.executable, str(PROGRAM), "gather", str(tmp_path)], 2) == 0
    ended = capfd.readouterr()
    assert json.loads(ended.out) == [[0, "1"], [1, "1"]]
    assert ended.err == ""


@pytest.mark.long
def test_an_error_beside_a_barrier_ends_all(launched: Launch) -> None:
    started = time.monotonic()
    code, lines = launched("raise_beside_a_barrier", grace_s=5)
    assert (code, lines) == (3, ["rank 1: memguard: no layer 7"])
    # Those who wait see their peer go; importing torch takes most of the time.
    assert time.monotonic() - started < 30


def test_a_rank_that_hears_nothing_is_ended(launched: Launch) -> None:
    started = time.monotonic()
    code, lines = launched("mistake_beside_a_deaf_rank")
    assert code == 1
    assert lines[0].startswith("Traceback")
    assert "ZeroDivisionError" in lines[-2]
    assert lines[-1].startswith("rank 1: memguard: this is a bug in memguard")
    assert time.monotonic() - started < 20


@pytest.mark.quick
@pytest.mark.parametrize("follows", [False, True], ids=["own error", "lost a rank"])
def test_a_killed_rank_is_named_even_where_its_peer_spoke_first(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    follows: bool,
) -> None:
    monkeypatch.setattr(launch_module, "_GRACE_S", 0.2 if follows else 30.0)
    report = ExitReport(code=3, kind="DataError", text="a socket is gone", follows=follows)
    message, is_said = tmp_path / "message", tmp_path / "said"
    message.write_text(json.dumps(asdict(report)))
    # A rank that lost its peer may be noticed long before that peer: longer than the other wait.
    late_s = 0.6 if follows else 0.0
    work = f"""
        if [ $RANK = 0 ]; then
            cp {message} $MEMGUARD_EXIT_REPORT; touch {is_said}; exit 3
        fi
        until [ -e {is_said} ]; do sleep 0.02; done
        sleep {late_s}; kill -KILL $$
    """
    assert launch_module.launch(["sh", "-c", work], 2) == 1
    line = (
        "memguard: rank 1 was killed by SIGKILL (out of memory?); see the system log for the reason"
    )
    assert capfd.readouterr().err.splitlines() == [line]


def test_a_rank_that_dies_without_a_word_is_quoted(launched: Launch) -> None:
    line = "memguard: rank 1 ended with code 77: cannot open libx.so"
    assert launched("silent") == (77, [line])


def test_the_first_rank_has_said_it_on_the_terminal(launched: Launch) -> None:
    quoted = ["first line", "cannot open libx.so", "", "memguard: rank 0 ended with code 77"]
    assert launched("first_is_silent") == (77, quoted)


def test_who_ends_as_agreed_may_end_late(launched: Launch, tmp_path: Path) -> None:
    assert launched("one_ends_late", grace_s=0.1) == (143, ["memguard: stopped and saved"])
    assert (tmp_path / "report").exists()


# -- signals --------------------------------------------------------------------------------------


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a launcher with two ranks and waits until both are at work."""
    launchers: list[subprocess.Popen[str]] = []

    def run(work: str, **how: Any) -> "subprocess.Popen[str]":
        command = [sys.executable, str(PROGRAM), "launch", str(tmp_path), work]
        how = {"stderr": subprocess.PIPE, "text": True, **how}
        launchers.append(subprocess.Popen(command, **how))
        wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)))
        return launchers[-1]

    yield run
    for launcher in launchers:
        launcher.kill()  # its ranks end with it
        launcher.communicate()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def signals_of(folder: Path, rank: int) -> list[int]:
    return [int(line) for line in (folder / f"signals-{rank}").read_text().split()]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_ranks_save_when_the_launcher_is_signalled(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    launcher = start("save_when_asked")
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=30)
    assert (launcher.returncode, err) == (
        128 + number,
        "memguard: stopped after step 3 and saved\n",
    )
    for rank in (0, 1):
        assert (tmp_path / f"saved-{rank}").exists()
        # Rank 1 ends 1.5 s before rank 0: nobody is hurried by that.
        assert signals_of(tmp_path, rank) == [number]


def test_a_terminals_ctrl_c_reaches_each_rank_once(start: Start, tmp_path: Path) -> None:
    terminal, inside = pty.openpty()
    launcher = start(
        "save_when_asked",
        stdin=inside,
        stderr=inside,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(inside, termios.TIOCSCTTY, 0),
    )
    os.close(inside)
    os.write(terminal, b"\x03")
    assert launcher.wait(timeout=30) == 130
    said = os.read(terminal, 10_000).decode()
    os.close(terminal)
    assert "stopped after step 3 and saved" in said
    assert [signals_of(tmp_path, rank) for rank in (0, 1)] == [[2], [2]]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_ranks_with_nothing_to_save_are_interrupted(start: Start, number: int) -> None:
    launcher = start("sleep")
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert err == "memguard: interrupted; run the same command again to resume\n"


def test_a_second_signal_ends_ranks_that_do_not(start: Start) -> None:
    launcher = start("deaf")
    launcher.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(timeout=1.2)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert err == "memguard: interrupted; run the same command again to resume\n"


def test_ranks_save_when_the_launcher_is_killed(start: Start, tmp_path: Path) -> None:
    launcher = start("save_when_asked", stderr=subprocess.DEVNULL)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1)))


# -- torchrun and the command line ----------------------------------------------------------------


def be_rank_of_torchrun(rank: int, port: int, folder: Path) -> None:
    """In a process of its own, with the variables that torchrun gives it."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ.update(meeting, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.dup2(os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    sys.argv = [str(PROGRAM), "raise_beside_a_barrier", str(folder)]
    runpy.run_path(str(PROGRAM), run_name="__main__")


def test_under_torchrun_each_rank_speaks_for_itself(ranks: RankPool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    children = [ranks.start(be_rank_of_torchrun, rank, port, tmp_path) for rank in (0, 1)]
    for child in children:
        child.join(timeout=60)
    assert children[0].exitcode not in (0, None)
    assert children[1].exitcode == 3
    assert (tmp_path / "said-1").read_text().endswith("[rank 1] memguard: no layer 7\n")
    assert "this is a bug" not in (tmp_path / "said-0").read_text()


def test_processes_are_started_by_one_of_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(folder)
    started: list[tuple[list[str], int]] = []

    def launch(command: list[str], count: int, restarts: object) -> int:
        assert restarts is None
        started.append((command, count))
        return 12

    monkeypatch.setattr(launch_module, "launch", launch)
    assert run_cli("train", path, "--nproc", 2, "optim.lr=1e-4").code == 12
    command = [
        sys.executable,
        "-m",
        "memguard",
        "train",
        str(path),
        "--nproc",
        "2",
        "optim.lr=1e-4",
    ]
    assert started == [(command, 2)]
    arguments = ("--members", folder / "documents.jsonl", "--out", folder / "out")
    assert run_cli("audit", "--model", "m", *arguments, "--nproc=2").code == 12
    assert started[1][1] == 2
    monkeypatch.setenv("LOCAL_RANK", "0")
    outcome = run_cli("train", path, "--nproc", 2)
    assert outcome.code == 2
    assert "leave it out under torchrun" in outcome.err


# -- Slurm ----------------------------------------------------------------------------------------

STUBS = {
    "scontrol": 'echo "scontrol $*" >> "$LOG"; [ "$1" != show ] || printf "n1\\nn2\\n"',
    "scancel": 'echo "scancel $*" >> "$LOG"; kill -TERM "$(cat "$LOG.srun")"',
    "srun": 'echo "srun $*" >> "$LOG"; echo $$ > "$LOG.srun"; trap "sleep 0.5; exit 1" TERM; '
    'if [ -n "${RUNS:-}" ]; then while :; do sleep 0.05; done; fi',
}


@pytest.mark.parametrize("file", SLURM, ids=lambda file: file.stem)
@pytest.mark.parametrize("is_stopped", [False, True], ids=["ends", "out of time"])
def test_slurm_files(tmp_path: Path, file: Path, is_stopped: bool) -> None:
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    log = tmp_path / "log"
    job = subprocess.Popen(
        ["bash", str(file), "optim.lr=1e-5", "name=a b"],
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "LOG": str(log),
            "SLURM_JOB_ID": "7",
            "SLURM_NNODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_CPUS_PER_TASK": "32",
            "RUNS": "yes" if is_stopped else "",
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    if is_stopped:
        wait_for(lambda: log.with_name("log.srun").exists())
        time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=30)
    assert (job.returncode, err) == (1 if is_stopped else 0, "")
    shown, run, *rest = log.read_text().splitlines()
    assert shown == "scontrol show hostnames n[1-2]"
    gpus = "4" if file.stem == "perlmutter" else "8"
    assert run.startswith("srun --cpus-per-task=32 torchrun --nnodes=2 ")
    assert f"--nproc-per-node={gpus} " in run
    assert "--rdzv-backend=c10d --rdzv-endpoint=n1:29500 --rdzv-id=7" in run
    assert run.endswith("-m memguard train scripts/slurm/stories260k.yaml optim.lr=1e-5 name=a b")
    assert rest == (["scancel --signal=TERM 7", "scontrol requeue 7"] if is_stopped else [])
    text = file.read_text()
    assert f"#SBATCH --gpus-per-node={gpus}\n" in text
    assert "#SBATCH --signal=B:TERM@300\n" in text


def test_there_is_a_slurm_file_for_each_kind_of_node() -> None:
    assert [file.stem for file in SLURM] == ["frontier", "h100", "perlmutter"]


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_rank_whose_launcher_was_killed_before_it_could_watch_ends(is_alive: bool) -> None:
    launcher = os.getpid() if is_alive else 1
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        launch_module.end_with_launcher(launcher)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == (0 if is_alive else -signal.SIGTERM)
