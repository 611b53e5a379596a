"""Benchmark tasks of lm-eval: found by name or by the path of a YAML, checked, and opened.

    setting    {task: hellaswag, limit: 200}
    found      its YAML, by path or name: a search in the text of lm-eval's 14,000 files takes half
               a second, its own look-up 7 to 15; groups and tags need its index, for the message
    opened     lm-eval's own task object, its documents read; offline unless downloads are allowed

A YAML with ``!function`` or ``class`` runs the Python file that it names, like a plug-in of a
suite. A task that lm-eval marks as unsafe runs programs that the model has written, and is refused.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, get_args

from memguard.audit.benchmarks.isolation import (
    OTHER_SEED,
    is_network_error,
    isolated,
    private_cache,
)
from memguard.config.utility import UtilityTask
from memguard.errors import (
    ConfigError,
    ForeignError,
    ModelError,
    describe_foreign,
    is_foreign,
    require_library,
    shorten,
)

Kind = Literal["multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"]

DEFAULT_FILTER: Final = "none"
"""lm-eval's name of no filter, which metrics of a task do not show."""
_NOT_HASHED = ("dataset_path", "dataset_name", "dataset_kwargs", "metadata", "num_fewshot")
"""Parts of a task's configuration that are not hashed: its documents are hashed themselves."""
_GREEDY: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (False, None),
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
}
"""Values of the arguments of generation for which a text is the most likely token, repeatedly."""
_LENGTHS = frozenset({"max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"})
_UNSAFE = "runs programs that the model has written, which an audit does not do"
_UNUSED = frozenset({"temperature", "top_p", "top_k", "min_p", "typical_p"})
"""Arguments that only sampling reads."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OpenedTask:
    """A task whose documents are read."""

    name: str
    """lm-eval's name of the task, that in its YAML."""
    settings: UtilityTask
    task: Any
    """lm-eval's task object."""
    version: str
    num_fewshot: int
    headline: str
    """Name of the metric that stands for the task."""
    kind: Kind
    fingerprint: str
    """SHA-256 of lm-eval's version, the task's configuration and documents, and the settings: equal
    where a model would be given the same prompts and its answers be judged in the same way."""
    allow_download: bool = False
    """Whether what the task loads later, such as a metric, may be downloaded."""

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Check that lm-eval can write the prompts with a tokenizer.

        Raises:
            ModelError: it has no chat template, or no token at which a text begins or ends.
        """
        lacks = ""
        if self.settings.chat and not getattr(tokenizer, "chat_template", None):
            lacks = "a chat template: set 'chat: false', or add one"
        elif tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            lacks = "a token at which a text begins or ends: set 'bos_token' or 'eos_token'"
        if lacks:
            raise ModelError(f"the task '{self.name}' needs a tokenizer with {lacks}")


def name_metric(metric: str, filter_name: str) -> str:
    """Return the name of a metric in our files: with its filter, if the task has filters."""
    return metric if filter_name == DEFAULT_FILTER else f"{metric},{filter_name}"


def check_tasks(tasks: Sequence[UtilityTask], *, setting: str = "audit.utility") -> None:
    """Check what can be checked before a model is read, without importing lm-eval.

    Raises:
        ConfigError: lm-eval is not installed, a YAML is missing, or two tasks have one name.
    """
    if not tasks:
        return
    require_library("lm_eval", f"'{setting}'")
    problems = [
        f"has no file '{shorten(task.task)}'. Give the path of a task's YAML, or a name of lm-eval"
        for task in tasks
        if is_path(task.task) and not Path(os.path.expanduser(task.task)).is_file()
    ]
    _refuse(problems or _list_twice(_guess_name(task.task) for task in tasks), f"'{setting}'")


def open_tasks(
    tasks: Sequence[UtilityTask], *, allow_download: bool, setting: str = "audit.utility"
) -> list[OpenedTask]:
    """Open the tasks, in their order; on several ranks each opens them.

    Raises:
        ConfigError: lm-eval is not installed, a task is unknown or damaged, is a group, needs a
            download, has no such metric, or needs what this program does not do.
    """
    check_tasks(tasks, setting=setting)
    if not tasks:
        return []
    with isolated(allow_download=allow_download):
        opened = [_open(task, setting, allow_download=allow_download) for task in tasks]
    _refuse(_list_twice(task.name for task in opened), f"'{setting}'")
    return opened


def _refuse(problems: Iterable[str], subject: str) -> None:
    """Raise all problems at once; each continues a sentence that begins with the subject."""
    listed = [f"{subject} {problem}" for problem in problems]
    if listed:
        raise ConfigError(*listed)


def _list_twice(names: Iterable[str]) -> list[str]:
    return [
        f"has two tasks '{shorten(name)}': results are stored by name. Remove one, or name it "
        "differently in its YAML"
        for name, count in Counter(names).items()
        if count > 1
    ]


def _guess_name(task: str) -> str:
    """Return the name that a YAML gives its task, as far as a glance at it shows."""
    if not is_path(task):
        return task
    text = Path(os.path.expanduser(task)).read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^task:[ \t]*(\S.*?)[ \t]*$", text, re.MULTILINE)
    return found.group(1).strip("'\"") if found else task


# -- opening ---------------------------------------------------------------------------------------


def _open(settings: UtilityTask, setting: str, *, allow_download: bool) -> OpenedTask:
    subject = f"'{setting}': the task '{shorten(settings.task)}'"
    try:
        return _open_as(settings, subject, allow_download=allow_download)
    except BaseException as error:
        if isinstance(error, ConfigError) or not is_foreign(error):
            raise
        raise ConfigError(f"{subject} cannot be opened: {describe_foreign(error)}") from error


def _open_as(settings: UtilityTask, subject: str, *, allow_download: bool) -> OpenedTask:
    path = find_yaml(settings.task, subject)
    config = _read_config(path, subject)
    task = _build(path, config, subject, allow_download=allow_download)
    own_fewshot, names = task.get_config("num_fewshot"), _name_metrics(task)
    _refuse(_list_problems(task, settings, own_fewshot, names), subject)
    wanted = own_fewshot if settings.num_fewshot is None else settings.num_fewshot
    num_fewshot = int(wanted or 0)
    task.set_config(key="num_fewshot", value=num_fewshot)
    task.set_fewshot_seed(seed=OTHER_SEED)
    return OpenedTask(
        name=str(config["task"]),
        settings=settings,
        task=task,
        version=str(task.VERSION),
        num_fewshot=num_fewshot,
        headline=names[settings.metric],
        kind=task.OUTPUT_TYPE,
        fingerprint=_hash(task, settings, num_fewshot, subject),
        allow_download=allow_download,
    )


def _read_config(path: Path, subject: str) -> dict[str, Any]:
    """Return the configuration of a task, its functions not resolved."""
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        config: dict[str, Any] = load_yaml(path, resolve_func=False)
    except Exception as error:
        reason = describe_foreign(error)
        raise ConfigError(f"{subject} has a YAML that cannot be read: {reason}") from error
    problems = []
    if not isinstance(config.get("task"), str):
        members = read_members(config)
        without = "has a YAML without 'task', the name of the task"
        problems.append(describe_group(members) if members else without)
    if config.get("unsafe_code"):
        problems.append(f"{_UNSAFE} (lm-eval marks it as unsafe). Choose another task")
    _refuse(problems, subject)
    return config


def _build(path: Path, config: Mapping[str, Any], subject: str, *, allow_download: bool) -> Any:
    """Return lm-eval's task."""
    from lm_eval.tasks import TaskManager

    dataset = ", ".join(str(config[k]) for k in ("dataset_path", "dataset_name") if config.get(k))
    files = json.dumps((config.get("dataset_kwargs") or {}).get("data_files") or "", default=str)
    address = re.search(r'\w+://[^"]+', files)
    cause = None
    if address is not None and not allow_download:
        dataset = shorten(address.group())
    else:
        try:
            with private_cache(config.get("dataset_path")):
                loaded = TaskManager(include_defaults=False).load([str(path)])
                (task,) = loaded["tasks"].values()
                return task
        except BaseException as error:
            if not is_foreign(error):
                raise
            cause = error
    problem = _explain_unopened(cause, dataset, allow_download=allow_download)
    raise ConfigError(f"{subject} {problem}") from cause


def _explain_unopened(error: BaseException | None, dataset: str, *, allow_download: bool) -> str:
    if error is not None and not is_network_error(error):
        return f"cannot be opened: {describe_foreign(error)}"
    if not dataset:  # Python code of the task names it.
        named = re.search(r"'([^']+)' on the Hub", str(error))
        dataset = named.group(1) if named else "(named by its Python code)"
    if error is not None and allow_download:
        return (
            f"needs the dataset '{dataset}', which could not be downloaded "
            f"({describe_foreign(error)}). Check the connection to the hub, or copy the dataset "
            "into this machine's cache"
        )
    return (
        f"needs the dataset '{dataset}', which is not on this machine. Set "
        "audit.allow_download=true to download it"
    )


# -- what a task needs -----------------------------------------------------------------------------


def _list_problems(
    task: Any, settings: UtilityTask, own_fewshot: int | None, metrics: Mapping[str | None, str]
) -> Iterator[str]:
    """Yield why a task cannot be measured."""
    if task.OUTPUT_TYPE not in get_args(Kind):
        yield f"has the output type '{task.OUTPUT_TYPE}', which is unknown"
    if getattr(task, "UNSAFE_CODE", False):
        yield f"{_UNSAFE}: choose another"
    if getattr(task, "MULTIMODAL", False):
        yield "has images or sound, and an audit's model reads text only"
    arguments = dict(task.config.generation_kwargs or {})
    if task.OUTPUT_TYPE != "generate_until":
        arguments = {}
    draws = arguments.get("do_sample") is None and bool(arguments.get("temperature"))
    known = _LENGTHS | _UNUSED | _GREEDY.keys() | {"until"}
    for name, value in arguments.items():
        is_greedy = value in _GREEDY.get(name, (value,)) and not (draws and name == "temperature")
        if name not in known or not is_greedy:
            yield (
                f"generates with '{name}: {shorten(str(value))}', and an audit always takes the "
                "most likely token. Remove it from 'generation_kwargs' in a copy of its YAML"
            )
    if settings.num_fewshot and own_fewshot == 0:
        yield (
            "fixes 'num_fewshot: 0' in its YAML, which lm-eval does not change; got 'num_fewshot: "
            f"{settings.num_fewshot}'. Leave it out, or remove it from a copy of the YAML"
        )
    if settings.metric not in metrics:
        listed = ", ".join(dict.fromkeys(metrics.values()))
        yield f"has no metric '{shorten(str(settings.metric))}'; it has {listed}"


def _name_metrics(task: Any) -> dict[str | None, str]:
    """Return the names of a task's metrics by what the settings may name; None is the first."""
    filters = [ensemble.name for ensemble in task._filters]
    metrics = list(task.aggregation())
    if not metrics:
        raise ForeignError("it has no metric")
    names = {name_metric(metric, name): "" for metric in metrics for name in filters}
    first = {metric: name_metric(metric, filters[0]) for metric in metrics}
    return {None: next(iter(names)), **{name: name for name in names}, **first}


# -- hash ------------------------------------------------------------------------------------------


def _hash(task: Any, settings: UtilityTask, num_fewshot: int, subject: str) -> str:
    import lm_eval

    config = {k: v for k, v in task.dump_config().items() if k not in _NOT_HASHED}
    documents = [doc for _, doc in task.doc_iterator(limit=settings.limit)]
    examples = list(task.fewshot_docs() or []) if num_fewshot else []
    _refuse([] if documents else ["has no items"], subject)
    whole = {
        "lm_eval": lm_eval.__version__,
        "version": str(task.VERSION),
        "config": config,
        "documents": documents,
        "examples": examples,
        "limit": settings.limit,
        "num_fewshot": num_fewshot,
        "chat": settings.chat,
    }
    text = json.dumps(whole, sort_keys=True, default=_write, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _write(value: object) -> str:
    # Addresses of functions differ from process to process.
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


_YAML = (".yaml", ".yml")
_NAMED = 5
"""Names of a longer list that a message holds."""


def is_path(task: str) -> bool:
    """Return whether a setting is the path of a YAML, not a name of lm-eval."""
    return task.endswith(_YAML) or "/" in task or "\\" in task


def find_yaml(task: str, subject: str) -> Path:
    """Return the YAML of a task.

    Raises:
        ConfigError: the name is unknown, or of a group.
    """
    if is_path(task):
        return Path(os.path.expanduser(task))
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
        problem = f"is unknown to lm-eval{hint}"
    elif entry.kind.name in ("GROUP", "TAG"):
        problem = describe_group(_list_tasks(index.task_index, task, set()))
    elif entry.yaml_path is None:
        problem = "has no YAML, which an audit needs. Choose another task"
    else:
        path: Path = entry.yaml_path
        return path
    raise ConfigError(f"{subject} {problem}")


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


def describe_group(names: Iterable[str]) -> str:
    """Return the message for a group of these tasks."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:_NAMED]) + (", ..." if len(ordered) > _NAMED else "")
    return (
        f"is a group of {len(ordered)}: an audit measures single tasks, so that they can "
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
