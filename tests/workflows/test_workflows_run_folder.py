"""Which settings a run may go on with, and that runs of older versions still do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memguard.config import RunConfig, dump_yaml, load_yaml
from memguard.errors import ConfigError
from memguard.workflows.run_folder import check_same_settings, compute_run_key

# Of the settings below, by the version before `normalise`, `k_by_dose`, `budget`, `data.forget` and
# `train.dropout`.
OLD_KEY = "7f4e88dae74309785b763748fe5aefd931a6c2a38eb223454af23c08c47ceed7"


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


def test_younger_settings_that_are_off_leave_a_runs_key_as_it_was() -> None:
    assert compute_key(make()) == OLD_KEY


YOUNGER: list[tuple[str, dict[str, Any]]] = [
    ("train.dropout", {"train": {"dropout": 0.0}}),
    ("train.audit_every_steps", {"train": {"audit_every_steps": 5}}),
    ("budget", {"budget": {}, "train": {"audit_every_steps": 5}}),
    ("mitigations", {"mitigations": [{"name": "goldfish", "k": 3, "normalise": "text"}]}),
    ("mitigations", {"mitigations": [{"name": "goldfish", "k": 3, "k_by_dose": {4: 2}}]}),
]


@pytest.mark.parametrize(("name", "changes"), YOUNGER)
def test_a_run_from_before_them_goes_on_without_them_alone(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    begin(make(), tmp_path)
    path = tmp_path / "config.yaml"
    text = path.read_text()
    for line in (
        "budget: null",
        "  dropout: null",
        "  audit_documents: 64",
        "  normalise: none",
        "  k_by_dose: {}",
    ):
        assert f"{line}\n" in text
        text = text.replace(f"{line}\n", "")
    path.write_text(text)
    assert "normalise" not in load_yaml(path).values["mitigations"][0]
    check_same_settings(make(), tmp_path)
    assert compute_key(make(**changes)) != OLD_KEY
    with pytest.raises(ConfigError, match=f"holds a run with other settings: .*{name}"):
        check_same_settings(make(**changes), tmp_path)


@pytest.mark.parametrize("changes", [changes for _, changes in YOUNGER])
def test_a_run_goes_on_with_its_own_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    begin(make(**changes), tmp_path)
    check_same_settings(make(**changes), tmp_path)


def test_audits_during_training_stay_what_they_were(tmp_path: Path) -> None:
    begin(make(train={"audit_every_steps": 5}), tmp_path)
    with pytest.raises(ConfigError, match=r"audit_every_steps \(5 there, null here\)"):
        check_same_settings(make(), tmp_path)
    with pytest.raises(ConfigError, match=r"audit_documents \(64 there, 32 here\)"):
        check_same_settings(make(train={"audit_every_steps": 5, "audit_documents": 32}), tmp_path)
