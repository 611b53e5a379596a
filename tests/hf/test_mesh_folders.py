"""A mesh reads and writes the folders of one process, for families that store other names."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_damages import edit_weights
from mesh_export import export_layer
from safetensors.torch import load_file
from test_load_sharded import Degrees, compare, load
from tiny_families import VOCAB_SIZE, build
from torch import distributed as dist

from memguard.errors import ModelError
from memguard.hf.assembly import Assembly
from memguard.hf.checkpoint import load_tokenizer
from memguard.hf.export import export_model
from memguard.hf.load import load_model, shard_scratch_model
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape

pytestmark = pytest.mark.slow

CARD = "# card\n"
# Experts in one tensor each, a stored buffer, one stored tensor for four layers, plain renames.
BY_DEFAULT = ["mixtral", "ernie4_5_moe", "hrm_text", "granitemoe"]
MORE = [
    *("qwen3_moe", "qwen2_moe", "olmoe", "phimoe", "deepseek_v3", "glm4_moe", "gpt_neox"),
    *("gpt_oss", "phi3", "falcon", "bitnet", "opt", "gpt2", "gptj", "bloom", "gemma3_text"),
]
CASES = [
    ((1, 3, 1, 1), BY_DEFAULT),
    pytest.param((2, 2, 1, 1), BY_DEFAULT, marks=pytest.mark.mesh),
    pytest.param((1, 3, 1, 1), MORE, marks=pytest.mark.mesh),
    pytest.param((2, 2, 1, 1), MORE, marks=pytest.mark.mesh),
]


def load_and_export(folders: list[str], tokenizer_folder: str, degrees: Degrees) -> list[list[str]]:
    """On a rank: load each folder, compare its shards, and write it to a folder beside it."""
    found = []
    for folder in folders:
        layer = load(folder, degrees)
        found.append(compare(layer, transformers.AutoModelForCausalLM.from_pretrained(folder)))
        tokenizer = load_tokenizer(tokenizer_folder)
        options: dict[str, Any] = {"dtype": torch.float32, "card": CARD}
        export_layer(layer, tokenizer, Path(f"{folder}-mesh"), **options, max_file_bytes=30_000)
    return found


def draw_model(family: str) -> Any:
    """A tiny model, none of whose tensors is constant: buffers of new models are."""
    model = build(family)
    generator = torch.Generator().manual_seed(1)
    state = model.state_dict()
    for name in state.keys() & dict(model.named_buffers()).keys():
        state[name].copy_(torch.rand(state[name].shape, generator=generator))
    return model


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def compute_logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for parameter in model.parameters():
        # Products round differently where a file maps a tensor to an odd address.
        parameter.data = parameter.data.clone()
    ids = torch.randint(3, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def check(ranks: Any, folders: Sequence[Path], tokenizer_folder: str, degrees: Degrees) -> None:
    """Compare what a mesh loads and writes with one process, for checkpoints in any form."""
    num_ranks = torch.Size(degrees).numel()
    names = [str(folder) for folder in folders]
    for found in ranks(load_and_export, num_ranks, names, tokenizer_folder, degrees):
        assert found == [[]] * len(folders)
    for folder in folders:
        ours, theirs = (folder.with_name(f"{folder.name}-{one}") for one in ("mesh", "one"))
        tokenizer = load_tokenizer(tokenizer_folder)
        model = load_model(str(folder))
        export_model(model, tokenizer, theirs, dtype=torch.float32, card=CARD)
        first, second = load_all(ours), load_all(theirs)
        assert first.keys() == second.keys(), folder.name
        for name, tensor in second.items():
            assert torch.equal(first[name], tensor), (folder.name, name)
        # Exact: the tensors are the same, and so is the arithmetic.
        assert torch.equal(compute_logits(ours), compute_logits(theirs)), folder.name
        assert (ours / "config.json").read_bytes() == (theirs / "config.json").read_bytes()


@pytest.mark.parametrize(("degrees", "families"), CASES)
def test_a_mesh_reads_and_writes_the_folder_of_one_process(
    ranks: Any, tmp_path: Path, tokenizer_folder: str, degrees: Degrees, families: list[str]
) -> None:
    folders = [tmp_path / family for family in families]
    for folder in folders:
        draw_model(folder.name).save_pretrained(folder)
    check(ranks, folders, tokenizer_folder, degrees)


def store_under_module_names(model: Any, folder: Path) -> None:
    """As transformers stores it without its older form."""
    model.save_pretrained(folder, save_original_format=False)


def store_body(model: Any, folder: Path) -> None:
    """The base model alone, whose names lack the prefix; for a tied head."""
    model.base_model.save_pretrained(folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)


@pytest.mark.parametrize("degrees", [(1, 2, 1, 1)])
def test_other_forms_of_the_same_checkpoint(
    ranks: Any, tmp_path: Path, tokenizer_folder: str, degrees: Degrees
) -> None:
    forms: dict[str, Callable[[Any, Path], None]] = {
        "mixtral": store_under_module_names,
        "hrm_text": store_under_module_names,
        "opt": store_body,
        "gpt2": store_body,
        "bloom": store_body,
    }
    folders = []
    for family, store in forms.items():
        folders.append(tmp_path / family)
        store(draw_model(family), folders[-1])
    names = {family: load_all(tmp_path / family).keys() for family in forms}
    assert "model.layers.0.mlp.experts.gate_up_proj" in names["mixtral"]
    assert "h.0.attn.c_attn.weight" in names["gpt2"]
    check(ranks, folders, tokenizer_folder, degrees)


def scratch_and_export(family: str, tokenizer_folder: str, folder: str) -> None:
    """On a rank: a model that was never loaded."""
    mesh = build_mesh(MeshShape(z=2), "cpu")
    sharding = Assembly(mesh=mesh, device=torch.device("cpu"))
    layer = shard_scratch_model(draw_model(family), sharding)
    tokenizer = load_tokenizer(tokenizer_folder)
    export_layer(layer, tokenizer, Path(folder), dtype=torch.float32, card=CARD)


def test_a_model_from_a_configuration_is_written_as_by_one_process(
    ranks: Any, tmp_path: Path, tokenizer_folder: str
) -> None:
    ranks(scratch_and_export, 2, "ernie4_5_moe", tokenizer_folder, str(tmp_path / "mesh"))
    tokenizer = load_tokenizer(tokenizer_folder)
    model = draw_model("ernie4_5_moe")
    export_model(model, tokenizer, tmp_path / "one", dtype=torch.float32, card=CARD)
    for file in (tmp_path / "one").iterdir():
        assert (tmp_path / "mesh" / file.name).read_bytes() == file.read_bytes(), file.name


def list_buffer_dtypes(folder: str) -> dict[str, torch.dtype]:
    """On a rank: of a model in bfloat16."""
    layer = load(folder, (1, 2, 1, 1), torch.bfloat16)
    assert dist.get_world_size() == 2
    return {name: buffer.dtype for name, buffer in layer.lm.model.named_buffers()}


def test_a_buffer_that_transformers_keeps_in_fp32_is_kept(ranks: Any, tmp_path: Path) -> None:
    draw_model("glm4_moe").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    wanted = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert wanted["model.layers.1.mlp.gate.e_score_correction_bias"] == torch.float32
    assert ranks(list_buffer_dtypes, 2, str(tmp_path)) == [wanted] * 2


# -- what does not fit -------------------------------------------------------------------------


def refuse(folder: str) -> str:
    """On a rank."""
    with pytest.raises(ModelError) as caught:
        load(folder, (1, 2, 1, 1))
    return str(caught.value)


def drop_down_projection(state: dict[str, torch.Tensor]) -> None:
    del state["model.layers.0.block_sparse_moe.experts.3.w2.weight"]


def drop_gate_projection(state: dict[str, torch.Tensor]) -> None:
    del state["model.layers.1.block_sparse_moe.experts.0.w1.weight"]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            drop_down_projection,
            (
                "model.layers.0.mlp.experts.down_proj (stored as model.layers.0.block_sparse_moe."
                "experts.0.w2.weight",
                "[3, 32, 64] instead of [4, 32, 64]",
            ),
        ),
        (
            drop_gate_projection,
            (
                "missing model.layers.1.mlp.experts.gate_up_proj",
                "unexpected model.layers.1.block_sparse_moe.experts.0.w3.weight",
            ),
        ),
    ],
)
def test_an_expert_that_is_missing_is_reported_with_the_names_in_the_files(
    ranks: Any, tmp_path: Path, change: Any, parts: tuple[str, ...]
) -> None:
    build("mixtral").save_pretrained(tmp_path)
    edit_weights(tmp_path, change)
    for message in ranks(refuse, 2, str(tmp_path)):
        assert "1 weights are missing from its files or do not match" in message
        assert all(part in message for part in parts), message
        assert "\n" not in message
