"""Benchmark tasks of an audit: opened before weights are read, run while a model is loaded, saved.

    audit/utility.parquet                     the score of each item, of the trained model and base
    audit/private/utility/TASK.MODEL.jsonl    questions, prompts and answers, as lm-eval logs them

Both can be read by the owner of the audit only. All audits use the same seed, whatever theirs is:
they draw the same solved examples, so that their items can be compared and their answers cached.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from memguard.audit.benchmarks.answers import FOLDER, AnswerCache, Evaluation, remove_text
from memguard.audit.benchmarks.tasks import OpenedTask, open_tasks
from memguard.audit.requests import CannotGenerate, Model
from memguard.config import AuditConfig
from memguard.errors import ModelError, describe_foreign, is_foreign, is_lost_peer
from memguard.records import PRIVATE_MODE, Banner, ProbeRun, Tables, write_atomically
from memguard.records.utility import (
    ITEM_SCORES,
    UTILITY,
    TaskResult,
    UtilityModel,
    list_item_scores,
    list_task_details,
    save_item_scores,
)
from memguard.report.audit_training import describe_utility
from memguard.runtime import Console, Runtime, default_cache_dir
from memguard.workflows.auditing.models import LazyModel
from memguard.workflows.auditing.resources import ShowStage

SETTING = "audit.utility"
SEED = 0
"""Of solved examples and of bootstraps over items."""
VERSION = 1
"""Of the probe `utility`."""
_STAGES: Mapping[UtilityModel, str] = {"trained": "model", "base": "base model"}
_NAMES: Mapping[UtilityModel, str] = {"trained": "trained model", "base": "base model"}


def open_on_all(settings: AuditConfig, runtime: Runtime) -> tuple[OpenedTask, ...]:
    """Open the tasks of an audit on every rank; the main rank first, which may download."""
    if not settings.utility:
        return ()
    opened = runtime.only_on_main(partial(open_alone, settings))
    return open_alone(settings) if opened is None else opened


def open_alone(settings: AuditConfig) -> tuple[OpenedTask, ...]:
    """Open the tasks of an audit on one rank."""
    return tuple(
        open_tasks(settings.utility, allow_download=settings.allow_download, setting=SETTING)
    )


def describe_tasks(opened: Sequence[OpenedTask]) -> list[dict[str, Any]]:
    """Return the settings of tasks for the method of a report; equal if the same tasks run."""
    return [
        {
            "task": task.name,
            "version": task.version,
            "num_fewshot": task.num_fewshot,
            "limit": task.settings.limit,
            "chat": task.settings.chat,
            "headline": task.headline,
            "fingerprint": task.fingerprint,
        }
        for task in opened
    ]


@dataclass(kw_only=True, slots=True, eq=False)
class UtilityRun:
    """Runs the tasks of an audit on its models, one after the other, on every rank."""

    tasks: Sequence[OpenedTask]
    settings: AuditConfig
    tokenizer: Any
    models: Mapping[Model, LazyModel]
    peers: Runtime
    console: Console
    show: ShowStage
    results: list[TaskResult] = field(default_factory=list)
    """Of the trained model, then of the base."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reason, by task, why it did not run on a model."""
    _samples: dict[tuple[str, UtilityModel], Sequence[Mapping[str, Any]]] = field(
        default_factory=dict
    )
    """On the main rank."""
    _cache: AnswerCache | None = None

    def __post_init__(self) -> None:
        if self.tasks and self.tokenizer is None:
            raise ModelError(
                f"'{SETTING}' needs the tokenizer of the model, which has none: save it with the "
                "model, or remove the tasks"
            )
        if self.settings.cache:
            self._cache = AnswerCache(default_cache_dir() / FOLDER)

    def measure(self, kind: Model) -> None:
        """Run all tasks on a trained model or a base that is loaded, or take cached answers."""
        if kind not in _NAMES:
            return
        model = cast("UtilityModel", kind)
        for task in self.tasks:
            if task.name in self.refused:
                continue
            evaluation = self._load(task, model) or self._evaluate(task, model)
            if evaluation is None:
                continue
            result = evaluation.result
            self.results.append(result)
            if self.peers.is_main:
                self._samples[result.task, result.model] = evaluation.samples

    def _load(self, task: OpenedTask, model: UtilityModel) -> Evaluation | None:
        identity = self.models[model].identity
        stored = None
        if self.peers.is_main and self._cache is not None and identity is not None:
            stored = self._cache.load(identity, task, model)
        return self.peers.broadcast_object(stored)

    def _evaluate(self, task: OpenedTask, model: UtilityModel) -> Evaluation | None:
        from memguard.audit.benchmarks.evaluation import evaluate_task

        audited = self.models[model]
        stage = f"{task.name}, {_STAGES[model]}"
        try:
            evaluation = evaluate_task(
                task,
                audited.load(),
                self.tokenizer,
                model,
                decoder=audited.decoder,
                max_tokens=audited.max_tokens,
                batch_tokens=self.settings.batch_tokens,
                runtime=audited.runtime,
                seed=SEED,
                on_progress=lambda done, total: self.show(stage, done, total, "items"),
            )
        except BaseException as error:
            if not is_foreign(error) or isinstance(error, ModelError) or is_lost_peer(error):
                raise
            # lm-eval and the task run the same code on every rank, so that all have the reason.
            reason = str(error) if isinstance(error, CannotGenerate) else describe_foreign(error)
            self.refused[task.name] = reason
            self.console.warn(
                f"'{SETTING}': {task.name} did not run on the {_NAMES[model]}: {reason}"
            )
            return None
        identity = audited.identity
        if self.peers.is_main and self._cache is not None and identity is not None:
            self._cache.store(identity, task, evaluation)
        return evaluation

    def list_results(self) -> list[TaskResult]:
        """Return the results task by task, in the order of the settings: trained, then base."""
        return [r for task in self.tasks for r in self.results if r.task == task.name]

    def describe_run(self) -> ProbeRun | None:
        """Return the entry among the probes that ran; None if the audit has no tasks."""
        if not self.tasks:
            return None
        trained = [result for result in self.results if result.model == "trained"]
        num_items = sum(len(result.item_N) for result in trained)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
        return ProbeRun(
            name=UTILITY,
            version=VERSION,
            num_documents=num_items or None,
            counted="items",
            reason_not_run=None if num_items else reasons,
        )

    def list_banners(self) -> list[Banner]:
        """Return what the page says about tasks that are left out."""
        return [
            Banner(level="warning", text=f"The task {name} did not run on every model: {reason}.")
            for name, reason in self.refused.items()
        ]

    def report(self, tables: Tables) -> None:
        """Print a line for each task that ran, from the tables of the audit."""
        details = list_task_details(tables)
        for detail, line in zip(details, describe_utility(tables), strict=True):
            cached = "; from the cache" if all(detail.is_cached.values()) else ""
            self.console.info(f"utility: {line}{cached}")

    def save(self, folder: Path) -> None:
        """Write scores and samples to an audit folder, on the main rank; others are removed."""
        save_samples(self._samples, folder / "private" / UTILITY)
        (folder / ITEM_SCORES).unlink(missing_ok=True)
        results = self.list_results()
        if results:
            save_item_scores(list_item_scores(results), folder / ITEM_SCORES)


def save_samples(
    samples: Mapping[tuple[str, UtilityModel], Sequence[Mapping[str, Any]]], folder: Path
) -> None:
    """Write the samples of each task and model; remove all other files of the folder.

    Answers from the cache have no text. A file with the same numbers and the text is kept.
    """
    files = {name_file(task, model): of for (task, model), of in samples.items()}
    if not files:
        shutil.rmtree(folder, ignore_errors=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    for private in (folder.parent, folder):
        private.chmod(0o700)
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, of_task in files.items():
        if not _has_text_of(folder / name, of_task):
            lines = "".join(f"{json.dumps(sample)}\n" for sample in of_task)
            write_atomically(folder / name, lines.encode(), mode=PRIVATE_MODE)


def _has_text_of(path: Path, samples: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a file has these samples, perhaps with text that they lack."""
    try:
        written = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return False
    if not all(isinstance(sample, dict) for sample in written):
        return False
    if any(remove_text(sample) != sample for sample in samples):
        return False  # They have text themselves.
    return [remove_text(sample) for sample in written] == list(samples)


def name_file(task: str, model: UtilityModel) -> str:
    """Return the name of the file with the samples of a task: ``arc_easy.trained.jsonl``."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", task)[:100]
    if plain != task:
        plain += f"-{hashlib.sha256(task.encode()).hexdigest()[:8]}"
    return f"{plain}.{model}.jsonl"
