"""The README's tree names every file with the caption it gives itself."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_tree_is_up_to_date() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: the list of files comes from git")
    script = ROOT / "scripts" / "readme_tree.py"
    result = subprocess.run([sys.executable, script, "--check"], cwd=ROOT, check=False)
    assert result.returncode == 0, "run: python scripts/readme_tree.py"
