"""One task on one model: lm-eval's values and samples, with a standard error for each value.

value    lm-eval's, of its own aggregation over the items
stderr   of a mean lm-eval's formula; of others, such as a perplexity or BLEU, for which lm-eval
         has none or one that takes minutes: standard deviation over B resamples of the items
item     SHA-256 of lm-eval's hashes of question, prompt and target
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from memguard.audit.batching import Progress
from memguard.audit.benchmarks.answers import Evaluation
from memguard.audit.benchmarks.isolation import OTHER_SEED, isolated
from memguard.audit.benchmarks.items import ItemValues, draw_items
from memguard.audit.benchmarks.tasks import OpenedTask, name_metric
from memguard.audit.decoding import Decoder
from memguard.errors import ForeignError, ModelError
from memguard.model.causal_lm import CausalLM
from memguard.records.utility import TaskMetric, TaskResult, UtilityModel
from memguard.runtime import Runtime
from memguard.seeds import derive_generator

_SLOW_DRAWS = 100
"""Resamples of an aggregation that lm-eval computes."""
_STEPS = ("name", "alias", "sample_len")
"""Entries of lm-eval's results that are no metric."""
_CHANCE = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")
"""Metrics that are right where one option is chosen, so that chance has a value."""
_WEIGHTED = frozenset({"weighted_perplexity", "bits_per_byte"})


def evaluate_task(
    opened: OpenedTask,
    lm: CausalLM,
    tokenizer: Any,
    kind: UtilityModel,
    *,
    decoder: Callable[[], Decoder],
    max_tokens: int | None,
    batch_tokens: int | None,
    runtime: Runtime,
    seed: int,
    on_progress: Progress | None = None,
) -> Evaluation:
    """Return lm-eval's values of a task; on a mesh every rank calls it and gets all of them.

    ``decoder`` is called if the task generates text. Without ``max_tokens`` the model has the
    positions of its configuration, without ``batch_tokens`` a forward has as many as fit.

    Raises:
        CannotGenerate: generating would take too long.
        ConfigError: an item does not fit this model.
        ForeignError: a metric has no number. Code of the task may raise anything else.
        ModelError: the ranks have different tasks, the tokenizer lacks what the task needs, or see
            `Batching.run`.
    """
    name, settings = opened.name, opened.settings
    if len(set(runtime.gather_objects(opened.fingerprint))) > 1:
        raise ModelError(
            f"the task '{name}' is not the same on all ranks: its files or lm-eval's version "
            "differ. Put the files on a file system that the machines share"
        )
    opened.check_tokenizer(tokenizer)
    with isolated(allow_download=opened.allow_download) as streams:
        # Imports lm-eval.
        from lm_eval.evaluator import evaluate

        from memguard.audit.benchmarks.harness_model import HarnessModel

        model = HarnessModel(
            lm,
            tokenizer,
            task=name,
            decoder=decoder,
            max_tokens=max_tokens,
            batch_tokens=batch_tokens,
            runtime=runtime,
            streams=streams,
            on_progress=on_progress,
        )
        # The same solved examples are drawn for each model.
        opened.task.set_fewshot_seed(seed=OTHER_SEED)
        outcome = evaluate(
            lm=model,
            task_dict={"tasks": {name: opened.task}, "groups": {}, "group_map": {}},
            limit=settings.limit,
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=True,
        )
        # The prompts of all items and their answers.
        opened.task._instances = None
        logged = outcome["samples"][name]
        metrics = _read_metrics(opened, outcome["results"][name], logged, seed)
        samples = tuple(_to_json(sample) for sample in logged)
    if opened.headline not in {metric.name for metric in metrics}:
        raise ForeignError(
            f"it has no values of its metric '{opened.headline}'; it has "
            f"{', '.join(metric.name for metric in metrics)}. Name one of them in 'metric'"
        )
    # An item is logged once for each filter.
    once = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    items = tuple(_hash(s["doc_hash"], s["prompt_hash"], s["target_hash"]) for s in once)
    result = TaskResult(
        task=name,
        model=kind,
        version=opened.version,
        limit=settings.limit,
        num_fewshot=opened.num_fewshot,
        is_chat=settings.chat,
        metrics=metrics,
        headline=opened.headline,
        item_N=items,
        samples_sha256=_hash(*items),
        chance=_find_chance(opened, once),
        num_forwards=model.num_forwards,
        num_decoded_tokens=model.num_decoded_tokens,
        num_truncated=len(model.truncated),
    )
    return Evaluation(result=result, samples=samples)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _to_json(sample: Mapping[str, Any]) -> dict[str, Any]:
    from lm_eval.utils import handle_non_serializable

    plain: dict[str, Any] = json.loads(json.dumps(sample, default=handle_non_serializable))
    return plain


def _find_chance(opened: OpenedTask, samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the expected value of the headline metric if an option is drawn."""
    metric = opened.headline.partition(",")[0]
    if opened.kind != "multiple_choice" or metric not in _CHANCE:
        return None
    # Of mutual information each option is scored twice, with the question and without.
    times = 2 if "acc_mutual_info" in samples[0]["metrics"] else 1
    shares = [
        (len(set(sample["target"])) if isinstance(sample["target"], list) else 1)
        * times
        / len(sample["arguments"])
        for sample in samples
    ]
    return float(np.mean(shares))


# -- metrics ---------------------------------------------------------------------------------------


def _read_metrics(
    opened: OpenedTask, values: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], seed: int
) -> tuple[TaskMetric, ...]:
    """Return the metrics of a task, in lm-eval's order."""
    from lm_eval.api.metrics import mean

    aggregations, higher = opened.task.aggregation(), opened.task.higher_is_better()
    metrics = []
    for key, value in values.items():
        if key in _STEPS or "_stderr," in key:
            continue
        metric, _, filter_name = key.partition(",")
        aggregate = aggregations.get(metric, mean)
        aggregation = getattr(aggregate, "__name__", type(aggregate).__name__)
        logged = [s.get(metric) for s in samples if s["filter"] == filter_name]
        numbers = [_read_number(item, aggregation) for item in logged]
        value_N = np.array([number for number, _ in numbers], dtype=np.float64)
        weight_N = None
        if aggregation in _WEIGHTED:
            weight_N = np.array([weight for _, weight in numbers], dtype=np.float64)
        stderr, is_bootstrap = _estimate_stderr(
            [item for item in logged if item is not None],
            ItemValues(aggregation=aggregation, value_N=value_N, weight_N=weight_N),
            aggregate,
            seed,
            f"utility\0{opened.name}\0{key}",
        )
        metrics.append(
            TaskMetric(
                name=name_metric(metric, filter_name),
                aggregation=aggregation,
                higher_is_better=bool(higher.get(metric, True)),
                value=_read_value(name_metric(metric, filter_name), value),
                stderr=stderr,
                stderr_is_bootstrap=is_bootstrap,
                value_N=value_N,
                weight_N=weight_N,
            )
        )
    return tuple(metrics)


def _read_value(name: str, value: object) -> float:
    number = float(value) if isinstance(value, int | float | np.number) else math.nan
    if not math.isfinite(number):
        raise ForeignError(f"its metric '{name}' has no finite number as value")
    return number


def _read_number(item: object, aggregation: str) -> tuple[float, float]:
    """Return the number of an item and its weight; NaN for what is no number."""
    if isinstance(item, bool | int | float | np.number):
        return float(item), math.nan
    if aggregation in _WEIGHTED and isinstance(item, tuple | list):
        return float(item[0]), float(item[1])
    return math.nan, math.nan


def _estimate_stderr(
    items: Sequence[Any],
    values: ItemValues,
    aggregate: Callable[[Sequence[Any]], float],
    seed: int,
    purpose: str,
) -> tuple[float | None, bool]:
    """Return the standard error of a value, and whether it is a bootstrap's."""
    from lm_eval.api.metrics import mean, stderr_for_metric

    if len(items) < 2:
        return None, False
    if values.kind == "score" and values.can_be_drawn:
        drawn = draw_items(values.draw, [values], seed)
    else:
        # Of a mean and the like lm-eval has a formula. It would draw others 100,000 times.
        formula = stderr_for_metric(aggregate, bootstrap_iters=1)
        if aggregate is mean or (formula is not None and formula.__name__ != "<lambda>"):
            return float(formula(items)), False
        indices = derive_generator(seed, purpose).integers(0, len(items), (_SLOW_DRAWS, len(items)))
        drawn = np.array([float(aggregate([items[i] for i in row])) for row in indices])
    spread = float(drawn.std(ddof=1))
    return (spread, True) if math.isfinite(spread) else (None, True)
