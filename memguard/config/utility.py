"""Benchmark tasks of an audit: ``hellaswag:200,./my_task.yaml``, or a list of settings.

hellaswag          all items of a task of lm-eval
hellaswag:200      its first 200
./my_task.yaml:50  the first 50 of a task in a file
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from memguard.config.settings import Count, PositiveInt, Settings
from memguard.errors import shorten


class UtilityTask(Settings):
    """A benchmark task of lm-eval that an audit runs on the trained model and on the base."""

    task: str = Field(description="Name of a task of lm-eval, or path of a task's YAML.")
    limit: PositiveInt | None = Field(
        None, description="Only the first so many items (items); null takes all."
    )
    num_fewshot: Count | None = Field(
        None, description="Solved examples before each item; null takes the task's own number."
    )
    metric: str | None = Field(
        None, description="Metric that stands for the task in charts; null takes its first."
    )
    chat: bool = Field(False, description="Render prompts with the model's chat template.")

    def list_files(self) -> list[str]:
        """Return the YAML of the task and the local files that it names; none for a name.

        Files are looked for by their names in the text, so that nothing of it runs.
        """
        path = Path(os.path.expanduser(self.task))
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            return []  # A name, or a file that is missing, which the run itself reports.
        modules = [f"{name}.py" for name in re.findall(r"!function\s+(\w+)\.", text)]
        names = [*re.findall(r"[^\s'\"\[\]{},]+", text), *modules]
        # Documents are relative to the current folder, functions to the YAML.
        places = dict.fromkeys(os.fspath(f) for name in names for f in (name, path.parent / name))
        return [os.fspath(path), *(place for place in places if os.path.isfile(place))]

    def describe(self) -> str:
        """Return the task as it is written in a list of names: ``hellaswag:200``."""
        return self.task if self.limit is None else f"{self.task}:{self.limit}"


def read_tasks(value: Any) -> Any:
    """Return tasks given by name as settings; anything else is returned for pydantic to check.

    They are names separated by commas, or a list of names, paths and settings.
    """
    if isinstance(value, str):
        return [_read_task(name.strip()) for name in value.split(",") if name.strip()]
    if isinstance(value, Mapping | UtilityTask):
        return [value]
    if isinstance(value, Sequence):
        return [
            _read_task(os.fspath(task)) if isinstance(task, str | os.PathLike) else task
            for task in value
        ]
    return value


def _read_task(text: str) -> dict[str, Any]:
    name, colon, limit = text.rpartition(":")
    # Of a path with a colon only a number is a limit.
    if colon and name and limit.isascii() and limit.isdigit():
        return {"task": name, "limit": int(limit)}
    return {"task": text}


def check_tasks_differ(tasks: Sequence[UtilityTask]) -> None:
    """Reject a task without a name, and two of one name.

    Raises:
        ValueError: names the task, and the way out.
    """
    for task in tasks:
        if not task.task.strip():
            raise ValueError("'task' of 'utility' is empty; name a task of lm-eval, or a YAML")
        if task.metric is not None and not task.metric.strip():
            raise ValueError(
                f"'metric' of 'utility' is empty for '{shorten(task.task)}'; name one of the "
                "task's metrics, or leave it out"
            )
    name, number = Counter(task.task for task in tasks).most_common(1)[0] if tasks else ("", 0)
    if number > 1:
        raise ValueError(
            f"'utility' has the task '{shorten(name)}' {number} times, whose rows would have one "
            "name; remove all but one, or give the others a YAML with a 'task' of its own"
        )
