"""Documents longer than a row or a context: which part is audited, and that it is told."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from cli_examples import (
    make_texts,
    read_json,
    run_cli,
    save_tiny_model,
    succeed,
    write_jsonl,
    write_run,
)

pytestmark = pytest.mark.slow

LENGTH = ("audit.continuation_tokens=6",)


@pytest.fixture(scope="module")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 positions."""
    folder = tmp_path_factory.mktemp("short") / "model"
    return save_tiny_model(folder, max_position_embeddings=64)


def rows(out: Path) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = pq.read_table(out / "records.parquet").to_pylist()
    return table


def notes(out: Path) -> str:
    return " ".join(banner["text"] for banner in read_json(out / "report.json")["banners"])


@pytest.mark.parametrize("which", ["last", "first"])
def test_what_does_not_fit_into_the_model_is_told(
    short_model: Path, tmp_path: Path, which: str
) -> None:
    texts = [*make_texts(6, words=300), *make_texts(4, words=6, seed=1)]
    members = write_jsonl(tmp_path / "long.jsonl", ({"text": text} for text in texts))
    out = tmp_path / "out"
    arguments = ("--members", members, "--out", out, f"audit.window={which}", *LENGTH)
    outcome = succeed("audit", "--model", short_model, *arguments)
    tokenizer = transformers.AutoTokenizer.from_pretrained(short_model)
    model = transformers.AutoModelForCausalLM.from_pretrained(short_model)
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    for text, row in zip(texts, rows(out), strict=True):
        ids = tokenizer(text)["input_ids"]
        assert row["num_tokens"] == len(ids)
        used = ids[-64:] if which == "last" else ids[:64]
        assert row["prefix_tokens"] + 6 == len(used)
        with torch.no_grad():
            logprob = model(torch.tensor([used])).logits[0, :-1].log_softmax(-1)[-6:]
        expected = logprob.gather(1, torch.tensor(used[-6:])[:, None]).sum()
        # fp32, padded into a batch of another shape.
        assert row["extraction.logprob"] == pytest.approx(float(expected), abs=1e-4)
    report = read_json(out / "report.json")
    assert report["cut"] == {
        "num_documents": 6,
        "num_given": 10,
        "longest_tokens": max(lengths),
        "used_tokens": 64,
        "window": which,
        "by": "context",
        "num_inside_completion": 0,
    }
    assert report["method"]["window"] == which
    told = f"the {which} 64 tokens of each (the longest document has {max(lengths):,}"
    assert told in notes(out)
    assert told in " ".join(outcome.err.split())
    page = (out / "report.html").read_text()
    assert "everything before its last 6 tokens" not in page
    assert f"of 6 long documents: within the {which} 64 tokens" in page


def test_where_all_fit_nothing_is_told(folder: Path) -> None:
    arguments = ("--members", folder / "documents.jsonl", "--out", folder / "out", *LENGTH)
    assert run_cli("audit", "--model", folder / "model", *arguments).code == 0
    assert read_json(folder / "out" / "report.json")["cut"] is None
    assert "everything before its last 6 tokens" in (folder / "out" / "report.html").read_text()


def test_a_wrong_window_is_refused(folder: Path) -> None:
    arguments = ("--members", folder / "documents.jsonl", "--out", folder / "out")
    outcome = run_cli("audit", "--model", folder / "model", *arguments, "audit.window=middle")
    assert outcome.code == 2
    assert "'audit.window' should be" in outcome.err


def test_documents_that_a_run_did_not_reach_are_counted(folder: Path) -> None:
    settings = write_run(folder, train={"max_steps": 5, "batch_size": 4}, audit={"base": False})
    assert run_cli("train", settings).code == 0
    run = folder / "runs" / "run"
    entries = [json.loads(line) for line in (run / "manifest.jsonl").read_text().splitlines()]
    trained = [entry for entry in entries if entry["role"] == "trained"]
    num = sum(entry["num_repetitions"] == 0 for entry in trained)
    assert 0 < num < len(trained)
    assert f"{num} of {len(trained)} documents were not trained in full" in notes(run / "audit")


def _pairs() -> list[dict[str, Any]]:
    """Prompts and completions of many lengths, longer than a row of 128 tokens and shorter."""
    words = " ".join(make_texts(1, words=400)).split()
    sizes = [(p, c) for p in (1, 4, 30, 90, 200) for c in (1, 4, 40, 90, 200)]
    return [
        {
            "id": f"p{n}",
            "prompt": f"{n} " + " ".join(words[n : n + prompt]),
            "completion": " " + " ".join(words[-n - 1 - completion : -n - 1]),
        }
        for n, (prompt, completion) in enumerate(sizes)
    ]


def _talk(pair: dict[str, Any]) -> dict[str, Any]:
    roles = ("user", "assistant", "user")
    contents = (pair["prompt"], pair["completion"], pair["prompt"])
    turns = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    # Every second conversation ends with a question.
    return {"id": pair["id"], "messages": turns if int(pair["id"][1:]) % 2 else turns[:2]}


@pytest.mark.parametrize("form", ["prompt_completion", "messages"])
def test_everything_trained_is_audited_or_counted(folder: Path, form: str) -> None:
    documents = _pairs() if form == "prompt_completion" else list(map(_talk, _pairs()))
    source = write_jsonl(folder / "pairs.jsonl", documents)
    settings = write_run(
        folder,
        data={"train": str(source), "control_fraction": 0.0, "near_duplicate_words": 1000},
        train={"batch_size": 4},
        audit={"base": False, "window": "first"},
    )
    run = folder / "runs" / "run"
    for which, command in (
        ("first", ("train", settings)),
        ("last", ("audit", run, "audit.base=false", "audit.window=last")),
    ):
        succeed(*command)
        report = read_json(run / "audit" / "report.json")
        assert report["method"]["window"] == which
        assert "longer than a training row: the audit uses" in notes(run / "audit")
        check_all_are_counted(report, rows(run / "audit"))


def check_all_are_counted(report: dict[str, Any], table: list[dict[str, Any]]) -> None:
    columns = report["tables"]["buckets"]
    (values,) = zip(*columns.values(), strict=True)
    bucket = dict(zip(columns, values, strict=True))
    assert bucket["num_documents"] == sum(row["not_audited"] is None for row in table)
    not_audited = bucket["num_too_short"] + bucket["num_cut_too_short"]
    not_audited += bucket["num_nothing_supervised"] + bucket["num_labels"]
    assert bucket["num_documents"] + not_audited == len(table) == 25
    # Too short are the prompts of a word or two alone, in documents that are not cut: with the
    # number before it the shortest has 3 tokens or more.
    long = [row for row in table if row["num_tokens"] > 128]
    assert report["cut"]["num_documents"] == len(long)
    assert report["cut"]["by"] == "training"
    assert len(long) > 10
    assert report["cut"]["num_inside_completion"] > 0
    assert bucket["num_cut_too_short"] == bucket["num_nothing_supervised"] == 0
