"""The tests of what has changed since `main`, by name and by imports.

    scripts/test.sh --changed

Of a module of memguard these are the tests that are named after it and those that import it; of a
helper of the tests those that import it; of a `conftest.py` all below it; of another file those
that mention its name. Tests that reach a module only through other modules are not among them: the
whole suite decides. Without `-m` tests marked `slow` run too.
"""

import ast
import subprocess
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path

import pytest
import tiers

_ROOT = Path(__file__).resolve().parents[1]
_TESTS = _ROOT / "tests"


def list_changed(root: Path) -> set[str]:
    """Return the files that differ from `main` where this branch left it, untracked ones too."""
    base = _git(root, "merge-base", "main", "HEAD").strip()
    changed = _git(root, "diff", "--name-only", base).splitlines()
    return {*changed, *_git(root, "ls-files", "--others", "--exclude-standard").splitlines()}


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode != 0:
        raise pytest.UsageError(f"--changed: git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def find_tests(changed: Set[str], root: Path) -> set[Path]:
    """Return the test files of the changed ones; paths are relative to ``root``."""
    graph = _Imports(root)
    return {test for test in graph.tests if graph.is_concerned(test, changed)}


class _Imports:
    """Which files of the project each test file imports, itself or through helpers of the tests."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.tests = sorted(path.relative_to(root) for path in root.glob("tests/**/test_*.py"))
        helpers = [path for path in root.glob("tests/**/*.py") if not path.stem.startswith("test_")]
        helpers += root.glob("scripts/*.py")  # pytest's `pythonpath`
        self._helpers = {path.stem: path for path in helpers}
        self._files = cache(self._find_files)

    def is_concerned(self, test: Path, changed: Set[str]) -> bool:
        """Return whether a test file checks one of the changed files."""
        files = {test.as_posix(), *self._files(self._root / test)}
        return any(
            name in files or self._is_named_after(test, Path(name)) or self._mentions(test, name)
            for name in changed
        )

    def _is_named_after(self, test: Path, changed: Path) -> bool:
        if changed.name == "conftest.py":
            return changed.parent in test.parents
        if changed.suffix != ".py" or changed.parts[0] == "tests":
            return False
        subject, package = test.stem.removeprefix("test_"), changed.parent.name
        names = (changed.stem, f"{package}_{changed.stem}")
        return package == test.parent.name.replace("tests", "memguard") and any(
            subject == name or subject.startswith(f"{name}_") for name in names
        )

    def _mentions(self, test: Path, changed: str) -> bool:
        if changed.endswith(".py"):
            return False
        return Path(changed).name in (self._root / test).read_text()

    def _find_files(self, path: Path) -> frozenset[str]:
        files: set[str] = set()
        for target in self._list_targets(path):
            if target in self._helpers.values():
                files |= self._files(target)
            files.add(target.relative_to(self._root).as_posix())
        return frozenset(files)

    def _list_targets(self, path: Path) -> Iterator[Path]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [(alias.name, None) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [(node.module, alias.name) for alias in node.names]
            else:
                continue
            for module, name in names:
                target = self._resolve(module, name)
                if target is not None and target != path:
                    yield target

    def _resolve(self, module: str, name: str | None) -> Path | None:
        """Return the file that defines ``name`` of a module, through what packages offer."""
        if module in self._helpers:
            return self._helpers[module]
        if module.split(".")[0] != "memguard":
            return None
        path = self._root.joinpath(*module.split("."))
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
        package = path / "__init__.py"
        if name is not None and (path / f"{name}.py").is_file():
            return path / f"{name}.py"
        if name is None or not package.is_file():
            return package if package.is_file() else None
        for node in ast.parse(package.read_text()).body:
            offers = isinstance(node, ast.ImportFrom) and name in {a.name for a in node.names}
            if offers and node.module and node.module.startswith("memguard."):
                return self._resolve(node.module, name)
        return package


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--changed", action="store_true", help="run tests of what differs from main")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("changed"):
        selected = find_tests(list_changed(_ROOT), _ROOT)
        config.stash[_SELECTED] = {_ROOT / path for path in selected}
        if tiers.is_default(config):
            config.option.markexpr = tiers.WITH_SLOW


_SELECTED = pytest.StashKey[set[Path]]()


def pytest_report_header(config: pytest.Config) -> str | None:
    selected = config.stash.get(_SELECTED, None)
    return None if selected is None else f"test files of what differs from main: {len(selected)}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    selected = config.stash.get(_SELECTED, None)
    if selected is None or collection_path.is_dir() or collection_path in selected:
        return None
    return True
