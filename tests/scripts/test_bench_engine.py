"""The engine's benchmark fills every row; what the figures are is not looked at."""

import re
from pathlib import Path

import pytest
from script_calls import start_script

ROWS = (
    "random 30M, plain",
    "random 30M, goldfish k=2",
    "random 30M, memory",
    "(z=4) vs FSDP2",
    "(x=4) vs FSDP2",
    "(x=2, y=2) vs FSDP2",
)


@pytest.mark.slow
def test_quick_fills_every_row(tmp_path: Path) -> None:
    done = start_script("bench/engine", "--quick", "--stories", str(tmp_path))
    lines = done.stdout.splitlines()
    assert f"stories260K: skipped, not found in {tmp_path}" in lines, done.stderr
    for row in ROWS:
        (line,) = (line for line in lines if line.startswith(row))
        assert re.match(rf"{re.escape(row)} +[\d,]+ +[\d,]+ +\d+\.\d\dx", line), line
    # A bar may be missed at this size; the exit code says what the last line does.
    assert lines[-1].startswith(("PASS", "FAIL")[done.returncode]), done.stderr
