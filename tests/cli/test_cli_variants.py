"""`memguard audit --variants`: forms of one model on the same documents."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from cli_examples import run_cli, save_tiny_model, write_run, write_texts
from pyarrow import parquet
from tiny_families import build, make_config

from memguard import errors
from memguard.data.corpus import Corpus, load_corpus
from memguard.data.tokenization import train_bpe
from memguard.errors import ModelError
from memguard.hf.load import load_model
from memguard.hf.variants import VariantForm
from memguard.records import AuditReport, ResultRow, VariantName, load_record
from memguard.train.heldout import choose_heldout

CONTINUATION = 6
ALL = "adapter,merged,int8,nf4"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that memorizes with an adapter; not audited yet."""
    folder = tmp_path_factory.mktemp("variants")
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
    ended = run_cli("train", path)
    assert ended.code == 0, ended.err
    return folder / "runs" / "run"


def audit(run: Path, out: Path, variants: str = ALL) -> tuple[AuditReport, str]:
    ended = run_cli(
        "audit",
        run,
        *("--out", out, "--continuation-tokens", CONTINUATION, "--min-documents", 1),
        *("--variants", variants, "--json"),
    )
    assert ended.code == 0, ended.err
    report = load_record(AuditReport, out / "report.json")
    assert json.loads(ended.out) == report.model_dump(mode="json")
    return report, ended.err


@pytest.fixture(scope="module")
def report(run: Path, tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    return audit(run, tmp_path_factory.mktemp("report"))[0]


def list_rows(report: AuditReport, variant: str | None = None) -> list[ResultRow]:
    """Return the rows of one variant, or of all."""
    rows = [row for row in report.tables.results if row.variant is not None]
    return [row for row in rows if variant in (None, row.variant)]


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


def build_references(run: Path) -> Mapping[VariantName, Any]:
    """Return the variants by plain transformers, peft and formulas."""

    def adapted() -> Any:
        base = transformers.AutoModelForCausalLM.from_pretrained(run.parents[1] / "base")
        return peft.PeftModel.from_pretrained(base, str(run / "adapter")).eval()

    merged = [adapted().merge_and_unload() for _ in range(3)]
    return {
        "adapter": adapted(),
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


def measure(model: Any, corpus: Corpus) -> tuple[float, float, int]:
    """Return the held-out loss, and mean log-probability and matches of the trained documents."""
    logprobs, matches = [], []
    for index, entry in enumerate(corpus.manifest):
        if entry.role == "trained":
            ids = corpus.document(index).input_ids[: corpus.document(index).num_content_tokens]
            losses, correct = compute_losses(model, ids)
            logprobs.append(-float(losses[-CONTINUATION:].mean()))
            matches.append(bool(correct[-CONTINUATION:].all()))
    _, heldout = choose_heldout(corpus)
    sums = [compute_losses(model, corpus.document(index).input_ids)[0] for index in heldout]
    return float(torch.cat(sums).mean()), float(np.mean(logprobs)), sum(matches)


def find(report: AuditReport, variant: str, metric: str, *, minus: bool = False) -> ResultRow:
    """Return a number of the trained documents, or the held-out loss, or its difference."""
    (trained,) = [bucket.bucket for bucket in report.tables.buckets if bucket.role == "trained"]
    probe = "heldout" if metric == "nll" else "extraction"
    rows = report.tables.select(
        probe, metric, variant=variant, against="variant:adapter" if minus else None
    )
    (row,) = [row for row in rows if probe == "heldout" or row.bucket == trained]
    assert row.value is not None
    return row


def test_each_variant_has_the_numbers_of_plain_libraries(run: Path, report: AuditReport) -> None:
    corpus = load_corpus(run)
    expected = {name: measure(model, corpus) for name, model in build_references(run).items()}
    assert [variant.name for variant in report.variants] == ["adapter", "merged", "int8", "nf4"]
    first = expected["adapter"]
    for name, (loss, logprob, num_matched) in expected.items():
        # fp32 arithmetic in another order. The largest weight of each row is halfway between two
        # steps of int8, so that the last bit of peft's merge decides it: 2.4e-4 was measured, a
        # tenth of the difference from the merged model.
        close = {"abs": 5e-4 if name == "int8" else 1e-5}
        assert find(report, name, "nll").value == pytest.approx(loss, **close)
        assert find(report, name, "logprob").value == pytest.approx(logprob, **close)
        verbatim = find(report, name, "verbatim")
        assert (verbatim.num_documents, verbatim.num_matched) == (9, num_matched)
        assert len(report.tables.risks(verbatim.bucket, variant=name)) == 3
        if name == "adapter":
            assert not [row for row in list_rows(report, name) if row.against]
            continue
        changes = [loss - first[0], logprob - first[1], (num_matched - first[2]) / 9]
        for metric, change in zip(("nll", "logprob", "verbatim"), changes, strict=True):
            minus = find(report, name, metric, minus=True)
            assert minus.value == pytest.approx(change, **close)
    # The adapter memorizes some documents, and 4 bits are too few to keep them.
    assert abs(expected["int8"][0] - first[0]) > 1e-3
    assert first[2] == expected["merged"][2] > expected["nf4"][2]
    nf4 = find(report, "nf4", "logprob", minus=True)
    assert nf4.ci is not None
    assert nf4.ci[1] < 0


def test_the_page_shows_the_variants(run: Path, tmp_path: Path) -> None:
    report, err = audit(run, tmp_path, "merged,nf4")
    assert "audit: variant nf4: 4-bit weights, from fp32 by bitsandbytes" in err
    page = (tmp_path / "report.html").read_text()
    assert "Paired with &#39;Merged&#39;, same documents" in page
    assert "4-bit weights, from fp32 by bitsandbytes" in page
    assert "Minus &#39;Merged&#39;" in page
    # The rates follow from the records.
    columns = parquet.read_table(tmp_path / "records.parquet").to_pydict()
    for name in ("merged", "nf4"):
        (row,) = report.tables.select("extraction", "verbatim", variant=name, against=None)[-1:]
        here = [bucket == row.bucket for bucket in columns["bucket"]]
        verbatim = np.array(columns[f"variant:{name}.extraction.verbatim"])[here]
        assert (len(verbatim), verbatim.sum()) == (row.num_documents, row.num_matched)


def test_kept_scores_are_not_measured_again(
    run: Path, report: AuditReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    load = VariantForm.load

    def count(form: VariantForm, *arguments: Any, **options: Any) -> Any:
        loaded.append(form.name)
        return load(form, *arguments, **options)

    def interrupt(form: VariantForm, *arguments: Any, **options: Any) -> Any:
        if form.name == "nf4":
            raise KeyboardInterrupt
        return count(form, *arguments, **options)

    monkeypatch.setattr(VariantForm, "load", count)
    again, _ = audit(run, tmp_path / "again")
    assert not loaded
    assert (again.variants, list_rows(again)) == (report.variants, list_rows(report))
    shorter = ("--continuation-tokens", CONTINUATION - 1, "--out", tmp_path / "out")
    arguments = ("audit", run, *shorter, "--min-documents", 1, "--variants", ALL)
    with monkeypatch.context() as patch:
        patch.setattr(VariantForm, "load", interrupt)
        assert run_cli(*arguments).code == 130
    assert loaded == ["adapter", "int8"]
    assert not (tmp_path / "out" / "audit.json").exists()
    assert run_cli(*arguments).code == 0
    assert loaded == ["adapter", "int8", "nf4"]


def test_a_model_without_an_adapter_is_the_first_variant(run: Path, tmp_path: Path) -> None:
    base, members = run.parents[1] / "base", run.parents[1] / "documents.jsonl"
    others = write_texts(tmp_path / "others.jsonl", 5, seed=1, words=24)
    ended = run_cli(
        *("audit", "--model", base, "--members", members, "--nonmembers", others),
        *("--out", tmp_path / "out", "--continuation-tokens", CONTINUATION, "--variants", "int8"),
    )
    assert ended.code == 0, ended.err
    report = load_record(AuditReport, tmp_path / "out" / "report.json")
    assert [variant.name for variant in report.variants] == ["model", "int8"]
    audited = {row.key: row for row in report.tables.results if row.variant is None}
    rows = [row for row in list_rows(report, "model") if row.probe != "heldout"]
    assert {(row.metric, row.bucket) for row in rows} >= {
        (metric, bucket)
        for metric in ("verbatim", "near_verbatim", "within_queries", "logprob")
        for bucket in ("members", "nonmembers")
    }
    for row in rows:
        same = audited[replace(row, variant=None).key]
        assert row == replace(same, variant="model")
    (loss,) = report.tables.select("heldout", "nll", variant="model")
    assert (loss.bucket, loss.num_documents) == ("nonmembers", 5)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--variants", "adapter,fp8"), "'--variants' must give each of adapter, merged, int8, "),
        (("--variants", "int8,int8"), "at most once, separated by commas; got 'int8,int8'"),
        (("--variants", "int8"), "needs two or more; got 'int8'. Write adapter,int8"),
        (("--variants", "merged,nf4", "--nproc", 2), "'--variants' needs one process; got 2"),
        (("--variants", "merged,nf4", "--device-map", "auto"), "cannot be combined"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    run: Path, arguments: tuple[object, ...], expected: str
) -> None:
    ended = run_cli("audit", run, *arguments)
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert expected in ended.err


def test_a_model_without_an_adapter_has_no_adapter_to_merge(run: Path, tmp_path: Path) -> None:
    base, members = run.parents[1] / "base", run.parents[1] / "documents.jsonl"
    out = ("--out", tmp_path / "out", "--variants", "merged,int8")
    ended = run_cli("audit", "--model", base, "--members", members, *out)
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert "'merged' needs a model with an adapter" in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "library"), [("int8", "torchao"), ("nf4", "bitsandbytes")])
def test_a_missing_library_is_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda module: None if module == library else module)
    ended = run_cli("audit", run, "--variants", f"adapter,{name}")
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert f"{name} needs {library}: pip install 'memguard[quant]'" in ended.err


def test_weights_that_are_already_quantised_have_no_variants(tmp_path: Path) -> None:
    save_ternary(tmp_path / "base")
    members = write_texts(tmp_path / "documents.jsonl")
    for name in ("int8", "nf4"):
        ended = run_cli(
            *("audit", "--model", tmp_path / "base", "--members", members),
            *("--out", tmp_path / "out", "--variants", name),
        )
        assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
        assert f"'{name}' needs a model that is not quantised" in ended.err
    assert not (tmp_path / "out").exists()
    # The models on the hub are checked once their files are there.
    form = VariantForm(name="nf4", stored=torch.float32, dtype=torch.float32)
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
