"""Evaluations on disk, so that no model answers a task twice.

    utility/KEY/HASH.json    values, numbers and hashes of one task on one model

The key identifies everything the answers depend on: the model, and the task with its documents and
settings. It does not say whether the model was the trained one or the base, so that all runs of a
sweep share the answers of their base.

No text is written: of a sample its numbers and hashes are kept, not the question, the prompt or a
generated text, which may be text of the user's documents. The name of a file is a hash of its
bytes; what is damaged counts as missing.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memguard.audit.benchmarks.tasks import OpenedTask
from memguard.audit.cache import PartFolder, compute_fingerprint
from memguard.records.utility import TaskMetric, TaskResult, UtilityModel

FOLDER = "utility"
"""In the cache folder, beside `scores`."""
_VERSION = 1
_TEXT = ("doc", "arguments", "target")
"""Parts of a sample that are text of the task, whatever their form."""
_NAMES = ("filter", "metrics")
"""Strings of a sample that are names."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evaluation:
    """The answers of one model to one task."""

    result: TaskResult
    samples: tuple[dict[str, Any], ...]
    """What lm-eval logs of each item and filter: question, prompts, answers, metrics and hashes.
    Text of the task and of the model, which only the owner of the audit may read; from the cache
    they are without text, see `remove_text`."""


def remove_text(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers, hashes and names of metrics of a sample, as they are read from JSON."""
    kept = {
        name: value if name in _NAMES or name.endswith("_hash") else _remove_strings(value)
        for name, value in sample.items()
        if name not in _TEXT
    }
    result: dict[str, Any] = json.loads(json.dumps(kept))
    return result


def _remove_strings(value: Any) -> Any:
    """Return numbers in their lists; None in the place of anything else."""
    if isinstance(value, list | tuple):
        return [_remove_strings(item) for item in value]
    return value if isinstance(value, bool | int | float) else None


class AnswerCache(PartFolder):
    """Answers of models to tasks."""

    loss = "answers to tasks cannot be cached in {}: another audit would run the model again"

    def load(self, identity: str, task: OpenedTask, model: UtilityModel) -> Evaluation | None:
        """Return the answers of a model; None if there are none, or they are damaged."""
        for content in self.read(_name(identity, task), ".json"):
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                return _read(json.loads(content), model)
        return None

    def store(self, identity: str, task: OpenedTask, answers: Evaluation) -> None:
        """Keep the answers of a model, without text."""
        samples = [remove_text(sample) for sample in answers.samples]
        stored = _write(answers.result) | {"samples": samples}
        self.write(_name(identity, task), json.dumps(stored).encode(), ".json")


def _name(identity: str, task: OpenedTask) -> str:
    """Return the folder of a model's answers to a task."""
    parts = {"model": identity, "task": task.fingerprint, "headline": task.headline}
    return compute_fingerprint({"version": _VERSION, **parts})


def _write(result: TaskResult) -> dict[str, Any]:
    plain = asdict(result)
    del plain["model"], plain["is_cached"]
    for metric in plain["metrics"]:
        for name in ("value_N", "weight_N"):
            if metric[name] is not None:
                metric[name] = [_to_json(number) for number in metric[name].tolist()]
        for name in ("value", "stderr"):
            metric[name] = None if metric[name] is None else _to_json(metric[name])
    return plain


def _to_json(number: float) -> float | str:
    """Return a number; text for those that JSON has not."""
    return number if math.isfinite(number) else str(number)


def _read(stored: dict[str, Any], model: UtilityModel) -> Evaluation:
    samples = tuple(stored.pop("samples"))
    metrics = tuple(_read_metric(metric) for metric in stored.pop("metrics"))
    result = TaskResult(
        **{**stored, "item_N": tuple(stored["item_N"])},
        metrics=metrics,
        model=model,
        is_cached=True,
    )
    num_items = len(result.item_N)
    if any(len(metric.value_N) != num_items for metric in metrics):
        raise ValueError("a metric has another number of items than the task")
    return Evaluation(result=result, samples=samples)


def _read_metric(plain: dict[str, Any]) -> TaskMetric:
    value_N, weight_N = (
        None if plain[name] is None else np.array([float(n) for n in plain[name]], dtype=np.float64)
        for name in ("value_N", "weight_N")
    )
    if value_N is None:
        raise ValueError("a metric has no values of items")
    stderr = None if plain["stderr"] is None else float(plain["stderr"])
    numbers: dict[str, Any] = {"value_N": value_N, "weight_N": weight_N, "stderr": stderr}
    return TaskMetric(**{**plain, **numbers, "value": float(plain["value"])})
