"""YAML and dotted overrides into checked settings; every problem at once, with its place."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from memguard.config.messages import KeyPath, drop_tags, explain, format_key
from memguard.config.schema import RunConfig
from memguard.errors import ConfigError

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A YAML file as read: its values and where each of them was written."""

    path: str
    values: dict[str, Any]
    places: dict[KeyPath, str]
    """``file:line:column`` of each key and list item (from 1), or the argument that set it."""

    def locate(self, key_path: KeyPath) -> str:
        """Say where a key was written, else a key inside it, else the nearest key above it."""
        length = len(key_path)
        inside = (key for key in self.places if length and key[:length] == key_path)
        above = (key_path[:end] for end in range(length - 1, 0, -1))
        candidates = itertools.chain([key_path], inside, above)
        return next((self.places[key] for key in candidates if key in self.places), self.path)

    def place(self, key_path: KeyPath, where: str) -> "Document":
        """Return a copy in which a key, with all below it, was written at ``where``."""
        length = len(key_path)
        others = {key: place for key, place in self.places.items() if key[:length] != key_path}
        return replace(self, places={**others, key_path: where})


def load_yaml(path: str | Path) -> Document:
    """Read a YAML mapping and remember where each key stands.

    Raises:
        ConfigError: unreadable, not YAML, not a mapping, or a key given twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML text"
        raise ConfigError(f"{path}{place} is not valid YAML: {problem}") from error
    except (ValueError, RecursionError) as error:  # a date such as 2024-99-99, a thousand brackets
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if root is None or not isinstance(values, dict):
        raise ConfigError(f"{path} must hold settings as 'key: value' lines")
    places: dict[KeyPath, str] = {}
    try:
        problems = list(_walk(root, (), places, str(path)))
    except RecursionError as error:
        raise ConfigError(f"{path} holds an alias (*name) inside its own anchor") from error
    if problems:
        raise ConfigError(*problems)
    return Document(path=str(path), values=values, places=places)


def _walk(node: yaml.Node, at: KeyPath, places: dict[KeyPath, str], path: str) -> Iterator[str]:
    """Fill ``places``; yield a line for each key given twice (PyYAML keeps the last)."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*at, str(key.value))
            place = f"{path}:{key.start_mark.line + 1}:{key.start_mark.column + 1}"
            if here in places:
                yield f"{place} '{format_key(here)}' is set twice"
                continue
            places[here] = place
            yield from _walk(value, here, places, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            mark = item.start_mark
            places[(*at, index)] = f"{path}:{mark.line + 1}:{mark.column + 1}"
            yield from _walk(item, (*at, index), places, path)


def parse_key(text: str) -> KeyPath:
    """Read ``mitigations[0].k`` or ``mitigations.0.k``."""
    parts = (part for part in re.split(r"[.\[\]]+", text) if part)
    return tuple(int(part) if re.fullmatch("[0-9]{1,9}", part) else part for part in parts)


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """Set dotted keys; ``overrides`` are ``key=value`` with the value as YAML.

    Raises:
        ConfigError: an argument has no '=', or its key leads through a plain value.
    """
    values = document.values
    problems = []
    for argument in overrides:
        key, equals, value = argument.partition("=")
        key_path = parse_key(key.removeprefix("--"))
        if not equals or not key_path:
            problems.append(f"argument {argument!r} must be KEY=VALUE, e.g. optim.lr=1e-4")
            continue
        try:
            parsed = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError):
            problems.append(f"argument {argument!r}: the value is not valid YAML")
            continue
        try:
            values = apply_settings(values, {format_key(key_path): parsed})
        except ConfigError as error:
            problems.append(f"argument {argument!r}: {error}")
        document = document.place(key_path, f"argument {argument!r}")
    if problems:
        raise ConfigError(*problems)
    return replace(document, values=values)


def apply_settings(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested ``values`` with dotted ``settings`` put in."""
    result: dict[str, Any] = _copy(values)
    for dotted, value in settings.items():
        key_path = parse_key(dotted)
        here: Any = result
        for key, following in zip(key_path, (*key_path[1:], None), strict=True):
            if not (isinstance(here, dict) if isinstance(key, str) else isinstance(here, list)):
                raise ConfigError(f"'{dotted}' leads through a plain value; nothing was set")
            if isinstance(key, int) and key >= len(here):
                raise ConfigError(f"'{dotted}' counts past the end of a list of {len(here)}")
            if following is None:
                here[key] = value
                break
            if isinstance(here, dict) and here.get(key) is None:
                here[key] = {} if isinstance(following, str) else []
            here = here[key]
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML, put the overrides in and check everything.

    Raises:
        ConfigError: with every problem found, one line each.
    """
    document = apply_overrides(load_yaml(path), overrides)
    if {"run", "settings"} <= document.values.keys():
        raise ConfigError(f"{path} holds a sweep, not a run: use 'memguard compare {path}'")
    return validate(RunConfig, document.values, document)


def validate(
    model: type[ModelT], values: Mapping[str, Any], origin: Document, prefix: KeyPath = ()
) -> ModelT:
    """Check ``values`` against ``model``.

    Args:
        model: the settings class.
        values: what was written (nested dicts and lists).
        origin: the file it came from, for places in messages.
        prefix: where in that file ``values`` stand.

    Raises:
        ConfigError: with every problem found, one line each.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            here = (*prefix, *drop_tags(values, item))
            problems.append(f"{origin.locate(here)} {explain(model, item, here)}")
        raise ConfigError(*problems) from error
