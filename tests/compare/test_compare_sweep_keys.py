"""A run's content hash: every document it reads counts."""

from pathlib import Path

import pytest

from memguard.compare.sweep import hash_inputs
from memguard.config import RunConfig


@pytest.mark.parametrize("setting", ["train", "control", "heldout", "forget"])
def test_other_documents_are_other_inputs(tmp_path: Path, setting: str) -> None:
    data = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "control", "heldout")}
    data["forget"] = str(tmp_path / "forget.jsonl")
    for path in data.values():
        Path(path).write_text('{"text": "as it was"}\n')
    config = RunConfig.model_validate(
        {"name": "run", "model": {"path": "folder"}, "data": data, "mitigations": [{"name": "npo"}]}
    )
    before = hash_inputs(config)
    assert hash_inputs(config) == before
    Path(data[setting]).write_text('{"text": "as it is"}\n')
    assert hash_inputs(config) != before
