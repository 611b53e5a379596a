"""Fixtures shared by all tests: real data where it is there, tiny models where it is not."""

from pathlib import Path

import pytest
from ranks import RankPool


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real checkpoints and text kept beside the project; never part of it."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real checkpoints and text (../shared/data) are not on this machine")
    return folder


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Runs a function on several ranks; the processes are forks of one that has torch already."""
    return RankPool()
