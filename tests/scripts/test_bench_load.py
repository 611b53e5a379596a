"""The loading benchmark runs and shows every side; what it measures is not judged here."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_load.py"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's accounts")
@pytest.mark.slow
def test_the_table_has_a_row_for_every_side_and_a_verdict(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--size-mb", "2", "--runs", "1"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0] == "2 MB of float32 onto 4 ranks in fp32, medians of 1 runs"
    sides = (
        "memguard load_sharded",
        "transformers fsdp_size=4",
        "transformers tp_size=4",
        "from_pretrained + fully_shard",
        "accelerate rank 0 + broadcast",
    )
    assert len(lines) == 2 + len(sides) + 1
    for side, line in zip(sides, lines[2:-1], strict=True):
        assert line.startswith(side)
        # Four ranks, the worst of them, ratio, shard and seconds; or why it does not run.
        assert len(line.removeprefix(side).split()) == 8 or "does not run: " in line
    assert lines[-1].startswith("PASS: memguard's worst rank takes ")
    assert not list(tmp_path.iterdir())
