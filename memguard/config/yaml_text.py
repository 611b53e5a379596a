"""Converts YAML into plain values, within bounds, with the place of each value.

    text       at most 1 MiB of UTF-8
    values     at most 50,000, with aliases (*name) expanded: eight levels of nine aliases are 43
               million values, which take too long to copy or check
    nesting    at most 50 deep

All bounds are checked before a value is built.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from memguard.errors import ConfigError, shorten

Key = str | int
KeyPath = tuple[Key, ...]

_MAX_BYTES = 2**20
_MAX_VALUES = 50_000
_MAX_DEPTH = 50
MAX_PROBLEMS = 20
"""Largest number of lines of an error; further problems are reported after these are corrected."""


def format_key(key_path: KeyPath) -> str:
    """Write a key path as users do: ``mitigations[0].k``."""
    text = ""
    for key in key_path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A YAML text as read: its values and where each of them was written."""

    path: str
    values: Any
    """Of a file of settings a mapping."""
    places: dict[KeyPath, str]
    """``file:line:column`` of each key and list item (from 1), or the argument that set it."""
    text: str = ""
    """Of a file, as it was read; a pipe can be read once."""

    def locate(self, key_path: KeyPath) -> str:
        """Return the place of a key, else of a key inside it, else of the nearest key above it."""
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
    """Read a YAML mapping and record the place of each key.

    Raises:
        ConfigError: unreadable, not YAML, beyond the bounds, not a mapping, or a key given twice.
    """
    problem, text = f"is larger than {_MAX_BYTES:,} bytes, the limit for settings", None
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) <= _MAX_BYTES:
            text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        problem = f"cannot be read: {reason}"
    if text is not None:
        document = parse_yaml(text, str(path))
        if isinstance(document.values, dict):
            return replace(document, text=text)
        problem = "must hold settings as 'key: value' lines"
    raise ConfigError(f"{path} {problem}")


def parse_yaml(text: str, path: str) -> Document:
    """Read a YAML text, whose values may be of any type; ``path`` is its name in messages.

    Raises:
        ConfigError: not YAML, beyond the bounds, or a key given twice.
    """
    loader = None
    try:
        # Its reader refuses NUL and other control characters.
        loader = _BoundedLoader(text)
        root = loader.get_single_node()
        if root is None:
            return Document(path=path, values=None, places={})
        _count_values(root, {})
        places: dict[KeyPath, str] = {}
        problems = list(itertools.islice(_walk(root, (), places, path), MAX_PROBLEMS))
        values = None if problems else loader.construct_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = shorten(getattr(error, "problem", None) or "not YAML text", 200)
        problems, values, places = [f"{path}{place} is not valid YAML: {problem}"], None, {}
    finally:
        if loader is not None:
            loader.dispose()
    if problems:
        raise ConfigError(*problems)
    return Document(path=path, values=values, places=places)


class _BoundedLoader(yaml.SafeLoader):
    """Stops at text that is nested too deeply or holds too many values."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._num_values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._num_values += 1
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self._depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(None, None, "nested too deeply", mark)
        if self._num_values > _MAX_VALUES:
            raise yaml.MarkedYAMLError(None, None, f"more than {_MAX_VALUES:,} values", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (AttributeError, KeyError, ValueError) as error:
            # A date such as 2024-99-99, a number of 5,000 digits, `!!timestamp 3`, `!!bool x`.
            raise yaml.MarkedYAMLError(None, None, str(error), node.start_mark) from error


def _count_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values of a node, with its aliases expanded.

    ``known`` has that of each node by its identity; 0 while it is counted.
    """
    if id(node) in known:
        if not known[id(node)]:
            text = "an alias (*name) inside its own anchor"
            raise yaml.MarkedYAMLError(None, None, text, node.start_mark)
        return known[id(node)]
    known[id(node)] = 0
    count = 1
    if isinstance(node, yaml.MappingNode):
        count += sum(_count_values(child, known) for pair in node.value for child in pair)
    elif isinstance(node, yaml.SequenceNode):
        count += sum(_count_values(child, known) for child in node.value)
    if count > _MAX_VALUES:
        text = f"its aliases (*name) stand for more than {_MAX_VALUES:,} values"
        raise yaml.MarkedYAMLError(None, None, text, node.start_mark)
    known[id(node)] = count
    return count


def _walk(node: yaml.Node, at: KeyPath, places: dict[KeyPath, str], path: str) -> Iterator[str]:
    """Fill ``places``; yield a line for each key given twice (PyYAML keeps the last)."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*at, str(key.value))
            place = f"{path}:{key.start_mark.line + 1}:{key.start_mark.column + 1}"
            if here in places:
                yield f"{place} '{shorten(format_key(here))}' is set twice"
                continue
            places[here] = place
            yield from _walk(value, here, places, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            mark = item.start_mark
            places[(*at, index)] = f"{path}:{mark.line + 1}:{mark.column + 1}"
            yield from _walk(item, (*at, index), places, path)
