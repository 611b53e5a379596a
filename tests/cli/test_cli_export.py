"""`memguard export --merge`: the folder, the screen, and what is refused without a trace."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from cli_examples import read_json, run_cli, save_tiny_model, succeed
from small_disk import NOT_ALLOWED, run_twice
from tiny_adapters import adapt

from memguard.hf.identity import hash_weights
from memguard.hf.merged_weights import MergedWeights


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    save_tiny_model(folder / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    adapted = adapt(base, target_modules="all-linear")
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(folder / "adapter")
    return folder / "adapter"


def test_a_merged_folder_and_its_json(adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    ended = succeed("export", adapter, out, "--merge", "--json")
    lines = [line for line in ended.err.splitlines() if line.startswith("export: ")]
    assert "export: merging LoRA, r=4, alpha=6 into " in ended.err
    assert lines[-3].startswith("export: 14 of 20 tensors merged, ")
    assert lines[-2].startswith("export: largest difference of a logit from adapter and base: ")
    # peft stores the form of the base in training nowhere.
    assert "trained over a base in 4 bits, this is another model" in lines[-1]
    assert lines[-1].endswith(f"memguard audit --model {out}")
    result = json.loads(ended.out)
    difference = result["difference"]
    assert 0 < difference["largest"] < 1e-4
    assert difference["mean_kl"] <= difference["mean_kl_allowed"] == 1e-6
    assert (result["dtype"], result["num_own_rows"]) == ("float32", 0)
    assert result["weights_sha256"] == hash_weights(out)
    assert result["base_sha256"] == hash_weights(adapter.parent / "base")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]
    card = (out / "README.md").read_text()
    assert "LoRA, r=4, alpha=6" in card
    assert "a local base model" in card
    assert "trained over a base in 4 bits, these weights are another model" in card
    assert str(adapter.parent) not in card
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.vocab_size == len(tokenizer)
    # A second time: there is one already.
    ended = run_cli("export", adapter, out, "--merge")
    assert (ended.code, len(ended.err.splitlines())) == (2, 1)
    assert "exists already; choose another name or delete it" in ended.err


def test_a_configuration_that_peft_refuses(adapter: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    config = copy / "adapter_config.json"
    fields = {**json.loads(config.read_text()), "target_modules": [], "lora_dropout": None}
    config.write_text(json.dumps(fields), encoding="utf-8-sig")
    succeed("export", copy, tmp_path / "out", "--merge")


def test_arguments_that_cannot_be_used(adapter: Path, tmp_path: Path) -> None:
    out, base = tmp_path / "out", adapter.parent / "base"
    for arguments, code, message in (
        ((adapter, out), 2, "give --step N, "),
        ((adapter, out, "--merge", "--dtype", "int8"), 2, "'--dtype' must be float32, "),
        ((tmp_path / "no", out, "--merge"), 2, "there is no folder"),
        ((base, out, "--merge"), 2, "has no adapter to merge (it has no adapter_config.json"),
        ((adapter, adapter / "merged", "--merge"), 2, "must not be inside the adapter's folder"),
    ):
        ended = run_cli("export", *arguments)
        assert (ended.code, len(ended.err.splitlines())) == (code, 1), ended.err
        assert message in ended.err
    assert not out.exists()


@pytest.mark.parametrize("problem", ["a wrong merge", "no permission"])
def test_nothing_is_left_after_an_error(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    if problem == "no permission":
        if os.getuid() == 0:
            monkeypatch.setattr(Path, "mkdir", _refuse)
        else:
            parent.chmod(0o555)
        code, message = 2, "cannot be written or read (Permission denied): choose another folder"
    else:
        read = MergedWeights.read
        monkeypatch.setattr(MergedWeights, "read", lambda *given: 1.01 * read(*given))
        code, message = 3, "differs from adapter and base by more than rounding to float32"
    ended = run_cli("export", adapter, parent / "out", "--merge")
    assert ended.code == code, ended.err
    assert message in ended.err.splitlines()[-1]
    assert list(parent.iterdir()) == []


def _refuse(self: Path, *_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied", str(self))


@pytest.mark.long
def test_a_full_disk_is_a_line_and_leaves_nothing(
    adapter: Path, tmp_path: Path, ranks: Any
) -> None:
    said, disk = tmp_path / "said.json", tmp_path / "disk"
    arguments = ["export", str(adapter), str(disk / "out"), "--merge"]
    place = "memguard.hf.adapter_export:plan_files"
    child = ranks.start(run_twice, arguments, disk, place, 1, 16 << 10, said)
    child.join()
    if child.exitcode == NOT_ALLOWED:
        pytest.skip("a process may not mount a file system of its own on this machine")
    assert child.exitcode == 0
    code, message, left, code_again, message_again = read_json(said)
    assert code == 1, message
    assert message.splitlines()[-1].startswith("memguard: the disk is full")
    assert left == ["ballast"]
    assert code_again == 0, message_again
