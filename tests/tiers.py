"""The default tier of the tests: what guards, in five minutes on two cores.

A file marked `slow` runs in it with its tests marked `quick` alone; `long`, `mesh`, `faults` and
`gpu` never do. Its expression is `-m` in pyproject.toml; every other `-m` chooses another tier, and
none of what follows holds then:

- A file of which nothing runs is not imported, unless it is named.
- All files with ranks go to one worker of pytest-xdist: each worker with one starts a server of
  ranks, which imports for seconds.
"""

import re
from pathlib import Path
from typing import Any

import pytest

WITH_SLOW = "not mesh and not long and not faults and not gpu"
"""The default tier, and what became slow so that it may be short."""

# One mark on a line, or a list of them.
_OUTSIDE = re.compile(
    r"^pytestmark = (?:.*?|\[[^\]]*?)\bmark\.(?:slow|long|mesh|faults|gpu)\b", re.MULTILINE
)


def is_default(config: pytest.Config) -> bool:
    """Return whether the tests are those of the default tier."""
    options = config.getini("addopts")
    return "-m" in options and config.option.markexpr == options[options.index("-m") + 1]


def may_have_default_tests(text: str) -> bool:
    """Return whether a file of tests with this text may have a test of the default tier."""
    return _OUTSIDE.search(text) is None or "mark.quick" in text


def uses_ranks(text: str) -> bool:
    """Return whether a file of tests with this text runs something on ranks."""
    return "RankPool" in text


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # pytest does not ask of files that are named.
    if not is_default(config) or not re.fullmatch(r"test_.*\.py", collection_path.name):
        return None
    return True if not may_have_default_tests(collection_path.read_text()) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile" or not is_default(config):
        return None
    from xdist.scheduler import LoadFileScheduling

    class RanksTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "ranks" if uses_ranks((config.rootpath / file).read_text()) else file

    return RanksTogether(config, log)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if terminalreporter.config.option.collectonly or not is_default(config):
        return
    if set(terminalreporter.stats) & {"deselected", "passed", "failed", "error"} == {"deselected"}:
        terminalreporter.write_line("None of these runs by default: add -m slow, or -m '' for all.")
