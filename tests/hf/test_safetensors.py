"""Rectangles out of files: the right bytes, only those, and every difference named."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_families import build

from memguard.errors import ModelError
from memguard.hf.safetensors import (
    FolderWeights,
    ModuleWeights,
    Origin,
    copy_rectangle,
    match_names,
    stores_different,
    warn_unexpected,
)
from memguard.parallel.layout import ShardSlice

WEIGHTS = {
    "a.weight": torch.arange(35, dtype=torch.float32).reshape(7, 5),
    "b.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "c.bias": torch.arange(6, dtype=torch.float32),
}
INDEX = "model.safetensors.index.json"


def write(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> None:
    save_file(tensors, folder / name, {"format": "pt"})


def write_split(folder: Path) -> None:
    """Two files and an index."""
    write(folder, {"a.weight": WEIGHTS["a.weight"]}, "model-00001-of-00002.safetensors")
    rest = {name: tensor for name, tensor in WEIGHTS.items() if name != "a.weight"}
    write(folder, rest, "model-00002-of-00002.safetensors")
    places = dict.fromkeys(rest, "model-00002-of-00002.safetensors")
    places["a.weight"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def whole(tensor: torch.Tensor) -> ShardSlice:
    return ShardSlice(start=(0,) * tensor.ndim, shape=tuple(tensor.shape))


@pytest.mark.parametrize("lay_out", [lambda folder: write(folder, WEIGHTS), write_split])
def test_names_shapes_and_values_are_those_of_the_files(
    tmp_path: Path, lay_out: Callable[[Path], None]
) -> None:
    lay_out(tmp_path)
    source = FolderWeights(tmp_path)
    assert source.shapes == {name: tuple(each.shape) for name, each in WEIGHTS.items()}
    for name in ["a.weight", "c.bias", "b.weight", "a.weight"]:  # back and forth between files
        read = source.read(name, whole(WEIGHTS[name]))
        assert read.dtype == WEIGHTS[name].dtype
        assert torch.equal(read, WEIGHTS[name])


@given(data=st.data())
def test_any_rectangle_is_read_as_memory_gives_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    full = torch.randn(shape)
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [
        data.draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True)
    ]
    rectangle = ShardSlice(start=tuple(starts), shape=tuple(sizes))
    folder = tmp_path_factory.mktemp("rectangle")
    write(folder, {"w": full})
    read = FolderWeights(folder).read("w", rectangle)
    assert torch.equal(read, full[rectangle.slices])


def test_a_rectangle_is_cast_into_its_target(tmp_path: Path) -> None:
    write(tmp_path, WEIGHTS)
    source = FolderWeights(tmp_path)
    corner = ShardSlice(start=(1, 2), shape=(2, 2))
    wide, narrow = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bfloat16)
    copy_rectangle(source, "b.weight", corner, wide)
    assert torch.equal(wide, WEIGHTS["b.weight"][1:3, 2:4].float())
    copy_rectangle(source, "a.weight", corner, narrow)
    assert torch.equal(narrow, WEIGHTS["a.weight"][1:3, 2:4].bfloat16())


def test_an_empty_rectangle_is_not_read() -> None:
    class Untouched:
        origin = None

        @property
        def shapes(self) -> dict[str, tuple[int, ...]]:
            return {}

        def read(self, name: str, rectangle: ShardSlice) -> torch.Tensor:
            raise AssertionError("there is nothing to read")

    copy_rectangle(Untouched(), "w", ShardSlice(start=(7, 0), shape=(0, 5)), torch.zeros(0, 5))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's accounts")
@pytest.mark.parametrize("columns", [False, True])
def test_reading_a_quarter_takes_the_memory_of_a_quarter(tmp_path: Path, columns: bool) -> None:
    write(tmp_path, {"w": torch.ones(4096, 4096)})
    source = FolderWeights(tmp_path)
    target = torch.zeros(4096, 1024) if columns else torch.zeros(1024, 4096)
    before = anonymous_bytes()
    piece = source.read("w", ShardSlice(start=(0, 0), shape=tuple(target.shape)))
    target.copy_(piece)
    # The mapped file does not count. Half of the tensor: what is read may be held beside it.
    assert anonymous_bytes() - before < 4096 * 4096 * 4 // 2
    assert float(target.sum()) == target.numel()


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]


def test_a_models_own_weights_are_a_source_too() -> None:
    model = build("llama", tie_word_embeddings=True)
    source = ModuleWeights(model)
    assert source.shapes["lm_head.weight"] == source.shapes["model.embed_tokens.weight"] == (97, 32)
    read = source.read("lm_head.weight", ShardSlice(start=(90, 4), shape=(3, 5)))
    assert torch.equal(read, model.lm_head.weight[90:93, 4:9])
    assert not read.requires_grad


def break_index(content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / INDEX).write_text(content)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no index": (lambda f: (f / INDEX).unlink(), r"no model\.safetensors and no .*index\.json"),
    "a file missing": (
        lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
        r"lacks model-00002-of-00002\.safetensors\. Is the copy complete\?",
    ),
    "a file cut off": (
        lambda f: os.truncate(f / "model-00001-of-00002.safetensors", 100),
        r"model-00001-of-00002\.safetensors is not a complete safetensors file",
    ),
    "a file empty": (
        lambda f: os.truncate(f / "model-00001-of-00002.safetensors", 0),
        r"model-00001-of-00002\.safetensors is not a complete safetensors file",
    ),
    "index cut off": (break_index('{"weight_map": {'), r"index\.json is not JSON"),
    "index a list": (break_index("[]"), r"is not an index of weights"),
    "index without a map": (break_index("{}"), r"is not an index of weights"),
    "map a list": (break_index('{"weight_map": []}'), r"is not an index of weights"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_is_not_whole_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    break_it, message = DAMAGES[damage]
    write_split(tmp_path)
    break_it(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        FolderWeights(tmp_path)
    assert str(caught.value).startswith(f"model '{tmp_path}'")
    assert "\n" not in str(caught.value)


def test_only_the_files_that_transformers_reads_count(tmp_path: Path) -> None:
    write_split(tmp_path)
    # Some publishers put the same weights there once more, under names of their own.
    write(tmp_path, {"tok_embeddings.weight": torch.zeros(2)}, "consolidated.safetensors")
    assert FolderWeights(tmp_path).shapes.keys() == WEIGHTS.keys()
    write(tmp_path, {"only": torch.zeros(2)})
    assert FolderWeights(tmp_path).shapes == {"only": (2,)}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantised_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    write(tmp_path, {"w": torch.zeros(4, 4).to(dtype)})
    with pytest.raises(ModelError, match=r"'w' is stored as .*quantised.*bfloat16"):
        FolderWeights(tmp_path)


WANTED = {"model.embed.weight": (7, 4), "model.norm.weight": (4,), "lm_head.weight": (7, 4)}


class Shapes:
    """A source of which only the names and shapes are read."""

    def __init__(self, shapes: Any, origin: Origin | None) -> None:
        self.shapes, self.origin = shapes, origin

    def read(self, name: str, rectangle: ShardSlice) -> torch.Tensor:
        raise AssertionError("names are matched before anything is read")


def match(
    wanted: Any, found: Any, aliases: Any = None, origin: Origin | None = None
) -> tuple[dict[str, str], list[str]]:
    return match_names(wanted, aliases or {}, Shapes(found, origin), model="m")


def test_names_are_taken_as_they_are_stored() -> None:
    stored, unexpected = match(WANTED, WANTED)
    assert stored == {name: name for name in WANTED}
    assert unexpected == []


@pytest.mark.parametrize("also_embedding", [False, True])
def test_a_tied_weight_is_found_under_any_of_its_names(also_embedding: bool) -> None:
    tied = {name: shape for name, shape in WANTED.items() if name != "lm_head.weight"}
    found = {"lm_head.weight": (7, 4), "model.norm.weight": (4,)}
    if also_embedding:
        found["model.embed.weight"] = (7, 4)
    stored, unexpected = match(tied, found, {"lm_head.weight": "model.embed.weight"})
    name = "model.embed.weight" if also_embedding else "lm_head.weight"
    assert stored["model.embed.weight"] == name
    assert unexpected == []


def test_what_is_too_much_is_returned_and_what_is_recomputed_is_not() -> None:
    found = {**WANTED, "score.weight": (2, 4), "model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    assert match(WANTED, found)[1] == ["score.weight"]


def test_all_differences_are_one_table_in_one_line() -> None:
    found = {"model.embed.weight": (9, 4), "lm_head.weight": (7, 4), "score.weight": (2, 4)}
    with pytest.raises(ModelError) as caught:
        match(WANTED, found)
    assert str(caught.value) == (
        "model 'm': 2 weights are missing from its files or do not match its configuration "
        "(model.embed.weight [9, 4] instead of [7, 4], missing model.norm.weight, "
        "unexpected score.weight); they would be random. Is it a causal language model, and is the "
        "copy complete?"
    )
    many = {f"layer.{number}": (1,) for number in range(30)}
    with pytest.raises(ModelError, match=r"30 weights .*missing layer\.7 and 22 more\)"):
        match(many, {})


def test_a_wrong_shape_is_reported_with_the_names_in_the_files() -> None:
    origin = Origin(names={"experts": ("w.0", "w.1"), "norm": ("norm",)}, conversions=())
    with pytest.raises(ModelError, match=r"\(experts \(stored as w\.0, w\.1\) \[2\] instead of"):
        match({"experts": (3,)}, {"experts": (2,)}, origin=origin)
    with pytest.raises(ModelError, match=r"\(norm \[2\] instead of"):
        match({"norm": (3,)}, {"norm": (2,)}, origin=origin)


def test_weights_without_a_place_are_told_in_one_line() -> None:
    with pytest.warns(UserWarning, match=r"model 'm': 20 weights .* not read \(w0, .* 12 more\)$"):
        warn_unexpected("m", [f"w{number}" for number in range(20)])
    warn_unexpected("m", [])


@pytest.mark.parametrize("num_rows", [3, 1024, 2500])
def test_stored_twice_means_different_only_where_a_value_differs(
    tmp_path: Path, num_rows: int
) -> None:
    embedding = torch.randn(num_rows, 2)
    write(tmp_path, {"embed": embedding, "head": embedding.clone(), "other": torch.zeros(3, 3)})
    source = FolderWeights(tmp_path)
    assert not stores_different(source, "embed", "head")
    assert not stores_different(source, "embed", "other"), "another shape is told elsewhere"
    assert not stores_different(source, "embed", "absent")
    assert not stores_different(source, "absent", "embed")
    head = embedding.clone()
    head[-1, -1] += 1
    write(tmp_path, {"embed": embedding, "head": head})
    assert stores_different(FolderWeights(tmp_path), "embed", "head")
