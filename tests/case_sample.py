"""A part of the tests that are too long to run at each change, drawn by a seed.

    scripts/test.sh -m "mesh or long" --tenth SEED     a tenth of the cases
    scripts/test.sh -m "slow and not quick" --third SEED     a third of the files

A case, or a file, is drawn by its own name, so that a seed draws the same whatever else is
collected. Of a file that is drawn all tests run, so that its fixtures are paid for once.
"""

import hashlib
from pathlib import Path

import pytest


def is_drawn(seed: str, name: str, *, one_in: int = 10) -> bool:
    """Tell whether a case or file is in the tenth, or other part, that `seed` draws.

    Args:
        seed: any text.
        name: the node id of a case, or the path of a file relative to the project.
        one_in: ten for a tenth.
    """
    digest = hashlib.sha256(f"{seed}\n{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", metavar="SEED", help="run a tenth of the cases, drawn by SEED")
    parser.addoption("--third", metavar="SEED", help="run a third of the files, drawn by SEED")


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = {"tenth": "a tenth of the cases", "third": "a third of the files"}
    return [
        f"{what}; to repeat it: --{option} {seed}"
        for option, what in lines.items()
        if (seed := config.getoption(option)) is not None
    ]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    seed = config.getoption("third")
    if seed is None or collection_path.suffix != ".py":
        return None
    file = collection_path.relative_to(config.rootpath).as_posix()
    return None if is_drawn(seed, file, one_in=3) else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("tenth")
    if seed is None:
        return
    others = [item for item in items if not is_drawn(seed, item.nodeid)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if is_drawn(seed, item.nodeid)]
