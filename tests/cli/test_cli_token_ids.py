"""Documents given as token ids are trained and audited as their texts are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import transformers
from cli_examples import read_json, run_cli, save_tiny_model, write_jsonl, write_run, write_texts

pytestmark = pytest.mark.slow

LENGTH = ("audit.continuation_tokens=6",)


def rows(out: Path) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = pq.read_table(out / "records.parquet").to_pylist()
    return table


def to_ids(folder: Path, source: Path, to: Path) -> Path:
    """Write the texts of a file as what the folder's model's tokenizer makes of them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    texts = [json.loads(line) for line in source.read_text().splitlines()]
    return write_jsonl(
        to, ({"id": r["id"], "input_ids": tokenizer(r["text"])["input_ids"]} for r in texts)
    )


def test_an_audit_of_ids_is_that_of_their_texts(folder: Path) -> None:
    others = write_texts(folder / "others.jsonl", 30, seed=1)
    members = to_ids(folder, folder / "documents.jsonl", folder / "ids.jsonl")
    nonmembers = to_ids(folder, others, folder / "others-ids.jsonl")
    found = []
    for name, paths in (
        ("texts", (folder / "documents.jsonl", others)),
        ("ids", (members, nonmembers)),
        ("mixed", (members, others)),
    ):
        out = folder / name
        arguments = (
            "--members",
            paths[0],
            "--nonmembers",
            paths[1],
            "--out",
            out,
            "audit.cache=false",
        )
        outcome = run_cli("audit", "--model", folder / "model", *arguments, *LENGTH)
        assert outcome.code == 0, outcome.err
        for row in (table := rows(out)):
            # Of token ids, the ids are hashed.
            del row["source"], row["text_hmac"]
        report = read_json(out / "report.json")
        found.append((table, report["tables"], report["data"]))
    for other in found[1:]:
        assert other[:2] == found[0][:2]
        for name in ("documents_sha256", "overlap_with_control"):
            assert other[2][name] == found[0][2][name]


@pytest.mark.quick
def test_ids_beyond_the_vocabulary_are_refused(folder: Path) -> None:
    path = folder / "wrong.npy"
    size = transformers.AutoConfig.from_pretrained(folder / "model").vocab_size
    np.save(path, np.full((8, 40), size, dtype=np.uint16))
    arguments = ("--members", path, "--out", folder / "out")
    outcome = run_cli("audit", "--model", folder / "model", *arguments, *LENGTH)
    assert outcome.code == 3
    said = f"'--members': 'wrong.npy', row wrong-000000, holds token id {size}; the model's "
    assert f"{said}vocabulary has {size} (0 to {size - 1})" in outcome.err
    settings = write_run(folder, data={"train": str(path)})
    outcome = run_cli("train", settings)
    assert outcome.code == 3
    assert f"row wrong-000000, holds token id {size}" in outcome.err


def test_ids_are_audited_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    members = to_ids(folder, folder / "documents.jsonl", folder / "ids.jsonl")
    nonmembers = write_jsonl(folder / "others.jsonl", [{"input_ids": [7] * 40}] * 1)
    bare = save_tiny_model(tmp_path / "bare")
    for path in bare.glob("*token*"):
        path.unlink()
    # Without the cache: another test may have scored one of these documents in another batch.
    arguments = ("--members", members, "--nonmembers", nonmembers, "audit.cache=false", *LENGTH)
    whole = run_cli("audit", "--model", folder / "model", "--out", tmp_path / "a", *arguments)
    assert whole.code == 0, whole.err
    outcome = run_cli(
        "audit", "--model", bare, "--out", tmp_path / "b", "audit.excerpts=true", *arguments
    )
    assert outcome.code == 0, outcome.err
    assert "no usable tokenizer" in outcome.err
    assert "token ids are audited without it" in outcome.err
    with_texts, without = rows(tmp_path / "a"), rows(tmp_path / "b")
    # The only score of the texts themselves.
    assert None not in [row.pop("membership.zlib") for row in with_texts]
    assert {row.pop("membership.zlib") for row in without} == {None}
    assert with_texts == without
    outcome = run_cli(
        "audit", "--model", bare, "--out", tmp_path / "c", "--members", folder / "documents.jsonl"
    )
    assert outcome.code == 3
    assert "no usable tokenizer" in outcome.err


def test_a_run_on_ids_is_that_on_their_texts(folder: Path) -> None:
    ids = to_ids(folder, folder / "documents.jsonl", folder / "ids.jsonl")
    weights = []
    for name, source in (("texts", folder / "documents.jsonl"), ("ids", ids)):
        settings = write_run(
            folder,
            name=name,
            data={"train": str(source), "append_eos": False},
            audit={"base": False},
        )
        outcome = run_cli("train", settings)
        assert outcome.code == 0, outcome.err
        run = folder / "runs" / name
        weights.append((run / "model" / "model.safetensors").read_bytes())
        entries = [json.loads(line) for line in (run / "manifest.jsonl").read_text().splitlines()]
        for entry in entries:
            del entry["text_hmac"], entry["source"]
        weights.append(entries)
    assert weights[0] == weights[2]
    assert weights[1] == weights[3]


def test_a_tokenizer_is_not_trained_on_ids(folder: Path) -> None:
    ids = to_ids(folder, folder / "documents.jsonl", folder / "ids.jsonl")
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = {"path": None, "scratch": {"config": config, "vocab_size": 300}}
    outcome = run_cli("train", write_run(folder, model=model, data={"train": str(ids)}))
    assert outcome.code == 2
    assert "'model.scratch.tokenizer' must name the tokenizer" in outcome.err


def test_the_extraction_benchmark_is_audited(shared_data: Path, tmp_path: Path) -> None:
    """Prefixes and suffixes of lm-extraction-benchmark, 50 + 50 GPT-2 tokens."""
    import torch

    prefix, suffix = (np.load(shared_data / "bench" / f"val_{n}.npy") for n in ("prefix", "suffix"))
    whole = np.concatenate([prefix, suffix], axis=1)[:12]
    np.save(tmp_path / "members.npy", whole)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=128)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    folder = tmp_path / "gpt2"
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "gpt2")
    tokenizer.save_pretrained(folder)
    out = tmp_path / "out"
    arguments = ("--members", tmp_path / "members.npy", "--out", out)
    outcome = run_cli("audit", "--model", folder, *arguments)
    assert outcome.code == 0, outcome.err
    found = rows(out)
    assert len(found) == 12
    with torch.no_grad():
        logprob_NTV = model(torch.tensor(whole.astype(np.int64))).logits.log_softmax(-1)
    for number, row in enumerate(found):
        assert (row["prefix_tokens"], row["continuation_tokens"]) == (50, 50)
        true = torch.tensor(whole[number, 50:].astype(np.int64))
        # The logits before a token are those that say it.
        expected = logprob_NTV[number, 49:99].gather(1, true[:, None]).sum()
        # fp32, in a batch of another shape; a sum of 50 terms of about 11.
        assert row["extraction.logprob"] == pytest.approx(float(expected), abs=1e-2)
        assert row["extraction.num_correct"] == int(
            (logprob_NTV[number, 49:99].argmax(-1) == true).sum()
        )
