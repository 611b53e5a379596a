"""A tenth of the cases, drawn by a seed: of a matrix that is too long to run at each change.

    scripts/test.sh -m "mesh or slow" --tenth SEED

A case is drawn by its own name, so that a seed draws the same cases whatever else is collected.
"""

import hashlib

import pytest


def is_drawn(seed: str, case: str) -> bool:
    """Tell whether a case, named by its node id, is in the tenth that `seed` draws."""
    digest = hashlib.sha256(f"{seed}\n{case}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", metavar="SEED", help="run a tenth of the cases, drawn by SEED")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("tenth")
    return None if seed is None else f"a tenth of the cases; to repeat it: --tenth {seed}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("tenth")
    if seed is None:
        return
    others = [item for item in items if not is_drawn(seed, item.nodeid)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if is_drawn(seed, item.nodeid)]
