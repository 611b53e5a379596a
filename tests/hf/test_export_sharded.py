"""A mesh into a folder: the one that a single process writes, and no rank holds the model."""

import itertools
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from mesh_export import export_layer
from safetensors.torch import load_file
from test_load_sharded import load
from tiny_families import build
from torch import distributed as dist

from memguard.hf import export
from memguard.hf.assembly import AssembledModel
from memguard.hf.checkpoint import load_tokenizer
from memguard.hf.export import export_model
from memguard.hf.load import load_model

pytestmark = pytest.mark.slow

CARD = "# card, naïve\n"
NUM_RANKS = {(1, 1, 1, 1): 1, (1, 2, 1, 1): 2, (2, 1, 1, 2): 4, (1, 1, 1, 4): 4, (1, 2, 2, 2): 8}
# Tied or not; the others with `-m mesh`.
BY_DEFAULT = [((1, 1, 1, 1), True), ((2, 1, 1, 2), False), ((1, 2, 2, 2), True)]


def load_and_export(
    source: str,
    tokenizer_folder: str,
    folder: str,
    degrees: Any,
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = 4 << 30,
) -> None:
    """On a rank."""
    layer = load(source, degrees, dtype)
    tokenizer = load_tokenizer(tokenizer_folder)
    export_layer(
        layer, tokenizer, Path(folder), dtype=dtype, card=CARD, max_file_bytes=max_file_bytes
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("degrees", "tied"),
    [
        case if case in BY_DEFAULT else pytest.param(*case, marks=pytest.mark.mesh)
        for case in itertools.product(NUM_RANKS, (False, True))
    ],
)
def test_the_folder_is_the_one_that_a_single_process_writes(
    ranks: Any, tmp_path: Path, tokenizer_folder: str, degrees: Any, tied: bool
) -> None:
    source, theirs, ours = (tmp_path / name for name in ("source", "theirs", "ours"))
    build("llama", tie_word_embeddings=tied).save_pretrained(source)
    tokenizer = load_tokenizer(tokenizer_folder)
    export_model(load_model(str(source)), tokenizer, theirs, dtype=torch.float32, card=CARD)
    arguments = (str(source), tokenizer_folder, str(ours), degrees)
    ranks(load_and_export, NUM_RANKS[degrees], *arguments)
    assert contents(ours) == contents(theirs)
    # What was loaded is what is written.
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (ours / name).read_bytes() == (source / name).read_bytes(), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "source", "theirs"]
    assert ours.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "phi3"),
        *(
            pytest.param(each, marks=pytest.mark.mesh)
            for each in ("mistral", "qwen2", "gpt2", "glm4", "falcon", "gpt_oss")
        ),
    ],
)
def test_other_families(ranks: Any, tmp_path: Path, tokenizer_folder: str, family: str) -> None:
    source, ours = tmp_path / "source", tmp_path / "ours"
    build(family).save_pretrained(source)
    ranks(load_and_export, 4, str(source), tokenizer_folder, str(ours), (1, 2, 1, 2))
    for name, content in contents(source).items():
        assert (ours / name).read_bytes() == content, name


@pytest.mark.parametrize("max_file_bytes", [pytest.param(1, marks=pytest.mark.mesh), 20_000])
def test_files_and_index_are_those_of_save_pretrained(
    ranks: Any, tmp_path: Path, tokenizer_folder: str, max_file_bytes: int
) -> None:
    first, source, ours = (tmp_path / name for name in ("first", "source", "ours"))
    build("llama", tie_word_embeddings=True).save_pretrained(first)
    # A model that was loaded is written in another order than one that was not.
    model = transformers.AutoModelForCausalLM.from_pretrained(first)
    model.save_pretrained(source, max_shard_size=max_file_bytes)
    assert (source / "model.safetensors.index.json").exists()
    arguments = (str(source), tokenizer_folder, str(ours), (2, 2, 1, 2))
    ranks(load_and_export, 8, *arguments, torch.float32, max_file_bytes)
    for name, content in contents(source).items():
        assert (ours / name).read_bytes() == content, name


def test_a_bf16_export_is_the_rounded_model(
    ranks: Any, tmp_path: Path, tokenizer_folder: str
) -> None:
    source, ours, theirs = (tmp_path / name for name in ("source", "ours", "theirs"))
    build("llama", tie_word_embeddings=True).save_pretrained(source)
    ranks(export_bf16_of_fp32, 4, str(source), tokenizer_folder, str(ours))
    tokenizer = load_tokenizer(tokenizer_folder)
    export_model(load_model(str(source)), tokenizer, theirs, dtype=torch.bfloat16, card=CARD)
    assert contents(ours) == contents(theirs)
    plain = transformers.AutoModelForCausalLM.from_pretrained(ours, dtype="auto")
    assert plain.dtype == torch.bfloat16


def test_settings_of_generate_in_the_configuration_are_kept(
    ranks: Any, tmp_path: Path, tokenizer_folder: str
) -> None:
    """Older checkpoints have no generation_config.json."""
    source, ours, theirs = (tmp_path / name for name in ("source", "ours", "theirs"))
    build("llama").save_pretrained(source)
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    config |= {"do_sample": True, "temperature": 0.5}
    (source / "config.json").write_text(json.dumps(config))
    ranks(load_and_export, 1, str(source), tokenizer_folder, str(ours), (1, 1, 1, 1))
    tokenizer = load_tokenizer(tokenizer_folder)
    export_model(load_model(str(source)), tokenizer, theirs, dtype=torch.float32, card=CARD)
    assert contents(ours) == contents(theirs)
    assert json.loads((ours / "generation_config.json").read_text())["temperature"] == 0.5


def export_bf16_of_fp32(source: str, tokenizer_folder: str, folder: str) -> None:
    """On a rank."""
    layer = load(source, (1, 2, 1, 2))
    tokenizer = load_tokenizer(tokenizer_folder)
    export_layer(layer, tokenizer, Path(folder), dtype=torch.bfloat16, card=CARD)
    assert layer.lm.model.config.dtype == torch.float32, "the layer is left alone"


def test_a_real_checkpoint_survives_load_and_export(
    ranks: Any, shared_data: Path, tmp_path: Path
) -> None:
    source = shared_data / "checkpoints" / "stories260K"
    ranks(load_and_export, 4, str(source), str(source), str(tmp_path / "m"), (1, 2, 1, 2))
    before, after = (load_file(each / "model.safetensors") for each in (source, tmp_path / "m"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert plain.lm_head.weight is plain.model.embed_tokens.weight


def test_unusable_generation_settings_do_not_cost_the_trained_weights(
    ranks: Any, tmp_path: Path, tokenizer_folder: str
) -> None:
    source, ours = tmp_path / "source", tmp_path / "ours"
    build("llama").save_pretrained(source)
    # Real checkpoints have them; transformers refuses to write them in some versions.
    (source / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    ranks(load_and_export, 2, str(source), tokenizer_folder, str(ours), (1, 2, 1, 1))
    assert json.loads((ours / "generation_config.json").read_text())["temperature"] == 0.6


def test_a_trained_model_is_exported_with_its_trained_weights(
    ranks: Any, tmp_path: Path, tokenizer_folder: str
) -> None:
    source, ours = tmp_path / "source", tmp_path / "ours"
    model = build("llama", tie_word_embeddings=True)
    model.save_pretrained(source)
    ranks(halve_and_export, 4, str(source), tokenizer_folder, str(ours))
    trained = load_file(ours / "model.safetensors")
    for name, parameter in model.named_parameters():
        # A power of two: exact.
        assert torch.equal(trained[name], parameter.detach() / 2), name


def halve_and_export(source: str, tokenizer_folder: str, folder: str) -> None:
    """On a rank: change the shards as an optimizer does, then look at the model once more."""
    layer = load(source, (1, 2, 1, 2))
    for parameter in layer.lm.model.parameters():
        parameter.to_local().detach().mul_(0.5)
    with torch.no_grad():
        layer.lm(lambda: layer.lm.hidden_states(torch.zeros(1, 4, dtype=torch.int64)))
    tokenizer = load_tokenizer(tokenizer_folder)
    export_layer(layer, tokenizer, Path(folder), dtype=torch.float32, card=CARD)


# -- failures ----------------------------------------------------------------------------------


def fail_on(rank: int, source: str, tokenizer_folder: str, folder: str) -> tuple[str, str]:
    """On a rank: export while one rank cannot write large files."""
    layer = load(source, (1, 2, 1, 2))
    tokenizer = load_tokenizer(tokenizer_folder)
    # As a full disk: the write fails in the middle of a file, which has five tensors or more.
    most = 9_000 if dist.get_rank() == rank else resource.RLIM_INFINITY
    limits = (most, resource.RLIM_INFINITY)
    try:
        return outcome(
            layer, tokenizer, folder, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def outcome(
    layer: AssembledModel,
    tokenizer: Any,
    folder: str,
    once_saved: Callable[[], None] = lambda: None,
) -> tuple[str, str]:
    options: dict[str, Any] = {"dtype": torch.float32, "card": CARD, "max_file_bytes": 20_000}
    try:
        export_layer(layer, tokenizer, Path(folder), once_saved=once_saved, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("failing", [1, 3])
def test_a_full_disk_on_one_rank_ends_all_and_leaves_the_older_folder(
    ranks: Any, tmp_path: Path, tokenizer_folder: str, failing: int
) -> None:
    source, ours = tmp_path / "source", tmp_path / "runs" / "model"
    build("llama").save_pretrained(source)
    ours.mkdir(parents=True)
    (ours / "old").touch()
    found = ranks(fail_on, 4, failing, str(source), tokenizer_folder, str(ours), timeout_s=60)
    for rank, (kind, message) in enumerate(found):
        if rank == failing:
            assert kind == "OSError"
            assert "File too large" in message
        else:
            assert (kind, message) == (
                "OtherRankFailed",
                f"rank {failing} failed; see its message above",
            )
    assert [path.name for path in ours.parent.iterdir()] == ["model"]
    assert [path.name for path in ours.iterdir()] == ["old"]


class BrokenTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        raise OSError("disk full")


def fail_at_the_end(source: str, folder: str) -> tuple[str, str]:
    """On a rank: what rank 0 writes last fails."""
    return outcome(load(source, (1, 1, 1, 2)), BrokenTokenizer(), folder)


def test_a_failure_of_rank_0_ends_all(ranks: Any, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "source")
    ours = tmp_path / "runs" / "model"
    first, second = ranks(fail_at_the_end, 2, str(tmp_path / "source"), str(ours), timeout_s=60)
    assert first == ("OSError", "disk full")
    assert second[0] == "OtherRankFailed"
    assert list(ours.parent.iterdir()) == []


def test_a_place_where_nothing_can_be_made_ends_all(ranks: Any, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "source")
    (tmp_path / "file").touch()
    where = str(tmp_path / "file" / "model")
    first, second = ranks(fail_at_the_end, 2, str(tmp_path / "source"), where, timeout_s=60)
    assert first[0] in ("FileExistsError", "NotADirectoryError")
    assert second[0] == "OtherRankFailed"


def die_while_writing(source: str, tokenizer_folder: str, folder: str) -> None:
    """On a rank: rank 0 is killed as it begins its second file."""
    layer = load(source, (1, 1, 1, 2))
    tokenizer = load_tokenizer(tokenizer_folder)
    written = []

    class Writer(export.FileWriter):
        def __init__(self, *args: Any) -> None:
            written.append(args)
            if len(written) > 1:
                os._exit(9)
            super().__init__(*args)

    if dist.get_rank() == 0:
        export.FileWriter = Writer  # type: ignore[misc]
    outcome(layer, tokenizer, folder)
    raise AssertionError("the other rank goes on without it")


def test_a_killed_rank_leaves_only_what_is_cleared_away(
    ranks: Any, tmp_path: Path, tokenizer_folder: str
) -> None:
    build("llama").save_pretrained(tmp_path / "source")
    folder = tmp_path / "runs" / "model"
    arguments = (str(tmp_path / "source"), tokenizer_folder, str(folder))
    with pytest.raises(AssertionError):
        ranks(die_while_writing, 2, *arguments, timeout_s=60)
    assert not folder.exists()
    assert all(path.name.startswith(".memguard-tmp-model.") for path in folder.parent.iterdir())
