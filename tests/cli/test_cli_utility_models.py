"""Benchmark tasks on every kind of model that an audit takes: one process, a mesh, in memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cli_examples import CHAT_TEMPLATE, make_texts, succeed, write_run
from utility_tasks import write_task

from memguard import api
from memguard.integrations.transformers import MemorizationAuditCallback
from memguard.records.utility import list_task_details, load_item_scores

pytestmark = pytest.mark.slow

KINDS = ("choice", "rolling", "generation")


@pytest.fixture
def tasks(folder: Path) -> str:
    return ",".join(str(write_task(folder, kind)) for kind in KINDS)  # type: ignore[arg-type]


def list_scores(audit: Path, model: str = "trained") -> dict[tuple[str, str, int], float]:
    return {
        (score.task, score.metric, score.index): np.nan if score.value is None else score.value
        for score in load_item_scores(audit / "utility.parquet")
        if score.model == model
    }


def audit_folder(folder: Path, model: Path, out: str, **settings: Any) -> Path:
    """Audit a folder on one process, without the cache."""
    api.audit(
        model=model,
        members=folder / "documents.jsonl",
        out=folder / out,
        continuation_tokens=8,
        cache=False,
        **settings,
    )
    return folder / out


def assert_equal(scores: dict[Any, float], expected: dict[Any, float], *, atol: float) -> None:
    assert scores
    assert scores.keys() == expected.keys()
    np.testing.assert_allclose(
        list(scores.values()), list(expected.values()), rtol=0, atol=atol, equal_nan=True
    )


def test_a_model_in_memory_answers_as_its_folder_does(folder: Path, tasks: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model.train()
    before, pad = torch.get_rng_state(), tokenizer.pad_token
    result = api.audit(
        model=model,
        tokenizer=tokenizer,
        members=make_texts(24),
        utility=tasks.split(","),
        out=folder / "memory",
        continuation_tokens=8,
        cache=False,
    )
    # The program's model, tokenizer and random numbers are as before.
    assert model.training
    assert tokenizer.pad_token == pad
    assert torch.equal(torch.get_rng_state(), before)
    assert [detail.task for detail in list_task_details(result.report.tables)] == list(KINDS)
    expected = list_scores(audit_folder(folder, folder / "model", "plain", utility=tasks))
    # The same weights, kernels and batches.
    assert_equal(list_scores(folder / "memory"), expected, atol=0)


def test_an_adapter_answers_merged_and_differs_from_its_base(folder: Path, tasks: str) -> None:
    path = write_run(
        folder,
        adapter={"name": "lora", "r": 2},
        optim={"lr": 0.05},
        train={"batch_size": 8, "max_steps": 2},
        audit={"utility": tasks},
    )
    succeed("train", path)
    audit = folder / "runs" / "run" / "audit"
    trained, base = list_scores(audit), list_scores(audit, "base")
    assert trained.keys() == base.keys()
    assert trained != base
    # The base was read from its folder, as any other model is.
    expected = list_scores(audit_folder(folder, folder / "model", "plain", utility=tasks))
    # Packed with other rows, sums differ in the last digits.
    assert_equal(base, expected, atol=1e-4)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"x": 2}, marks=pytest.mark.long),
        pytest.param({"z": 2}, marks=pytest.mark.mesh),
        pytest.param({"y": 2}, marks=pytest.mark.mesh),
    ],
)
def test_two_processes_answer_as_one_does(folder: Path, tasks: str, mesh: dict[str, int]) -> None:
    """Each item, not the accuracy, which may be equal where every answer is wrong."""
    path = write_run(
        folder, parallel=mesh, train={"batch_size": 8, "max_steps": 2}, audit={"utility": tasks}
    )
    command = [sys.executable, "-m", "memguard"]
    train = [*command, "train", str(path), "--nproc", "2"]
    done = subprocess.run(train, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    # The main rank alone speaks.
    assert done.stderr.count("utility: generation: exact_match") == 1
    run = folder / "runs" / "run"
    expected = list_scores(audit_folder(folder, run / "model", "alone", utility=tasks))
    assert_equal(list_scores(run / "audit"), expected, atol=1e-4)
    report = json.loads((run / "audit" / "report.json").read_text())
    assert report["environment"]["world_size"] == "2"
    again = [*command, "audit", str(run), "--nproc", "2"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("; from the cache") == len(KINDS)


@pytest.mark.long
def test_the_callback_runs_tasks_on_the_model_of_a_trainer(folder: Path, tasks: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = CHAT_TEMPLATE
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    texts = make_texts(16)
    rows = [tokenizer(text).input_ids[:48] for text in texts]
    rows = [{"input_ids": row, "labels": row} for row in rows if len(row) == 48]
    callback = MemorizationAuditCallback(
        members=texts,
        out=folder / "audits",
        continuation_tokens=8,
        utility=[{"task": task, "limit": 3} for task in tasks.split(",")],
        base=folder / "model",
    )
    transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder / "trainer"),
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=4,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[callback],
    ).train()
    (report,) = callback.reports
    details = list_task_details(report.tables)
    assert [(detail.task, detail.num_items) for detail in details] == [(kind, 3) for kind in KINDS]
    assert {"trained", "base"} == set(details[0].num_forwards)
