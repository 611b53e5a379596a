"""`memguard verify`: each part of a run, intact, damaged or not there yet, and its repair."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_examples import run_cli, succeed, write_run, write_texts
from damage import cut, flip_byte

from memguard.data.identity_key import load_identity_key
from memguard.errors import ConfigError
from memguard.records.run_files import CheckpointManifest, name_checkpoint
from memguard.records.sealed import save_sealed, sum_file
from memguard.workflows.verify import State, Verified, verify


def look(folder: Path) -> Verified:
    return verify(folder, lambda name, size: None)


def list_states(found: Verified) -> dict[str, State]:
    return {part.name: part.state for part in found.parts}


@pytest.fixture(scope="module")
def prepared(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "model").symlink_to(tiny_folder / "model")
    write_texts(folder / "documents.jsonl")
    succeed("prepare", write_run(folder))
    return folder / "runs" / "run"


def test_what_has_not_been_done_is_not_damage(prepared: Path) -> None:
    found = look(prepared)
    assert found.is_intact
    assert list_states(found) == {
        "config.yaml": "intact",
        "prepared": "intact",
        "manifest": "intact",
        "checkpoints": "not there yet",
        "metrics": "not there yet",
        "model": "not there yet",
        "audit": "not there yet",
    }


def test_the_identity_key_is_named_and_needs_not_be_there(
    prepared: Path, session_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = load_identity_key(session_key).fingerprint
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    found = look(prepared)
    assert found.is_intact
    (part,) = (part for part in found.parts if part.name == "prepared")
    assert part.note.endswith(f", identity key {fingerprint}")


@pytest.mark.parametrize("change", [flip_byte, cut, Path.unlink])
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("config.yaml", "config.yaml"),
        ("prepared/offsets.npy", "prepared"),
        ("prepared/summary.json", "prepared"),
        ("manifest.jsonl", "manifest"),
    ],
)
def test_what_is_damaged_is_named(
    prepared: Path, name: str, part: str, change: Callable[[Path], None]
) -> None:
    path = prepared / name
    before = path.read_bytes()
    change(path)
    found = look(prepared)
    path.write_bytes(before)
    (damaged,) = (each for each in found.parts if each.state == "damaged")
    assert (damaged.name, [one.file for one in damaged.damages]) == (part, [name])
    assert damaged.repair is not None
    assert "memguard train" in damaged.repair
    assert not found.is_intact


@pytest.mark.parametrize("name", ["config.yaml", "prepared/summary.json", "manifest.jsonl"])
def test_what_the_disk_does_not_give_is_damage_beside_what_is_checked(
    prepared: Path, name: str
) -> None:
    path = prepared / name
    before = path.read_bytes()
    path.unlink()
    path.symlink_to("/proc/self/mem")  # Reading it is an error of the system (EIO).
    found = look(prepared)
    path.unlink()
    path.write_bytes(before)
    (damaged,) = (each for each in found.parts if each.state == "damaged")
    assert [str(one) for one in damaged.damages] == [f"{name} cannot be read: Input/output error"]
    assert list(list_states(found).values()).count("intact") == 2
    assert not found.is_intact


@pytest.mark.parametrize(("ends", "state"), [("two\n", "intact"), ("2wo\n", "damaged")])
def test_the_log_is_compared_with_the_newest_whole_checkpoint(
    prepared: Path, tmp_path: Path, ends: str, state: State
) -> None:
    run = Path(shutil.copytree(prepared, tmp_path / "run"))
    for step, log in ((1, "one\n"), (2, "one\ntwo\n"), (3, "one\ntwo\nthree\n")):
        save = run / "checkpoints" / name_checkpoint(step)
        save.mkdir(parents=True)
        (save / "metrics.jsonl").write_text(log)
        files = {"metrics.jsonl": sum_file(save / "metrics.jsonl")}
        manifest = CheckpointManifest(
            step=step, run_key="", sample_sha256=None, num_supervised_tokens=0, num_kept_tokens=0,
            num_rows=0, train_s=0, torch_version="", files=files,
        )  # fmt: skip
        save_sealed(manifest, save / "manifest.json")
    cut(run / "checkpoints" / name_checkpoint(3) / "metrics.jsonl")
    (run / "metrics.jsonl").write_text(f"one\n{ends}three\n")
    states = list_states(look(run))
    assert (states["checkpoints"], states["metrics"]) == ("damaged", state)


def test_it_is_told_as_json_and_without_torch(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    told = subprocess.run(
        [sys.executable, "-m", "memguard", "verify", str(prepared), "--json"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (told.returncode, told.stderr) == (0, "")
    assert json.loads(told.stdout) == look(prepared).describe()


def test_what_is_read_is_told_before_it_is_read(prepared: Path) -> None:
    read: list[tuple[str, int]] = []
    verify(prepared, lambda name, size: read.append((name, size)))
    assert [name for name, _ in read] == ["documents", "model"]
    assert read[0][1] > sum(path.stat().st_size for path in (prepared / "prepared").iterdir())


def test_the_repair_of_a_run_that_was_moved_names_its_folder(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = prepared.rename(prepared.with_name("moved"))
    (model,) = (part for part in look(moved).parts if part.name == "model")
    moved.rename(prepared)
    assert f"name=moved output_dir={prepared.parent}" in model.note


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither the folder of a run"):
        look(tmp_path)
    assert run_cli("verify", tmp_path / "none").code == 2
