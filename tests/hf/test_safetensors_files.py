"""Files written tensor by tensor are, byte for byte, those of safetensors and transformers."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_families import build

from memguard.hf.safetensors import FileWriter, StoredTensor, WeightsFile, build_index, plan_files


def describe(tensors: dict[str, torch.Tensor]) -> list[StoredTensor]:
    return [
        StoredTensor(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
        for name, tensor in tensors.items()
    ]


def write(folder: Path, tensors: dict[str, torch.Tensor], max_file_bytes: int) -> list[WeightsFile]:
    files = plan_files(describe(tensors), max_file_bytes)
    for file in files:
        with FileWriter(folder, file) as writer:
            # Any order will do: the data of converted weights is not gathered in that of the file.
            for stored in reversed(file.tensors):
                writer.write(stored.name, tensors[stored.name])
    return files


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 4), max_size=3)
dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)


@given(
    described=st.dictionaries(
        names.filter(lambda name: name != "__metadata__"),
        st.tuples(shapes, st.sampled_from([torch.float32, torch.bfloat16])),
        min_size=1,
        max_size=6,
    )
)
def test_bytes_are_those_of_safetensors_own_writer(
    described: dict[str, tuple[list[int], torch.dtype]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    tensors = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in described.items()}
    write(folder, tensors, 1 << 30)
    save_file(tensors, folder / "theirs", {"format": "pt"})
    assert (folder / "model.safetensors").read_bytes() == (folder / "theirs").read_bytes()


@given(described=st.dictionaries(names, st.tuples(shapes, dtypes), min_size=1, max_size=6))
def test_every_dtype_is_read_back(
    described: dict[str, tuple[list[int], torch.dtype]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    tensors = {
        name: torch.randint(0, 2, shape).to(dtype)
        for name, (shape, dtype) in described.items()
        if name != "__metadata__"
    }
    if not tensors:
        return
    write(folder, tensors, 1 << 30)
    read = load_file(folder / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


@pytest.mark.parametrize("max_file_bytes", [1, 5_000, 12_000, 40_000, 1 << 30])
def test_files_and_index_are_those_of_save_pretrained(tmp_path: Path, max_file_bytes: int) -> None:
    model = build("llama")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    ours.mkdir()
    model.save_pretrained(theirs, max_shard_size=max_file_bytes)
    files = write(ours, model.state_dict(), max_file_bytes)
    written = sorted(theirs.glob("*.safetensors"))
    assert [path.name for path in written] == sorted(path.name for path in ours.iterdir())
    for path in written:
        assert (ours / path.name).read_bytes() == path.read_bytes(), path.name
    index = theirs / "model.safetensors.index.json"
    if len(files) == 1:
        assert not index.exists()
    else:
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        built = build_index(files, num_parameters=num_parameters)
        assert built == json.loads(index.read_text())


def test_no_file_is_larger_than_asked_for_but_for_one_large_tensor() -> None:
    tensors = {str(number): torch.zeros(number * 10) for number in range(1, 9)}
    for file in plan_files(describe(tensors), 1000):
        assert len(file.tensors) == 1 or sum(each.num_bytes for each in file.tensors) <= 1000


def test_a_file_of_a_missing_folder_or_a_full_disk_is_an_oserror(tmp_path: Path) -> None:
    (file,) = plan_files(describe({"a": torch.zeros(1 << 16)}), 1 << 30)
    with pytest.raises(FileNotFoundError):
        FileWriter(tmp_path / "absent", file)
    if not Path("/dev/full").exists():
        pytest.skip("no device here that is always full")
    (tmp_path / file.name).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"), FileWriter(tmp_path, file) as writer:
        writer.write("a", torch.zeros(1 << 16))


def test_another_tensor_than_planned_is_our_mistake(tmp_path: Path) -> None:
    (file,) = plan_files(describe({"a": torch.zeros(4)}), 1 << 30)
    with pytest.raises(AssertionError, match="a"), FileWriter(tmp_path, file) as writer:
        writer.write("a", torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="every planned"), FileWriter(tmp_path, file):
        pass
