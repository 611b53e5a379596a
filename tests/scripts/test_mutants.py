"""scripts/mutants.py: its list fits the code, and on a toy project it tells what no test holds."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from script_calls import SCRIPTS, load_script

pytestmark = pytest.mark.slow

ROOT = SCRIPTS.parent
mutants: Any = load_script("mutants")

CODE = """
def is_old(age):
    return age >= 18

def is_new(age):
    return age < 18
"""
TESTS = """
import subprocess, sys
import pytest
from toy.ages import is_old

def test_in_a_child_process():
    code = "from toy.ages import is_old; assert is_old(18)"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_far_from_the_limit():
    assert is_old(40)

def test_that_fails():
    assert is_old(4)

@pytest.mark.slow
def test_only_when_slow():
    assert is_old(18)

def test_elsewhere():
    pytest.skip("not here")
"""
SETTINGS = """
[tool.pytest.ini_options]
testpaths = ["tests/suite"]
addopts = "-m 'not slow'"
markers = ["slow"]
"""


def make_mutant(name: str, **changes: Any) -> Any:
    fields = {"old": "age >= 18", "new": "age > 18", "tests": ("tests/test_ages.py",)}
    return mutants.Mutant(name=name, file="toy/ages.py", **{**fields, **changes})


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A project whose tests hold one of two rules, and fail in one place."""
    root = tmp_path / "project"
    for name, text in (
        ("toy/__init__.py", ""),
        ("toy/ages.py", CODE),
        ("tests/test_ages.py", TESTS),
        ("pyproject.toml", SETTINGS),
        ("tests/suite/test_import.py", "def test_it(): import toy.ages\n"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return root


def test_the_list_fits_the_code() -> None:
    """Whoever changes the text of a mutant changes its entry, or chooses another rule."""
    listed = mutants.read_mutants(mutants.LIST)
    assert len(listed) >= 80
    assert [error for each in listed if (error := mutants.find_error(each, ROOT))] == []
    tests = {test for each in listed for test in each.tests}
    for file, _, name in (test.partition("::") for test in sorted(tests)):
        function = name.partition("[")[0]
        assert not function or f"def {function}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_a_mutant_is_killed_survives_or_cannot_be_judged(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half of the time goes into loading plugins that a toy does not need.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    far = "tests/test_ages.py::test_far_from_the_limit"
    given = [
        # Only the child process of a test sees the limit: it imports the copy too.
        make_mutant("limit", tests=("tests/test_ages.py::test_in_a_child_process",)),
        make_mutant("new", old="age < 18", new="age <= 18", tests=(far,)),
        make_mutant("fails", tests=("tests/test_ages.py",)),
        make_mutant("slow", tests=("tests/test_ages.py::test_only_when_slow",)),
        make_mutant("skipped", tests=("tests/test_ages.py::test_elsewhere", far)),
    ]
    said: list[str] = []
    before = {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()}
    found = list(mutants.run_mutants(toy, given, said.append))
    assert [(each.name, each.state) for each in found] == [
        ("limit", "killed"),
        ("new", "survived"),
        ("fails", "broken"),
        ("slow", "broken"),
        ("skipped", "broken"),
    ]
    assert found[0].by == "tests/test_ages.py::test_in_a_child_process"
    assert "test_that_fails" in found[2].by
    assert found[3].by == "no test ran by default: tests/test_ages.py::test_only_when_slow"
    assert found[4].by == "no test ran by default: tests/test_ages.py::test_elsewhere"
    assert len(said) == 1 + len(given)
    assert {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()} == before


def test_a_run_without_tests_kills_nothing(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = ["tests/test_ages.py::test_only_when_slow"]
    ended = mutants.run_tests(toy, slow, limit_s=60)
    assert (ended.code, ended.describe()) == (5, "no test ran")
    for code, state in ((5, "broken"), (4, "broken"), (3, "broken"), (2, "killed"), (1, "killed")):
        ended = mutants.Tested(code=code, output="")
        monkeypatch.setattr(mutants, "run_tests", lambda *_, _ended=ended, **__: _ended)
        assert mutants._try(toy, make_mutant("a"))[0] == state


def test_named_tests_that_do_not_run_by_default_are_shown(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (toy / "pyproject.toml").write_text(SETTINGS.replace("/suite", ""))
    monkeypatch.setattr(mutants, "ROOT", toy)
    given = [
        make_mutant("file"),
        make_mutant("a", tests=("tests/test_ages.py::test_only_when_slow",)),
    ]
    assert mutants.check_tests(given) == 1
    assert "a: tests/test_ages.py::test_only_when_slow\n" in capsys.readouterr().out
    assert mutants.check_tests(given[:1]) == 0


def test_tests_that_take_too_long_are_ended(toy: Path) -> None:
    (toy / "tests" / "test_ages.py").write_text("import time\ndef test_it(): time.sleep(60)\n")
    ended = mutants.run_tests(toy, ["tests/test_ages.py"], limit_s=2)
    assert ended.code is None
    assert ended.describe() == "timeout, which counts as killed"


def test_a_list_that_does_not_fit_is_refused_by_name(toy: Path) -> None:
    for changes, told in (
        ({"old": "18"}, "'a': 'old' must be in 'toy/ages.py' exactly once, it is 2 times"),
        ({"old": "19"}, "it is 0 times"),
        ({"new": "age >= 18"}, "are the same"),
        ({"tests": ("tests/none.py::test_it",)}, "there is no 'tests/none.py::test_it'"),
        ({"tests": ()}, "'tests' must name tests"),
    ):
        assert told in mutants.find_error(make_mutant("a", **changes), toy)
    path = toy / "list.toml"
    path.write_text("[a]\nfile = 'toy/ages.py'\nold = 'age'\n")
    with pytest.raises(ValueError, match=r"'a' in list\.toml: 'tests'"):
        mutants.read_mutants(path)


def test_one_that_no_user_could_notice_may_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    passed = mutants.Tested(code=0, output="")
    monkeypatch.setattr(mutants, "run_tests", lambda _, tests, **__: asked.append(tests) or passed)
    given = make_mutant("a", why="it is the same")
    assert mutants._try(tmp_path, given) == ("may survive", "it is the same")
    assert asked == [given.tests, []], "its own tests, and then the default suite"


def test_what_is_asked_for_is_checked_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mutants.py", "--only", "verify-oldest-checkpoint", "--list"])
    assert mutants.main() == 0
    assert "memguard/workflows/verify.py" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["mutants.py", "--only", "no-such"])
    with pytest.raises(SystemExit, match="2"):
        mutants.main()
    assert "there is no mutant no-such" in capsys.readouterr().err
