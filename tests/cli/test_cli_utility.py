"""Benchmark tasks of `audit`, `train` and `plan`: run on the models of an audit."""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from cli_examples import read_json, run_cli, save_tiny_model, succeed, write_run, write_texts
from utility_tasks import write_task

from memguard import api, errors
from memguard.audit.benchmarks import evaluation
from memguard.config import AuditConfig
from memguard.model.causal_lm import CausalLM
from memguard.records import AuditReport, load_record
from memguard.records.utility import TaskDetail, list_task_details, load_item_scores

pytestmark = pytest.mark.slow

ASKED: list[tuple[str, str]] = []
"""Task and model of each evaluation since it was cleared."""


@pytest.fixture(scope="module", autouse=True)
def _count_evaluations() -> Iterator[None]:
    evaluate = evaluation.evaluate_task

    def count(task: Any, lm: Any, tokenizer: Any, kind: Any, **settings: Any) -> Any:
        ASKED.append((task.name, kind))
        return evaluate(task, lm, tokenizer, kind, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "evaluate_task", count)
        yield


@pytest.fixture(autouse=True)
def _asked() -> None:
    ASKED.clear()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with two models, documents, tasks and a trained run."""
    folder = tmp_path_factory.mktemp("utility")
    save_tiny_model(folder / "model")
    write_texts(folder / "documents.jsonl", 40)
    for kind in ("choice", "rolling", "generation"):
        write_task(folder, kind)  # type: ignore[arg-type]
    tasks = [
        {"task": str(folder / "choice.yaml")},
        {"task": str(folder / "rolling.yaml"), "limit": 4, "metric": "bits_per_byte"},
        {"task": str(folder / "generation.yaml")},
    ]
    path = write_run(folder, train={"batch_size": 8, "max_steps": 3}, audit={"utility": tasks})
    ASKED.clear()
    outcome = succeed("train", path)
    assert "utility: choice: acc " in outcome.err
    (folder / "said.txt").write_text(outcome.err)
    (folder / "asked.json").write_text(json.dumps(ASKED))
    return folder


def load_details(audit: Path) -> dict[str, TaskDetail]:
    report = load_record(AuditReport, audit / "report.json")
    return {detail.task: detail for detail in list_task_details(report.tables)}


def list_lines(audit: Path, name: str) -> list[dict[str, Any]]:
    text = (audit / "private" / "utility" / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


def list_values(audit: Path) -> list[tuple[Any, ...]]:
    report = load_record(AuditReport, audit / "report.json")
    return [
        (row.parameters, row.metric, row.model, row.against, row.value, row.low, row.high)
        for row in report.tables.results
        if row.probe == "utility"
    ]


@pytest.mark.quick
def test_a_run_answers_its_tasks_with_both_models(place: Path) -> None:
    asked = [tuple(pair) for pair in json.loads((place / "asked.json").read_text())]
    names = ("choice", "rolling", "generation")
    assert asked == [(name, kind) for kind in ("trained", "base") for name in names]
    audit = place / "runs" / "run" / "audit"
    report = load_record(AuditReport, audit / "report.json")
    (run,) = [run for run in report.probe_runs if run.name == "utility"]
    assert (run.num_documents, run.counted) == (6 + 4 + 6, "items")
    assert "utility (16 items)" in (place / "said.txt").read_text()
    # Items of both models, also of the metric that is not shown in charts.
    scores = load_item_scores(audit / "utility.parquet")
    assert len(scores) == 2 * (6 + 2 * 4 + 6)
    assert {score.model for score in scores} == {"trained", "base"}
    # Not in the verdict, and no extraction risk.
    assert "utility" not in report.verdict.describe()
    details = load_details(audit)
    assert [details[name].headline for name in names] == ["acc", "bits_per_byte", "exact_match"]
    assert [detail["limit"] for detail in report.method.utility] == [None, 4, None]
    # Two of the three options of a question differ in their last token only.
    assert details["choice"].num_forwards == {"trained": 2 * 6, "base": 2 * 6}
    for name in names:
        for model in ("trained", "base"):
            lines = list_lines(audit, f"{name}.{model}.jsonl")
            assert len(lines) == details[name].num_items
            assert all(line["doc"]["question"] for line in lines)
    for path in (audit / "private").rglob("*.jsonl"):
        assert path.stat().st_mode & 0o077 == 0
    # No path of this machine in what is handed on.
    assert str(place) not in (audit / "report.json").read_text()


def test_cached_answers_are_not_asked_again(place: Path) -> None:
    audit = place / "runs" / "run" / "audit"
    before, text = list_values(audit), list_lines(audit, "generation.trained.jsonl")
    assert before
    outcome = succeed("audit", place / "runs" / "run")
    assert not ASKED
    assert list_values(audit) == before
    assert outcome.err.count("; from the cache") == 3
    # The cache has no text, but the audit has.
    assert list_lines(audit, "generation.trained.jsonl") == text
    assert load_details(audit)["choice"].is_cached == {"trained": True, "base": True}
    # Elsewhere the base is the audited model, and answered as such.
    arguments = ("--model", place / "model", "--members", place / "documents.jsonl")
    other = place / "other"
    tasks = f"{place / 'choice.yaml'},{place / 'rolling.yaml'}:4"
    succeed(
        "audit", *arguments, "--out", other, f"audit.utility={tasks}", "audit.continuation_tokens=8"
    )
    # The rolling task has another headline here.
    assert ASKED == [("rolling", "trained")]
    of_base = [row for row in before if row[2] == "base" and "choice" in row[0] and not row[3]]
    of_model = [row for row in list_values(other) if "choice" in row[0]]
    assert [row[4:] for row in of_model] == [row[4:] for row in of_base]
    assert all("doc" not in line for line in list_lines(other, "choice.trained.jsonl"))
    ASKED.clear()
    succeed(
        *("audit", *arguments, "--out", other, "audit.continuation_tokens=8", "audit.cache=false"),
        *(f"audit.utility={place / 'choice.yaml'}", "audit.batch_tokens=64"),
    )
    assert ASKED == [("choice", "trained")]
    names = [path.name for path in (other / "private" / "utility").iterdir()]
    assert names == ["choice.trained.jsonl"]
    succeed("audit", *arguments, "--out", other, "audit.continuation_tokens=8")
    assert not (other / "private" / "utility").exists()
    assert not (other / "utility.parquet").exists()


def test_an_audit_is_current_only_with_the_tasks_asked_for(place: Path) -> None:
    path, audit = place / "run.yaml", place / "runs" / "run" / "audit"
    created = read_json(audit / "report.json")["created"]
    succeed("train", path)
    assert read_json(audit / "report.json")["created"] == created
    documents = place / "choice.jsonl"
    before = documents.read_text()
    try:
        documents.write_text(before.replace('"label": 1', '"label": 2'))
        succeed("train", path)
        # The other tasks are in the cache.
        assert ASKED == [("choice", "trained"), ("choice", "base")]
    finally:
        documents.write_text(before)
    ASKED.clear()
    succeed("audit", place / "runs" / "run", "audit.utility=[]")
    assert not load_details(audit)
    succeed("train", path)
    assert set(load_details(audit)) == {"choice", "rolling", "generation"}
    assert not ASKED


def test_what_is_handed_on_has_no_samples(place: Path) -> None:
    run = place / "runs" / "run"
    assert (run / "audit" / "private" / "utility").is_dir()
    succeed("bundle", run, place / "run.zip")
    with zipfile.ZipFile(place / "run.zip") as archive:
        names = archive.namelist()
    assert any(name.endswith("report.html") for name in names)
    assert not [name for name in names if "private" in name or "utility" in name]


def test_generation_that_takes_too_long_is_left_out_and_the_rest_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a mesh whose weights are gathered for each token.
    monkeypatch.setattr(CausalLM, "fits_gathered", lambda _: False)
    outcome = succeed(
        *("audit", "--model", place / "model", "--members", place / "documents.jsonl"),
        *("--out", place / "slow", "audit.cache=false", "audit.continuation_tokens=8"),
        *(f"audit.utility={place / 'generation.yaml'},{place / 'choice.yaml'}",),
        *(f"audit.max_generation_minutes={1e-9}",),
    )
    assert "warning: 'audit.utility': generation did not run on the trained model" in outcome.err
    assert set(load_details(place / "slow")) == {"choice"}
    report = load_record(AuditReport, place / "slow" / "report.json")
    (warning,) = [one for one in report.banners if "The task generation" in one.text]
    assert "for 1e-09 minutes, which is 'audit.max_generation_minutes'" in warning.text


def write_far_task(folder: Path) -> Path:
    """Write a task whose dataset is on no machine."""
    path = write_task(folder, "choice", name="far")
    head, _, tail = path.read_text().partition("dataset_kwargs")
    tail = tail.partition("output_type")[2]
    path.write_text(f"{head.replace('json', 'none-such/far-data', 1)}output_type{tail}")
    return path


# -- refusals: one line, before anything is read ---------------------------------------------------


@pytest.fixture
def arguments(folder: Path) -> tuple[object, ...]:
    return (
        *("audit", "--model", folder / "model", "--members", folder / "documents.jsonl"),
        *("--out", folder / "out"),
    )


def refuse(*command: object) -> str:
    """Return the one line of a command that must be refused as a wrong setting."""
    outcome = run_cli(*command)
    assert outcome.code == 2, outcome.err
    *before, line = outcome.err.splitlines()
    assert all(text.endswith("loading torch and transformers") for text in before), outcome.err
    assert not ASKED
    return line


def test_without_the_extra_the_line_names_it(
    folder: Path, arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "lm_eval" else name)
    expected = "'audit.utility' needs lm_eval: pip install 'lm-eval>=0.4.13'"
    assert expected in refuse(*arguments, "audit.utility=arc_easy")
    path = write_run(folder, audit={"utility": "arc_easy"})
    for command in ("train", "plan"):
        assert expected in refuse(command, path)
    assert not (folder / "runs").exists()


def test_a_task_that_is_not_there(folder: Path, arguments: tuple[object, ...]) -> None:
    assert "no file './none.yaml'" in refuse(*arguments, "audit.utility=./none.yaml")
    path = write_run(folder, audit={"utility": "./none.yaml:5"})
    assert "no file './none.yaml'" in refuse("train", path)
    assert not (folder / "runs").exists()
    assert "has the task 'a' 2 times" in refuse(*arguments, "audit.utility=a,a:3")


def test_a_download_must_be_allowed(
    folder: Path, arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a machine with HF_HUB_OFFLINE, whose value the libraries read at their import.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    task = write_far_task(folder)
    line = refuse(*arguments, f"audit.utility={task}")
    assert "'none-such/far-data', which is not on this machine" in line
    assert "audit.allow_download=true" in line
    line = refuse(*arguments, f"audit.utility={task}", "audit.allow_download=true")
    assert "'none-such/far-data', which could not be downloaded" in line
    path = write_run(folder, audit={"utility": str(task)})
    # Before the documents are read.
    assert "audit.allow_download=true" in refuse("train", path, "data.seq_len=64")
    assert not (folder / "runs" / "run" / "prepared").exists()
    assert "audit.allow_download=true" in refuse("plan", path)


def test_prompts_may_have_examples_and_a_template(place: Path) -> None:
    settings = AuditConfig(
        utility=[{"task": str(place / "choice.yaml"), "num_fewshot": 2, "chat": True, "limit": 3}]  # type: ignore[arg-type]
    )
    out = place / "chat"
    path = place / "chat.yaml"
    path.write_text(json.dumps({"utility": settings.model_dump(mode="json")["utility"]}))
    result = api.audit(
        model=place / "model",
        members=place / "documents.jsonl",
        out=out,
        utility=settings.utility,
        continuation_tokens=8,
    )
    (detail,) = list_task_details(result.report.tables)
    assert (detail.num_items, detail.num_forwards["trained"]) == (3, 6)
    assert (detail.num_fewshot, detail.is_chat) == (2, True)
