"""Imports point downwards, readers need no torch, and errors have their exit codes."""

import ast
import importlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memguard import errors

ROOT = Path(__file__).parents[1]


def test_imports_point_downwards() -> None:
    # A process of its own: the linter keeps caches and changes the import path.
    script = (
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Contracts: 3 kept, 0 broken." in done.stdout


@pytest.mark.parametrize(
    "module",
    ["report", "compare", "config", "records", "seeds", "assets", "errors"],
)
def test_readers_work_where_torch_does_not(module: str, tmp_path: Path) -> None:
    for name in ("torch", "transformers", "datasets"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import memguard.{module}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_package_itself_imports_nothing() -> None:
    script = (
        "import sys; before = set(sys.modules); import memguard\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["memguard"]


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.MemguardError("x"), 1),
        (errors.ConfigError("x"), 2),
        (errors.DataError("x"), 3),
        (errors.ModelError("x"), 3),
        (errors.RecordError("x"), 3),
        (errors.Interrupted(signal.SIGINT, "x"), 130),
        (errors.Interrupted(signal.SIGTERM, "x"), 143),
    ],
)
def test_exit_codes(error: errors.MemguardError, exit_code: int) -> None:
    assert error.exit_code == exit_code
    assert str(error) == "x"


def test_an_interruption_names_its_signal() -> None:
    assert errors.Interrupted(signal.SIGTERM, "stopped").signal_name == "SIGTERM"


def test_a_config_error_carries_all_problems() -> None:
    error = errors.ConfigError("one", "two")
    assert error.problems == ("one", "two")
    assert str(error) == "one\ntwo"


@pytest.mark.parametrize("module", ["audit.statistics", "compare", "config", "records", "runtime"])
def test_what_a_package_offers_is_imported_somewhere(module: str) -> None:
    package = importlib.import_module(f"memguard.{module}")
    assert package.__file__ is not None
    inside = Path(package.__file__).parent
    offered = {
        alias.name
        for node in ast.parse(Path(package.__file__).read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    files = [
        file
        for folder in ("memguard", "scripts", "eval", "tests")
        for file in (ROOT / folder).rglob("*.py")
        if inside not in file.parents
    ]
    imported = {
        alias.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == f"memguard.{module}"
        for alias in node.names
    }
    assert offered
    assert offered <= imported
