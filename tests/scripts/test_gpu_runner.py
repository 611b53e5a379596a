"""The runner of the GPU check: facts at once, steps that end, and what failed in the last line."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
BENCH = TESTS.parent / "scripts" / "bench"
FACT = """
import json, pathlib, sys, time
def fact(name, **values): print("FACT: " + json.dumps({"fact": name, **values}), flush=True)
facts = pathlib.Path(sys.argv[3]) / "facts.jsonl"
"""


def load(name: str) -> ModuleType:
    """Import a module of the benchmarks; one of them has the name of a module of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    return load("gpu")


def make_step(gpu: ModuleType, name: str, code: str, limit_s: float = 60) -> Any:
    return gpu.Step(name=name, limit_s=limit_s, command=(sys.executable, "-S", "-c", FACT + code))


def check(gpu: ModuleType, out: Path, *steps: Any, names: tuple[str, ...] = ()) -> int:
    code: int = gpu.main(["--out", str(out), *names], steps)
    return code


def read_facts(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "facts.jsonl").read_text().splitlines()]


def test_a_fact_is_there_before_the_step_goes_on(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
print("unfinished ", end="")
fact("first", loss=2.5)
while not facts.exists() or "first" not in facts.read_text(): time.sleep(0.01)
fact("second", ok=True)
"""
    assert check(gpu, tmp_path, make_step(gpu, "check", code)) == 0
    assert [(fact["step"], fact["fact"]) for fact in read_facts(tmp_path)] == [
        ("check", "first"),
        ("check", "second"),
    ]
    output = capsys.readouterr().out
    assert re.search(r"^ +\d+\.\d s  first: loss 2.5$", output, re.MULTILINE)
    assert output.splitlines()[-1].startswith("PASS")


def test_what_fails_is_listed_and_the_next_step_runs(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        make_step(
            gpu, "check", 'fact("plain", ok=False); fact("mesh", failed="no NCCL", ok=False)'
        ),
        make_step(gpu, "run", 'fact("before"); raise RuntimeError("the cause")'),
        make_step(gpu, "rows", 'fact("before"); time.sleep(60)', limit_s=0.3),
        make_step(gpu, "kernels", 'fact("fp8", failed="not on this card")'),
    ]
    assert check(gpu, tmp_path, *steps) == 1
    kept = [fact["step"] for fact in read_facts(tmp_path)]
    assert kept == ["check", "check", "run", "rows", "kernels"]
    output = capsys.readouterr().out
    assert "   | RuntimeError: the cause" in output
    listed = output.partition("== steps")[2]
    for problem in ("plain", "mesh: no NCCL", "exit 1", "ended at its limit of 0.3 s"):
        assert re.search(rf"^ +{problem}$", listed, re.MULTILINE), listed
    assert output.splitlines()[-1].startswith("FAIL: check, run, rows (")
    # Later facts of some steps come after those of before.
    assert check(gpu, tmp_path, *steps, names=("kernels",)) == 0
    assert [fact["step"] for fact in read_facts(tmp_path)] == [*kept, "kernels"]


def test_a_step_for_which_no_time_is_left_fails(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(gpu, tmp_path, make_step(gpu, "tests", ""), names=("--deadline-s", "15")) == 1
    assert "no time was left: scripts/gpu_check.sh tests" in capsys.readouterr().out


def test_without_a_gpu_nothing_else_runs(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [make_step(gpu, "machine", "sys.exit(3)"), make_step(gpu, "check", 'fact("one")')]
    assert check(gpu, tmp_path, *steps) == 3
    assert capsys.readouterr().err.startswith("gpu_check: torch sees no GPU")
    assert not (tmp_path / "facts.jsonl").exists()


def test_an_end_from_outside_ends_the_step_and_lists_what_was_found(tmp_path: Path) -> None:
    kill = """
import os, signal
fact("one", pid=os.getpid())
while not facts.exists(): time.sleep(0.01)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    code = f"""
import signal, sys
sys.path.insert(0, {str(BENCH)!r})
import gpu
signal.signal(signal.SIGTERM, signal.default_int_handler)
step = {FACT + kill!r}
steps = [gpu.Step(name=name, limit_s=50, command=(sys.executable, "-S", "-c", step))
         for name in ("check", "run")]
sys.exit(gpu.main(["--out", {str(tmp_path)!r}], steps))
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "ended from outside" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("FAIL: check, run (")
    (found,) = read_facts(tmp_path)
    assert not Path(f"/proc/{found['pid']}").exists()


def test_the_files_of_the_gpu_tests_are_named() -> None:
    """By the mark, or by the fixture that carries it: collecting all takes half a minute."""
    of_device = re.compile(r"^def (?:test_|pool)[^:]*\bdevice: torch\.device", re.MULTILINE)
    found = {
        str(file.relative_to(TESTS.parent))
        for file in TESTS.glob("*/test_*.py")
        for text in [file.read_text()]
        if re.search(r"pytest\.mark\.gpu$", text.replace(",", ""), re.MULTILINE)
        or of_device.search(text)
    }
    assert found == set(load("gpu_tests").FILES)
