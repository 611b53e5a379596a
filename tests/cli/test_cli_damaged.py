"""A finished run that is damaged: told, not audited as it is, and made whole where that can be."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cli_examples import read_json, run_cli, write_run
from damage import cut, flip_byte

from memguard.audit.run import measure
from memguard.records.folders import AuditFolder
from memguard.workflows.auditing import audit as audit_module
from memguard.workflows.auditing import pages as audit_output
from memguard.workflows.auditing.models import LazyModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a finished run in runs/run and its settings beside; do not write here."""
    folder = tmp_path_factory.mktemp("damaged")
    for name in ("model", "documents.jsonl"):
        (folder / name).symlink_to(tiny_folder / name)
    settings = write_run(folder, output_dir="runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        outcome = run_cli("train", settings)
    assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run, in the current folder."""
    shutil.copytree(finished, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("runs/run")


@contextmanager
def no_model_loaded() -> Iterator[None]:
    with mock.patch.object(LazyModel, "_load", side_effect=AssertionError("a model is loaded")):
        yield


def read_all(folder: Path, *names: str) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.quick
@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "prepared/input_ids.npy",
        "manifest.jsonl",
        "metrics.jsonl",
        "model/model.safetensors",
        "model/config.json",
    ],
)
def test_a_damaged_run_is_not_audited(run: Path, name: str) -> None:
    flip_byte(run / name)
    before = read_all(run / "audit", "report.json", "records.parquet", "audit.json")
    refused = run_cli("audit", run, "audit.base=false")
    assert refused.code == 3
    line = refused.err.splitlines()[-1]
    assert line.startswith(f"memguard: '{run / name}' ")
    assert "'memguard train" in line
    assert read_all(run / "audit", *before) == before
    found = run_cli("verify", run)
    assert found.code == 3
    assert name in found.out
    assert "repair: 'memguard train" in found.out


def test_a_run_of_another_version_is_refused_by_every_command(run: Path) -> None:
    manifest = run / "manifest.jsonl"
    entries = [json.loads(line) for line in manifest.read_text().splitlines()]
    manifest.write_text("".join(f"{json.dumps({**e, 'dropped': 1})}\n" for e in entries))
    for arguments in (("train", "run.yaml"), ("audit", run, "audit.base=false"), ("verify", run)):
        refused = run_cli(*arguments)
        assert refused.code == 3, refused.err
        assert refused.err.splitlines()[-1] == (
            f"memguard: '{manifest}' was written by another version of memguard (it has the field "
            f"'dropped'): delete '{run}', or choose another 'name', and run memguard train again"
        )
    shutil.rmtree(run)
    assert run_cli("prepare", "run.yaml").code == 0


@pytest.mark.parametrize("change", [flip_byte, cut, Path.unlink])
@pytest.mark.parametrize("name", ["audit/report.html", "model/README.md"])
def test_training_again_renders_pages_without_a_model(
    run: Path, name: str, change: Callable[[Path], None]
) -> None:
    before = read_all(run, name, "audit/report.json", "audit/records.parquet", "audit/audit.json")
    change(run / name)
    with no_model_loaded():
        again = run_cli("train", "run.yaml")
    assert again.code == 0, again.err
    warning = next(line for line in again.err.splitlines() if line.startswith("warning: audit: "))
    assert Path(name).name in warning
    assert warning.endswith("Rendered again from report.json")
    assert read_all(run, *before) == before


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("report.json", flip_byte),
        ("records.parquet", flip_byte),
        ("records.parquet", Path.unlink),
        ("audit.json", Path.unlink),
    ],
)
def test_training_again_audits_again_what_is_damaged(
    run: Path, name: str, change: Callable[[Path], None]
) -> None:
    scores = (run / "audit" / "records.parquet").read_bytes()
    verdict = read_json(run / "audit" / "report.json")["verdict"]
    change(run / "audit" / name)
    with no_model_loaded():  # The scores are kept.
        again = run_cli("train", "run.yaml")
    assert again.code == 0, again.err
    assert f"warning: audit: {name} is" in again.err
    assert AuditFolder(run / "audit").find_damage() == []
    assert (run / "audit" / "records.parquet").read_bytes() == scores
    assert read_json(run / "audit" / "report.json")["verdict"] == verdict
    assert verdict["sentence"].split(".")[0][:20] in (run / "model" / "README.md").read_text()


@pytest.mark.parametrize("place", ["write_card", "save_audit_files"])
def test_an_audit_that_is_killed_before_its_end_is_made_again(run: Path, place: str) -> None:
    with mock.patch.object(audit_output, place, side_effect=KeyboardInterrupt):
        killed = run_cli("audit", run, "audit.continuation_tokens=6")
    assert killed.code == 130
    assert run_cli("verify", run).code == 3
    assert run_cli("train", "run.yaml").code == 0
    assert run_cli("verify", run).code == 0


def test_an_audit_of_other_probes_stands_in_the_model_card(run: Path) -> None:
    assert run_cli("audit", run, "audit.continuation_tokens=6").code == 0
    assert "6 tokens" in (run / "model" / "README.md").read_text()
    assert run_cli("verify", run).code == 0


def test_an_audit_elsewhere_leaves_the_run_as_it_is(run: Path, tmp_path: Path) -> None:
    before = read_all(run, "model/README.md", "audit/audit.json")
    assert run_cli("audit", run, "--out", "out", "audit.continuation_tokens=6").code == 0
    assert read_all(run, *before) == before
    assert run_cli("verify", "out").code == 0
    flip_byte(tmp_path / "out" / "report.html")
    found = run_cli("verify", "out")
    assert (found.code, "repair: 'memguard report out' renders it again" in found.out) == (3, True)
    assert run_cli("report", "out").code == 0
    assert run_cli("verify", "out").code == 0


@pytest.mark.parametrize(
    "out",
    [
        "runs/run/model",
        "runs/run/model/deep/er",
        "runs/run/adapter",
        "runs/run/audit/../prepared",
        "link/prepared",
        "linked/audit",
        "runs/run/checkpoints/step-00000001",
    ],
)
def test_an_audit_is_not_written_among_the_files_of_a_run(run: Path, out: str) -> None:
    Path("link").symlink_to(run)
    Path("linked").symlink_to(run / "model")
    for arguments in ((run,), ("--model", "model", "--members", "documents.jsonl")):
        refused = run_cli("audit", *arguments, "--out", out)
        assert (refused.code, refused.err.count("\n")) == (2, 1), refused.err
        assert refused.err.startswith("'--out' must not be in ")
        assert refused.err.endswith("Choose a folder outside the run\n")
    assert run_cli("verify", run).code == 0


def test_the_audit_of_a_run_is_written_by_that_run_only(run: Path) -> None:
    given = ("--model", "model", "--members", "documents.jsonl", "--out", run / "audit")
    refused = run_cli("audit", *given)
    assert (refused.code, "'--out' must not be in audit/ of a run" in refused.err) == (2, True)
    # export, compare and train do not write there either.
    for command in (
        ("export", run, run / "model" / "merged", "--merge"),
        ("compare", run, run, "--out", run / "prepared"),
        ("train", "run.yaml", "name=again", f"output_dir={run}/model"),
    ):
        refused = run_cli(*command)
        assert (refused.code, refused.err.count("\n")) == (2, 1), refused.err
        assert "must not be in " in refused.err
    # A folder in audit/ is the user's.
    given = ("--out", "runs/run/audit/other", "audit.continuation_tokens=6")
    assert run_cli("audit", run, *given).code == 0
    assert run_cli("verify", run).code == 0


@pytest.mark.parametrize("damage", [flip_byte, cut])
@pytest.mark.parametrize("name", ["report.json", "audit.json"])
def test_a_damaged_report_is_not_rendered(
    run: Path, name: str, damage: Callable[[Path], None]
) -> None:
    before = read_all(run, "audit/report.html", "model/README.md")
    damage(run / "audit" / name)
    refused = run_cli("report", run)
    assert (refused.code, refused.err.count("\n")) == (3, 1)
    assert f"{name}' is damaged" in refused.err
    assert "Run 'memguard audit' again" in refused.err
    assert read_all(run, *before) == before


@pytest.mark.parametrize(("arguments", "locked"), [((), "runs/run"), (("--out", "out"), "out")])
def test_a_second_audit_of_the_same_folder_is_refused(
    run: Path, arguments: tuple[str, ...], locked: str
) -> None:
    Path(locked).mkdir(exist_ok=True)
    before = read_all(run / "audit", "report.json", "audit.json")
    handle = os.open(Path(locked) / ".lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        refused = run_cli("audit", run, *arguments)
        in_use = run_cli("verify", locked) if locked != "out" else None
    finally:
        os.close(handle)
    assert refused.code == 2
    # One line: torch, whose import is told, is not waited for.
    assert refused.err.startswith(f"another process is using '{locked}'")
    assert refused.err.count("\n") == 1
    assert in_use is None or "files that it is writing may look damaged" in in_use.out
    assert read_all(run / "audit", *before) == before
    assert run_cli("audit", run, *arguments).code == 0


@pytest.mark.parametrize(
    ("command", "is_early"), [("audit", True), ("audit", False), ("train", False)]
)
def test_a_run_that_is_renamed_in_mid_audit_is_not_made_again(
    run: Path, command: str, is_early: bool
) -> None:
    (run / "audit" / "audit.json").unlink()

    def rename_and_measure(*given: Any, **more: Any) -> Any:
        outcome = None if is_early else measure(*given, **more)
        run.rename("runs/elsewhere")
        return measure(*given, **more) if is_early else outcome

    with mock.patch.object(audit_module, "measure", rename_and_measure):
        ended = run_cli(command, "run.yaml" if command == "train" else run)
    assert ended.code == 3, ended.err
    assert f"'{run}' was deleted, renamed or replaced" in ended.err.splitlines()[-1]
    assert not run.exists()


def test_where_a_run_lay_does_not_stand_in_its_report(run: Path, tmp_path: Path) -> None:
    outcome = run_cli("audit", tmp_path / "runs" / "run", "--base", tmp_path / "model")
    assert outcome.code == 0, outcome.err
    report = read_json(run / "audit" / "report.json")
    assert report["method"]["command"] == (f"memguard audit runs/run --base {tmp_path.name}/model")
    for name in ("audit/report.json", "audit/report.html", "model/README.md"):
        assert str(tmp_path.parent) not in (run / name).read_text(), name


def test_scores_of_another_configuration_are_not_used(run: Path, tmp_path: Path) -> None:
    model = tmp_path / "other"
    shutil.copytree(run / "model", model)
    arguments = ("audit", "--model", model, "--members", "documents.jsonl", "--out", "out")
    arguments += ("audit.continuation_tokens=8",)
    assert run_cli(*arguments).code == 0
    with no_model_loaded():
        assert run_cli(*arguments).code == 0
    config = model / "config.json"
    config.write_text(json.dumps({**read_json(config), "rms_norm_eps": 0.5}))
    with mock.patch.object(LazyModel, "_load", side_effect=KeyboardInterrupt):
        assert run_cli(*arguments).code == 130, "other arithmetic, other scores"
