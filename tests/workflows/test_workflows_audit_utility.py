"""Tasks in an audit: private samples, lines of the terminal, tasks that are refused."""

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memguard.audit.benchmarks import evaluation
from memguard.audit.benchmarks.answers import Evaluation, remove_text
from memguard.audit.requests import CannotGenerate
from memguard.config import AuditConfig
from memguard.errors import ConfigError, ForeignError, ModelError
from memguard.records.utility import TaskMetric, TaskResult, UtilityModel
from memguard.runtime import Console, Runtime
from memguard.workflows.auditing.utility import UtilityRun, name_file, save_samples

SAMPLE = {"doc_id": 0, "doc": {"q": "text"}, "resps": [["answer"]], "acc": 1.0, "doc_hash": "h"}


def make_task_result(task: str = "mine", model: UtilityModel = "trained") -> TaskResult:
    metric = TaskMetric(
        name="acc",
        aggregation="mean",
        higher_is_better=True,
        value=0.25,
        stderr=0.0123,
        stderr_is_bootstrap=False,
        value_N=np.array([0.0, 0.0, 0.0, 1.0]),
    )
    return TaskResult(
        task=task,
        model=model,
        version="1",
        limit=None,
        num_fewshot=0,
        is_chat=False,
        metrics=(metric,),
        headline="acc",
        item_N=tuple("abcd"),
        samples_sha256="s",
        chance=None,
        num_forwards=4,
        num_decoded_tokens=0,
    )


class LoadedModel:
    """A model of an audit that counts how often it is loaded."""

    identity, max_tokens, runtime = None, None, Runtime()

    def __init__(self) -> None:
        self.num_loads = 0

    def load(self) -> str:
        self.num_loads += 1
        return "model"

    def decoder(self) -> None:
        raise AssertionError("the stand-in generates nothing")


def make_run(names: tuple[str, ...] = ("mine", "written"), **changes: Any) -> UtilityRun:
    tasks: Any = [
        SimpleNamespace(name=name, fingerprint=name, headline="acc", num_fewshot=0, version="1")
        for name in names
    ]
    models: Any = {"trained": LoadedModel(), "base": LoadedModel()}
    values: dict[str, Any] = {
        "tasks": tasks,
        "settings": AuditConfig(cache=False),
        "tokenizer": object(),
        "models": models,
        "peers": Runtime(),
        "console": Console(quiet=True),
        "show": lambda *_: None,
    }
    return UtilityRun(**{**values, **changes})


def answer(task: Any, _lm: Any, _tokenizer: Any, kind: UtilityModel, **_: Any) -> Evaluation:
    if task.name == "written" and kind == "base":
        raise CannotGenerate("it would take 3 days")
    return Evaluation(result=make_task_result(task.name, kind), samples=(SAMPLE,))


def test_a_task_that_cannot_generate_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(evaluation, "evaluate_task", answer)
    run = make_run()
    for kind in ("trained", "base", "reference"):
        run.measure(kind)  # type: ignore[arg-type]
    assert [(r.task, r.model) for r in run.list_results()] == [
        ("mine", "trained"),
        ("mine", "base"),
        ("written", "trained"),
    ]
    entry = run.describe_run()
    assert entry is not None
    assert (entry.num_documents, entry.counted) == (8, "items")
    (warning,) = run.list_banners()
    assert "written did not run on every model: it would take 3 days" in warning.text
    run.save(tmp_path)
    written = sorted(path.name for path in (tmp_path / "private" / "utility").iterdir())
    assert written == ["mine.base.jsonl", "mine.trained.jsonl", "written.trained.jsonl"]
    assert (tmp_path / "utility.parquet").stat().st_mode & 0o777 == 0o600


def _exit(*_: Any, **__: Any) -> Evaluation:
    sys.exit(0)


def _raise(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> Evaluation:
        raise error

    return fail


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (_raise(ValueError("the text of a document")), "ValueError at "),
        (_exit, "SystemExit at test_workflows_audit_utility.py:"),
        (_raise(ForeignError("its metric 'acc' has no finite number as value")), "its metric"),
        (_raise(ConfigError("the task 'mine' has an empty context")), "the task 'mine' has"),
    ],
)
def test_a_task_that_fails_is_left_out_without_its_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fail: Any, reason: str
) -> None:
    monkeypatch.setattr(evaluation, "evaluate_task", fail)
    run = make_run(names=("mine",), console=Console(quiet=False))
    run.measure("trained")
    entry = run.describe_run()
    assert entry is not None
    assert (entry.reason_not_run or "").startswith(f"mine: {reason}")
    assert "the text of a document" not in f"{entry} {run.list_banners()} {capsys.readouterr()}"


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), ModelError("no chat template"), RuntimeError("/gloo/ lost")]
)
def test_signals_models_and_lost_ranks_end_the_audit(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(evaluation, "evaluate_task", _raise(error))
    monkeypatch.setattr("signal.getsignal", lambda _: signal.default_int_handler)
    with pytest.raises(type(error)):
        make_run(names=("mine",)).measure("trained")


def test_a_task_that_the_trained_model_could_not_answer_is_not_asked_of_the_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> Evaluation:
        raise CannotGenerate("it would take 3 days")

    monkeypatch.setattr(evaluation, "evaluate_task", refuse)
    run = make_run(names=("written",))
    run.measure("trained")
    run.measure("base")
    assert run.models["base"].num_loads == 0  # type: ignore[attr-defined]
    entry = run.describe_run()
    assert entry is not None
    assert entry.reason_not_run == "written: it would take 3 days"


def test_an_audit_without_tasks_has_no_entry_and_removes_former_ones(tmp_path: Path) -> None:
    save_samples({("mine", "trained"): [SAMPLE]}, tmp_path / "private" / "utility")
    (tmp_path / "private" / "excerpts.txt").touch()
    (tmp_path / "utility.parquet").touch()
    run = make_run(names=())
    run.measure("trained")
    run.save(tmp_path)
    assert run.describe_run() is None
    assert not run.list_banners()
    assert not (tmp_path / "utility.parquet").exists()
    assert [path.name for path in (tmp_path / "private").iterdir()] == ["excerpts.txt"]


def test_tasks_need_a_tokenizer() -> None:
    with pytest.raises(ModelError, match=r"'audit\.utility' needs the tokenizer of the model"):
        make_run(tokenizer=None)


def test_samples_keep_the_text_that_cached_answers_lack(tmp_path: Path) -> None:
    folder = tmp_path / "private" / "utility"
    save_samples({("a/b", "trained"): [SAMPLE], ("mine", "base"): [SAMPLE]}, folder)
    path = folder / name_file("a/b", "trained")
    assert json.loads(path.read_text()) == SAMPLE
    assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    cached = remove_text(SAMPLE)
    save_samples({("a/b", "trained"): [cached]}, folder)
    assert [file.name for file in folder.iterdir()] == [path.name]
    assert json.loads(path.read_text()) == SAMPLE
    # Other numbers: the text is of another model.
    save_samples({("a/b", "trained"): [{**cached, "acc": 0.0}]}, folder)
    assert json.loads(path.read_text()) == {**cached, "acc": 0.0}
    # A model that answered now has its own text.
    save_samples({("a/b", "trained"): [{**SAMPLE, "resps": [["other"]]}]}, folder)
    assert json.loads(path.read_text())["resps"] == [["other"]]


def test_files_of_different_tasks_have_different_names() -> None:
    names = [name_file(task, "base") for task in ("a/b", "a_b", "a.b", "a" * 300, "a" * 301)]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name) < 130 for name in names)
    assert name_file("arc_easy", "trained") == "arc_easy.trained.jsonl"
