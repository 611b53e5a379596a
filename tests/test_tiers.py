"""What the default tier collects and how it is divided, on a project of a few files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import WITH_SLOW, may_have_default_tests

SETTINGS = """
[pytest]
addopts = -m 'not mesh and not long and not faults and not gpu and (quick or not slow)'
markers =
    slow
    quick
    long
    mesh
    faults
    gpu
"""
RANKS = "from os import getpid\nRankPool = 0\ndef test_it(): print('worker', getpid())\n"
SLOW = "import pytest\npytestmark = pytest.mark.slow\n"
FILES = {
    "test_small.py": "def test_it(): pass\n",
    "test_whole.py": SLOW + "raise AssertionError('nobody needs this')\n",
    "test_partly.py": SLOW + "@pytest.mark.quick\ndef test_it(): pass\ndef test_not(): pass\n",
    "test_long.py": "import pytest\n@pytest.mark.long\ndef test_it(): assert False\n",
    "test_ranks_1.py": RANKS,
    "test_ranks_2.py": RANKS,
    "test_ranks_3.py": RANKS,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(project: Path, *arguments: str) -> str:
    plugins = ["-p", "xdist", "-p", "tiers", "-p", "case_sample", "-p", "no:cacheprovider"]
    environment = {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--rootdir=.", *arguments],
        cwd=project,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_the_default_tier_imports_no_file_without_a_test_of_it(project: Path) -> None:
    out = run(project, "-n", "2", "--dist", "loadfile", "-v", "-rA")
    ran = set(re.findall(r"PASSED (test_\w+\.py::\w+)", out))
    assert ran == {
        *("test_small.py::test_it", "test_partly.py::test_it"),
        *(f"test_ranks_{number}.py::test_it" for number in (1, 2, 3)),
    }
    assert "failed" not in out
    assert "error" not in out
    assert len(set(re.findall(r"worker (\d+)", out))) == 1, "one server of ranks"


@pytest.mark.slow
def test_what_is_named_or_chosen_by_marks_is_imported(project: Path) -> None:
    assert "nobody needs this" in run(project, "test_whole.py")
    assert "nobody needs this" in run(project, "-m", "slow")
    assert "add -m slow, or -m ''" in run(project, "test_partly.py::test_not")
    assert "2 passed" in run(project, "-m", WITH_SLOW, "test_partly.py")


def test_a_third_of_the_files_is_drawn_whole(project: Path) -> None:
    for number in range(30):
        text = "def test_a(): pass\ndef test_b(): pass\n"
        (project / f"test_more_{number}.py").write_text(text)
    (project / "test_whole.py").unlink()
    out = run(project, "--third", "a", "-v")
    ran = re.findall(r"(test_more_\d+)\.py::test_[ab] PASSED", out)
    assert 4 <= len(set(ran)) <= 17
    assert len(ran) == 2 * len(set(ran)), "all of a file"
    assert "a third of the files; to repeat it: --third a" in out


def test_module_marks_are_read_from_the_text() -> None:
    listed = "pytestmark = [\n    pytest.mark.browser,\n    pytest.mark.gpu,\n]\n"
    for text, may in (
        ("pytestmark = pytest.mark.slow\n", False),
        ('pytestmark = [pytest.mark.filterwarnings("a"), pytest.mark.long]\n', False),
        (listed, False),
        (listed + "@pytest.mark.quick\n", True),
        ("pytestmark = pytest.mark.browser\n@pytest.mark.slow\n", True),
        ("", True),
    ):
        assert may_have_default_tests(text) == may
