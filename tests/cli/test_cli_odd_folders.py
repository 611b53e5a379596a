"""Odd fields and files of a model, an adapter or the environment: one line, or a result."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_examples import Outcome, run_cli, write_run
from safetensors.torch import load_file, save_file
from tiny_adapters import adapt

from memguard.records.record import TEMPORARY, make_temporary_folder
from memguard.workflows.training import export

pytestmark = pytest.mark.slow

Change = Callable[[Path], object]
ADAPTER_WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def adapter(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapter of one layer of the tiny model; do not write here."""
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder / "model")
    adapted = adapt(base, target_modules=["layers.0.self_attn.q_proj"])
    adapted.peft_config["default"].base_model_name_or_path = str(tiny_folder / "model")
    path = tmp_path_factory.mktemp("adapted") / "adapter"
    adapted.save_pretrained(path)
    return path


def copy_model(folder: Path, change: Change) -> Path:
    copy = Path(shutil.copytree(folder / "model", folder / "odd"))
    change(copy)
    return copy


def audit(folder: Path, model: Path, *options: object) -> Outcome:
    members = ("--members", folder / "documents.jsonl", "--out", folder / "out")
    lengths = ("audit.continuation_tokens=8", "audit.min_prefix_tokens=8")
    return run_cli("audit", "--model", model, *members, *lengths, *options)


def train(folder: Path, model: Path) -> Outcome:
    settings = write_run(
        folder, model={"path": str(model)}, train={"max_steps": 1}, audit={"enabled": False}
    )
    return run_cli("train", settings)


def edit(name: str, **fields: Any) -> Change:
    def change(copy: Path) -> None:
        path = copy / name
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **fields}))

    return change


def write(name: str, content: str) -> Change:
    return lambda copy: (copy / name).write_text(content)


def rename_tensor(file: str, part: str, new: str) -> Change:
    """Replace a part of the names of tensors."""

    def change(copy: Path) -> None:
        tensors = load_file(copy / file)
        renamed = {name.replace(part, new): tensor for name, tensor in tensors.items()}
        assert renamed.keys() != tensors.keys()
        save_file(renamed, copy / file, metadata={"format": "pt"})

    return change


def read_refusal(ended: Outcome, code: int) -> str:
    """Return the only line that refuses, which is short."""
    assert ended.code == code, ended.err
    lines = ended.err.splitlines()
    assert "Traceback" not in ended.err
    assert max(map(len, lines)) < 2000
    assert [line for line in lines if line.startswith("memguard: ")] in ([], lines[-1:])
    return lines[-1]


LONG = "x" * 50_000
CONTROL = "x\nmemguard: right\x1b[2J"
CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
ROLES, ADDED = "special_tokens_map.json", "added_tokens.json"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edit(CONFIG, attention_dropout=5.0), "'attention_dropout' must be a number from 0 to 1"),
        (edit(CONFIG, attention_dropout=-1), "'attention_dropout' must be a number from 0 to 1"),
        (edit(CONFIG, text_config=[]), "'text_config' must be the fields of a language model"),
        (edit(CONFIG, text_config={}), "a model of the family 'llama' has no configuration inside"),
        (edit(TOKENIZER, model_max_length="512"), f"{TOKENIZER}: 'model_max_length' must be a num"),
        (edit(TOKENIZER, model_max_length=[512]), f"{TOKENIZER}: 'model_max_length' must be a num"),
        (write(TOKENIZER, "["), f"{TOKENIZER} is not JSON"),
        (write(ROLES, "{"), f"{ROLES} is not JSON"),
        (write(ROLES, "[1]"), f"{ROLES} must be a JSON object"),
        (edit(ROLES, eos_token=5), f"{ROLES}: 'eos_token' must be a token"),
        (write(ADDED, "{"), f"{ADDED} is not JSON"),
        (edit(ADDED, x="y"), f"{ADDED}: 'x' must be the id of the token, a whole number; got 'y'"),
        (rename_tensor("model.safetensors", "0.mlp.up_proj", LONG), "missing model.layers.0.mlp"),
        (rename_tensor("model.safetensors", "0.mlp.up_proj", CONTROL), r"x\nmemguard: right\x1b[2"),
        (rename_tensor("model.safetensors", "model.norm", CONTROL), r"x\nmemguard: right\x1b[2"),
    ],
)
def test_what_is_refused_in_a_line(folder: Path, change: Change, words: str) -> None:
    assert words in read_refusal(train(folder, copy_model(folder, change)), 3)


@pytest.mark.parametrize("value", [False, None])
def test_a_configuration_that_does_not_name_outputs(folder: Path, value: bool | None) -> None:
    fields = {"return_dict": value, "output_attentions": True, "attention_dropout": None}
    model = copy_model(folder, edit(CONFIG, **fields))
    assert train(folder, model).code == 0
    assert audit(folder, model, "audit.cache=false").code == 0


def test_weights_that_are_not_numbers(folder: Path, adapter: Path) -> None:
    copy = Path(shutil.copytree(adapter, folder / "adapter"))
    tensors = load_file(copy / ADAPTER_WEIGHTS)
    next(iter(tensors.values())).fill_(torch.nan)
    save_file(tensors, copy / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    line = read_refusal(audit(folder, copy, "audit.dtype=fp32"), 3)
    assert line.endswith("its weights are damaged. Restore or download them again.")
    assert read_refusal(audit(folder, copy, "audit.dtype=bf16"), 3).endswith("'audit.dtype' fp32.")


def test_long_words_of_a_file_or_an_option(folder: Path, adapter: Path) -> None:
    for words in (LONG, CONTROL):
        copy = Path(shutil.copytree(adapter, folder / "adapter", dirs_exist_ok=True))
        rename_tensor(ADAPTER_WEIGHTS, "q_proj", words)(copy)
        line = read_refusal(run_cli("export", copy, folder / "merged", "--merge"), 3)
        assert "does not match its base model" in line
    line = read_refusal(audit(folder, adapter, "--load-as", "x" * 3000), 2)
    assert line.startswith("'--load-as' must be one of")
    assert len(line) < 250


# -- adapters in other places ---------------------------------------------------------------------


def test_an_adapter_beside_weights_gets_one_advice(folder: Path, adapter: Path) -> None:
    both = Path(shutil.copytree(adapter, folder / "both"))
    shutil.copy(folder / "model" / "model.safetensors", both)
    way_out = "to a folder of their own, and give that"
    assert way_out in read_refusal(audit(folder, both), 3)
    line = read_refusal(run_cli("export", both, folder / "merged", "--merge"), 2)
    assert way_out in line
    assert "export --merge" not in line
    alone = folder / "alone"
    alone.mkdir()
    for name in ("adapter_config.json", ADAPTER_WEIGHTS):
        shutil.move(both / name, alone)
    assert run_cli("export", alone, folder / "merged", "--merge").code == 0


def test_an_adapter_that_peft_saved_under_a_name(folder: Path, adapter: Path) -> None:
    shutil.copytree(adapter, folder / "outer" / "default")
    words = "its folder 'default' has an adapter: give that folder"
    assert words in read_refusal(audit(folder, folder / "outer"), 3)
    ended = run_cli("export", folder / "outer", folder / "merged", "--merge")
    assert words in read_refusal(ended, 2)


# -- the folder of an export ----------------------------------------------------------------------


def test_a_dangling_link_is_refused_before_the_merge(folder: Path, adapter: Path) -> None:
    (folder / "merged").symlink_to(folder / "nowhere")
    ended = run_cli("export", adapter, folder / "merged", "--merge")
    assert "is a link to a folder that does not exist" in read_refusal(ended, 2)
    assert "merging" not in ended.err


def test_the_next_export_deletes_what_a_killed_one_left(
    folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = folder / "parent"
    left = make_temporary_folder(parent / "merged")
    (left / "model.safetensors").write_text("half")
    # Folders of others: another name, which is named, and no temporary one.
    others = [parent / f"{TEMPORARY}merged.v2.12345678", parent / ".merged.git"]
    for other in others:
        other.mkdir()
        (other / "model.safetensors").write_text("half")
    while_merging: list[Path] = []

    def compare(*given: Any) -> Any:
        # A second export to the same folder leaves the first one's alone.
        (mine,) = set(parent.iterdir()) - set(others)
        while_merging.append(mine)
        deleted = export.clear_left_folders(parent / "merged")
        assert deleted == ([], [])
        assert export.list_left_folders(parent / "another") == others[:1]
        assert (mine / "model.safetensors").exists()
        return real(*given)

    real = export.compare_logits
    monkeypatch.setattr(export, "compare_logits", compare)
    ended = run_cli("export", adapter, parent / "merged", "--merge")
    assert ended.code == 0, ended.err
    assert f"export: deleted '{left}', which an export that was killed had left" in ended.err
    assert f"'{others[0]}' may be left by an export to another folder" in ended.err
    assert ended.err.count("may be left") == 1
    assert while_merging
    assert while_merging != [left]
    assert sorted(parent.iterdir()) == sorted([*others, parent / "merged"])


def test_what_may_not_be_deleted_is_named(
    folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(9, "Bad file descriptor")  # As of a network file system without locks.

    left = make_temporary_folder(folder / "merged")
    monkeypatch.setattr("fcntl.flock", refuse)
    ended = run_cli("export", adapter, folder / "merged", "--merge")
    assert ended.code == 0, ended.err
    assert f"'{left}' may be left by an export that was killed" in ended.err
    assert left.is_dir()


# -- the environment ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["x", "9" * 30, "1.5"])
@pytest.mark.parametrize("command", [audit, train])
def test_a_wrong_time_is_refused_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: str, command: Callable[..., Outcome]
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", value)
    ended = command(folder, folder / "model")
    assert "SOURCE_DATE_EPOCH must be a whole number" in read_refusal(ended, 2)
    assert len(ended.err.splitlines()) == 1


def test_a_user_without_a_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object = None) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("MEMGUARD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", fail)
    assert "set the environment variable MEMGUARD_CACHE" in read_refusal(
        train(folder, folder / "model"), 2
    )


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE must be a whole number of 1 or more; got 'x'"),
        ({"RANK": "1.5"}, "RANK must be a whole number of 0 or more; got '1.5'"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK must be a whole number of 0 or more; got '-1'"),
        ({"RANK": "2"}, "RANK must be below WORLD_SIZE, the number of ranks"),
    ],
)
def test_wrong_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: dict[str, str], words: str
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **ranks}.items():
        monkeypatch.setenv(name, value)
    ended = audit(folder, folder / "model")
    assert words in read_refusal(ended, 2)


def test_a_library_that_panics(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # tokenizers raises this class of its own, which is no Exception, for a failed check in Rust.
    panic = type("PanicException", (BaseException,), {})

    def fail(*_: Sequence[object], **__: object) -> None:
        raise panic("index out of bounds")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    line = read_refusal(train(folder, folder / "model"), 3)
    assert "no usable tokenizer in" in line
    assert line.endswith("index out of bounds")
    monkeypatch.setattr("memguard.workflows.training.data.prepare", fail)
    ended = train(folder, folder / "model")
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith("memguard: ")
