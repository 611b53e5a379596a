"""A folder onto a mesh: every shard is the rectangle of what transformers itself loads."""

import importlib
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_damages import LOADED, REFUSED, change_config, edit_weights
from meshes import mesh_of
from safetensors.torch import load_file, save_file
from tiny_families import build

from memguard.errors import ModelError
from memguard.hf.assembly import AssembledModel, Assembly
from memguard.hf.load import load_assembled, load_model
from memguard.parallel.layout import find_rectangle
from memguard.parallel.mesh_shape import MeshShape

pytestmark = pytest.mark.slow

Degrees = tuple[int, int, int, int]
MESHES = [
    (1, 2, 2, 2),
    (1, 1, 1, 4),  # twice as many ranks as key/value heads
    *(
        pytest.param(each, marks=pytest.mark.mesh)
        for each in ((2, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 1))
    ),
]


def load(folder: str, degrees: Degrees, dtype: torch.dtype = torch.float32) -> AssembledModel:
    """On a rank."""
    shape = MeshShape(**dict(zip(("data", "z", "y", "x"), degrees, strict=True)))
    mesh = mesh_of(shape)
    return load_assembled(folder, Assembly(mesh=mesh, device=torch.device("cpu"), dtype=dtype))


def compare(layer: AssembledModel, reference: Any) -> list[str]:
    """On a rank: what differs from the model that transformers has loaded."""
    mesh, model = layer.lm.mesh, layer.lm.model
    assert mesh is not None
    here = {axis: mesh.axis(axis).rank for axis in ("z", "y", "x")}
    full = dict(reference.named_parameters(remove_duplicate=False))
    shards = dict(model.named_parameters(remove_duplicate=False))
    differing = [] if full.keys() == shards.keys() else [f"{full.keys() ^ shards.keys()}"]
    for name, shard in shards.items():
        rectangle = find_rectangle(shard.shape, layer.plan.placements(name), mesh.shape, here)
        # Gate and up of experts have a dimension more on meshes.
        local = shard.to_local()
        wanted = full[name].detach().view(shard.shape)[rectangle.slices]
        if local.dtype != wanted.dtype or not torch.equal(local, wanted):
            differing.append(name)
    buffers = dict(model.named_buffers())
    for name, buffer in reference.named_buffers():
        if buffers[name].dtype != buffer.dtype or not torch.equal(buffers[name], buffer):
            differing.append(name)
    if buffers.keys() != dict(reference.named_buffers()).keys():
        differing.append("names of buffers")
    ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    if (ends[0] is ends[1]) != model.config.tie_word_embeddings:
        differing.append("tying")
    return differing if not model.training else [*differing, "training mode"]


def load_and_compare(
    references: dict[str, Any], degrees: Degrees, dtype: torch.dtype
) -> dict[str, list[str]]:
    """On a rank: load each folder, and compare it with what transformers has loaded."""
    return {
        folder: compare(load(folder, degrees, dtype), reference)
        for folder, reference in references.items()
    }


def check(
    ranks: Any, folders: list[Path], degrees: Degrees, dtype: torch.dtype = torch.float32
) -> None:
    load_plainly = transformers.AutoModelForCausalLM.from_pretrained
    references = {str(folder): load_plainly(folder, dtype=dtype) for folder in folders}
    num_ranks = torch.Size(degrees).numel()
    for found in ranks(load_and_compare, num_ranks, references, degrees, dtype):
        assert found == {folder: [] for folder in references}


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Untied and tied; 97 tokens, which nothing divides."""
    folders = []
    for tied in (False, True):
        folder = tmp_path_factory.mktemp("tied" if tied else "untied")
        build("llama", tie_word_embeddings=tied).save_pretrained(folder)
        folders.append(folder)
    return folders


@pytest.mark.parametrize("degrees", MESHES)
def test_every_shard_is_the_rectangle_of_what_transformers_loads(
    ranks: Any, llamas: list[Path], degrees: Degrees
) -> None:
    check(ranks, llamas, degrees)


def test_other_families_and_one_rank(ranks: Any, tmp_path: Path) -> None:
    folders = [tmp_path / family for family in ("mistral", "qwen2", "qwen3")]
    for folder in folders:
        build(folder.name, attention_bias=True).save_pretrained(folder)
    check(ranks, folders, (1, 2, 1, 2))
    check(ranks, folders[:1], (1, 1, 1, 1))


def test_a_family_that_was_not_compared_is_told(ranks: Any, tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path)
    told = ranks(load_and_listen, 2, tmp_path)
    assert told[0] == ["family 'qwen2' is split by transformers' plan"]
    assert told[1] == [], "rank 0 alone speaks"


def load_and_listen(folder: Path) -> list[str]:
    mesh = mesh_of(MeshShape(x=2))
    # All families that can be split are compared today. The package has a function of this name.
    module = importlib.import_module("memguard.hf.load")
    patched = pytest.MonkeyPatch.context()
    with patched as patch, warnings.catch_warnings(record=True) as caught:
        patch.setattr(module, "COMPARED_FAMILIES", ("llama",))
        warnings.simplefilter("always")
        load_assembled(str(folder), Assembly(mesh=mesh, device=torch.device("cpu")))
    return [text.split(",")[0] for text in map(str, (w.message for w in caught)) if "plan" in text]


def test_a_real_checkpoint(ranks: Any, shared_data: Path) -> None:
    check(ranks, [shared_data / "checkpoints" / "stories260K"], (1, 2, 1, 2))


def test_dtypes_of_file_and_shard_may_differ(ranks: Any, tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        build("llama").to(dtype).save_pretrained(tmp_path / str(dtype))
    check(ranks, [tmp_path / "torch.bfloat16"], (1, 2, 1, 2), torch.float32)
    check(ranks, [tmp_path / "torch.float32"], (1, 2, 1, 2), torch.bfloat16)


def lay_out_split(source: Path, folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model.save_pretrained(folder, max_shard_size=8_000)
    assert len(list(folder.glob("*.safetensors"))) > 3


def lay_out_body(source: Path, folder: Path) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(source).model.save_pretrained(folder)
    shutil.copy(source / "config.json", folder)
    assert "layers.0.mlp.up_proj.weight" in load_file(folder / "model.safetensors")


def lay_out_head_only(source: Path, folder: Path) -> None:
    """The tied weight under the head's name, with frequencies as older checkpoints have them."""
    shutil.copytree(source, folder)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def lay_out_twice(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def test_the_same_tied_weights_in_other_layouts(
    ranks: Any, llamas: list[Path], tmp_path: Path
) -> None:
    folders = []
    for lay_out in (lay_out_split, lay_out_body, lay_out_head_only, lay_out_twice):
        folders.append(tmp_path / lay_out.__name__)
        lay_out(llamas[1], folders[-1])
    check(ranks, folders, (1, 2, 1, 2))


def test_two_different_weights_are_not_tied_whatever_the_configuration_says(
    ranks: Any, llamas: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "untied"
    shutil.copytree(llamas[0], folder)
    change_config(folder, tie_word_embeddings=True)
    # transformers keeps them apart too; its configuration still says otherwise.
    check(ranks, [folder], (1, 1, 1, 2))


# -- buffers -----------------------------------------------------------------------------------


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 500.0},
    "linear": {"factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500000.0,
    },
}


def test_frequencies_are_those_of_transformers(ranks: Any, tmp_path: Path) -> None:
    for kind, fields in ROPES.items():
        rope = {"rope_type": kind, **fields}
        model = build("llama", rope_parameters=rope)
        assert list(model.buffers()), "`compare` has something to compare"
        model.save_pretrained(tmp_path / kind)
    check(ranks, [tmp_path / kind for kind in ROPES], (1, 1, 1, 2))


# -- what does not fit -------------------------------------------------------------------------


def refusals(folders: list[str]) -> list[tuple[str, str]]:
    """On a rank: how each folder is refused."""
    found = []
    for folder in folders:
        try:
            load(folder, (1, 1, 1, 2))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("", "was loaded"))
    return found


def test_what_cannot_be_loaded_is_refused_as_on_one_process(
    ranks: Any, llamas: list[Path], tmp_path: Path
) -> None:
    folders, damages = [], {**LOADED, **REFUSED}
    for number, (break_it, _) in enumerate(damages.values()):
        folders.append(Path(shutil.copytree(llamas[0], tmp_path / f"damaged{number}")))
        break_it(folders[-1])
    for found in ranks(refusals, 2, [str(folder) for folder in folders]):
        for folder, damage, (kind, message) in zip(folders, damages, found, strict=True):
            assert kind == "ModelError", f"{damage}: {kind} {message}"
            assert str(folder) in message, damage
            assert "\n" not in message, damage
            assert len(message) < 1000, damage
            with pytest.raises(ModelError, match=damages[damage][1]):
                raise ModelError(message)


def test_the_table_of_differences_is_the_same_as_on_one_process(
    ranks: Any, llamas: list[Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(llamas[0], tmp_path / "model"))

    def change(state: dict[str, torch.Tensor]) -> None:
        del state["model.layers.1.mlp.up_proj.weight"]
        state["model.norm.weight"] = torch.ones(3)
        state["score.weight"] = torch.ones(3)

    edit_weights(folder, change)
    with pytest.raises(ModelError) as caught:
        load_model(str(folder))
    parts = (
        "2 weights are missing from its files or do not match",
        "missing model.layers.1.mlp.up_proj.weight",
        "model.norm.weight [3] instead of [32]",
        "unexpected score.weight",
    )
    for ((_, message),) in ranks(refusals, 2, [str(folder)]):
        for told in (message, str(caught.value)):
            assert all(part in told for part in parts), told


def warnings_of(folder: str) -> list[str]:
    """On a rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(folder, (1, 1, 1, 2))
    return [str(each.message) for each in caught if "not read" in str(each.message)]


def test_unexpected_weights_alone_are_told_once(
    ranks: Any, llamas: list[Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(llamas[0], tmp_path / "model"))
    edit_weights(folder, lambda state: state.update({"score.weight": torch.ones(3)}))
    with pytest.warns(UserWarning, match=r"1 weights in its files .*score\.weight") as caught:
        load_model(str(folder))
    one_process = [str(each.message) for each in caught if "not read" in str(each.message)]
    assert ranks(warnings_of, 2, str(folder)) == [one_process, []]
    assert len(one_process) == 1
