"""Imports point downwards, readers need no torch, and errors have their exit codes."""

import ast
import importlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memguard import errors

pytestmark = pytest.mark.slow

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


def test_readers_work_where_torch_does_not(tmp_path: Path) -> None:
    for name in ("torch", "transformers", "datasets"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    pages = ("html", "comparison_picture", "model_card")
    modules = ("compare", "config", "records", "seeds", "assets", "errors")
    modules += tuple(f"report.{page}" for page in pages)
    imports = "; ".join(f"import memguard.{module}" for module in modules)
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {imports}"
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


@pytest.mark.quick
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


def test_a_config_error_carries_all_problems() -> None:
    error = errors.ConfigError("one", "two")
    assert error.problems == ("one", "two")
    assert str(error) == "one\ntwo"


@pytest.fixture(scope="module")
def imports() -> list[tuple[Path, str, str]]:
    """File, module and name of every `from ... import` of this project."""
    return [
        (file, node.module or "", alias.name)
        for folder in ("memguard", "scripts", "eval", "tests")
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


@pytest.mark.parametrize("module", ["audit.statistics", "compare", "config", "records", "runtime"])
def test_what_a_package_offers_is_imported_somewhere(
    module: str, imports: list[tuple[Path, str, str]]
) -> None:
    package = importlib.import_module(f"memguard.{module}")
    assert package.__file__ is not None
    inside = Path(package.__file__).parent
    offered = {name for file, _, name in imports if file == inside / "__init__.py"}
    imported = {
        name
        for file, source, name in imports
        if source == f"memguard.{module}" and inside not in file.parents
    }
    assert offered
    assert offered <= imported


@pytest.mark.quick
def test_no_script_hides_a_module_of_the_tests() -> None:
    """Tests that load a script put its folder first in the import path."""
    scripts = {path.name for path in (ROOT / "scripts").rglob("*.py")}
    assert not scripts & {path.name for path in (ROOT / "tests").rglob("*.py")} - {"conftest.py"}
