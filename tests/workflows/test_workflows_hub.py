"""Which files go to the hub, and what in them names this machine."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from memguard.config import RunConfig
from memguard.errors import ConfigError, ModelError
from memguard.workflows.training.hub import (
    HubRequest,
    _clean_file,
    _find_base,
    _is_allowed,
    _list_places,
)


def make_config(model: str | None = "base", **data: Any) -> RunConfig:
    data = {"train": ["/srv/data/mails.jsonl", "docs/notes.txt"], **data}
    scratch = {"config": {"model_type": "llama"}, "tokenizer": "/srv/tokenizer"}
    of_model = {"scratch": scratch} if model is None else {"path": model}
    values = {"name": "run", "output_dir": "/srv/runs", "model": of_model, "data": data}
    return RunConfig.model_validate(values)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache of the hub with one model."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / "models--org--base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_files_of_a_model_may_be_sent_and_no_others() -> None:
    for name in (
        *("model.safetensors", "model-00002-of-00016.safetensors", "adapter_model.safetensors"),
        *("model.safetensors.index.json", "config.json", "adapter_config.json"),
        *("generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"),
    ):
        assert _is_allowed(name), name
    for name in (
        *("manifest.jsonl", "records.parquet", "config.yaml", "optimizer.pt", "training_args.bin"),
        *("metrics.jsonl", "trained.json", "audit/report.json", "input_ids.npy", "README.md"),
        *("memguard-identity.key", "other.safetensors", "model.safetensors.old", "CONFIG.JSON"),
        *("model-1-of-2.safetensors", "sub/config.json", "../config.json", "__0_0.distcp"),
    ):
        assert not _is_allowed(name), name


def test_fields_that_name_places_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = {"model_type": "llama", "text_config": {"_name_or_path": "/srv/x", "vocab_size": 4}}
    path.write_text(json.dumps({"_name_or_path": "/srv/x", **fields}))
    content = _clean_file(path, None, frozenset())
    assert content is not None
    assert json.loads(content) == {"model_type": "llama", "text_config": {"vocab_size": 4}}
    # Without such a field the file is sent as it is, byte for byte.
    path.write_bytes(content)
    assert _clean_file(path, None, frozenset()) is None


@pytest.mark.parametrize(
    ("base", "expected"), [(None, (None, None)), ("org/base", ("org/base", "v1"))]
)
def test_the_base_of_an_adapter(
    tmp_path: Path, base: str | None, expected: tuple[str | None, str | None]
) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"base_model_name_or_path": "/srv/b", "revision": "v1", "r": 4}))
    fields = json.loads(_clean_file(path, base, frozenset()) or b"")
    assert (fields["base_model_name_or_path"], fields["revision"], fields["r"]) == (*expected, 4)


def test_a_place_in_another_field_is_refused(tmp_path: Path) -> None:
    places = frozenset(("/srv/data/mails.jsonl", "mails.jsonl"))
    for name, fields, text in (
        ("config.json", {"a": [{"b": "see mails.jsonl"}]}, "see mails.jsonl"),
        ("tokenizer_config.json", {"extra": str(tmp_path)}, str(tmp_path)),
        ("generation_config.json", {"x mails.jsonl": 1}, "x mails.jsonl"),
    ):
        (tmp_path / name).write_text(json.dumps(fields))
        with pytest.raises(ModelError, match="a place of this machine: it is not sent") as caught:
            _clean_file(tmp_path / name, None, places)
        assert f"names '{text}" in str(caught.value)
    (tmp_path / "chat_template.jinja").write_text("{# /srv/data/mails.jsonl #}")
    with pytest.raises(ModelError, match="a place of this machine"):
        _clean_file(tmp_path / "chat_template.jinja", None, places)
    # Tokens may look like paths, and words like names of files.
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "/", "unk_token": "/root"}')
    (tmp_path / "vocab.json").write_text('{"/usr/bin": 0, "mails.jsonl": 1}')
    for name in ("special_tokens_map.json", "vocab.json"):
        assert _clean_file(tmp_path / name, None, places) is None


def test_places_are_paths_and_names_of_files(cache: Path) -> None:
    config = make_config(train=["/srv/data/mails.jsonl", "docs/notes.txt"])
    places = _list_places(Path("/srv/runs/run"), config, None)
    assert {
        *("/srv/data/mails.jsonl", "mails.jsonl", "docs/notes.txt", "notes.txt"),
        *("/srv/runs", "/srv/runs/run", str(cache.parent)),
    } <= places
    assert all(len(place) > 5 for place in places)
    assert "/srv/tokenizer" in _list_places(Path("run"), make_config(None), None)
    # A base that is named on the hub may be named in its configuration.
    assert "org/base" not in _list_places(Path("run"), make_config("org/base"), "org/base")
    assert "org/base" in _list_places(Path("run"), make_config("org/base"), None)


def test_a_base_is_named_only_if_it_certainly_is_on_the_hub(cache: Path) -> None:
    assert _find_base(make_config("org/base")) == "org/base"
    # A relative path of another working directory looks the same.
    assert _find_base(make_config("models/base")) is None
    for path in ("/srv/base", "./base", None):
        assert _find_base(make_config(path)) is None
    (cache.parent / "org" / "base").mkdir(parents=True)
    assert _find_base(make_config("org/base")) is None
    (cache.parent / "config.yaml").touch()
    for base in ("org/base", "/srv/missing"):
        request = HubRequest(folder=cache.parent, to="hub:x", base=base, dry_run=True)
        with pytest.raises(ConfigError, match="'--base' must be a hub id with '--to'"):
            request.check()
