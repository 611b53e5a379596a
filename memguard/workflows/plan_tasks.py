"""Counts the benchmark tasks of a run before it is trained.

With the documents every task must be usable. Without them, and without the network:

counted       each task that can be opened on this machine, with the run's tokenizer
not counted   a dataset that must be downloaded, a library that is missing, a tokenizer that is
              trained on the documents: the plan names the task and the reason
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memguard.audit.benchmarks.work import TaskWork, count_work
from memguard.config import RunConfig
from memguard.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from memguard.audit.benchmarks.tasks import OpenedTask


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedTasks:
    """What the benchmark tasks of a run's audit ask of each model."""

    counted: tuple[TaskWork, ...] = ()
    not_counted: dict[str, str] = field(default_factory=dict)
    """Reason by task, as the settings name it."""


def count_tasks(opened: "Sequence[OpenedTask]", tokenizer: Any, model: Any) -> list[TaskWork]:
    """Return what benchmark tasks ask of a model.

    Args:
        opened: the tasks.
        tokenizer: of the model.
        model: its transformers configuration.

    Raises:
        ConfigError, ModelError: see `count_work`.
    """
    if not opened:
        return []
    from memguard.hf.checkpoint import find_positions  # imports torch

    return [count_work(task, tokenizer, model, max_tokens=find_positions(model)) for task in opened]


def count_local_tasks(config: RunConfig, *, has_own_model: bool) -> CountedTasks:
    """Count the tasks of a run's audit that can be opened on this machine.

    Args:
        config: the run's settings.
        has_own_model: False if the plan is for the sizes of another model, whose tokenizer is not
            known.
    """
    if not config.audit.utility:
        return CountedTasks()
    from memguard.audit.benchmarks.tasks import open_tasks

    load = functools.cache(lambda: _load_model_parts(config, has_own_model=has_own_model))
    counted: list[TaskWork] = []
    not_counted: dict[str, str] = {}
    for task in config.audit.utility:
        try:
            opened = open_tasks([task], allow_download=False)
            counted += count_tasks(opened, *load())
        except (ConfigError, ModelError) as error:
            not_counted[task.task] = str(error)
    return CountedTasks(counted=tuple(counted), not_counted=not_counted)


def _load_model_parts(config: RunConfig, *, has_own_model: bool) -> tuple[Any, Any]:
    """Return tokenizer and transformers configuration of a run's model, from this machine only.

    Raises:
        ModelError: they are not on this machine, or there is no tokenizer before training.
    """
    if not has_own_model:
        raise ModelError("the plan has the sizes of another model, and no tokenizer")
    from memguard.audit.benchmarks.isolation import isolated
    from memguard.workflows.setup import load_known_tokenizer, read_model_config  # imports torch

    with isolated(allow_download=False):
        tokenizer = load_known_tokenizer(config)
        if tokenizer is None:
            raise ModelError("the tokenizer of 'model.scratch' is trained on the documents")
        return tokenizer, read_model_config(config, tokenizer)
