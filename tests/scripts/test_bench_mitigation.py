"""The mitigations' benchmark fills every row; what the figures are is not looked at."""

import re

import pytest
from script_calls import start_script

ROWS = ("published: unfold, product, table", "hash ", "hash, normalise: text", "hash_reference")


@pytest.mark.slow
def test_quick_fills_every_row() -> None:
    done = start_script("bench/mitigation", "--quick")
    lines = done.stdout.splitlines()
    for row in ROWS:
        (line,) = (line for line in lines if line.startswith(row))
        assert re.search(r" +\d+\.\d{3} +\d+\.\dx$", line), line
    assert any(re.match(r"step of \[2, 32\] tokens [\d,]+ ms, its mask ", line) for line in lines)
    # A bar may be missed at this size; the exit code says what the last line does.
    assert lines[-1].startswith(("PASS: ", "FAIL: ")[done.returncode]), done.stderr
