"""`memguard audit --load-as`: one model, loaded in a form in which it may be shipped."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from cli_examples import run_cli, save_tiny_model, succeed, write_run, write_texts
from tiny_families import build, make_config

from memguard import api, errors
from memguard.data.corpus import Corpus, load_corpus
from memguard.data.tokenization import train_bpe
from memguard.errors import ConfigError, ModelError
from memguard.hf.load import load_model
from memguard.hf.load_as import LoadedForm
from memguard.records import AuditReport, LoadAs, ResultRow, load_record

pytestmark = pytest.mark.slow

CONTINUATION = 6
FORMS: tuple[LoadAs, ...] = ("stored", "merged", "int8", "nf4")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that memorizes with an adapter; not audited yet."""
    folder = tmp_path_factory.mktemp("load-as")
    save_tiny_model(folder / "base", initializer_range=0.2)
    write_texts(folder / "documents.jsonl", 14, words=24)
    path = write_run(
        folder,
        model={"path": str(folder / "base")},
        adapter={"name": "lora", "r": 16, "lora_alpha": 64},
        data={"heldout_documents": 3},
        optim={"lr": 1e-2},
        train={"epochs": 60, "batch_size": 2},
        audit={"enabled": False},
    )
    succeed("train", path)
    return folder / "runs" / "run"


def audit(run: Path, out: Path, form: str) -> tuple[AuditReport, str]:
    ended = succeed(
        *("audit", run, "--out", out, f"audit.continuation_tokens={CONTINUATION}"),
        *("audit.min_documents=1", "--load-as", form, "--json"),
    )
    report = load_record(AuditReport, out / "report.json")
    assert json.loads(ended.out) == report.model_dump(mode="json")
    return report, ended.err


@pytest.fixture(scope="module")
def folders(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[LoadAs, Path]:
    """The audit of each form, outside the run."""
    folder = tmp_path_factory.mktemp("reports")
    for form in FORMS:
        audit(run, folder / form, form)
    return {form: folder / form for form in FORMS}


@pytest.fixture(scope="module")
def reports(folders: Mapping[LoadAs, Path]) -> Mapping[LoadAs, AuditReport]:
    return {form: load_record(AuditReport, path / "report.json") for form, path in folders.items()}


def change_weights(model: Any, kind: str) -> Any:
    """Replace the weights of all layers but the head by those of int8 or nf4, in fp32."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        weight = module.weight.data
        if kind == "int8":
            # Symmetric, a scale for each output feature; torchao divides by half of 255.
            scale = weight.abs().amax(1, keepdim=True) / 127.5
            module.weight.data = (weight * (1 / scale)).round().clamp(-128, 127) * scale
        else:
            options = {"blocksize": 64, "quant_type": "nf4"}
            # As one row, see `dequantise_nf4`.
            packed, state = quantize_4bit(weight.reshape(1, -1), **options)
            module.weight.data = dequantize_4bit(packed, state).reshape(weight.shape)
    return model


def build_references(run: Path) -> Mapping[LoadAs, Any]:
    """Return the forms by plain transformers, peft and formulas."""

    def adapted() -> Any:
        base = transformers.AutoModelForCausalLM.from_pretrained(run.parents[1] / "base")
        return peft.PeftModel.from_pretrained(base, str(run / "adapter")).eval()

    merged = [adapted().merge_and_unload() for _ in range(3)]
    return {
        "stored": adapted(),
        "merged": merged[0],
        "int8": change_weights(merged[1], "int8"),
        "nf4": change_weights(merged[2], "nf4"),
    }


@torch.no_grad()
def compute_losses(model: Any, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token but the first, and whether it is the most likely one."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0, :-1]
    losses = -logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return losses, logits.argmax(-1) == tokens[1:]


def measure(model: Any, corpus: Corpus) -> tuple[float, int]:
    """Return mean log-probability and matches of the trained documents."""
    logprobs, matches = [], []
    for index, entry in enumerate(corpus.manifest):
        if entry.role == "trained":
            ids = corpus.document(index).input_ids[: corpus.document(index).num_content_tokens]
            losses, correct = compute_losses(model, ids)
            logprobs.append(-float(losses[-CONTINUATION:].mean()))
            matches.append(bool(correct[-CONTINUATION:].all()))
    return float(np.mean(logprobs)), sum(matches)


def find(report: AuditReport, metric: str) -> ResultRow:
    """Return a number of the trained documents."""
    (trained,) = [bucket.bucket for bucket in report.tables.buckets if bucket.role == "trained"]
    row = report.tables.find("extraction", metric, trained)
    assert row is not None
    return row


def test_each_form_has_the_numbers_of_plain_libraries(
    run: Path, reports: Mapping[LoadAs, AuditReport]
) -> None:
    corpus = load_corpus(run)
    expected = {name: measure(model, corpus) for name, model in build_references(run).items()}
    for name, (logprob, num_matched) in expected.items():
        report = reports[name]
        assert report.model.load_as == name
        # fp32 arithmetic in another order. The largest weight of each row is halfway between two
        # steps of int8, so that the last bit of peft's merge decides it: 2.4e-4 was measured, a
        # tenth of the difference from the merged model.
        close = {"abs": 5e-4 if name == "int8" else 1e-5}
        assert find(report, "logprob").value == pytest.approx(logprob, **close)
        verbatim = find(report, "verbatim")
        assert (verbatim.num_documents, verbatim.num_matched) == (9, num_matched)
        assert len(report.tables.risks(verbatim.bucket)) == 3
    # The adapter memorizes some documents, and 4 bits are too few to keep them.
    assert abs(expected["int8"][0] - expected["stored"][0]) > 1e-3
    assert expected["stored"][1] == expected["merged"][1] > expected["nf4"][1]
    # The base is that of every audit, and what was read of the run is the same.
    for report in reports.values():
        assert report.model.base is not None
        assert report.model.weights_sha256 == reports["stored"].model.weights_sha256
        rows = [row for row in report.tables.results if row.model == "base"]
        assert rows == [r for r in reports["stored"].tables.results if r.model == "base"]


def test_report_page_card_and_screens_say_how_it_was_loaded(
    run: Path, folders: Mapping[LoadAs, Path], tmp_path: Path
) -> None:
    made = "4-bit weights, from fp32 by bitsandbytes"
    report, err = audit(run, tmp_path / "nf4", "nf4")
    assert f"audit: the model is loaded as nf4: {made}" in err
    assert report.model.load_as_detail.startswith(made)
    assert report.subject == "run, loaded as nf4"
    page = (tmp_path / "nf4" / "report.html").read_text()
    assert "Run &#39;run&#39;, loaded as nf4</bdi></h1>" in page
    assert f"{made}" in page
    assert "other forms, may give out more" in page
    result = api.audit(run, load_as="nf4", out=tmp_path / "again", min_documents=1)
    assert "Run &#39;run&#39;, loaded as nf4" in result._repr_html_()
    assert "run, loaded as nf4" in repr(result)
    ended = run_cli("gate", tmp_path / "nf4", "--init", "--policy", tmp_path / "policy.yaml")
    assert ended.code == 0, ended.err
    assert "run, loaded as nf4" in (tmp_path / "policy.yaml").read_text()
    stored = (folders["stored"] / "report.html").read_text()
    assert "loaded as" not in stored.lower()


def test_the_held_out_loss_is_not_that_of_another_form(
    folders: Mapping[LoadAs, Path], reports: Mapping[LoadAs, AuditReport]
) -> None:
    stored, int8 = reports["stored"], reports["int8"]
    assert stored.training is not None
    assert int8.training is not None
    assert stored.training.heldout_nll is not None
    assert int8.training.heldout_nll is None
    (row,) = int8.tables.select("heldout", "nll", model="trained")
    assert (row.value, row.missing_because) == (
        None,
        "not measured: training measured it of the stored model",
    )
    assert "Training measured the stored model." in (folders["int8"] / "report.html").read_text()
    (base,) = int8.tables.select("heldout", "nll", model="base")
    assert base in stored.tables.results


def test_a_report_of_another_form_is_never_that_of_the_run(
    run: Path, folders: Mapping[LoadAs, Path], tmp_path: Path
) -> None:
    """Nothing is written into the run, and a report that was copied there is refused."""
    assert not (run / "audit").exists()
    assert "have not been audited" in (run / "adapter" / "README.md").read_text()
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.copytree(folders["int8"], copy / "audit")
    policy = tmp_path / "policy.yaml"
    policy.write_text("gate: [{metric: verbatim, on: trained, at_most: 1.0}]")
    bundle = tmp_path / "bundle.zip"
    for command in (
        ("gate", copy, "--policy", policy, "--weights"),
        ("bundle", copy, bundle),
        ("bundle", folders["int8"], bundle),
        ("export", copy, "--to", "hub:someone/model", "--dry-run"),
    ):
        ended = run_cli(*command)
        assert (ended.code, len(ended.err.splitlines()[-1:])) == (3, 1), ended.err
        assert "is of the model loaded as int8, not of its stored weights" in ended.err
    assert not bundle.exists()
    # The run is audited again, whatever the copied report says.
    assert succeed("bundle", folders["stored"], bundle)


def test_an_earlier_audit_of_another_form_is_not_compared_by_a_gate(
    folders: Mapping[LoadAs, Path], tmp_path: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    rule = {"metric": "verbatim", "on": "trained", "at_most": 0.5}
    policy.write_text(json.dumps({"gate": [{**rule, "than": str(folders["stored"])}]}))
    ended = run_cli("gate", folders["int8"], "--policy", policy, "--out", tmp_path / "gate")
    assert ended.code == 12, ended.err
    result = json.loads((tmp_path / "gate" / "gate.json").read_text())
    (judgement,) = result["judgements"]
    assert "was audited with another 'load_as'" in judgement["sentence"]


def test_a_diff_sets_two_forms_side_by_side(folders: Mapping[LoadAs, Path]) -> None:
    screen = succeed("diff", folders["stored"], folders["nf4"])
    assert "run, loaded as nf4" in screen.out
    both = json.loads(succeed("diff", folders["stored"], folders["nf4"], "--json").out)
    assert (both["old"]["name"], both["new"]["name"]) == ("run", "run, loaded as nf4")
    # The adapter memorizes documents that 4 bits do not keep; both measured the same.
    assert {document["kind"] for document in both["documents"]} >= {"gone"}


def test_kept_scores_are_not_measured_again(
    run: Path,
    reports: Mapping[LoadAs, AuditReport],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = []
    load = LoadedForm.load

    def count(form: LoadedForm, *arguments: Any, **options: Any) -> Any:
        loaded.append(form.name)
        return load(form, *arguments, **options)

    monkeypatch.setattr(LoadedForm, "load", count)
    again, _ = audit(run, tmp_path / "again", "nf4")
    assert not loaded
    assert again.tables.results == reports["nf4"].tables.results


def test_a_model_without_an_adapter_is_quantised(run: Path, tmp_path: Path) -> None:
    base, members = run.parents[1] / "base", run.parents[1] / "documents.jsonl"
    others = write_texts(tmp_path / "others.jsonl", 5, seed=1, words=24)
    model = ("--model", base, "--members", members, "--nonmembers", others)
    for form in ("stored", "int8"):
        succeed(
            *("audit", *model, "--out", tmp_path / form, "--load-as", form),
            *(f"audit.continuation_tokens={CONTINUATION}",),
        )
    stored, int8 = (
        load_record(AuditReport, tmp_path / form / "report.json") for form in ("stored", "int8")
    )
    assert int8.model.load_as_detail.startswith("8-bit weights, from fp32 by torchao ")
    assert int8.model.weights_sha256 == stored.model.weights_sha256
    ones, others_ = (r.tables.find("extraction", "logprob", "members") for r in (stored, int8))
    assert ones is not None
    assert others_ is not None
    assert 0 < abs((ones.value or 0) - (others_.value or 0)) < 0.1
    ended = run_cli("audit", *model, "--out", tmp_path / "out", "--load-as", "merged")
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert "'--load-as' merged needs a model with an adapter" in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--load-as", "fp8"), "'--load-as' must be one of merged, int8, nf4; got 'fp8'"),
        (("--load-as", "int8"), "--load-as needs --out: a folder for its report, which is not"),
        (("--load-as", "nf4", "--out", "OWN"), "--load-as needs --out"),
        (("--load-as", "nf4", "--out", "OUT", "--nproc", 2), "needs one process; got 2"),
        (("--load-as", "nf4", "--out", "OUT", "audit.device_map=auto"), "cannot be combined"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    run: Path, tmp_path: Path, arguments: tuple[object, ...], expected: str
) -> None:
    places = {"OWN": run / "audit", "OUT": tmp_path / "out"}
    ended = run_cli("audit", run, *(places.get(str(one), one) for one in arguments))
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert expected in ended.err
    assert not (run / "audit").exists()
    assert not (tmp_path / "out").exists()


def test_python_needs_a_folder_too(run: Path) -> None:
    with pytest.raises(ConfigError, match="--load-as needs --out"):
        api.audit(run, load_as="int8")
    assert not (run / "audit").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(run.parents[1] / "base")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.parents[1] / "base")
    with pytest.raises(ConfigError, match="'--load-as' needs the folder of a model"):
        api.audit(model=model, tokenizer=tokenizer, members=["a text"], load_as="int8")


@pytest.mark.parametrize(("name", "library"), [("int8", "torchao"), ("nf4", "bitsandbytes")])
def test_a_missing_library_is_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda module: None if module == library else module)
    ended = run_cli("audit", run, "--load-as", name, "--out", tmp_path / "out")
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert f"{name} needs {library}: pip install '{library}>=" in ended.err


def test_weights_that_are_already_quantised_have_no_other_form(tmp_path: Path) -> None:
    save_ternary(tmp_path / "base")
    members = write_texts(tmp_path / "documents.jsonl")
    for name in ("int8", "nf4"):
        ended = run_cli(
            *("audit", "--model", tmp_path / "base", "--members", members),
            *("--out", tmp_path / "out", "--load-as", name),
        )
        assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
        assert f"'--load-as' {name} needs a model that is not quantised" in ended.err
    assert not (tmp_path / "out").exists()
    # The models on the hub are checked once their files are there.
    form = LoadedForm(name="nf4", stored=torch.float32, dtype=torch.float32)
    with pytest.raises(ModelError, match="cannot be quantised: its configuration has 'quant"):
        form.load(str(tmp_path / "base"), torch.device("cpu"), attn=None)


def save_ternary(folder: Path) -> None:
    """A model whose layers round their weights in each forward."""
    build("bitnet", vocab_size=400).save_pretrained(folder)
    train_bpe(["a cat and a dog"], vocab_size=300).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    online = {"linear_class": "autobitlinear", "quantization_mode": "online"}
    config["quantization_config"] = {"quant_method": "bitnet", **online}
    (folder / "config.json").write_text(json.dumps(config))


def test_ternary_weights_are_no_base_of_an_adapter(tmp_path: Path) -> None:
    save_ternary(tmp_path / "base")
    write_texts(tmp_path / "documents.jsonl")
    adapter = {"name": "lora", "quantization": "nf4"}
    path = write_run(tmp_path, model={"path": str(tmp_path / "base")}, adapter=adapter)
    ended = run_cli("train", path)
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert "'adapter.quantization' must not be set for" in ended.err
    # An adapter by another program: as merged it would be rounded away.
    model = transformers.AutoModelForCausalLM.from_config(make_config("bitnet", vocab_size=400))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"round their weights .* a merged adapter would be lost"):
        load_model(str(tmp_path / "adapter"))
