"""What would fail in an export is refused, or repaired, before the first step."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_examples import run_cli, write_run
from transformers import GenerationConfig

from memguard.errors import ModelError
from memguard.hf.checkpoint import load_tokenizer
from memguard.hf.export_rehearsal import rehearse_adapter, rehearse_export, repair_generation
from memguard.hf.load import load_model

pytestmark = pytest.mark.slow

Break = Callable[[Path], object]


def replace(name: str, text: str) -> Break:
    return lambda model: (model / name).write_text(text)


def change(name: str, **fields: Any) -> Break:
    def act(model: Path) -> None:
        path = model / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return act


def set_generation(**fields: Any) -> Break:
    return replace("generation_config.json", json.dumps({"eos_token_id": 0, **fields}))


REPAIRED: dict[str, tuple[Break, str]] = {
    "temperature": (set_generation(temperature=0.6, top_p=0.9), "do_sample to true"),
    "top_k": (set_generation(top_k=10, do_sample=False), "do_sample to true"),
    "temperature in words": (set_generation(temperature="hot"), "do_sample to true"),
    "stop of beams": (set_generation(early_stopping=True), "early_stopping to null"),
    "length of beams": (
        set_generation(top_k=3, length_penalty=0.5),
        "do_sample to true, length_penalty to null",
    ),
    "padding": (set_generation(pad_token_id=-1), "pad_token_id to null"),
}
"""Files that releases of transformers read and refuse to save."""

REFUSED: dict[str, tuple[Break, str]] = {
    "cut off": (replace("generation_config.json", '{"eos_token_id": 0,'), "is not JSON"),
    "a list": (replace("generation_config.json", "[0]"), "must be a JSON object"),
    "no new tokens": (set_generation(max_new_tokens=0), "max_new_tokens"),
    "many answers": (set_generation(num_return_sequences=3), "num_return_sequences"),
    "cache": (set_generation(cache_implementation="fast"), "cache_implementation"),
    "tokenizer cut off": (replace("tokenizer_config.json", '{"a":'), "tokenizer_config.json"),
    "empty tokenizer": (replace("tokenizer.json", "{}"), "no usable tokenizer"),
    "special token": (change("tokenizer_config.json", eos_token={"content": 3}), "eos_token"),
    "padding side": (change("tokenizer_config.json", padding_side="middle"), "side"),
    "dtype": (change("config.json", dtype="float99"), "float99"),
    "rope": (change("config.json", rope_parameters={"rope_type": "no", "rope_theta": 1}), "no"),
}


@pytest.fixture
def own(folder: Path) -> Path:
    """A folder whose model may be changed."""
    source = (folder / "model").resolve()
    (folder / "model").unlink()
    shutil.copytree(source, folder / "model")
    return folder


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save generation settings as transformers 5.17 does; 5.23 saves unchanged ones unchecked."""
    original = GenerationConfig.save_pretrained

    def save(self: GenerationConfig, folder: Any, **options: Any) -> None:
        self.validate(strict=True)
        original(self, folder, **options)

    monkeypatch.setattr(GenerationConfig, "save_pretrained", save)


def train(folder: Path) -> tuple[int, str, bool]:
    """Return exit code, messages and whether a step was taken."""
    run = write_run(folder, train={"max_steps": 1, "batch_size": 2}, audit={"enabled": False})
    outcome = run_cli("train", run)
    metrics = folder / "runs" / "run" / "metrics.jsonl"
    has_stepped = metrics.exists() and '"step"' in metrics.read_text()
    return outcome.code, " ".join(outcome.err.split()), has_stepped


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.quick] if name == "temperature" else [])
        for name in REPAIRED
    ],
)
def test_generation_settings_are_repaired_and_the_model_is_exported(own: Path, name: str) -> None:
    act, changed = REPAIRED[name]
    act(own / "model")
    base = (own / "model" / "generation_config.json").read_bytes()
    code, text, has_stepped = train(own)
    assert (code, has_stepped) == (0, True)
    # Before training.
    assert text.index(f"the export sets {changed} in it") < text.index("held-out loss")
    GenerationConfig.from_pretrained(own / "runs" / "run" / "model").validate(strict=True)
    assert (own / "model" / "generation_config.json").read_bytes() == base


@pytest.mark.parametrize("name", REFUSED)
def test_other_files_are_refused_before_the_first_step(own: Path, name: str) -> None:
    act, word = REFUSED[name]
    act(own / "model")
    code, text, has_stepped = train(own)
    assert (code, has_stepped) == (3, False)
    assert word in text
    assert "bug" not in text


@pytest.mark.parametrize("part", ["save", "read"])
@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_what_the_library_cannot_write_or_read_again_is_refused(
    own: Path, monkeypatch: pytest.MonkeyPatch, part: str, kind: str
) -> None:
    tokenizer = load_tokenizer(str(own / "model"))

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("added_tokens")

    target, name = (tokenizer, "save_pretrained")
    if part == "read":
        target, name = (transformers.AutoTokenizer, "from_pretrained")
    model = load_model(str(own / "model"))
    monkeypatch.setattr(target, name, fail)
    rehearse: Callable[[], object] = partial(rehearse_adapter, dict, tokenizer)
    if kind == "model":
        rehearse = partial(rehearse_export, model, tokenizer, dtype=torch.float32, is_sharded=False)
    with pytest.raises(ModelError, match=r"could not be exported .*tokenizer: .*added_tokens"):
        rehearse()


def test_a_model_on_a_mesh_is_tried_with_its_stored_tensors(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, model = load_tokenizer(str(own / "model")), load_model(str(own / "model"))
    assert rehearse_export(model, tokenizer, dtype=torch.float32, is_sharded=True) is None
    reverted = "memguard.hf.export.revert_weight_conversion"
    monkeypatch.setattr(reverted, lambda _, state: dict(list(state.items())[1:]))
    with pytest.raises(ModelError, match="cannot be exported from a checkpoint"):
        rehearse_export(model, tokenizer, dtype=torch.float32, is_sharded=True)


@pytest.mark.usefixtures("strict")
def test_settings_that_cannot_be_repaired_are_refused(own: Path) -> None:
    model = load_model(str(own / "model"))
    before = model.generation_config
    assert repair_generation(model) is None
    assert model.generation_config is before
    model.generation_config.max_new_tokens = 0
    with pytest.raises(ModelError, match=r"generation_config\.json .*`max_new_tokens` must"):
        repair_generation(model)
