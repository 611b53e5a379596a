"""Which settings a run may go on with, and who may work in its folder."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memguard.config import RunConfig, dump_yaml
from memguard.errors import ConfigError
from memguard.records.record import TEMPORARY, make_temporary_folder, write_atomically
from memguard.records.run_files import add_hash_line
from memguard.runtime import Console
from memguard.workflows.common.folder import (
    check_free,
    check_outside_runs,
    check_same_settings,
    compute_run_key,
    locked,
)


def make(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "name": "run",
        "model": {"path": "start"},
        "data": {"train": "documents.jsonl"},
        "mitigations": [{"name": "goldfish", "k": 3}],
    }
    return RunConfig.model_validate(values | changes)


def compute_key(config: RunConfig, identity_key: str | None = "aa") -> str:
    summary: Any = SimpleNamespace(documents_sha256="0", identity_key=identity_key)
    return compute_run_key(config, summary)


def begin(config: RunConfig, folder: Path) -> None:
    (folder / "config.yaml").write_text(add_hash_line(dump_yaml(config)))
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
    check_same_settings(make(), tmp_path, Console())
    assert compute_key(make(**changes)) != compute_key(make())
    with pytest.raises(ConfigError, match=f"holds a run with other settings: .*{name}"):
        check_same_settings(make(**changes), tmp_path, Console())


FREE: list[dict[str, Any]] = [
    {"name": "other"},
    {"parallel": {"z": 2}},
    {"audit": {"enabled": False}},
    {"train": {"checkpoint_every_steps": 7}},
    # Where the identity key is; which it is, is not.
    {"data": {"train": "documents.jsonl", "identity_key": "elsewhere.key"}},
]


@pytest.mark.parametrize("changes", FREE)
def test_what_does_not_change_what_is_trained_is_free(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    begin(make(), tmp_path)
    check_same_settings(make(**changes), tmp_path, Console())
    assert compute_key(make(**changes)) == compute_key(make())


def test_a_run_does_not_go_on_with_another_identity_key() -> None:
    assert len({compute_key(make(), fingerprint) for fingerprint in ("aa", "bb", None)}) == 3


@pytest.mark.parametrize("changes", [changes for _, changes in OTHERS])
def test_a_run_goes_on_with_its_own_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    begin(make(**changes), tmp_path)
    check_same_settings(make(**changes), tmp_path, Console())


def test_audits_during_training_stay_what_they_were(tmp_path: Path) -> None:
    begin(make(train={"audit_every_steps": 5}), tmp_path)
    with pytest.raises(ConfigError, match=r"audit_every_steps \(5 there, null here\)"):
        check_same_settings(make(), tmp_path, Console())
    with pytest.raises(ConfigError, match=r"audit_documents \(64 there, 32 here\)"):
        check_same_settings(
            make(train={"audit_every_steps": 5, "audit_documents": 32}), tmp_path, Console()
        )


def leave_half_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be killed before the file gets its name."""

    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        patch.setattr(os, "unlink", kill)
        with pytest.raises(Killed):
            write_atomically(path, b"half")


def test_what_killed_processes_were_writing_is_cleared_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    for name in ("model", "prepared", "checkpoints/step-12"):
        (make_temporary_folder(folder / name) / "part").write_bytes(b"half")
    for name in (
        *("config.yaml", "manifest.jsonl", "metrics.jsonl", "trained.json", "environment.json"),
        *("audit/records.parquet", "audit/report.json", "audit/report.html", "audit/audit.json"),
        *("audit/canaries.parquet", "audit/findings.csv", "audit/private/excerpts.txt"),
        *("model/README.md", "reference_nll.npy"),
        # An audit that lies elsewhere.
        *("records.parquet", "report.json", "report.html", "audit.json", "private/excerpts.txt"),
    ):
        leave_half_written(folder / name, monkeypatch)
    (folder / f"{TEMPORARY}model.old").mkdir()
    (folder / "checkpoints" / f"{TEMPORARY}step-9.old").mkdir()
    kept = [
        *("config.yaml", ".config.yaml.swp", ".model.mine", ".notes.md.12345678", ".model"),
        *("checkpoints/.step-x.12345678", "audit/.config.yaml.12345678", "memguard-tmp-notes"),
    ]
    for name in kept:
        (folder / name).write_text("the user's")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (folder / f"{TEMPORARY}prepared.0").symlink_to(tmp_path / "elsewhere")
    with locked(folder):
        pass
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    assert left == {*kept, ".lock"}
    assert not list(folder.glob(f"**/{TEMPORARY}*"))
    assert (tmp_path / "elsewhere" / "file").exists()


def test_a_folder_that_is_free_stays_as_it_was(tmp_path: Path) -> None:
    check_free(tmp_path / "runs" / "run")
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "run"):
        pass
    check_free(tmp_path / "run")
    with locked(tmp_path / "run"):  # It holds no lock afterwards.
        pass


def test_a_folder_where_a_process_is_at_work_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        for enter in (check_free, lambda folder: locked(folder).__enter__()):
            with pytest.raises(ConfigError, match="another process is using"):
                enter(tmp_path / "run")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        check_free(tmp_path / "file" / "run")
    assert caught.value.filename == str(tmp_path / "file" / "run")
    with pytest.raises(OSError, match="File name too long"):
        check_free(tmp_path / ("x" * 300) / "run")


def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    with pytest.raises(PermissionError, match="Permission denied") as caught:
        check_free(tmp_path / "runs" / "run")
    assert caught.value.filename == str(tmp_path / "runs" / "run")


def test_only_folders_whose_files_a_run_compares_are_closed_to_others(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        for name in ("prepared", "checkpoints/step-00000001"):
            (folder / name).mkdir(parents=True)
        (folder / "config.yaml").touch()
    (tmp_path / "disk").mkdir()
    (run / "model").symlink_to(tmp_path / "disk")
    # A folder of the user's that only looks like one.
    (tmp_path / "config.yaml").touch()
    (tmp_path / "model").mkdir()
    for out in (
        *("run", "run/audit", "run/audit/private/x", "run/checkpoints", "run/other", "model/x"),
        *("run/prepared/../report", "audit", "disk", "new"),
    ):
        check_outside_runs(tmp_path / out, "--out", but=run)
    for out, place in (
        ("run/model", "model/"),
        ("run/model/x", "model/"),
        ("run/prepared/x/y", "prepared/"),
        ("new/../run/adapter", "adapter/"),
        ("run/checkpoints/step-00000001/x", "checkpoints/step-00000001/"),
        ("other/audit", "audit/"),
    ):
        with pytest.raises(ConfigError, match=f"'--out' must not be in {place} of a run"):
            check_outside_runs(tmp_path / out, "--out", but=run)
