"""The loading benchmark runs and shows every side; what it measures is not judged here."""

from pathlib import Path

import pytest
from script_calls import start_script


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's accounts")
@pytest.mark.long
def test_the_table_has_a_row_for_every_side_and_a_verdict(tmp_path: Path) -> None:
    arguments = ("--size-mb", "2", "--runs", "1", "--folder", str(tmp_path))
    done = start_script("bench/load", *arguments)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0] == "2 MB of float32 onto 4 ranks in fp32, medians of 1 runs"
    sides = (
        "memguard load_assembled",
        "transformers fsdp_size=4",
        "transformers tp_size=4",
        "from_pretrained + fully_shard",
        "accelerate rank 0 + broadcast",
    )
    # Above the rows what is loaded and the headings, below them an empty line and the verdict.
    assert len(lines) == 2 + len(sides) + 2
    for side, line in zip(sides, lines[2:-2], strict=True):
        assert line.startswith(side)
        # Four ranks, the worst of them, ratio, shard and seconds; or why it does not run.
        assert len(line.removeprefix(side).split()) == 8 or "does not run: " in line
    assert lines[-1].startswith("PASS: 1 limit met: memguard's worst rank takes ")
    assert not list(tmp_path.iterdir())
