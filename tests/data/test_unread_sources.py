"""A prepared run does not open sources whose files look the same."""

import os
from pathlib import Path
from typing import Any

import pytest
from cli_examples import make_texts
from prepare_examples import make_run, prepare_as, write_named

from memguard.config import RunConfig
from memguard.data.sources import list_stamps
from memguard.data.tokenization import train_bpe
from memguard.errors import DataError
from memguard.records.run_files import load_summary
from memguard.records.sealed import save_sealed


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe(make_texts(30), vocab_size=400)


class Prepared:
    """Documents of a folder and a file, prepared, and what is opened when they are once more."""

    def __init__(self, folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokenizer, self.run = tokenizer, folder / "run"
        (folder / "many").mkdir()
        self.files = [folder / "many/a.jsonl", folder / "many/b.jsonl", folder / "one.jsonl"]
        for number, file in enumerate(self.files):
            write_named(file, make_texts(20, seed=number), prefix=f"{file.stem}-")
        sources = [str(folder / "many"), str(folder / "o*.jsonl")]
        self.config = make_run(sources, audit={"enabled": False})
        self.opened: list[str] = []
        original = Path.open

        def counted(path: Path, *given: Any, **named: Any) -> Any:
            self.opened += [path.name] if path in self.files else []
            return original(path, *given, **named)

        monkeypatch.setattr(Path, "open", counted)
        self.again()
        assert self.opened == ["a.jsonl", "b.jsonl", "one.jsonl"]

    def again(self, config: RunConfig | None = None) -> str:
        """Prepare and return what was printed."""
        self.opened.clear()
        return prepare_as(config or self.config, self.run, self.tokenizer)[1]

    def begin(self) -> None:
        (self.run / "metrics.jsonl").touch()


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    return Prepared(tmp_path, tokenizer, monkeypatch)


def change(file: Path) -> None:
    """Replace a text by another of the same length."""
    before, text = file.stat(), file.read_text()
    place = len(text) // 2
    other = "z" if text[place] != "z" else "y"
    file.write_text(text[:place] + other + text[place + 1 :])
    assert file.stat().st_size == before.st_size
    moment = before.st_mtime_ns + 1
    os.utime(file, ns=(moment, moment))


def test_sources_are_read_once_and_again_only_if_one_changed(prepared: Prepared) -> None:
    assert "unchanged" in prepared.again()
    assert prepared.opened == []
    os.utime(prepared.files[0], ns=(1, 1))
    # The texts are the same, and so it is not opened a second time.
    assert "unchanged" in prepared.again()
    assert len(prepared.opened) == 3
    prepared.again()
    assert prepared.opened == []
    change(prepared.files[1])
    assert "preparing again" in prepared.again()
    assert len(prepared.opened) == 3
    prepared.begin()
    prepared.again()
    assert prepared.opened == []
    change(prepared.files[2])
    with pytest.raises(DataError, match="documents have changed since training began"):
        prepared.again()


@pytest.mark.slow
def test_settings_of_the_format_are_compared(prepared: Prepared) -> None:
    data = prepared.config.data.model_copy(update={"format": "text"})
    prepared.again(prepared.config.model_copy(update={"data": data}))
    assert len(prepared.opened) == 3


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 3])
def test_missing_sources_are_a_warning_once_training_has_begun(
    prepared: Prepared, num: int
) -> None:
    for source in [prepared.files[-1], prepared.files[0].parent][: 1 + num // 3]:
        source.rename(source.with_name(f"{source.stem}.away"))
    with pytest.raises(DataError):
        prepared.again()
    prepared.begin()
    said = prepared.again()
    assert prepared.opened == []
    assert f"{num} of 3 source files are missing" in said
    assert "the documents prepared before are used" in said


@pytest.mark.slow
@pytest.mark.parametrize("is_new", [False, True])
def test_a_missing_source_hides_no_change_of_another(prepared: Prepared, is_new: bool) -> None:
    prepared.begin()
    prepared.files[2].unlink()
    if is_new:
        write_named(prepared.files[0].with_name("c.jsonl"), make_texts(3, seed=9), "c")
    else:
        change(prepared.files[0])
    with pytest.raises(DataError):
        prepared.again()


@pytest.mark.slow
def test_a_new_file_in_a_folder_is_seen(prepared: Prepared) -> None:
    write_named(prepared.files[0].with_name("c.jsonl"), make_texts(3, seed=9), "c")
    assert "preparing again" in prepared.again()


@pytest.mark.slow
def test_damaged_tokens_are_prepared_again(prepared: Prepared) -> None:
    path = prepared.run / "prepared" / "input_ids.npy"
    content = path.read_bytes()
    prepared.begin()
    path.write_bytes(content[:-1] + b"\x01")
    assert "prepared again" in prepared.again()
    assert len(prepared.opened) == 3
    assert path.read_bytes() == content


@pytest.mark.slow
def test_a_source_whose_files_are_not_known_is_read(prepared: Prepared) -> None:
    """As a dataset of the hub that is not in the cache."""
    assert list_stamps(["owner/name"], prepared.run) == {"owner/name": ""}
    prepared.begin()
    path = prepared.run / "prepared" / "summary.json"
    summary = load_summary(prepared.run)
    assert summary is not None
    save_sealed(summary.model_copy(update={"files": {**summary.files, "owner/name": ""}}), path)
    prepared.again()
    assert len(prepared.opened) == 3


@pytest.mark.slow
def test_a_dataset_of_the_hub_is_known_by_its_cached_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "datasets--owner--name" / "snapshots" / "123"
    snapshot.mkdir(parents=True)
    (snapshot / "rows.parquet").write_bytes(b"123")
    sources = ["owner/name:part@main", "docstrings:json"]
    stamps = list_stamps(sources, tmp_path / "cache")
    rows, docstrings = stamps
    assert rows == str(snapshot / "rows.parquet")
    assert stamps[rows].startswith("3 ")
    assert Path(docstrings).parent == tmp_path / "cache"
    assert list_stamps(sources, tmp_path / "cache") == stamps
