"""The tenth of the slow cases that each change runs."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

from case_sample import is_drawn

CASES = [f"test_some.py::test_case[{number}]" for number in range(1000)]


def draw(seed: str) -> set[str]:
    return {case for case in CASES if is_drawn(seed, case)}


def test_a_seed_draws_a_tenth() -> None:
    drawn = draw("a")
    # Three standard deviations of a binomial count of 1000 are 29.
    assert abs(len(drawn) - 100) < 29
    # Written out: sha256 of seed, line break and name; 16 of its hexadecimal digits are a number.
    for case in CASES[:100]:
        digits = hashlib.sha256(b"a\n" + case.encode()).hexdigest()[:16]
        assert (case in drawn) == (int(digits, 16) % 10 == 0)


def test_seeds_draw_every_case_in_turn() -> None:
    # A case that 200 seeds leave out has a chance of 0.9^200 = 7e-10.
    assert set().union(*(draw(f"seed {number}") for number in range(200))) == set(CASES)
    # Two seeds share a tenth of a tenth: 10 cases, three standard deviations are 9.
    assert len(draw("a") & draw("b")) < 20


def test_pytest_runs_what_is_drawn_and_tells_the_seed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('number', range(50))\n"
        "def test_case(number): pass\n"
    )
    # Two workers, of which each draws for itself. Without plugins that nothing here needs.
    command = [sys.executable, "-m", "pytest", "-v", "-p", "case_sample", "-p", "xdist", "-n", "2"]
    environment = {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, "--rootdir=.", f"--confcutdir={tmp_path}", "--tenth=a", "test_some.py"],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    ran = re.findall(r"PASSED (test_some.py::test_case\[\d+\])", done.stdout)
    assert len(ran) > 1
    assert sorted(ran) == sorted(case for case in CASES[:50] if is_drawn("a", case))
    assert "to repeat it: --tenth a" in done.stdout
