"""The YAML of a task, by its path or by lm-eval's name.

lm-eval's own look-up parses its 14,000 files, which takes 7 to 15 s of a processor. Here a name is
searched in their text, in half a second; only a name that is no single task needs the index, for
the message: groups and tags name the tasks that they stand for.
"""

import os
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memguard.errors import ConfigError

_YAML = (".yaml", ".yml")
_NAMED = 5
"""Names of a longer list that a message holds."""


def is_path(task: str) -> bool:
    """Return whether a setting is the path of a YAML, not a name of lm-eval."""
    return task.endswith(_YAML) or "/" in task or "\\" in task


def find_yaml(task: str, subject: str) -> Path:
    """Return the YAML of a task.

    Args:
        task: name or path, as in the settings.
        subject: what messages begin with.

    Raises:
        ConfigError: the name is unknown, or of a group.
    """
    if is_path(task):
        return Path(task).expanduser()
    root = find_root()
    found = list(_search(root, task))
    if len(found) == 1:
        return found[0]
    from lm_eval.tasks import TaskManager

    index = TaskManager(include_path=str(root), include_defaults=False)
    entry = index.task_index.get(task)
    if entry is None:
        near = get_close_matches(task, index.all_tasks, n=3, cutoff=0.75)
        hint = f". Did you mean {', '.join(near)}?" if near else ", and it is no path of a YAML"
        raise ConfigError(f"{subject} is unknown to lm-eval{hint}")
    if entry.kind.name in ("GROUP", "TAG"):
        raise ConfigError(describe_group(subject, _list_tasks(index.task_index, task, set())))
    path: Path | None = entry.yaml_path
    if path is None:
        raise ConfigError(f"{subject} has no YAML, which an audit needs. Choose another task")
    return path


def find_root() -> Path:
    """Return the folder of lm-eval's tasks, without importing it."""
    spec = find_spec("lm_eval")
    assert spec is not None, "`check_tasks` has looked"
    assert spec.origin is not None, "lm-eval is no namespace"
    return Path(spec.origin).parent / "tasks"


def read_members(config: dict[str, Any]) -> list[str]:
    """Return the names in the list of a group's YAML."""
    members = config.get("task")
    if not isinstance(members, list):
        return []
    return [m if isinstance(m, str) else str(m.get("task") or m.get("group")) for m in members]


def describe_group(subject: str, names: Iterable[str]) -> str:
    """Return the message for a group of these tasks."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:_NAMED]) + (", ..." if len(ordered) > _NAMED else "")
    return (
        f"{subject} is a group of {len(ordered)}: an audit measures single tasks, so that they can "
        f"be compared item by item. Name those to measure: {shown}"
    )


def _search(root: Path, task: str) -> Iterable[Path]:
    name_of_task = re.escape(task.encode())
    # Keys and values may be quoted.
    pattern = re.compile(
        rb"^(['\"]?)task\1:[ \t]*(['\"]?)" + name_of_task + rb"\2[ \t\r]*(#.*)?$", re.MULTILINE
    )
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if name.endswith(_YAML) and pattern.search(path.read_bytes()):
                yield path


def _list_tasks(index: Any, name: str, seen: set[str]) -> Sequence[str]:
    """Return the single tasks of a group or tag, through its groups and tags."""
    entry = index.get(name)
    if entry is None or entry.kind.name not in ("GROUP", "TAG"):
        return [name]
    if name in seen:
        return []
    seen.add(name)
    members: Iterable[str] = entry.tags
    if entry.kind.name == "GROUP":
        from lm_eval.tasks._yaml_loader import load_yaml

        members = read_members(load_yaml(entry.yaml_path, resolve_func=False))
    return [task for member in members for task in _list_tasks(index, member, seen)]
