"""A disk that is really full at each stage: one line, exit code 1, and nothing saved is lost."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli_examples import write_run
from small_disk import NOT_ALLOWED, run_twice

pytestmark = pytest.mark.slow

# Where the disk is full, from which call on; a file that is not there, and one that still is;
# what the same command says when there is room again.
STAGES: dict[str, tuple[str, int, str, str, str]] = {
    "prepare": ("memguard.data.prepare:save_corpus", 1, "prepared", "config.yaml", ""),
    "save": (
        "memguard.train.resume:save_checkpoint",
        2,
        "checkpoints/step-00000004",
        "checkpoints/step-00000002",
        "resuming after step 2",
    ),
    "export": (
        "memguard.workflows.training.train:export_model",
        1,
        "model",
        "checkpoints/step-00000006",
        "resuming after step 6",
    ),
    "audit": (
        "memguard.workflows.auditing.audit:save_scores",
        1,
        "audit/report.json",
        "model/model.safetensors",
        "was trained before",
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_full_disk_is_told_in_a_line_and_loses_nothing(
    folder: Path, ranks: Any, stage: str
) -> None:
    place, at_call, absent, kept, again = STAGES[stage]
    path = write_run(
        folder,
        train={"max_steps": 6, "checkpoint_every_steps": 2, "keep_checkpoints": 9},
        audit={"enabled": stage == "audit", "min_documents": 1},
    )
    command = "prepare" if stage == "prepare" else "train"
    said = folder / "said.json"
    # In prepare the arrays' headers fit and the arrays do not, which numpy tells in its own words.
    room = 16 << 10 if stage == "prepare" else 0
    arguments = ([command, str(path)], folder / "runs", place, at_call, room, said)
    child = ranks.start(run_twice, *arguments)
    child.join()
    if child.exitcode == NOT_ALLOWED:
        pytest.skip("a process may not mount a file system of its own on this machine")
    assert child.exitcode == 0
    code, message, left, code_again, message_again = json.loads(said.read_text())
    assert code == 1, message
    assert "Traceback" not in message
    assert message.splitlines()[-1].startswith("memguard: the disk is full; files saved before")
    assert f"run/{absent}" not in left
    assert f"run/{kept}" in left
    assert not [name for name in left if "/." in name and name.count(".") > 1], left
    assert code_again == 0, message_again
    assert again in message_again
