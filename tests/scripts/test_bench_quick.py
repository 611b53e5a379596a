"""Benchmarks at their smallest size fill every row; what the figures are is not looked at."""

import re
from pathlib import Path

import pytest
from script_calls import start_script

ENGINE_ROWS = (
    "random 30M, plain",
    "random 30M, goldfish k=2",
    "random 30M, memory",
    "(z=4) vs FSDP2",
    "(x=4) vs FSDP2",
    "(x=2, y=2) vs FSDP2",
)
MASK_ROWS = (
    "published: unfold, product, table", "hash ", "hash, normalise: text", "hash_reference",
)  # fmt: skip


def run_quick(
    name: str, *arguments: str, ends: tuple[str, str] = ("PASS", "FAIL")
) -> tuple[list[str], str]:
    """Return the lines of standard output, and standard error."""
    done = start_script(f"bench/{name}", "--quick", *arguments)
    lines = done.stdout.splitlines()
    # A bar may be missed at this size; the exit code says what the last line does.
    assert lines[-1].startswith(ends[done.returncode]), done.stderr
    return lines, done.stderr


@pytest.mark.long
def test_adapters() -> None:
    lines, err = run_quick("adapters")
    for precision in ("fp32", "bf16"):
        rows = ("tokens/s, P", "peak memory, P (MB)", "plan, P (MB)", "state, P (MB)")
        for row in (name.replace("P", precision) for name in rows):
            (line,) = (line for line in lines if line.startswith(row))
            assert re.match(rf"{re.escape(row)} +[\d,]+ +[\d,]+ +\d+\.\d\dx", line), line
    assert err == "", "libraries do not write between the rows"


@pytest.mark.long
def test_audit() -> None:
    lines, _ = run_quick("audit", ends=("PASS: 5 limits", "FAIL: "))
    row, audit = (line for line in lines if line.startswith("prefix 50, batch 4"))
    # Documents a second and ratio of either side, verdicts that are the same, both bars.
    assert re.search(
        r"( +[\d,]+\.\d){2} +\d+\.\dx +[\d,]+\.\d +\d+\.\dx +6/6  >= 2x \w+, >= 15x \w+$", row
    )
    assert re.search(r"( +[\d,]+\.\d){2}( +\d+\.\d\dx){2}.* +6/6  >= 1.7x \w+$", audit)
    for lm in ("V = 2,048", "V = 32,000"):
        (row,) = (line for line in lines if line.startswith(lm))
        assert re.search(r"( +[\d,]+\.\d){2} +\d+\.\d\dx +[\d,]+\.\d +\d+\.\d\dx ", row), row


@pytest.mark.long
def test_engine(tmp_path: Path) -> None:
    lines, err = run_quick("engine", "--stories", str(tmp_path))
    assert f"stories260K: skipped, not found in {tmp_path}" in lines, err
    for row in ENGINE_ROWS:
        (line,) = (line for line in lines if line.startswith(row))
        assert re.match(rf"{re.escape(row)} +[\d,]+ +[\d,]+ +\d+\.\d\dx", line), line


@pytest.mark.long
def test_mitigation() -> None:
    lines, _ = run_quick("mitigation", ends=("PASS: ", "FAIL: "))
    for row in MASK_ROWS:
        (line,) = (line for line in lines if line.startswith(row))
        assert re.search(r" +\d+\.\d{3} +\d+\.\dx$", line), line
    assert any(re.match(r"step of \[2, 32\] tokens [\d,]+ ms, its mask ", line) for line in lines)


@pytest.mark.long
def test_ranks() -> None:
    lines, _ = run_quick("token_ranks")
    for row in ("stories260K, V = 512", "d = 288, V = 32,000", "d = 64, V = 32,000"):
        (line,) = (line for line in lines if line.startswith(row))
        assert re.search(r"( +\d+\.\d{3}){2} +\d\.\d\dx +\d\.\d\d-\d\.\d\d  <= 1", line), line


@pytest.mark.long
def test_near_duplicates(shared_data: Path) -> None:
    lines, _ = run_quick("near_duplicates", str(shared_data / "text" / "documents.jsonl"))
    # Bars of counts hold at any size: every kind has a row.
    kinds = ("Hindi, closing of 12", "English, in capitals", "Thai, one letter", "forget list")
    assert not [kind for kind in kinds if not any(line.startswith(kind) for line in lines)]
    assert lines[-1].startswith("PASS")


@pytest.mark.long
def test_optimizers() -> None:
    lines, _ = run_quick("optimizers")
    for row in ("adamw ", "adamw_8bit ", "adamw_8bit, bf16, several", "adalomo ", "lomo ", "mezo "):
        (line,) = (line for line in lines if line.startswith(row))
        assert re.search(r"( +\d+\.\d\d){4} +\d+$", line), line
