"""A run whose files were damaged ends with the weights of one whose files were not, or says why."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_examples import (
    Killed,
    acting_after,
    copy_run,
    kill_after,
    make_run,
    run_folder,
    train_checked,
)

from memguard.config import RunConfig
from memguard.errors import ConfigError, DataError, RecordError
from memguard.records import load_manifest
from memguard.records.folders import CheckpointFolder, RunFiles
from memguard.records.run_files import has_trained, list_trained_files, load_checkpoint_manifest
from memguard.records.sealed import FileSum, save_sealed, sum_file
from memguard.train.trainer import Trainer
from memguard.workflows.common.folder import RunFolder
from memguard.workflows.training.checks import check_run
from memguard.workflows.training.data import prepare_run

pytestmark = pytest.mark.slow

GOLDFISH = [{"name": "goldfish", "k": 3, "mode": "random"}]


def make(folder: Path, **changes: Any) -> RunConfig:
    """Return a run of 9 steps with checkpoints after 4, 8 and 9."""
    values = {
        "mitigations": GOLDFISH,
        "train": {"max_steps": 9, "checkpoint_every_steps": 4},
        "audit": {"enabled": False},
    }
    return make_run(folder, **(values | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run that nothing has interrupted."""
    return train_checked(make(tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The same run, killed after its second checkpoint and a step beyond."""
    config = make(tmp_path_factory.mktemp("killed"))
    kill_after(9, config)
    return config


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Leave the first half of the lines, each of them whole."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]))


def plan_more(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace('"planned_repetitions":2', '"planned_repetitions":9', 1))


def say_another_step(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 8', '"step": 4'))


def seal_another_step(path: Path) -> None:
    manifest = load_checkpoint_manifest(path.parent)
    save_sealed(manifest.model_copy(update={"step": 4}), path)


def read_steps(config: RunConfig) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the lines of steps, and the line of the end with the totals."""
    log = (run_folder(config) / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in log]
    (end,) = (line for line in lines if line["event"] == "end")
    return [line for line in lines if line["event"] == "step"], end


def assert_ends_like(config: RunConfig, expected: RunConfig) -> None:
    ours, theirs = run_folder(config), run_folder(expected)
    weights = "model/model.safetensors"
    assert (ours / weights).read_bytes() == (theirs / weights).read_bytes()
    (steps, end), (wanted, _) = read_steps(config), read_steps(expected)
    assert [line["loss"] for line in steps] == [line["loss"] for line in wanted]
    for name in ("num_rows", "num_supervised_tokens", "num_kept_tokens"):
        assert end[name] == sum(line[name] for line in steps), name

    def counted(run: Path) -> list[tuple[str, int | None, int | None]]:
        entries = load_manifest(run / "manifest.jsonl")
        return [(each.id, each.num_repetitions, each.num_tokens_fed) for each in entries]

    assert counted(ours) == counted(theirs)
    assert has_trained(ours)
    assert RunFiles(ours).find_damage("trained") == RunFiles(ours).find_damage("prepared") == []


def test_weights_are_summed_by_the_function_that_is_given(whole: RunConfig) -> None:
    """So that each rank can hash its share of them before."""
    folder, read = run_folder(whole), []

    def note(path: Path) -> FileSum:
        read.append(path)
        return sum_file(path)

    assert RunFiles(folder).find_damage("trained", read=note) == []
    assert sorted(read) == sorted(list_trained_files(folder))
    assert {"model.safetensors", "config.json"} <= {path.name for path in read}
    read.clear()
    RunFolder(folder).require_trained(read=note)
    assert sorted(read) == sorted(list_trained_files(folder))


# -- of a run that is half done --------------------------------------------------------------------

HALF_DONE: list[tuple[str, Callable[[Path], None], str]] = [
    ("prepared/input_ids.npy", flip, "the documents are prepared again"),
    ("prepared/supervised.npy", flip, "the documents are prepared again"),
    ("prepared/offsets.npy", Path.unlink, "the documents are prepared again"),
    ("prepared/summary.json", flip, "the documents are prepared again"),
    ("manifest.jsonl", plan_more, "the documents are prepared again"),
    ("metrics.jsonl", flip, "restored from the checkpoint"),
    ("metrics.jsonl", cut, "restored from the checkpoint"),
    ("metrics.jsonl", Path.unlink, "restored from the checkpoint"),
    ("config.yaml", flip, "the settings given now are used"),
    ("checkpoints/step-00000008/manifest.json", say_another_step, "is skipped"),
    ("checkpoints/step-00000008/manifest.json", seal_another_step, "is skipped"),
    ("checkpoints/step-00000008/metadata.json", flip, "is skipped"),
    ("checkpoints/step-00000008/metrics.jsonl", flip, "is skipped"),
    ("checkpoints/step-00000008/__0_0.distcp", flip, "is skipped"),
    ("checkpoints/step-00000008/.metadata", Path.touch, "is skipped"),
]


@pytest.mark.parametrize(
    ("file", "damage", "told"),
    # One of each kind of file is quick.
    [
        pytest.param(*case, marks=[] if number % 3 else pytest.mark.quick)
        for number, case in enumerate(HALF_DONE)
    ],
)
def test_a_damaged_file_is_told_and_changes_nothing(
    killed: RunConfig,
    whole: RunConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    damage: Callable[[Path], None],
    told: str,
) -> None:
    config = copy_run(killed, tmp_path)
    damage(run_folder(config) / file)
    train_checked(config)
    said = " ".join(capsys.readouterr().err.split())
    assert told in said, said
    assert Path(file).name in said
    assert_ends_like(config, whole)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_documents_that_changed_are_not_prepared_again(tmp_path: Path, is_damaged: bool) -> None:
    config = make(tmp_path)
    kill_after(5, config)
    if is_damaged:
        flip(run_folder(config) / "prepared" / "input_ids.npy")
    source = tmp_path / "documents.jsonl"
    source.write_text(source.read_text().replace("doc-5", "doc-500"))
    with pytest.raises(DataError, match="documents have changed since training began"):
        train_checked(config)


@pytest.mark.parametrize("is_away", [False, True])
def test_a_run_goes_on_without_reading_its_sources(
    killed: RunConfig,
    whole: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_away: bool,
) -> None:
    """Its tokenizer, which was trained on them, is the same too."""
    config = copy_run(killed, tmp_path)
    source = Path(config.data.train[0])
    away = source.rename(source.with_suffix(".away")) if is_away else source
    opened: list[Path] = []
    original = Path.open

    def counted(path: Path, *given: Any, **named: Any) -> Any:
        opened.append(path)
        return original(path, *given, **named)

    monkeypatch.setattr(Path, "open", counted)
    try:
        train_checked(config)
    finally:
        away.rename(source)
    said = " ".join(capsys.readouterr().err.split())
    assert ("1 of 1 source files are missing" in said) == is_away, said
    assert opened
    assert source not in opened
    assert_ends_like(config, whole)
    for path in (run_folder(whole) / "model").iterdir():
        assert (run_folder(config) / "model" / path.name).read_bytes() == path.read_bytes(), path


def test_documents_are_known_again_where_their_summary_is_lost(tmp_path: Path) -> None:
    config = make(tmp_path)
    kill_after(5, config)
    prepared = run_folder(config) / "prepared"
    shutil.rmtree(prepared)
    source = tmp_path / "documents.jsonl"
    text = source.read_text()
    source.write_text(text.replace("doc-5", "doc-500"))
    with pytest.raises(DataError, match="documents have changed since training began"):
        train_checked(config)
    assert not prepared.exists(), "or the right ones would be refused"
    source.write_text(text)
    train_checked(config)
    assert RunFiles(run_folder(config)).find_damage("trained") == []


def test_documents_are_prepared_again_only_for_the_audit_they_were_placed_for(
    killed: RunConfig, tmp_path: Path
) -> None:
    config = copy_run(killed, tmp_path)
    flip(run_folder(config) / "prepared" / "format.npy")
    audit = config.audit.model_copy(update={"continuation_tokens": 5})
    with pytest.raises(RecordError, match=r"format\.npy .* lengths in 'audit' .* restore them"):
        train_checked(config.model_copy(update={"audit": audit}))


def test_damaged_settings_do_not_let_others_in(killed: RunConfig, tmp_path: Path) -> None:
    config = copy_run(killed, tmp_path)
    path = run_folder(config) / "config.yaml"
    flip(path)
    content = path.read_bytes()
    other = config.model_copy(update={"seed": 4})
    with pytest.raises(ConfigError, match="trained with other settings"):
        train_checked(other)
    assert path.read_bytes() == content


def test_a_private_run_does_not_go_on_without_its_key(
    killed: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its noise is derived from the key: other noise would not be the noise it was begun with."""
    config = copy_run(killed, tmp_path)
    data = config.data.model_copy(update={"identity_key": str(tmp_path / "lost.key")})
    elsewhere = config.model_copy(update={"data": data})
    # A run without noise says so, and makes no other key.
    prepare_run(check_run(elsewhere))
    assert "The run goes on without it" in " ".join(capsys.readouterr().err.split())
    (run_folder(config) / "config.yaml").unlink()
    noisy = elsewhere.model_copy(update={"mitigations": make_private(tmp_path)})
    with pytest.raises(DataError, match=r"identity key of .* is missing: .*lost\.key"):
        prepare_run(check_run(noisy))
    assert not (tmp_path / "lost.key").exists()


def make_private(folder: Path) -> Any:
    noise = {"name": "dp_sgd", "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    return make(folder, mitigations=[noise]).mitigations


# -- killed at its end -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        "training.train.save_manifest",
        "training.train.export_model",
        "training.train.save_sealed",
    ],
)
def test_killed_between_its_last_files_it_ends_the_same(
    killed: RunConfig, whole: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def die(*_: object, **__: object) -> None:
        raise Killed

    config = copy_run(killed, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(f"memguard.workflows.{place}", die)
        with pytest.raises(Killed):
            train_checked(config)
    assert not has_trained(run_folder(config))
    train_checked(config)
    assert_ends_like(config, whole)


# -- of a run that has ended -----------------------------------------------------------------------


def count_more(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace('"num_repetitions":1', '"num_repetitions":7', 1))


def feed_more(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace('"num_tokens_fed":', '"num_tokens_fed":1', 1))


ENDED: list[tuple[str, Callable[[Path], None]]] = [
    ("model/model.safetensors", flip),
    ("model/config.json", flip),
    ("model/tokenizer.json", Path.unlink),
    ("model", shutil.rmtree),
    ("trained.json", flip),
    ("trained.json", Path.unlink),
    ("manifest.jsonl", count_more),
    ("manifest.jsonl", feed_more),
    ("metrics.jsonl", flip),
    ("metrics.jsonl", cut),
]


@pytest.mark.parametrize(("file", "damage"), ENDED)
def test_what_training_left_is_made_again(
    whole: RunConfig, tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    config = copy_run(whole, tmp_path)
    damage(run_folder(config) / file)
    train_checked(config)
    assert_ends_like(config, whole)


@pytest.mark.parametrize(("file", "damage"), [ENDED[0], ENDED[4], ENDED[5]])
def test_without_a_checkpoint_a_finished_model_is_not_trained_over(
    whole: RunConfig, tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    config = copy_run(whole, tmp_path)
    run = run_folder(config)
    damage(run / file)
    shutil.rmtree(run / "checkpoints")
    weights = (run / "model" / "model.safetensors").read_bytes()
    with pytest.raises(RecordError, match=r"trained.json|model.safetensors.* no intact checkpoint"):
        train_checked(config)
    assert (run / "model" / "model.safetensors").read_bytes() == weights


def test_a_whole_model_needs_no_checkpoint(whole: RunConfig, tmp_path: Path) -> None:
    config = copy_run(whole, tmp_path)
    shutil.rmtree(run_folder(config) / "checkpoints")
    train_checked(config)
    assert RunFiles(run_folder(config)).find_damage("trained") == []


def test_a_file_that_is_not_the_runs_is_not_deleted_with_its_model(
    whole: RunConfig, tmp_path: Path
) -> None:
    config = copy_run(whole, tmp_path)
    adapter = run_folder(config) / "model" / "adapter_config.json"
    adapter.write_text("{}")
    with pytest.raises(RecordError, match=r"adapter_config\.json was not written .* move it away"):
        train_checked(config)
    assert adapter.exists()


def test_a_users_own_file_in_the_model_is_kept(whole: RunConfig, tmp_path: Path) -> None:
    config = copy_run(whole, tmp_path)
    model = run_folder(config) / "model"
    (model / "converted.gguf").write_text("a conversion, which nothing here reads")
    assert RunFiles(run_folder(config)).find_damage("trained") == []
    train_checked(config)
    (model / "config.json").write_text("{}")
    # Making the model again would delete it.
    with pytest.raises(RecordError, match=r"converted\.gguf was not written .* move it away"):
        train_checked(config)
    assert (model / "converted.gguf").exists()


def test_every_checkpoint_of_a_run_is_whole(whole: RunConfig) -> None:
    checkpoints = sorted((run_folder(whole) / "checkpoints").iterdir())
    assert [CheckpointFolder(path).find_damage() for path in checkpoints] == [[]] * len(checkpoints)


def test_a_run_folder_is_as_open_as_the_umask_lets_it_be(whole: RunConfig) -> None:
    run = run_folder(whole)
    umask = os.umask(0)
    os.umask(umask)
    modes = {
        path.relative_to(run).as_posix(): path.stat().st_mode & 0o777 for path in run.rglob("*")
    }
    private = {name: mode for name, mode in modes.items() if mode in (0o700, 0o600)}
    arrays = ("content_tokens", "format", "input_ids", "offsets", "supervised")
    owned = ["prepared/tokenizer.json", *(f"prepared/{name}.npy" for name in arrays)]
    if (run / "audit/audit.json").exists():
        owned += ["audit/records.parquet", "audit/findings.csv", "audit/canaries.parquet"]
    assert private == dict.fromkeys(owned, 0o600)
    for name in modes.keys() - private.keys():
        expected = 0o755 if (run / name).is_dir() else 0o644
        assert modes[name] & ~umask == expected & ~umask, (name, oct(modes[name]))


# -- what was fed of a document --------------------------------------------------------------------


def test_a_document_that_was_fed_in_part_says_how_much(tmp_path: Path) -> None:
    config = make(tmp_path, data={"seq_len": 24}, train={"max_steps": 3})
    train_checked(config)
    entries = load_manifest(run_folder(config) / "manifest.jsonl")
    fed = np.array([entry.num_tokens_fed for entry in entries])
    in_part = [
        entry
        for entry in entries
        if entry.num_repetitions == 0 and entry.num_tokens_fed and entry.role == "trained"
    ]
    assert in_part, "documents are longer than a row"
    assert all((entry.num_tokens_fed or 0) > 0 for entry in in_part)
    lines = (run_folder(config) / "metrics.jsonl").read_text().splitlines()
    assert all(each["num_rows"] == 8 for each in map(json.loads, lines) if each["event"] == "step")
    # Full rows of 24: nothing else was fed.
    assert 0 < fed.sum() <= 3 * 8 * 24
    assert not fed[[entry.role == "control" for entry in entries]].any()


# -- a folder that is taken away -------------------------------------------------------------------


@pytest.mark.parametrize("deed", ["renamed", "deleted", "replaced"])
def test_a_run_whose_folder_goes_away_does_not_make_it_again(tmp_path: Path, deed: str) -> None:
    config = make(tmp_path)
    run, other = run_folder(config), tmp_path / "elsewhere"

    def take_away(trainer: Trainer) -> None:
        trainer.wait_for_save()
        run.rename(other)
        if deed == "deleted":
            shutil.rmtree(other)
        if deed == "replaced":
            shutil.copytree(other, run)

    with (
        acting_after(6, take_away),
        pytest.raises(RecordError, match=r"runs/run' was deleted, renamed or replaced") as told,
    ):
        train_checked(config)
    assert told.value.exit_code == 3
    assert "\n" not in str(told.value)
    assert run.exists() == (deed == "replaced")
    left = run if deed == "replaced" else other
    if deed != "deleted":
        names = sorted(path.name for path in (left / "checkpoints").iterdir())
        assert names == ["step-00000002", "step-00000004"]
