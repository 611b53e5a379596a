"""Which settings a run may go on with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memguard.config import RunConfig, dump_yaml
from memguard.errors import ConfigError
from memguard.workflows.run_folder import check_same_settings, compute_run_key


def make(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "name": "run",
        "model": {"path": "start"},
        "data": {"train": "documents.jsonl"},
        "mitigations": [{"name": "goldfish", "k": 3}],
    }
    return RunConfig.model_validate(values | changes)


def compute_key(config: RunConfig) -> str:
    corpus: Any = SimpleNamespace(summary=SimpleNamespace(documents_sha256="0"))
    return compute_run_key(config, corpus)


def begin(config: RunConfig, folder: Path) -> None:
    (folder / "config.yaml").write_text(dump_yaml(config))
    (folder / "metrics.jsonl").touch()


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("train.dropout", {"train": {"dropout": 0.0}}),
    ("train.audit_every_steps", {"train": {"audit_every_steps": 5}}),
    ("budget", {"budget": {}, "train": {"audit_every_steps": 5}}),
    ("mitigations", {"mitigations": [{"name": "goldfish", "k": 3, "normalise": "text"}]}),
    ("mitigations", {"mitigations": [{"name": "goldfish", "k": 3, "k_by_dose": {4: 2}}]}),
]


@pytest.mark.parametrize(("name", "changes"), OTHERS)
def test_a_run_does_not_go_on_with_others(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    begin(make(), tmp_path)
    check_same_settings(make(), tmp_path)
    assert compute_key(make(**changes)) != compute_key(make())
    with pytest.raises(ConfigError, match=f"holds a run with other settings: .*{name}"):
        check_same_settings(make(**changes), tmp_path)


FREE: list[dict[str, Any]] = [
    {"name": "other"},
    {"parallel": {"z": 2}},
    {"audit": {"enabled": False}},
    {"train": {"checkpoint_every_steps": 7}},
]


@pytest.mark.parametrize("changes", FREE)
def test_what_does_not_change_what_is_trained_is_free(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    begin(make(), tmp_path)
    check_same_settings(make(**changes), tmp_path)
    assert compute_key(make(**changes)) == compute_key(make())


@pytest.mark.parametrize("changes", [changes for _, changes in OTHERS])
def test_a_run_goes_on_with_its_own_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    begin(make(**changes), tmp_path)
    check_same_settings(make(**changes), tmp_path)


def test_audits_during_training_stay_what_they_were(tmp_path: Path) -> None:
    begin(make(train={"audit_every_steps": 5}), tmp_path)
    with pytest.raises(ConfigError, match=r"audit_every_steps \(5 there, null here\)"):
        check_same_settings(make(), tmp_path)
    with pytest.raises(ConfigError, match=r"audit_documents \(64 there, 32 here\)"):
        check_same_settings(make(train={"audit_every_steps": 5, "audit_documents": 32}), tmp_path)
