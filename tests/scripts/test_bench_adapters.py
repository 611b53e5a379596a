"""The benchmark of adapters fills every row; what the figures are is not looked at."""

import re

import pytest
from script_calls import start_script


@pytest.mark.slow
def test_quick_fills_every_row() -> None:
    done = start_script("bench/adapters", "--quick")
    lines = done.stdout.splitlines()
    for precision in ("fp32", "bf16"):
        rows = ("tokens/s, P", "peak memory, P (MB)", "plan, P (MB)", "state, P (MB)")
        for row in (name.replace("P", precision) for name in rows):
            (line,) = (line for line in lines if line.startswith(row))
            assert re.match(rf"{re.escape(row)} +[\d,]+ +[\d,]+ +\d+\.\d\dx", line), line
    assert done.stderr == "", "libraries do not write between the rows"
    # A limit may be missed at this size; the exit code says what the last line does.
    assert lines[-1].startswith(("PASS", "FAIL")[done.returncode]), done.stderr
