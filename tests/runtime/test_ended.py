"""RUN/ended.json, and whether a run is started again after it."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from memguard.errors import MemguardError, OtherRankFailed
from memguard.records.run_files import name_checkpoint
from memguard.runtime import Runtime, ended
from memguard.runtime.children import EXIT_REPORT_FILE, ExitReport
from memguard.runtime.ended import (
    Ended,
    attempted,
    begin_attempt,
    close_attempt,
    may_follow,
    read_why,
)

ALONE = Runtime()


def read(folder: Path) -> Ended:
    return Ended.model_validate_json((folder / "ended.json").read_bytes())


def checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints" / name_checkpoint(step)).mkdir(parents=True)


def close(folder: Path, code: int, kind: str = "SomeError", step: int | None = None) -> None:
    close_attempt(folder, ExitReport(code=code, kind=kind, text="", step=step))


def fail(folder: Path, code: int = 1, step: int | None = None, new: int | None = None) -> Ended:
    """Have one more attempt that fails, perhaps after a new checkpoint."""
    begin_attempt(folder, is_restart=True)
    if new is not None:
        checkpoint(folder, new)
    close(folder, code, step=step)
    return read(folder)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"exit_code": 1}, None),
        ({"exit_code": 4, "diverged": (6,)}, None),
        ({"exit_code": 4, "diverged": (5, 6)}, None),
        ({"exit_code": 4, "diverged": (6, 5, 6)}, "diverged at step 6 again, restarted from step"),
        ({"exit_code": 1, "diverged": (6, 6)}, None),
        ({"exit_code": 1, "num_fruitless": 1}, None),
        ({"exit_code": 1, "num_fruitless": 2}, "2 attempts in a row made no checkpoint after step"),
        ({"exit_code": None, "num_fruitless": 2}, "2 attempts in a row"),
        ({"exit_code": 1, "attempt": 3}, None),
        ({"exit_code": 1, "attempt": 4}, "it was started again 3 times"),
        ({"exit_code": 0}, "it has ended"),
        ({"exit_code": 2}, "correct its settings"),
        ({"exit_code": 3}, "correct its inputs"),
        ({"exit_code": 130}, "it was stopped"),
        ({"exit_code": 143}, "it was stopped"),
    ],
)
def test_the_rule(changes: dict[str, Any], why: str | None) -> None:
    found = Ended(at_s=0.0, newest_checkpoint=4).model_copy(update=changes).explain_end(3)
    assert found is None if why is None else found is not None and why in found


def test_attempts_are_counted_until_one_makes_a_checkpoint(tmp_path: Path) -> None:
    assert fail(tmp_path, new=4).num_fruitless == 0
    assert [fail(tmp_path).num_fruitless, fail(tmp_path).num_fruitless] == [1, 2]
    assert read(tmp_path).attempt == 3
    assert fail(tmp_path, new=6).num_fruitless == 0
    assert read(tmp_path).newest_checkpoint == 6
    # A person's start, and one after a stop, begin a row of their own.
    begin_attempt(tmp_path, is_restart=True)
    assert begin_attempt(tmp_path, is_restart=False).why == "killed"
    close(tmp_path, 1)
    begun = begin_attempt(tmp_path, is_restart=False)
    assert (begun.attempt, begun.why) == (1, "exit code 1, SomeError")
    assert fail(tmp_path, 143).attempt == 2
    assert (fail(tmp_path).attempt, read(tmp_path).num_fruitless) == (1, 1)


def test_a_divergence_is_known_after_other_failures(tmp_path: Path) -> None:
    fail(tmp_path, 4, step=6, new=2)
    fail(tmp_path, 1, new=4)
    assert fail(tmp_path, 4, step=6, new=5).explain_end() is not None


def test_the_first_rank_tells_how_it_ended(tmp_path: Path) -> None:
    begin_attempt(tmp_path, is_restart=False)
    with pytest.raises(ZeroDivisionError), attempted(tmp_path, ALONE):
        raise ZeroDivisionError
    close(tmp_path, 3, "DataError")
    close(tmp_path, 1, "RuntimeError")
    assert (read(tmp_path).exit_code, read(tmp_path).error) == (3, "DataError")


def test_an_attempt_that_ends_well_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with attempted(tmp_path, ALONE):
        assert (read(tmp_path).exit_code, read_why(tmp_path)) == (None, "first start")
        assert os.environ[ended.RUN_FOLDER] == str(tmp_path)
    assert ended.RUN_FOLDER not in os.environ
    assert (read(tmp_path).exit_code, read(tmp_path).explain_end()) == (0, "it has ended")
    # A rank that was killed while it left: what is finished is skipped.
    assert may_follow(tmp_path, 3)
    assert (read(tmp_path).exit_code, read(tmp_path).num_fruitless) == (1, 1)
    # The launcher has begun the next one.
    monkeypatch.setenv(EXIT_REPORT_FILE, "file")
    begin_attempt(tmp_path, is_restart=True)
    with attempted(tmp_path, ALONE):
        assert (read(tmp_path).attempt, read_why(tmp_path)) == (2, "exit code 1, no message")
    assert capsys.readouterr().err == "memguard: starting again\n"


def test_what_did_not_begin_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not may_follow(tmp_path, 3)
    begin_attempt(tmp_path, is_restart=False)
    monkeypatch.setattr(ended, "read_start_s", lambda _: time.time())
    assert not may_follow(tmp_path, 3)
    # It may be one that goes on.
    assert read(tmp_path).exit_code is None
    monkeypatch.undo()
    assert may_follow(tmp_path, 3, 77)
    assert (read(tmp_path).exit_code, read(tmp_path).error) == (77, "no message")
    refused = "memguard: not started again: it had not begun"
    assert capsys.readouterr().err.splitlines() == [*[refused] * 2, "memguard: starting again"]


@pytest.mark.parametrize("code", [1, 2, 3, 130, 143, None])
@pytest.mark.parametrize("rank", [0, 1])
def test_torchruns_workers_end_after_a_final_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, rank: int
) -> None:
    begin_attempt(tmp_path, is_restart=False)
    if code is not None:
        close(tmp_path, code)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("RANK", str(rank))
    ended.refuse_restart(tmp_path)  # torchrun has not started it.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    if code in (1, None):
        ended.refuse_restart(tmp_path)
        return
    with pytest.raises(MemguardError) as refused:
        ended.refuse_restart(tmp_path)
    assert refused.value.exit_code == code
    assert isinstance(refused.value, OtherRankFailed) == (rank > 0)
    # Another torchrun, after a person has corrected it.
    monkeypatch.setattr(ended, "read_start_s", lambda _: time.time())
    ended.refuse_restart(tmp_path)


def test_a_requeued_job_goes_on_with_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(tmp_path)
    monkeypatch.setattr(ended, "read_start_s", lambda _: time.time())
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(ZeroDivisionError), attempted(tmp_path, ALONE):
        raise ZeroDivisionError
    assert (read(tmp_path).attempt, read(tmp_path).num_fruitless) == (2, 1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    with attempted(tmp_path, ALONE):
        assert read(tmp_path).attempt == 1


def test_a_process_knows_when_it_was_started() -> None:
    assert 0 <= time.time() - ended.read_start_s(os.getpid()) < 3600 * 24
    assert ended.read_start_s(os.getppid()) <= ended.read_start_s(os.getpid()) + 0.1
