"""What the tests cost is measured where it arises, and judged by the budget."""

import json
import os
import subprocess
import sys
from pathlib import Path

import budget
import pytest
from budget import Cost

ALLOWED = {
    "a/test_small.py": Cost(units=1.0, processes=2, steps=8),
    "a/test_large.py": Cost(units=40.0, processes=50, steps=40),
    "conftest.py::ranks": Cost(units=9.0, processes=1),
}
SUITE = """
import subprocess, sys, time
import torch

def burn(seconds):
    start = time.process_time()
    while time.process_time() - start < seconds: pass

def step(seconds):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    for _ in range(3): optimizer.step()
    burn(seconds)

def test_here(): step(0.3)
def test_ranks(pool): pool(step, 2, 0.4)
def test_killed(pool):
    process = pool.start(burn, 60.0)
    time.sleep(1.0)
    process.kill()
    process.join()
def test_child():
    code = "import time\\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
"""
CONFTEST = """
import os, pytest, ranks
from ranks import RankPool
pytest_plugins = ["costs"]
ranks._PRELOADED[:] = ["torch.distributed"]

@pytest.fixture(scope="session")
def pool():
    pool = RankPool()
    pool.start(os.getpid).join()
    return pool
"""


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {"PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "--rootdir=.", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.long
def test_a_session_is_measured_and_held_to_its_budget(tmp_path: Path) -> None:
    for name in ("budget.py", "costs.py", "step_count.py", "ranks.py", "tiers.py"):
        (tmp_path / name).symlink_to(Path(__file__).with_name(name))
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -m 'not slow'\nmarkers = slow")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(SUITE)
    (tmp_path / "test_new.py").write_text("def test_new(): pass")
    entry = {"units": 100.0, "processes": 3, "steps": 8}
    (tmp_path / "budget.json").write_text(json.dumps({"test_some.py": entry}))
    done = run(tmp_path, "-n1", "--costs", "--budget")
    rows = [line.split() for line in done.stdout.splitlines()]
    printed = {row[4]: row[:4] for row in rows if len(row) == 5}
    units, *counts = printed["test_some.py"]
    # Two ranks, one process that is killed, one child; three steps here and in each rank.
    assert counts == ["4", "9", "4"]
    # 0.3 here, 0.4 in each rank, 0.5 in the child and some before the kill, in units of a second
    # which a fast machine may halve and a slow one double.
    assert 0.8 < float(units) < 8
    assert printed["conftest.py::pool"][1] == "1"
    assert done.returncode == 1
    assert "tests/budget.json: test_some.py: 4 processes, 3 allowed" in done.stdout
    assert "tests/budget.json: test_some.py: 9 steps, 8 allowed" in done.stdout
    assert "tests/budget.json: test_new.py has no entry" in done.stdout
    assert "5 passed" in done.stdout
    assert "failed" not in done.stdout


def test_an_existing_test_may_not_become_dearer() -> None:
    def problems(**costs: Cost) -> list[str]:
        named = {f"a/test_{name}.py": cost for name, cost in costs.items()}
        return budget.find_excesses(named, ALLOWED, whole=False)

    assert not problems(small=ALLOWED["a/test_small.py"], large=ALLOWED["a/test_large.py"])
    # 5 units where that is more than 40 %, else 40 %.
    assert not problems(small=Cost(units=5.9, processes=2, steps=8))
    assert "6.1 units" in problems(small=Cost(units=6.1, processes=2, steps=8))[0]
    assert not problems(large=Cost(units=55.9, processes=50))
    assert "60.0 units" in problems(large=Cost(units=60.0, processes=50))[0]
    assert "3 processes, 2 allowed" in problems(small=Cost(processes=3, steps=8))[0]
    assert "9 steps, 8 allowed" in problems(small=Cost(processes=2, steps=9))[0]
    assert not problems(large=Cost(units=40.0, processes=50, steps=42))
    assert "43 steps, 42 allowed" in problems(large=Cost(processes=50, steps=43))[0]
    assert not problems(small=Cost())
    new, advice = problems(new=Cost())
    assert "a/test_new.py has no entry" in new
    assert "--accept-costs FILE" in advice


def test_the_sum_is_judged_where_every_file_ran() -> None:
    dearer = {name: Cost(c.units * 1.3, c.processes, c.steps) for name, c in ALLOWED.items()}
    assert not budget.find_excesses(dearer, ALLOWED, whole=False)
    assert "all: 65 units, 50 expected" in budget.find_excesses(dearer, ALLOWED, whole=True)[0]
    many = {f"a/test_{number}.py": Cost(units=1.0) for number in range(int(budget.MOST_UNITS) + 1)}
    assert not budget.find_excesses(many, many, whole=False)
    assert (
        "five minutes are 240: mark files slow" in budget.find_excesses(many, many, whole=True)[0]
    )


def test_only_named_entries_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "PATH", tmp_path / "budget.json")
    (tmp_path / "conftest.py").touch()
    for name in ("test_one.py", "test_two.py", "test_old.py", "test_slow.py"):
        (tmp_path / name).touch()
    before = {"test_one.py": Cost(2.0, 1, 1), "test_two.py": Cost(3.0, 2, 2), "test_old.py": Cost()}
    budget.accept({**before, "conftest.py::ranks": Cost(9.0, 1), "test_slow.py": Cost()})
    (tmp_path / "test_old.py").unlink()
    (tmp_path / "test_slow.py").write_text("pytestmark = pytest.mark.long\n")
    lines = budget.accept(
        {"test_one.py": Cost(9.04, 3, 0, tests=7), "conftest.py::ranks": Cost(11.0, 1)}
    )
    assert budget.read() == {
        "test_one.py": Cost(9.0, 3, 0),
        "test_two.py": before["test_two.py"],
        # Within what it may cost, so as it was.
        "conftest.py::ranks": Cost(9.0, 1),
    }
    assert len(lines) == 3


def test_the_budget_of_this_suite_names_files_that_exist() -> None:
    root = Path(__file__).parent
    names = list(json.loads(budget.PATH.read_text()))
    assert names == sorted(names)
    assert [name for name in names if not (root / name.split("::")[0]).is_file()] == []
