"""Whatever happens to a file of a run, it is told, and nothing else comes out than before."""

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from damages import Hurt, draw_hurt, hurt
from fault_runs import (
    RUN,
    Result,
    Variant,
    check_ended,
    read_result,
    said_once,
    say,
    write_settings,
)

from memguard.train.trainer import Trainer

pytestmark = pytest.mark.slow


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is damaged, and how often."""

    variant: Variant
    has_ended: bool
    num_faults: int


_CASES = {
    "half": Case(variant="scratch", has_ended=False, num_faults=60),
    "finished": Case(variant="scratch", has_ended=True, num_faults=60),
    "tuned-half": Case(variant="tuned", has_ended=False, num_faults=40),
    "tuned-finished": Case(variant="tuned", has_ended=True, num_faults=40),
    "private-half": Case(variant="private", has_ended=False, num_faults=30),
}
_SAMPLE = {("half", 0), ("half", 9), ("finished", 2), ("finished", 21)}
# Settings are the user's: the one file that nothing else tells how to make again.
_NOT_MADE_AGAIN = ("config.yaml",)


def _list_faults() -> list[object]:
    return [
        pytest.param(
            name,
            seed,
            id=f"{name}-seed{seed}",
            marks=() if (name, seed) in _SAMPLE else pytest.mark.faults,
        )
        for name, case in _CASES.items()
        for seed in range(case.num_faults)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Folders to be copied, and how a run of their settings ends."""

    half: Path
    finished: Path
    result: Result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], Runs]:
    """One run that was stopped after three of its steps, and the same when it had ended."""
    made: dict[Variant, Runs] = {}

    def make(variant: Variant) -> Runs:
        if variant not in made:
            made[variant] = _make_runs(tmp_path_factory.mktemp(variant), variant)
        return made[variant]

    return make


def _make_runs(folder: Path, variant: Variant) -> Runs:
    half, finished = folder / "half", folder / "finished"
    write_settings(half, variant)
    take_step = Trainer._timed_step

    def stop_at_three(trainer: Trainer) -> object:
        if trainer.totals.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return take_step(trainer)

    with mock.patch.object(Trainer, "_timed_step", stop_at_three):
        stopped = say(half, "train", "run.yaml")
    assert stopped.code == 143, stopped
    assert sorted(os.listdir(half / RUN / "checkpoints")) == ["step-00000002", "step-00000003"]
    whole = say(half, "verify", RUN)
    assert whole.code == 0, whole
    shutil.copytree(half, finished)
    ended = say(finished, "train", "run.yaml")
    assert ended.code == 0, ended
    result = read_result(finished / RUN)
    check_ended(finished, result)
    return Runs(half=half, finished=finished, result=result)


@pytest.mark.parametrize(("name", "seed"), _list_faults())
def test_damage_is_told_and_changes_nothing(
    name: str, seed: int, runs: Callable[[Variant], Runs], tmp_path: Path
) -> None:
    case = _CASES[name]
    made = runs(case.variant)
    before = made.finished if case.has_ended else made.half
    harm = draw_hurt(seed, before / RUN)
    for command in ("audit", "train"):
        folder = tmp_path / command
        shutil.copytree(before, folder)
        hurt(folder / RUN, harm)
        if command == "audit":
            _check_told(folder, case, harm)
            _check_audit(folder, case, harm, made.result)
        else:
            _check_train(folder, case, harm, made.result)


def _check_told(folder: Path, case: Case, harm: Hurt) -> None:
    """`memguard verify` names what is damaged."""
    verified = say(folder, "verify", RUN)
    assert "Traceback" not in verified.err, f"{harm}\n{verified.err}"
    if not _is_covered(harm, case):
        assert verified.code == 0, f"{harm}\n{verified}"
        return
    assert verified.code == 3, f"{harm}\n{verified}"
    assert Path(harm.file).name in verified.out + verified.err, f"{harm}\n{verified}"


def _is_covered(harm: Hurt, case: Case) -> bool:
    """Return whether something still depends on what the file was."""
    if harm.file.startswith("reference_nll"):
        # Without its record it was not measured yet, and after training nothing needs it.
        return not case.has_ended and (harm.file.endswith(".npy") or harm.kind != "lose")
    # Versions and hardware, and how the last attempt ended, for the reader.
    return harm.file not in ("environment.json", "ended.json")


def _check_audit(folder: Path, case: Case, harm: Hurt, expected: Result) -> None:
    """`memguard audit` refuses, or measures what it measured before."""
    audited = say(folder, "audit", RUN)
    if audited.code != 0:
        assert said_once(audited.err, audited.code), f"{harm}\n{audited.err}"
        return
    assert case.has_ended, f"{harm}\n{audited}"
    found = read_result(folder / RUN)
    assert (found.rows, found.report) == (expected.rows, expected.report), f"{harm}\n{audited.err}"


def _check_train(folder: Path, case: Case, harm: Hurt, expected: Result) -> None:
    """`memguard train` makes again what is damaged, or refuses where it cannot."""
    trained = say(folder, "train", "run.yaml")
    if trained.code != 0:
        assert said_once(trained.err, trained.code), f"{harm}\n{trained.err}"
        assert harm.file in _NOT_MADE_AGAIN, f"refused: {harm}\n{trained.err}"
        return
    assert "Traceback" not in trained.err, f"{harm}\n{trained.err}"
    _delete_needless_save(folder, harm)
    try:
        check_ended(folder, expected)
    except AssertionError as error:
        error.add_note(f"{harm}\n{trained.err}")
        raise


def _delete_needless_save(folder: Path, harm: Hurt) -> None:
    """Do as `memguard verify` says of a save that is damaged, when training had ended before."""
    verified = say(folder, "verify", RUN)
    if verified.code == 0 or not harm.file.startswith("checkpoints/"):
        return
    assert harm.file in verified.out
    assert "delete the damaged checkpoint folders" in verified.out
    shutil.rmtree((folder / RUN / harm.file).parent)
