"""A model's hash is that of all that is read, and of nothing else."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import huggingface_hub
import pytest
from tiny_adapters import save_adapter
from tiny_families import build

from memguard.errors import ModelError
from memguard.hf.identity import find_base_folder, hash_sums, hash_weights, sum_model
from memguard.hf.load import load_model
from memguard.records.sealed import sum_file

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    model = build("llama")
    model.save_pretrained(folder / "single")
    model.save_pretrained(folder / "split", max_shard_size=12_000)
    return folder


@pytest.fixture(params=["single", "split"])
def folder(originals: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Path(shutil.copytree(originals / request.param, tmp_path / "model"))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_each_file_that_is_read_counts_and_no_other(folder: Path) -> None:
    before = hash_weights(folder)
    assert hash_weights(str(folder)) == before
    assert len(before) == 64
    read = sorted(path for path in folder.iterdir() if path.name != "generation_config.json")
    assert sorted(sum_model(folder)) == [path.name for path in read]
    for path in read:
        content = path.read_bytes()
        path.write_bytes(content + b" ")
        if path.suffix == ".json":
            assert hash_weights(folder) != before, path.name
        path.write_bytes(content)
        flip(path)
        if path.suffix == ".safetensors":
            assert hash_weights(folder) != before, path.name
        path.write_bytes(content)
    (folder / "generation_config.json").write_text("{}")
    (folder / "consolidated.safetensors").write_bytes(b"not read")
    assert hash_weights(folder) == before


def test_an_index_beside_whole_weights_does_not_count(originals: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals / "single", tmp_path / "model"))
    before = hash_weights(folder)
    (folder / INDEX).write_text('{"weight_map": {"a": "../b.safetensors"}}')
    assert hash_weights(folder) == before


def test_the_hash_follows_from_the_files_own(folder: Path) -> None:
    sums = sum_model(folder)
    assert sums == {name: sum_file(folder / name) for name in sums}
    assert hash_sums(dict(reversed(sums.items()))) == hash_weights(folder)
    # As the documentation says, in the shell.
    command = "LC_ALL=C sha256sum $(ls config.json *.safetensors *.index.json 2>/dev/null | "
    command += "LC_ALL=C sort) | sha256sum"
    said = subprocess.run(command, shell=True, cwd=folder, capture_output=True, check=True)
    assert said.stdout.split()[0].decode() == hash_weights(folder)


def test_links_pass_and_what_they_lead_to_counts(folder: Path, tmp_path: Path) -> None:
    # As the hub's cache has them.
    before, blobs = hash_weights(folder), tmp_path / "blobs"
    blobs.mkdir()
    for path in list(folder.glob("*.safetensors")):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    assert hash_weights(folder) == before
    load_model(str(folder))
    flip(next(blobs.iterdir()))
    assert hash_weights(folder) != before


@pytest.mark.parametrize(
    "outside", ["../x.safetensors", "{tmp}/x.safetensors", "a/../../x.safetensors"]
)
def test_weights_outside_the_folder_are_refused(
    originals: Path, tmp_path: Path, outside: str
) -> None:
    folder = Path(shutil.copytree(originals / "split", tmp_path / "model"))
    index = json.loads((folder / INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    shutil.copy(folder / names[0], tmp_path / "x.safetensors")
    moved = outside.format(tmp=tmp_path)
    index["weight_map"] = {
        key: moved if name == names[0] else name for key, name in index["weight_map"].items()
    }
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "a").mkdir()
    for read in (hash_weights, load_model):
        with pytest.raises(ModelError, match="it must name safetensors files inside the model's"):
            read(str(folder))


def test_a_folder_without_weights_has_no_hash(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"safetensors; it has none at all"):
        hash_weights(tmp_path)


def test_an_adapter_is_its_files_and_those_of_its_base(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    adapter = tmp_path / "adapter"
    before = hash_weights(adapter)
    # As by sha256sum in a folder that has the base as `base`.
    shutil.copytree(tmp_path / "base", adapter / "base")
    names = ("adapter_config.json", "adapter_model.safetensors", "base/config.json")
    text = subprocess.run(
        ["sha256sum", *names, "base/model.safetensors"],
        cwd=adapter,
        capture_output=True,
        check=True,
    )
    assert hashlib.sha256(text.stdout).hexdigest() == before
    for file in (adapter / "adapter_model.safetensors", tmp_path / "base" / "model.safetensors"):
        content = file.read_bytes()
        flip(file)
        assert hash_weights(adapter) != before, file
        file.write_bytes(content)
    (adapter / "README.md").write_text("not read")
    assert hash_weights(adapter) == before


def test_a_base_on_the_hub_is_located_without_a_download_if_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(tmp_path)
    names = sum_model(tmp_path / "base").keys()
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(tmp_path / "base"), "someone/base"))
    assert find_base_folder(tmp_path / "adapter", names) is None

    def fetch(path: str, *, revision: str | None, local_files_only: bool) -> str:
        assert (path, revision, local_files_only) == ("someone/base", None, True)
        return str(tmp_path / "base")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert find_base_folder(tmp_path / "adapter", names) == tmp_path / "base"
    (tmp_path / "base" / "model.safetensors").unlink()
    assert find_base_folder(tmp_path / "adapter", names) is None
    with pytest.raises(ModelError, match="its base model '/no/such/base' is missing"):
        find_base_folder(tmp_path / "adapter", names, base="/no/such/base")
