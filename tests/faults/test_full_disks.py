"""A disk that is full costs a line and nothing else: with room again the run goes on."""

import random
from pathlib import Path

import pytest
from fault_runs import RUN, Result, check_ended, read_result, said_once, say, write_settings
from full_disks import find_obstacle, work_on_full_disk
from ranks import RankPool

from memguard.records.record import TEMPORARY

# What is written first in each stage; each is then full after some more bytes.
_STAGES = {
    "prepare": f"/{TEMPORARY}prepared.",
    "first save": f"/{TEMPORARY}step-00000002.",
    "save": f"/{TEMPORARY}step-00000004.",
    "one save": f"/{TEMPORARY}step-00000004.",
    "export": f"/{TEMPORARY}model.",
    "audit": f"/audit/{TEMPORARY}re",
}
_TIMES = 5


def _list_disks() -> list[object]:
    return [
        pytest.param(
            stage,
            seed,
            id=f"{stage}-seed{seed}",
            # By default tests/cli/test_cli_full_disk.py fills one for each stage.
            marks=pytest.mark.faults,
        )
        for stage in _STAGES
        for seed in range(_TIMES)
    ]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """How the run ends where there is room."""
    obstacle = find_obstacle()
    if obstacle is not None:
        pytest.skip(f"this machine lets nobody mount a disk of their own: {obstacle}")
    folder = tmp_path_factory.mktemp("room")
    write_settings(folder)
    ended = say(folder, "train", "run.yaml")
    assert ended.code == 0, ended
    return read_result(folder / RUN)


@pytest.mark.parametrize(("stage", "seed"), _list_disks())
def test_a_full_disk_loses_nothing(
    stage: str, seed: int, expected: Result, ranks: RankPool, tmp_path: Path
) -> None:
    draw = random.Random(f"disk {stage} {seed}")
    num_bytes_left = draw.choice((0, 4096, draw.randrange(60_000)))
    write_settings(tmp_path / "settings")
    deleted = _STAGES[stage] if stage == "one save" else None
    given = (tmp_path / "settings", _STAGES[stage], num_bytes_left, deleted)
    process = ranks.start(work_on_full_disk, *given)
    process.join()
    assert process.exitcode == 0
    first, _, code = (tmp_path / "first").read_text().rpartition("\n")
    # What is left may be enough for a stage that writes little.
    if stage == "one save":
        assert code == "0", first
        assert "warning: a save failed on rank 0 (OSError (No space left on device)" in first
    elif code != "0":
        assert code == "1", first
        assert said_once(first, 1), first
        assert "the disk is full" in first.strip().splitlines()[-1], first
    else:
        assert num_bytes_left > 0, f"a full disk went unnoticed\n{first}"
    second, _, code = (tmp_path / "second").read_text().rpartition("\n")
    assert code == "0", f"{first}\n{second}"
    check_ended(tmp_path / "copy", expected)
