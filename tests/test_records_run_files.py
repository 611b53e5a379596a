"""What each stage of a run wrote, and whether it is still that."""

from pathlib import Path

import pytest
from corpus_examples import summarise
from record_examples import make_entry

from memguard.records import hash_plan, save_manifest
from memguard.records.folders import CheckpointFolder, RunFiles
from memguard.records.run_files import CheckpointManifest, add_hash_line, has_trained, sum_trained
from memguard.records.sealed import Damage, save_sealed, sum_file

ENTRY = make_entry(num_tokens=3)
COUNTED = ENTRY.model_copy(update={"num_repetitions": 1, "num_tokens_fed": 3})


def list_names(damages: list[Damage]) -> list[str]:
    return [each.file for each in damages]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_every_flipped_bit_of_the_settings_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    content = add_hash_line("a: ö\n").encode()
    path.write_bytes(content)
    assert RunFiles(tmp_path).find_damage("config") == []
    for index in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[index // 8] ^= 1 << index % 8
        path.write_bytes(flipped)
        assert list_names(RunFiles(tmp_path).find_damage("config")) == ["config.yaml"], flipped


@pytest.mark.parametrize("changed", [b"", b"seed: 3\n", b"seed: 3\n# sha256: 00\n"])
def test_settings_without_their_hash_are_damaged(tmp_path: Path, changed: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(changed)
    assert list_names(RunFiles(tmp_path).find_damage("config")) == ["config.yaml"]


def test_settings_that_are_not_there_are_missing(tmp_path: Path) -> None:
    assert str(RunFiles(tmp_path).find_damage("config")[0]) == "config.yaml is missing"


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    folder = tmp_path / "prepared"
    folder.mkdir()
    (folder / "input_ids.npy").write_bytes(b"tokens")
    summary = summarise(
        1,
        arrays={"input_ids.npy": sum_file(folder / "input_ids.npy")},
        manifest_sha256=hash_plan([ENTRY]),
        identity_key="00ff",
    )
    save_sealed(summary, folder / "summary.json")
    save_manifest([ENTRY], tmp_path / "manifest.jsonl")
    return tmp_path


def test_what_is_counted_after_training_is_not_part_of_the_plan(prepared: Path) -> None:
    assert RunFiles(prepared).find_damage("prepared") == []
    save_manifest([COUNTED], prepared / "manifest.jsonl")
    assert RunFiles(prepared).find_damage("prepared") == []


@pytest.mark.parametrize(
    "file", ["prepared/summary.json", "prepared/input_ids.npy", "manifest.jsonl"]
)
@pytest.mark.parametrize("change", [flip, Path.unlink])
def test_a_prepared_file_that_changed_is_named(prepared: Path, file: str, change: object) -> None:
    change(prepared / file)  # type: ignore[operator]
    assert list_names(RunFiles(prepared).find_damage("prepared")) == [file]


@pytest.mark.parametrize(
    "change",
    [
        {"planned_repetitions": 9},
        {"cluster": 1},
        {"bucket": "x"},
        {"text_hmac": "g"},
        {"has_own_id": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_plan_is_damage(prepared: Path, change: dict[str, object]) -> None:
    save_manifest([ENTRY.model_copy(update=change)], prepared / "manifest.jsonl")
    assert list_names(RunFiles(prepared).find_damage("prepared")) == ["manifest.jsonl"]


def test_a_file_that_was_not_prepared_is_damage(prepared: Path) -> None:
    (prepared / "prepared" / "labels.npy").write_bytes(b"")
    assert list_names(RunFiles(prepared).find_damage("prepared")) == ["prepared/labels.npy"]


def test_documents_may_be_missing_only_until_training_begins(tmp_path: Path) -> None:
    assert RunFiles(tmp_path).find_damage("prepared") == []
    (tmp_path / "metrics.jsonl").touch()
    assert list_names(RunFiles(tmp_path).find_damage("prepared")) == ["prepared/summary.json"]


def save_checkpoint_files(folder: Path, **changes: object) -> Path:
    path = folder / "step-00000006"
    path.mkdir()
    (path / "__0_0.distcp").write_bytes(b"weights")
    values: dict[str, object] = {
        "step": 6,
        "run_key": "r",
        "sample_sha256": None,
        "num_supervised_tokens": 0,
        "num_kept_tokens": 0,
        "num_rows": 0,
        "train_s": 0.0,
        "torch_version": "2",
        "files": {"__0_0.distcp": sum_file(path / "__0_0.distcp")},
    }
    manifest = CheckpointManifest.model_validate(values | changes)
    save_sealed(manifest, path / "manifest.json")
    return path


def test_a_whole_checkpoint_has_no_damage(tmp_path: Path) -> None:
    assert CheckpointFolder(save_checkpoint_files(tmp_path)).find_damage() == []


@pytest.mark.parametrize("file", ["__0_0.distcp", "manifest.json"])
@pytest.mark.parametrize("change", [flip, Path.unlink])
def test_a_file_of_a_checkpoint_that_changed_is_named(
    tmp_path: Path, file: str, change: object
) -> None:
    path = save_checkpoint_files(tmp_path)
    change(path / file)  # type: ignore[operator]
    assert list_names(CheckpointFolder(path).find_damage()) == [file]


def test_a_file_that_no_manifest_lists_is_damage(tmp_path: Path) -> None:
    path = save_checkpoint_files(tmp_path)
    (path / ".metadata").write_bytes(b"")
    assert list_names(CheckpointFolder(path).find_damage()) == [".metadata"]


def test_a_checkpoint_of_another_step_is_damaged(tmp_path: Path) -> None:
    path = save_checkpoint_files(tmp_path, step=4)
    told = [str(each) for each in CheckpointFolder(path).find_damage()]
    assert told == ["manifest.json is of step 4, not of 'step-00000006'"]


def test_a_file_outside_the_checkpoint_is_damage(tmp_path: Path) -> None:
    (tmp_path / "outside.json").write_bytes(b"weights")
    path = save_checkpoint_files(
        tmp_path, files={"../outside.json": sum_file(tmp_path / "outside.json")}
    )
    assert list_names(CheckpointFolder(path).find_damage()) == ["__0_0.distcp", "../outside.json"]


TEMPLATE = "additional_chat_templates/tools.jinja"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "README.md", TEMPLATE):
        (model / name).write_bytes(b"content")
    (tmp_path / "metrics.jsonl").write_bytes(b"a line\n")
    save_manifest([COUNTED], tmp_path / "manifest.jsonl")
    save_sealed(sum_trained(tmp_path, run_key="r", step=6), tmp_path / "trained.json")
    return tmp_path


def test_training_that_has_not_ended_is_not_damage(tmp_path: Path) -> None:
    assert not has_trained(tmp_path)
    assert RunFiles(tmp_path).find_damage("trained") == []


def test_the_card_of_a_model_may_be_written_again(trained: Path) -> None:
    (trained / "model" / "README.md").write_text("another card")
    assert has_trained(trained)
    assert RunFiles(trained).find_damage("trained") == []


@pytest.mark.parametrize(
    "file", ["metrics.jsonl", "manifest.jsonl", "model/config.json", f"model/{TEMPLATE}"]
)
@pytest.mark.parametrize("change", [flip, Path.unlink])
def test_what_training_left_and_changed_since_is_named(
    trained: Path, file: str, change: object
) -> None:
    change(trained / file)  # type: ignore[operator]
    assert list_names(RunFiles(trained).find_damage("trained")) == [file]


def test_a_damaged_record_of_the_end_is_damage(trained: Path) -> None:
    flip(trained / "trained.json")
    assert has_trained(trained)
    assert list_names(RunFiles(trained).find_damage("trained")) == ["trained.json"]


def test_a_file_that_training_did_not_leave_is_damage(trained: Path) -> None:
    (trained / "model" / "adapter_config.json").write_text("{}")
    assert list_names(RunFiles(trained).find_damage("trained")) == ["model/adapter_config.json"]
