"""peft folders as models: audited, trained on, planned, and refused without their base."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from cli_examples import read_json, run_cli, save_tiny_model, succeed, write_run, write_texts
from tiny_adapters import adapt
from tiny_families import build

from memguard.errors import ModelError
from memguard.hf.identity import hash_weights, sum_model
from memguard.records import AuditReport, load_record
from memguard.records.run_files import sum_trained
from memguard.records.sealed import save_sealed

pytestmark = pytest.mark.slow

LENGTH = ("audit.continuation_tokens=6",)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base/` with a tokenizer, `adapter/` without one, `merged/` by peft, and documents."""
    folder = tmp_path_factory.mktemp("adapted")
    save_tiny_model(folder / "base")
    model = adapt(
        transformers.AutoModelForCausalLM.from_pretrained(folder / "base"),
        target_modules="all-linear",
        use_dora=True,
    )
    model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    model.save_pretrained(folder / "adapter")
    merged = model.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    transformers.AutoTokenizer.from_pretrained(folder / "base").save_pretrained(folder / "merged")
    write_texts(folder / "members.jsonl", 30)
    return folder


def audit(folder: Path, model: str, out: Path, *arguments: object) -> AuditReport:
    members = ("--members", folder / "members.jsonl", *LENGTH)
    succeed("audit", "--model", folder / model, *members, "--out", out, *arguments)
    return load_record(AuditReport, out / "report.json")


def test_an_adapter_is_audited_as_the_model_it_merges_to(adapted: Path, tmp_path: Path) -> None:
    report = audit(adapted, "adapter", tmp_path / "adapter", "--base", adapted / "base")
    merged = audit(adapted, "merged", tmp_path / "merged")
    assert report.model.adapter.description == "DoRA, r=4, alpha=6"
    assert report.model.adapter.base.endswith("/base")
    assert report.model.adapter.base_weights_sha256 == hash_weights(adapted / "base")
    assert report.model.weights_sha256 == hash_weights(adapted / "adapter")
    assert report.model.adapter.weights_sha256 not in (
        report.model.weights_sha256,
        report.model.adapter.base_weights_sha256,
    )
    assert merged.model.adapter is None
    assert report.model.num_parameters == merged.model.num_parameters
    rows = [
        [
            row
            for metric in ("verbatim", "token_accuracy")
            for row in made.tables.select("extraction", metric, model="trained", against=None)
        ]
        for made in (report, merged)
    ]
    assert rows[0]
    assert rows[0] == rows[1]
    page = (tmp_path / "adapter" / "report.html").read_text()
    assert "DoRA, r=4, alpha=6" in page
    assert report.model.adapter.base_weights_sha256 in page


def test_training_starts_from_the_merged_weights(
    adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "documents.jsonl")
    losses = []
    for name in ("adapter", "merged"):
        path = write_run(
            tmp_path,
            name=name,
            model={"path": str(adapted / name)},
            train={"max_steps": 1},
            audit={"enabled": False},
        )
        succeed("train", path)
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses.append(next(row["loss"] for row in map(json.loads, lines) if "loss" in row))
    # Rounding of the merge: peft's is float32.
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    model = tmp_path / "runs" / "adapter" / "model"
    assert not (model / "adapter_config.json").exists()
    assert run_cli("plan", "--model", adapted / "adapter", "--machine", "h200").code == 0


@pytest.mark.parametrize("command", ["train", "audit", "plan"])
def test_a_base_that_is_missing_is_one_line(adapted: Path, tmp_path: Path, command: str) -> None:
    adapter = Path(shutil.copytree(adapted / "adapter", tmp_path / "adapter"))
    fields = read_json(adapter / "adapter_config.json")
    fields["base_model_name_or_path"] = str(tmp_path / "gone")
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    members = write_texts(tmp_path / "documents.jsonl")
    arguments: dict[str, tuple[Any, ...]] = {
        "train": (write_run(tmp_path, model={"path": str(adapter)}),),
        "audit": ("--model", adapter, "--members", members, "--out", tmp_path / "out"),
        "plan": ("--model", adapter, "--machine", "h200"),
    }
    ended = run_cli(command, *arguments[command])
    assert (ended.code, len(ended.err.splitlines())) == (3, 1), ended.err
    assert f"its base model '{tmp_path / 'gone'}' is missing" in ended.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter": {"target_modules": ["q_proj", "q_prj"]}}, "got 'q_prj'. They are down_proj, "),
        ({"adapter": {"target_modules": ["layers.2.mlp.up_proj"]}}, "got 'layers.2.mlp.up_proj'"),
        ({"audit": {"device_map": "auto"}}, "'audit.device_map' cannot be combined with an ada"),
    ],
)
def test_adapters_that_cannot_be_trained_or_audited_are_refused_before_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    values = {"model": {"path": str(folder / "model")}, **changes}
    values["adapter"] = {"name": "lora", **values.get("adapter", {})}
    monkeypatch.setitem(sys.modules, "memguard.workflows.training.train", None)
    ended = run_cli("train", write_run(folder, **values))
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert message in ended.err
    assert not (folder / "runs").exists()


def test_an_audit_over_devices_is_refused_before_torch(
    adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "memguard.workflows.auditing.audit", None)
    members = ("--members", adapted / "members.jsonl", "--out", tmp_path / "out")
    ended = run_cli("audit", "--model", adapted / "adapter", *members, "audit.device_map=auto")
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert "'audit.device_map' cannot be combined with an adapter" in ended.err


@pytest.mark.parametrize("command", ["audit", "export"])
def test_a_base_on_the_hub_without_a_network_is_named_with_its_adapter(
    adapted: Path, tmp_path: Path, command: str
) -> None:
    adapter = Path(shutil.copytree(adapted / "adapter", tmp_path / "adapter"))
    fields = read_json(adapter / "adapter_config.json")
    fields["base_model_name_or_path"] = "someone/model-7b"
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    arguments: dict[str, tuple[Any, ...]] = {
        "audit": ("--model", adapter, "--members", adapted / "members.jsonl", "--out", tmp_path),
        "export": (adapter, tmp_path / "merged", "--merge"),
    }
    ended = run_cli(command, *arguments[command])
    assert ended.code == 3, ended.err
    line = ended.err.splitlines()[-1]
    assert f"adapter '{adapter}': its base model: model 'someone/model-7b'" in line
    assert line.endswith(
        "Download the base, or correct 'base_model_name_or_path' in adapter_config.json"
    )


def test_layers_of_another_family_are_checked_before_documents(folder: Path) -> None:
    build("gpt_neox", max_position_embeddings=512).save_pretrained(folder / "neox")
    transformers.AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "neox")
    adapter = {"name": "lora", "target_modules": ["q_proj"]}
    ended = run_cli(
        "train", write_run(folder, model={"path": str(folder / "neox")}, adapter=adapter)
    )
    assert ended.code == 2, ended.err
    assert "got 'q_proj'. They are dense, dense_4h_to_h, " in ended.err.splitlines()[-1]
    assert "documents:" not in ended.err
    assert not (folder / "runs/run/prepared").exists()


def test_a_run_with_an_adapter_is_audited_and_merged_and_its_base_is_checked(
    folder: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(folder / "model", folder / "base"))
    path = write_run(
        folder,
        model={"path": str(base)},
        adapter={"name": "lora", "r": 4, "use_rslora": True},
        train={"max_steps": 4},
        audit={"min_documents": 1},
    )
    succeed("train", path)
    run = folder / "runs" / "run"
    report = load_record(AuditReport, run / "audit" / "report.json")
    assert report.model.adapter.description == "LoRA, r=4, alpha=8, rsLoRA"
    assert report.model.adapter.base_weights_sha256 == hash_weights(base)
    assert "LoRA, r=4, alpha=8, rsLoRA" in (run / "adapter" / "README.md").read_text()
    ended = succeed("export", run, folder / "merged", "--merge", "--json")
    result = json.loads(ended.out)
    assert result["num_own_rows"] == 4
    assert result["difference"]["largest"] < 1e-4
    ended = run_cli("export", folder / "merged", folder / "again", "--merge")
    assert (ended.code, len(ended.err.splitlines())) == (2, 1)
    # The base is moved away from its run.
    moved = base.rename(folder / "elsewhere")
    for arguments in (
        ("audit", run),
        ("audit", run, "audit.base=false"),
        ("export", run, folder / "no"),
    ):
        ended = run_cli(*arguments, *(["--merge"] if arguments[0] == "export" else []))
        assert ended.code == 3, ended.err
        assert "--base DIR" in ended.err.splitlines()[-1]
    verified = run_cli("verify", run)
    assert verified.code == 3
    assert f"base model cannot be read: adapter '{run / 'adapter'}': its base" in verified.out
    assert run_cli("verify", run, "--base", moved).code == 0
    assert run_cli("verify", folder / "merged", "--base", moved).code == 2
    before = (run / "audit" / "records.parquet").read_bytes()
    succeed("audit", run, "--base", moved)
    assert (run / "audit" / "records.parquet").read_bytes() == before
    report = load_record(AuditReport, run / "audit" / "report.json")
    assert report.model.adapter.base == report.model.base == f"{folder.name}/elsewhere"
    succeed("audit", run, "--base", moved, "audit.base=false", "--out", folder / "only")
    ended = succeed("export", run, folder / "merged-2", "--merge", "--base", moved, "--json")
    assert json.loads(ended.out)["weights_sha256"] == result["weights_sha256"]
    ended = run_cli("export", run, folder / "no", "--merge", "--base", folder / "nowhere")
    assert (ended.code, len(ended.err.splitlines())) == (3, 1), ended.err
    assert f"its base model '{folder / 'nowhere'}' is missing. Correct '--base'" in ended.err
    # The base is trained on: its weights are others, of the same shapes.
    save_tiny_model(base, initializer_range=0.03)
    verified = run_cli("verify", run)
    assert verified.code == 3
    assert f"{base / 'model.safetensors'} is not what was written" in verified.out
    members = ("--members", folder / "documents.jsonl", "--out", folder / "out", *LENGTH)
    for arguments in (
        ("audit", run),
        ("audit", "--model", run / "adapter", *members),
        ("export", run, folder / "again", "--merge"),
        ("train", write_run(folder, name="next", model={"path": str(run / "adapter")})),
    ):
        ended = run_cli(*arguments)
        assert ended.code == 3, ended.err
        line = ended.err.splitlines()[-1]
        assert f"its base model '{base}' was changed since training: " in line
        assert "--base DIR" in line
    assert not (folder / "again").exists()


def load_on_a_rank(path: str) -> str:
    """On a rank: the error of a changed base, which all ranks raise."""
    from memguard.hf.merged_weights import open_merged

    with pytest.raises(ModelError, match="was changed since training") as caught:
        open_merged(Path(path))
    return str(caught.value)


def test_all_ranks_refuse_a_changed_base(adapted: Path, tmp_path: Path, ranks: Any) -> None:
    run = tmp_path / "run"
    shutil.copytree(adapted / "adapter", run / "adapter")
    for name in ("manifest.jsonl", "metrics.jsonl"):
        (run / name).write_text("")
    sums = sum_model(adapted / "merged")
    trained = sum_trained(run, run_key="k", step=1, base=sums)
    save_sealed(trained, run / "trained.json")
    errors = ranks(load_on_a_rank, 2, str(run / "adapter"))
    assert errors[0] == errors[1]
