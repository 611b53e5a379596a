"""Which rank is waited for: who says it, when, and when nothing is said."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cli_examples import read_json, write_run, write_texts
from tiny_llama import TINY_LLAMA

from memguard.runtime import stalls
from memguard.runtime.children import EXIT_REPORT_FILE, RUN_FOLDER, read_exit_report
from memguard.runtime.ended import begin_attempt
from memguard.runtime.stalls import (
    Look,
    Progress,
    StallWatch,
    StoreBoard,
    find_place,
    say,
    take_notice,
)
from memguard.workflows.common import launch

STOPPED = Path(__file__).with_name("stopped.py")
C10D = ("torch.distributed.distributed_c10d", "all_reduce")
SAVE = "in the save"
Do = Callable[[float], Look]


def waits(_: float) -> Look:
    """Be blocked in a collective of the save."""
    return Look(place="the save", stack=((1, 1),), thread_s=0.0, process_s=0.0)


def works(now_s: float) -> Look:
    """Compute."""
    return Look(place=None, stack=((2, int(now_s)),), thread_s=now_s, process_s=now_s)


def hangs(_: float) -> Look:
    """Be blocked in a file system."""
    return Look(place=None, stack=((3, 3),), thread_s=0.0, process_s=0.0)


def waits_in_step(_: float) -> Look:
    """Be blocked in a backward."""
    return Look(place="the backward", stack=((4, 4),), thread_s=0.0, process_s=0.0)


def spins_in_step(now_s: float) -> Look:
    """Wait for a GPU."""
    return Look(place="the backward", stack=((4, 4),), thread_s=now_s, process_s=now_s)


def meets_often(now_s: float) -> Look:
    """Call one collective after another, each seen at the same instruction."""
    return Look(place="the save", stack=((1, 1),), thread_s=0.1 * now_s, process_s=0.0)


@dataclass
class Ranks:
    """Ranks that look every five seconds; one that is None is stopped and does not look."""

    do: list[Do | None]
    is_answering: bool = True
    progress: Progress = field(default_factory=Progress)
    ended: list[tuple[int, int, str]] = field(default_factory=list)
    now_s: float = 0.0
    said: list[tuple[int, int, str]] = field(default_factory=list)
    """Rank, second and line."""
    posts: dict[int, str] = field(default_factory=dict)
    num_posts: int = 0
    watches: list[StallWatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.posts = dict.fromkeys(range(len(self.do)), "idle")
        self.watches = [self._make(rank) for rank in range(len(self.do))]

    def _make(self, rank: int) -> StallWatch:
        def see() -> Look:
            do = self.do[rank]
            assert do is not None
            return do(self.now_s)

        return StallWatch(
            rank=rank,
            world_size=len(self.do),
            board=self,
            say=lambda line: self.said.append((rank, int(self.now_s), line)),
            see=see,
            clock=lambda: self.now_s,
            progress=self.progress,
            end=lambda line: self.ended.append((rank, int(self.now_s), line)),
        )

    def post(self, rank: int, text: str) -> None:
        self.posts[rank] = text
        self.num_posts += 1

    def read(self) -> list[str] | None:
        return [self.posts[rank] for rank in sorted(self.posts)] if self.is_answering else None

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            for watch, do in zip(self.watches, self.do, strict=True):
                if do is not None:
                    watch.look()
            self.now_s += 5 * self.progress.pace


def test_the_line_says_which_rank_where_and_how_long() -> None:
    ranks = Ranks([waits, hangs])
    ranks.run(600)
    assert ranks.said == [
        (0, 60, f"waiting for rank 1 {SAVE} for 1 minute"),
        (0, 120, f"waiting for rank 1 {SAVE} for 2 minutes"),
        (0, 240, f"waiting for rank 1 {SAVE} for 4 minutes"),
        (0, 480, f"waiting for rank 1 {SAVE} for 8 minutes"),
    ]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_also_if_it_had_waited_itself(stopped: int) -> None:
    ranks = Ranks([waits, waits])
    ranks.run(50)
    assert ranks.said == []
    ranks.do[stopped] = None
    ranks.run(40)
    ((rank, second, line),) = ranks.said
    assert (rank, line) == (1 - stopped, f"waiting for rank {stopped} {SAVE} for 1 minute")
    assert second <= 50 + 40


def test_the_lowest_of_those_that_wait_speaks() -> None:
    ranks = Ranks([None, waits, waits, hangs, waits])
    ranks.run(70)
    assert ranks.said == [(1, 60, f"waiting for ranks 0, 3 {SAVE} for 1 minute")]
    ranks = Ranks([waits, *[hangs] * 6, waits])
    ranks.run(70)
    assert ranks.said == [(0, 60, f"waiting for ranks 1, 2, 3, 4 and 2 more {SAVE} for 1 minute")]


def test_rank_0_at_work_shows_its_own_progress() -> None:
    ranks = Ranks([works, waits])
    ranks.run(300)
    assert ranks.said == []
    ranks.do[0] = hangs
    ranks.run(40)
    assert [line for *_, line in ranks.said] == [f"waiting for rank 0 {SAVE} for 5 minutes"]


def test_another_rank_at_work_is_named() -> None:
    ranks = Ranks([waits, works])
    ranks.run(70)
    assert len(ranks.said) == 1


def test_where_the_store_does_not_answer_its_rank_is_named_once() -> None:
    ranks = Ranks([None, waits, waits], is_answering=False)
    ranks.run(70)
    assert ranks.said == [(1, 60, f"waiting for rank 0 {SAVE} for 1 minute")]


@pytest.mark.parametrize(
    ("do", "silent", "limit_s", "spins", "ended_s"),
    [
        (waits_in_step, None, 600, False, 600),
        (waits_in_step, hangs, 600, False, 600),
        (waits_in_step, None, 12, False, 12),
        (spins_in_step, None, 600, True, 600),
        (waits, None, 600, False, 600),
        # It works, or all are equally slow.
        (waits_in_step, works, 600, False, None),
        (waits_in_step, waits_in_step, 600, False, None),
        (spins_in_step, spins_in_step, 600, True, None),
        (spins_in_step, None, 600, False, None),
    ],
)
def test_after_the_limit_a_rank_that_waits_ends(
    monkeypatch: pytest.MonkeyPatch,
    do: Do,
    silent: Do | None,
    limit_s: float,
    spins: bool,
    ended_s: int | None,
) -> None:
    dumps: list[float] = []
    monkeypatch.setattr("faulthandler.dump_traceback_later", dumps.append)
    ranks = Ranks([do, do, silent, do], progress=Progress(7, limit_s, spins))
    ranks.run(limit_s + limit_s / 10)
    place = "the save" if do is waits else "the backward"
    limit = f"{limit_s / 60:g} minutes ('train.stall_minutes')"
    line = f"rank 2 stalled in {place} of step 7: no sign within {limit}"
    assert ranks.ended[:1] == ([] if ended_s is None else [(0, ended_s, line)])
    assert set(dumps) == {limit_s}


def test_the_first_step_and_other_places_have_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda _: None)
    ranks = Ranks([waits, None], progress=Progress(0, 12))
    ranks.run(100)
    assert ranks.ended == []

    def prepares(_: float) -> Look:
        return Look(place="the preparation", stack=((1, 1),), thread_s=0.0, process_s=0.0)

    ranks = Ranks([prepares, None], progress=Progress(3, 12))
    ranks.run(100)
    assert ranks.ended == []


def test_a_store_that_stops_in_a_step_is_the_rank_that_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda _: None)
    ranks = Ranks(
        [None, waits_in_step, waits_in_step], is_answering=False, progress=Progress(2, 12)
    )
    ranks.run(14)
    assert [line.partition(":")[0] for *_, line in ranks.ended[:1]] == [
        "rank 0 stalled in the backward of step 2"
    ]
    assert {rank for rank, *_ in ranks.ended} == {1}


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        ([("torch._ops", "__call__"), ("memguard.train.step", "_sum_loss")], "the forward"),
        ([("torch.autograd.graph", "run"), ("memguard.train.step", "_backward"),
          ("memguard.train.step", "run")], "the backward"),
        ([("memguard.train.step", "run")], "the update"),
        ([("threading", "wait"), ("memguard.train.prefetch", "peek"),
          ("memguard.train.step", "run")], None),
        ([("memguard.train.trainer", "_timed_step")], None),
    ],
)  # fmt: skip
def test_phases_of_a_step(calls: list[tuple[str, str]], place: str | None) -> None:
    assert find_place(calls, in_step=True) == place


@pytest.mark.parametrize("do", [works, meets_often, hangs])
def test_nothing_is_posted_by_a_rank_that_does_not_wait(do: Do) -> None:
    ranks = Ranks([hangs, do])
    ranks.run(300)
    assert (ranks.said, ranks.num_posts) == ([], 0)


def test_a_new_wait_is_counted_from_its_start() -> None:
    ranks = Ranks([waits, hangs])
    ranks.run(70)
    ranks.do[0] = works
    ranks.run(10)
    ranks.do[0] = waits
    ranks.run(70)
    assert [(second, line.split(" for ")[-1]) for _, second, line in ranks.said] == [
        (60, "1 minute"),
        (140, "1 minute"),
    ]


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        ([C10D, ("memguard.runtime.processes", "_tell"),
          ("memguard.train.checkpoint", "save_checkpoint")], "the save"),
        ([C10D, ("memguard.train.resume", "wait"),
          ("memguard.workflows.training.train", "_train")], "the save"),
        ([C10D, ("memguard.train.checkpoint", "find_checkpoint")], "the loading of a checkpoint"),
        ([C10D, ("memguard.runtime.processes", "only_on_main"),
          ("memguard.workflows.training.data", "prepare_on_ranks")], "the preparation"),
        ([C10D, ("memguard.hf.export", "export_stored"),
          ("memguard.workflows.training.train", "_export")], "the export"),
        ([C10D, ("memguard.hf.load", "load_assembled")], "the loading of the model"),
        ([C10D, ("memguard.audit.decoding", "agree")], "the audit"),
        ([C10D, ("memguard.train.step", "run")], None),
        ([C10D, ("memguard.train.step_of_another", "run")], None),
        ([("threading", "wait"), ("memguard.train.checkpoint", "save_checkpoint")], None),
        ([], None),
    ],
)  # fmt: skip
def test_places(calls: list[tuple[str, str]], place: str | None) -> None:
    assert find_place(calls) == place


def test_every_place_exists() -> None:
    import importlib

    for module, function, _ in (*stalls._PLACES, *stalls._PHASES):
        found = importlib.import_module(module)
        owner = getattr(found, "TrainStep", found)
        assert not function or hasattr(owner, function), (module, function)


def test_a_thread_is_looked_at() -> None:
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait)
    thread.start()
    assert thread.ident is not None
    first, second = stalls.look_at(thread.ident), stalls.look_at(thread.ident)
    may_end.set()
    thread.join()
    assert first.place is None
    assert second.thread_s - first.thread_s < 0.1
    assert first.stack
    assert stalls.look_at(threading.get_ident()).stack != first.stack


class Store:
    """A store whose process may be stopped."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.answers = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.answers.wait()
        return [self.values[key] for key in keys]


def test_a_store_that_does_not_answer_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    board = StoreBoard(store, 2)
    monkeypatch.setattr(stalls, "_ANSWER_WITHIN_S", 0.01)
    board.post(0, "waits 1")
    board.post(1, "idle")
    assert board.read() is None
    board.post(0, "waits 2")  # It would wait for the read.
    assert store.values["memguard/stalls/0"] == b"waits 1"
    store.answers.set()
    assert board._reader is not None
    board._reader.join()
    monkeypatch.setattr(stalls, "_ANSWER_WITHIN_S", 10.0)
    assert board.read() == ["waits 1", "idle"]


# -- the line --------------------------------------------------------------------------------------


def test_a_rank_of_nproc_speaks_through_the_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_file = tmp_path / "1.json"
    monkeypatch.setenv("MEMGUARD_EXIT_REPORT", str(report_file))
    say(1, "waiting for rank 0")
    rank: Any = launch._Rank(1, subprocess.Popen(["true"]), report_file, None)
    rank.process.wait()
    assert capsys.readouterr().err == ""
    launch._show_notices([rank])
    launch._show_notices([rank])
    assert capsys.readouterr().err == "waiting for rank 0\n"
    assert take_notice(report_file) is None
    say(0, "waiting for rank 1")
    assert capsys.readouterr().err == "waiting for rank 1\n"


def test_a_rank_of_torchrun_speaks_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MEMGUARD_EXIT_REPORT", raising=False)
    say(3, "waiting for rank 0")
    assert capsys.readouterr().err == "[rank 3] waiting for rank 0\n"


def test_an_end_for_a_stall_may_be_followed_by_a_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin_attempt(tmp_path, is_restart=False)
    monkeypatch.setenv(RUN_FOLDER, str(tmp_path))
    monkeypatch.setenv(EXIT_REPORT_FILE, str(tmp_path / "1.json"))
    monkeypatch.setattr(threading, "Timer", mock.Mock())
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit, match="1"):
        stalls._end("rank 2 stalled")
    report = read_exit_report(tmp_path / "1.json")
    assert report is not None
    assert report.text == "memguard: rank 2 stalled"
    ended = read_json(tmp_path / "ended.json")
    assert (ended["exit_code"], ended["error"]) == (1, "Stalled")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts ranks of which one stops itself; kills all of them at the end."""
    with started(tmp_path) as start:
        yield start


@contextmanager
def started(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    launchers: list[subprocess.Popen[str]] = []
    write_texts(tmp_path / "documents.jsonl", 27, words=30)
    scratch = {"scratch": {"config": TINY_LLAMA, "vocab_size": 300}, "path": None}
    train = {"checkpoint_every_steps": 3, "epochs": 8, "stall_minutes": 0.2}
    write_run(tmp_path, model=scratch, train=train)
    root = str(STOPPED.parents[2])

    def run(
        where: str, rank: int, num_ranks: int = 2, restarts: int = 0
    ) -> "subprocess.Popen[str]":
        command = [sys.executable, str(STOPPED), "launch", where, str(rank), "train", "run.yaml"]
        launchers.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env={
                    **os.environ,
                    "PYTHONPATH": root,
                    "OMP_NUM_THREADS": "1",
                    "STOPPED_RANKS": str(num_ranks),
                    "STOPPED_RESTARTS": str(restarts),
                },
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return launchers[-1]

    yield run
    for launcher in launchers:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()


@pytest.mark.faults
def test_a_rank_that_is_stopped_is_named(
    start: Callable[..., "subprocess.Popen[str]"],
) -> None:
    launcher = start("prepare", 0)
    assert launcher.stderr is not None
    lines = iter(launcher.stderr)
    next(line for line in lines if line == "rank 0 stops\n")
    said = next(line for line in lines if line.startswith("waiting for"))
    assert re.fullmatch("waiting for rank 0 in the preparation for 1 minute\n", said)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hash of the weights of the run of four ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with started(folder) as start:
        _, errors = (launcher := start("never", 0, 4)).communicate(timeout=200)
    assert launcher.returncode == 0, errors
    return hash_weights(folder)


def hash_weights(folder: Path) -> str:
    weights = folder / "runs" / "run" / "model" / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()


@pytest.mark.faults
@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize(
    ("where", "rank", "place"),
    [
        ("forward", 2, "(forward|backward|update)"),
        ("backward", 0, "(backward|update)"),
        # Training goes on while the stopped rank should save.
        ("save", 1, "(forward|backward|update|save)"),
    ],
)
def test_a_rank_that_stops_in_training_ends_the_run(
    start: Callable[..., "subprocess.Popen[str]"],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    where: str,
    rank: int,
    place: str,
    restarts: int,
) -> None:
    launcher = start(where, rank, 4, restarts)
    assert launcher.stderr is not None
    next(line for line in launcher.stderr if line == f"rank {rank} stops\n")
    stopped_s, said = time.monotonic(), ""
    for line in launcher.stderr:
        said += line
        if "stalled" in line:
            break
    assert time.monotonic() - stopped_s < 30, said
    wanted = f"rank {rank} stalled in the {place} of step [234]: no sign within 0.2 minutes"
    assert re.search(wanted, said), said
    said += launcher.stderr.read()
    if not restarts:
        assert launcher.wait() == 1, said
        return
    assert "memguard: starting again\n" in said
    assert launcher.wait() == 0, said
    assert hash_weights(tmp_path) == request.getfixturevalue("undisturbed")


@pytest.mark.faults
def test_a_rank_that_hangs_shows_where(start: Callable[..., "subprocess.Popen[str]"]) -> None:
    launcher = start("data", 1)
    _, said = launcher.communicate(timeout=200)
    assert launcher.returncode == 1, said
    assert re.search("rank 1 stalled in the (forward|backward|update) of step 3", said), said
    assert re.search(r"rank 1: Timeout \(0:00:12\)!\nThread (.*\n)*.*stopped.py", said), said


@pytest.mark.faults
@pytest.mark.parametrize("where", ["slow", "late"])
def test_slow_ranks_are_not_ended(
    start: Callable[..., "subprocess.Popen[str]"], where: str
) -> None:
    launcher = start(where, 0, 4)
    _, errors = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, errors
