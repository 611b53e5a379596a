"""Fixtures of the tests of the command line."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from without_torch import serve

# The example reports of the page's tests, also where only these tests run.
sys.path.append(str(Path(__file__).parents[1] / "report"))


@pytest.fixture(scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serve(tmp_path_factory.mktemp("bare")) as ask:
        yield ask


@pytest.fixture
def bare(_server: Any, tmp_path: Path) -> Any:
    """Runs `memguard` in the test's folder where importing torch, transformers or datasets fails.

    Takes arguments, and environment variables by keyword.
    """
    return partial(_server, tmp_path)
