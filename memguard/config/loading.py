"""YAML and dotted overrides into checked settings; every problem at once, with its place."""

import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from memguard.config.foreign_names import find_advice
from memguard.config.schema import RunConfig, SweepConfig
from memguard.config.yaml_text import (
    MAX_PROBLEMS,
    Document,
    KeyPath,
    format_key,
    load_yaml,
    parse_yaml,
)
from memguard.errors import ConfigError, shorten

# Similarity (difflib) from which a name is assumed to be a typing error. At 0.5, 'report_to' would
# be 'dropout'.
_SLIP = 0.75
_NO_BLOCK = ("model_type", "model_attributes_type")
"""Types of errors for a value in place of a block of settings."""


def explain(model: type[BaseModel], item: Any, here: KeyPath, above: KeyPath = ()) -> str:
    """Return a sentence with the setting, the rule that it breaks, and its value.

    ``item`` is an entry of ``ValidationError.errors()``, ``here`` the key path of the setting in
    the user's file, and ``above`` that of what was checked.
    """
    name = shorten(format_key(here))
    kind = item["type"]
    if kind == "extra_forbidden":
        return f"'{name}' is not a setting; {_suggest(model, item['loc'], above)}"
    if kind == "missing":
        field = _fields_at(model, item["loc"][:-1]).get(str(item["loc"][-1]))
        about = describe_field(field) if field else ""
        return f"'{name}' is missing{': ' if about else ''}{about}"
    if kind == "union_tag_not_found":
        return f"'{name}' is missing: which of {', '.join(_list_names(model, item['loc']))}"
    if kind == "union_tag_invalid":
        wrong = str(item["ctx"]["tag"])
        known = _list_names(model, item["loc"])
        return (
            f"'{name}' should be one of {', '.join(known)}; got {shorten(repr(wrong))}"
            f"{suggest_near(wrong, known)}"
        )
    if kind == "value_error":
        message = str(item["ctx"]["error"])
        return f"'{name}': {message}" if name else message
    problem = f"'{name}' {_rule(item)}; got {shorten(repr(item['input']))}"
    if kind in _NO_BLOCK and (advice := _find_advice(model, item["loc"], above)):
        return f"{problem}; {advice}"
    if kind == "literal_error" and isinstance(item["input"], str):
        allowed = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        return problem + suggest_near(item["input"], allowed)
    return problem


def drop_tags(values: Any, item: Any) -> KeyPath:
    """Return the place of an entry of ``ValidationError.errors()`` as the user wrote it.

    If a block may be one of several kinds, identified by their names, pydantic inserts the name in
    the place of errors inside it.
    """
    here, place = values, []
    for key in item["loc"]:
        if isinstance(here, Mapping) and key not in here and key == here.get("name"):
            continue
        place.append(key)
        try:
            here = here[key]
        except (KeyError, IndexError, TypeError):
            here = None
    if item["type"] in ("union_tag_invalid", "union_tag_not_found"):
        place.append("name")
    return tuple(place)


def describe_field(field: FieldInfo) -> str:
    """Return the description of a setting; for a block the first sentence of its docstring."""
    block = _settings_in(field.annotation)
    if field.description or block is None:
        return field.description or ""
    return (block.__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ")


def suggest_near(wrong: str, known: list[str]) -> str:
    """Return ``; did you mean 'right'?`` where one of ``known`` is near, else nothing."""
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=_SLIP)
    return f"; did you mean '{near[0]}'?" if near else ""


def _rule(item: Any) -> str:
    """Return pydantic's rule without pydantic's own terms."""
    if item["type"] in _NO_BLOCK:
        return "should be a block of settings ('key: value' lines)"
    if item["type"] == "invalid_key":
        return "should be a word (put it in quotes)"
    if item["type"] == "string_pattern_mismatch":  # only names have a pattern
        return "should be letters, digits, '.', '_' and '-', beginning with a letter or digit"
    rule = re.sub(r"^\w+ should", "should", str(item["msg"]))
    return rule.replace("a valid tuple", "a list").replace("valid dictionary", "block of settings")


def _suggest(model: type[BaseModel], loc: KeyPath, above: KeyPath) -> str:
    """Return what to use instead of an unknown key.

    That is the setting for another library's name, a similar name in the same block, or a setting
    of that name in another block, in this order; else what is known in the block.
    """
    wrong = str(loc[-1])
    if advice := _find_advice(model, loc, above):
        return advice
    known = list(_fields_at(model, loc[:-1]))
    if near := suggest_near(wrong, known):
        return near.removeprefix("; ")
    elsewhere = next(_find_elsewhere(model, wrong), None)
    if elsewhere:
        where = "" if above or len(elsewhere) > 1 else " (at the top level)"
        return f"did you mean '{format_key((*above, *elsewhere))}'{where}?"
    return f"known here: {', '.join(known)}"


def _find_advice(model: type[BaseModel], loc: KeyPath, above: KeyPath) -> str | None:
    """Return what to use in a run or sweep instead of another library's setting."""
    wrong = str(loc[-1])
    if model is SweepConfig and loc[0] == "settings" and wrong in ("optim", "train", "adapter"):
        return f"put its settings that differ into 'overrides', as {{{wrong}.KEY: VALUE}}"
    if model is SweepConfig and wrong not in SweepConfig.model_fields:
        return find_advice(wrong, (*above, "run"))
    return find_advice(wrong, above) if model is RunConfig else None


def _find_elsewhere(model: type[BaseModel], name: str) -> Iterator[KeyPath]:
    """Yield the paths of the settings named ``name`` in ``model``, nearest to the top first."""
    blocks: list[tuple[KeyPath, type[BaseModel]]] = [((), model)]
    for at, block in blocks:  # grows while it is read: breadth first
        for key, field in block.model_fields.items():
            if key == name:
                yield (*at, key)
            inner = _settings_in(field.annotation)
            if inner is not None:
                many = typing.get_origin(field.annotation) is tuple
                blocks.append(((*at, key, 0) if many else (*at, key), inner))


def _fields_at(model: type[BaseModel], loc: KeyPath) -> Mapping[str, FieldInfo]:
    """Return the fields that are allowed at ``loc``; empty if it is not a block of settings."""
    blocks = _blocks_at(model, loc)
    return blocks[0].model_fields if blocks else {}


def _list_names(model: type[BaseModel], loc: KeyPath) -> list[str]:
    """Return the names of the blocks that are allowed at ``loc``."""
    return [name for block in _blocks_at(model, loc) for name in _list_tags(block)]


def _blocks_at(model: type[BaseModel], loc: KeyPath) -> list[type[BaseModel]]:
    blocks = [model]
    for key in loc:
        if not isinstance(key, str):
            continue
        named = [block for block in blocks if key in _list_tags(block)]
        if named:
            blocks = named
        elif blocks and key in blocks[0].model_fields:
            blocks = _all_settings_in(blocks[0].model_fields[key].annotation)
    return blocks


def _list_tags(block: type[BaseModel]) -> tuple[str, ...]:
    """Return the names that identify a block among the kinds allowed in its place."""
    field = block.model_fields.get("name")
    if field is None or typing.get_origin(field.annotation) is not typing.Literal:
        return ()
    return typing.get_args(field.annotation)


def _settings_in(annotation: Any) -> type[BaseModel] | None:
    """Find the first settings class in ``X | None``, ``tuple[X, ...]``, ``Annotated[X, ...]``."""
    return next(iter(_all_settings_in(annotation)), None)


def _all_settings_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    inner = typing.get_args(annotation)
    return [found for argument in inner for found in _all_settings_in(argument)]


ModelT = TypeVar("ModelT", bound=BaseModel)


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
        place = f"argument {shorten(repr(argument))}"
        key_path = parse_key(key.removeprefix("--"))
        if not equals or not key_path:
            problems.append(f"{place} must be KEY=VALUE, e.g. optim.lr=1e-4")
            continue
        try:
            parsed = parse_yaml(value, place).values
        except ConfigError:
            problems.append(f"{place}: the value is not valid YAML")
            continue
        try:
            values = apply_settings(values, {format_key(key_path): parsed})
        except ConfigError as error:
            problems.append(f"{place}: {error}")
        document = document.place(key_path, place)
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
            problem = ""
            if not isinstance(here, dict if isinstance(key, str) else list):
                problem = "leads through a plain value; nothing was set"
            elif isinstance(key, int) and key >= len(here):
                problem = f"counts past the end of a list of {len(here)}"
            if problem:
                raise ConfigError(f"'{shorten(dotted)}' {problem}")
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
    """Read a run's YAML, apply the overrides and check everything.

    Raises:
        ConfigError: lists every problem found, one line each.
    """
    document = apply_overrides(load_yaml(path), overrides)
    if {"run", "settings"} <= document.values.keys():
        raise ConfigError(f"{path} contains a sweep, not a run: use 'memguard compare {path}'")
    return validate(RunConfig, document.values, document)


def validate(
    model: type[ModelT], values: Mapping[str, Any], origin: Document, prefix: KeyPath = ()
) -> ModelT:
    """Check ``values``, which stand at ``prefix`` in the file ``origin``, against ``model``.

    Raises:
        ConfigError: with every problem found, one line each.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = []
        # A list that has items is empty to pydantic, which has removed what is wrong.
        items = [one for one in error.errors() if one["type"] != "too_short" or not one["input"]]
        for item in items[:MAX_PROBLEMS]:
            here = (*prefix, *drop_tags(values, item))
            problems.append(f"{origin.locate(here)} {explain(model, item, here, prefix)}")
        left_out = len(items) - len(problems)
        if left_out:
            problems.append(f"{origin.path} has {left_out:,} more such problems")
        raise ConfigError(*problems) from error
