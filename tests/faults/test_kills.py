"""A run that is killed, once or several times, ends as if nothing had happened."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_runs import RUN, Result, Variant, check_ended, read_result, start_command, write_settings
from kills import (
    SAVE_STAGES,
    Undisturbed,
    draw_killed_run,
    kill_at_stage,
    kill_once,
    measure,
    wait_until_gone,
)
from ranks import RankPool

_SAMPLE = (3,)


def _choose_variant(seed: int) -> Variant:
    return "tuned" if seed % 3 == 1 else "scratch"


def _list_runs() -> list[object]:
    processes = [1] * 70 + [2] * 20 + [4] * 10
    return [
        pytest.param(
            seed,
            count,
            id=f"seed{seed}-on{count}",
            marks=() if seed in _SAMPLE else pytest.mark.faults,
        )
        for seed, count in enumerate(processes)
    ]


def _train(num_processes: int) -> tuple[object, ...]:
    return ("train", "run.yaml", *(("--nproc", num_processes) if num_processes > 1 else ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    usual: Undisturbed
    result: Result


@pytest.fixture(scope="module")
def reference(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, Variant], Reference]:
    """The run that nothing happens to, on so many processes."""
    made: dict[tuple[int, Variant], Reference] = {}

    def make(num_processes: int, variant: Variant) -> Reference:
        if (num_processes, variant) not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            write_settings(folder, variant)
            usual = measure(ranks, folder, _train(num_processes))
            result = read_result(folder / RUN)
            check_ended(folder, result)
            made[num_processes, variant] = Reference(usual=usual, result=result)
        return made[num_processes, variant]

    return make


@pytest.mark.parametrize(("seed", "num_processes"), _list_runs())
def test_a_killed_run_ends_as_if_nothing_had_happened(
    seed: int,
    num_processes: int,
    ranks: RankPool,
    reference: Callable[[int, Variant], Reference],
    tmp_path: Path,
) -> None:
    variant = _choose_variant(seed)
    expected = reference(num_processes, variant)
    write_settings(tmp_path, variant)
    plan = draw_killed_run(seed, num_processes)
    command = _train(num_processes)
    for kill in plan.kills:
        kill_once(ranks, tmp_path, command, kill, expected.usual)
    log = tmp_path / "last"
    last = start_command(ranks, tmp_path, log, command)
    last.join()
    assert last.exitcode == 0, f"{plan}\n{log.read_text()}"
    check_ended(tmp_path, expected.result)


@pytest.mark.parametrize(
    ("stage", "num_processes", "victim"),
    [
        pytest.param(
            stage,
            count,
            victim,
            marks=pytest.mark.faults,
        )
        for stage in SAVE_STAGES
        for count, victim in ((1, "all"), (2, "all"), (2, "self"), (4, "self"))
    ],
)
def test_a_run_killed_at_a_stage_of_a_background_save_ends_alike(
    stage: str,
    num_processes: int,
    victim: str,
    ranks: RankPool,
    reference: Callable[[int, Variant], Reference],
    tmp_path: Path,
) -> None:
    expected = reference(num_processes, "scratch")
    write_settings(tmp_path)
    command, log = _train(num_processes), tmp_path / "log"
    killed = start_command(ranks, tmp_path, log, command, kill_at_stage, stage, victim)
    killed.join()
    wait_until_gone(killed)
    assert killed.exitcode != 0
    last = start_command(ranks, tmp_path, log, command)
    last.join()
    assert last.exitcode == 0, log.read_text()
    assert "resuming after step" in log.read_text()
    check_ended(tmp_path, expected.result)
