"""What another user of the machine reads of a run, and what commands tell them."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_examples import Outcome, run_cli, write_run
from damage import flip_byte
from other_user import needs_root, open_copy, run_as_nobody
from ranks import RankPool

pytestmark = pytest.mark.slow

ARRAYS = [
    f"prepared/{name}.npy"
    for name in ("content_tokens", "format", "input_ids", "offsets", "supervised")
]
PRIVATE = [
    "audit/findings.csv",
    "audit/private/excerpts.txt",
    "audit/records.parquet",
    *ARRAYS,
    "reference_nll.json",
    "reference_nll.npy",
]


@pytest.fixture(scope="module")
def finished(tiny_folder: Path) -> Iterator[Path]:
    """Folder with a finished run of adapters in runs/run, written under a umask of 0."""
    with open_copy(tiny_folder) as folder:
        (folder / "out").rmdir()
        train(folder)
        yield folder


def train(folder: Path) -> None:
    (folder / "model" / "model.safetensors").chmod(0o644)  # transformers leaves it to its owner.
    settings = write_run(
        folder,
        output_dir="runs",
        model={"path": "model"},
        data={"train": "documents.jsonl", "seq_len": 128},
        adapter={"name": "lora", "r": 2},
        mitigations=[{"name": "ngram_penalty"}],
        audit={"continuation_tokens": 8, "excerpts": True},
    )
    before = os.umask(0)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            outcome = run_cli("train", settings.name)
    finally:
        os.umask(before)
    assert outcome.code == 0, outcome.err


@pytest.fixture
def place(finished: Path) -> Iterator[Path]:
    with open_copy(finished) as copy:
        yield copy


def say_line(ended: Outcome) -> str:
    assert "Traceback" not in ended.err
    return ended.err.splitlines()[-1]


def test_private_files_have_mode_0600_whatever_the_umask(finished: Path) -> None:
    run = finished / "runs" / "run"
    modes = {
        path.relative_to(run).as_posix(): path.stat().st_mode & 0o777
        for path in run.rglob("*")
        if path.is_file()
    }
    assert sorted(name for name, mode in modes.items() if mode == 0o600) == PRIVATE
    assert {mode for name, mode in modes.items() if name not in PRIVATE} == {0o644}
    assert (run / "audit" / "private").stat().st_mode & 0o777 == 0o700


def test_files_written_again_are_private_again(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "runs" / "run"
    for name in PRIVATE:
        (run / name).chmod(0o644)
    # As damage is mended: documents, losses, checkpoints and audit are made again.
    flip_byte(run / "prepared" / "input_ids.npy")
    for name in ("reference_nll.json", "trained.json", "audit/audit.json"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "adapter")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        again = run_cli("train", "run.yaml")
    assert again.code == 0, again.err
    assert [name for name in PRIVATE if (run / name).stat().st_mode & 0o777 != 0o600] == []


@pytest.mark.quick
@needs_root
def test_verify_lists_what_another_user_may_not_read(place: Path, ranks: RankPool) -> None:
    told, as_json = run_as_nobody(
        ranks, place, ("verify", "runs/run"), ("verify", "runs/run", "--json")
    )
    assert told.code == as_json.code == 0, told.err
    unread = [*ARRAYS, "audit/records.parquet", "audit/findings.csv"]
    lines = told.out.splitlines()
    assert [line.split()[-5] for line in lines if line.endswith(" not checked: no permission")] == (
        unread
    )
    assert lines[-1] == ("runs/run: no damage found; not checked (no permission): prepared, audit")
    found = json.loads(as_json.out)
    assert (found["intact"], found["not_checked"]) == (False, unread)
    states = {part["name"]: part["state"] for part in found["parts"]}
    assert {name for name, state in states.items() if state == "not checked"} == {
        "prepared", "audit",
    }  # fmt: skip
    assert states["model"] == states["base model"] == states["manifest"] == "intact"
    # Their owner sees the same files whole.
    assert run_cli("verify", place / "runs" / "run").out.splitlines()[-1].endswith(": intact")


@needs_root
@pytest.mark.parametrize("name", ["manifest.jsonl", "audit/report.json", "prepared/summary.json"])
def test_damage_beside_what_is_not_checked_is_damage(
    place: Path, ranks: RankPool, name: str
) -> None:
    flip_byte(place / "runs" / "run" / name)
    (told,) = run_as_nobody(ranks, place, ("verify", "runs/run"))
    assert told.code == 3
    assert name in told.out
    assert "repair: " in told.out
    assert "not checked (no permission): " in told.out.splitlines()[-1]


@needs_root
def test_closed_folders_are_not_checked_and_not_missing(place: Path, ranks: RankPool) -> None:
    run = place / "runs" / "run"
    closed = ["prepared", "checkpoints", "adapter", "audit"]
    for name in closed:
        (run / name).chmod(0o700)
    (told,) = run_as_nobody(ranks, place, ("verify", "runs/run", "--json"))
    assert told.code == 0, told.out
    found = json.loads(told.out)
    states = {part["name"]: part["state"] for part in found["parts"]}
    assert states.pop("config.yaml") == states.pop("metrics") == "intact"
    assert set(states.values()) == {"not checked", "intact"}
    assert states["manifest"] == "intact"
    assert {"prepared/summary.json", "checkpoints/", "audit/"} <= set(found["not_checked"])
    # An unfinished run still needs the losses before training.
    for name in closed:
        (run / name).chmod(0o755)
    (run / "trained.json").unlink()
    shutil.rmtree(run / "audit")
    (told,) = run_as_nobody(ranks, place, ("verify", "runs/run", "--json"))
    found = json.loads(told.out)
    assert "reference_nll.json" in found["not_checked"]


@needs_root
def test_another_user_merges_the_adapter_without_the_documents(
    place: Path, ranks: RankPool
) -> None:
    (merged,) = run_as_nobody(
        ranks, place, ("export", "runs/run", "out/merged", "--merge", "--json")
    )
    assert merged.code == 0, merged.err
    assert (
        "export: the run's documents cannot be read (no permission); logits are compared on random "
        "tokens only"
    ) in merged.err.splitlines()
    assert json.loads(merged.out)["num_own_rows"] == 0
    owned = run_cli("export", place / "runs" / "run", place / "own", "--merge", "--json")
    assert json.loads(owned.out)["num_own_rows"] > 0
    assert json.loads(owned.out)["weights_sha256"] == json.loads(merged.out)["weights_sha256"]


@needs_root
def test_what_needs_a_private_file_ends_with_one_line(place: Path, ranks: RankPool) -> None:
    shutil.copytree(place / "runs" / "run", place / "runs" / "other")
    audited, compared, bundled, written, planned, tried = run_as_nobody(
        ranks,
        place,
        ("audit", "runs/run", "--out", "out/audit"),
        ("compare", "runs/run", "runs/other", "--out", "out/comparison"),
        ("bundle", "runs/run", "out/run.zip"),
        ("report", "runs/run"),
        ("plan", "run.yaml", "--gpus", "1"),
        ("plan", "run.yaml", "--json"),
    )
    assert [audited.code, compared.code, bundled.code] == [3, 3, 3], (audited.err, compared.err)
    way_out = "cannot be read: no permission. Run this command as the user whom the file belongs to"
    assert say_line(audited) == f"memguard: 'runs/run/{ARRAYS[0]}' {way_out}"
    for ended in (compared, bundled):
        assert say_line(ended) == f"memguard: 'runs/run/audit/records.parquet' {way_out}"
    # A folder of another user cannot be written to: a matter of settings, not of the run.
    assert written.code == 2
    assert "cannot be written or read (Permission denied)" in say_line(written)
    assert planned.code == 0, planned.err
    # Documents are prepared anew where those of the run cannot be read.
    assert tried.code == 0, tried.err
