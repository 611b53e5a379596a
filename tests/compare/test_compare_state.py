"""What is finished stays finished, and nothing goes on from another run's checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
from compare_examples import write_run
from damage import flip_byte

from memguard.compare import (
    Sweep,
    SweepRun,
    describe_sweep,
    find_state,
    is_finished,
    load_sweep,
    mark_finished,
    prepare_folder,
)
from memguard.records.run_files import sum_trained
from memguard.records.sealed import save_sealed

TEXT = """\
name: sweep
pretrain: {model: {path: m}, data: {train: b.jsonl}}
run: {data: {train: a.jsonl}}
settings: [{name: plain}, {name: other, overrides: {optim.lr: 0.5}}]
"""


def read_key(folder: Path) -> Any:
    return json.loads((folder / "finished.json").read_text())["key"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(*overrides: str) -> Sweep:
    Path("sweep.yaml").write_text(TEXT)
    return load_sweep("sweep.yaml", overrides)


def finish(run: SweepRun) -> None:
    """Do what the command line does when a run has ended well."""
    prepare_folder(run)
    if run.config.audit.enabled:
        write_run(run.folder)
    write_trained(run.folder)
    mark_finished(run.folder, run.key)


def write_trained(folder: Path) -> None:
    """Write the least that training leaves."""
    (folder / "model").mkdir(exist_ok=True)
    for name in ("model/config.json", "manifest.jsonl", "metrics.jsonl"):
        (folder / name).write_text("{}")
    save_sealed(sum_trained(folder, run_key="", step=1), folder / "trained.json")


def test_a_run_from_start_to_end() -> None:
    run = load().runs[0]
    assert find_state(run) == "starts"
    assert not run.folder.exists()
    assert prepare_folder(run) == "starts"
    assert find_state(run) == "continues"
    (run.folder / "checkpoints").mkdir()
    assert prepare_folder(run) == "continues"
    assert (run.folder / "checkpoints").is_dir()
    finish(run)
    assert is_finished(run)
    assert find_state(run) == prepare_folder(run) == "finished"
    assert read_key(run.folder) == run.key


def test_a_changed_setting_sets_the_old_folder_aside() -> None:
    before = load().runs[0]
    finish(before)
    for number in (1, 2):
        run = load(f"run.train.epochs={number + 1}").runs[0]
        assert find_state(run) == "replaced"
        assert prepare_folder(run) == "replaced"
        assert find_state(run) == "continues"
        assert not is_finished(run)
        assert (run.folder.parent / f"plain.replaced-{number}" / "started.json").is_file()
    assert read_key(run.folder.parent / "plain.replaced-1") == before.key


def test_an_empty_folder_starts_and_one_of_unknown_origin_is_set_aside() -> None:
    empty, run = load().runs
    empty.folder.mkdir(parents=True)
    assert prepare_folder(empty) == "starts"
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text("")
    assert prepare_folder(run) == "replaced"
    assert [path.name for path in run.folder.iterdir()] == ["started.json"]


@pytest.mark.parametrize(
    "name",
    [
        *("audit/report.json", "audit/records.parquet", "audit/report.html", "audit/audit.json"),
        "model/config.json",
    ],
)
def test_finished_means_the_audit_and_the_base_are_whole(name: str) -> None:
    base, run = load().in_order[:2]
    damaged = run if name.startswith("audit") else base
    finish(damaged)
    assert find_state(damaged) == "finished"
    flip_byte(damaged.folder / name)
    assert find_state(damaged) == "continues"
    (damaged.folder / name).unlink()
    assert find_state(damaged) == "continues"


def test_a_folder_whose_beginning_is_damaged_is_kept_and_told() -> None:
    run = load().runs[0]
    prepare_folder(run)
    (run.folder / "checkpoints").mkdir()
    flip_byte(run.folder / "started.json")
    assert describe_sweep(load())[-1] == (
        "1 of 3 runs start again (started.json is damaged; old folder kept): plain"
    )
    assert prepare_folder(run) == "unknown"
    assert (run.folder.parent / "plain.replaced-1" / "checkpoints").is_dir()
    assert find_state(run) == "continues"


@pytest.mark.parametrize("content", ["", "{", "{}", '{"key": 3}', '{"key": "another"}'])
def test_a_broken_mark_is_no_mark(content: str) -> None:
    run = load().runs[0]
    finish(run)
    (run.folder / "finished.json").write_text(content)
    assert not is_finished(run)
    assert find_state(run) == "continues"


def test_progress_names_every_run_once() -> None:
    sweep = load()
    assert describe_sweep(sweep) == ("3 of 3 runs start: base, plain, other",)
    base, plain, other = sweep.in_order
    finish(base)
    prepare_folder(plain)
    other.folder.mkdir()
    (other.folder / "file").touch()
    assert describe_sweep(sweep) == (
        "1 of 3 runs already finished: base",
        "1 of 3 runs resume: plain",
        "1 of 3 runs start again (settings, documents or version changed; old folder kept): other",
    )
