"""What pydantic found wrong, as sentences a user can act on."""

import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Key = str | int
KeyPath = tuple[Key, ...]

# From _SLIP on, a near name in the same block is taken for a slip of the finger; below it a setting
# of exactly that name elsewhere is the better guess (`data.seed`, though there is `seq_len`).
_SLIP = 0.75
_NEAR = 0.5


def format_key(key_path: KeyPath) -> str:
    """Write a key path as users do: ``mitigations[0].k``."""
    text = ""
    for key in key_path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text


def explain(model: type[BaseModel], item: Any, here: KeyPath) -> str:
    """Say which setting breaks which rule, what was got and what would do.

    Args:
        model: the settings class that was checked.
        item: one entry of ``ValidationError.errors()``.
        here: where the setting stands in the user's file; ends with the entry's own place.
    """
    name = format_key(here)
    kind = item["type"]
    if kind == "extra_forbidden":
        return f"'{name}' is not a setting; {_suggest(model, item['loc'], here)}"
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
            f"'{name}' should be one of {', '.join(known)}; got {wrong!r}"
            f"{suggest_near(wrong, known)}"
        )
    if kind == "value_error":
        message = str(item["ctx"]["error"])
        return f"'{name}': {message}" if name else message
    return f"'{name}' {_rule(item)}; got {_shorten(item['input'])}{_suggest_value(item)}"


def drop_tags(values: Any, item: Any) -> KeyPath:
    """Return an entry's place as the user wrote it.

    Where a block may be one of several, told apart by their names, pydantic puts the name into the
    place of what is wrong in it.

    Args:
        values: what was written.
        item: one entry of ``ValidationError.errors()``.
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
    """Return the sentence about a setting; a block's is the first of its class."""
    block = _settings_in(field.annotation)
    if field.description or block is None:
        return field.description or ""
    return (block.__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ")


def suggest_near(wrong: str, known: list[str]) -> str:
    """Return ``; did you mean 'right'?`` where one of ``known`` is near, else nothing."""
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=_NEAR)
    return f"; did you mean '{near[0]}'?" if near else ""


def _rule(item: Any) -> str:
    """Return pydantic's rule without the words of its own trade."""
    if item["type"] in ("model_type", "model_attributes_type"):
        return "should be a block of settings ('key: value' lines)"
    if item["type"] == "invalid_key":
        return "should be a word (put it in quotes)"
    if item["type"] == "string_pattern_mismatch":  # only names have a pattern
        return "should be letters, digits, '.', '_' and '-', beginning with a letter or digit"
    rule = re.sub(r"^\w+ should", "should", str(item["msg"]))
    return rule.replace("a valid tuple", "a list").replace("valid dictionary", "block of settings")


def _suggest_value(item: Any) -> str:
    """Return a near value of those allowed, where a value must be one of a few words."""
    if item["type"] != "literal_error" or not isinstance(item["input"], str):
        return ""
    return suggest_near(item["input"], re.findall(r"'([^']*)'", item["ctx"]["expected"]))


def _suggest(model: type[BaseModel], loc: KeyPath, here: KeyPath) -> str:
    """Find what an unknown key may have been meant to be: a near name here, or one elsewhere."""
    wrong = str(loc[-1])
    known = list(_fields_at(model, loc[:-1]))
    for cutoff in (_SLIP, _NEAR):
        near = difflib.get_close_matches(wrong, known, n=1, cutoff=cutoff)
        if near:
            return f"did you mean '{near[0]}'?"
        elsewhere = next(_find_elsewhere(model, wrong), None) if cutoff == _SLIP else None
        if elsewhere:
            above = here[: len(here) - len(loc)]
            where = "" if above or len(elsewhere) > 1 else " (at the top level)"
            return f"did you mean '{format_key((*above, *elsewhere))}'{where}?"
    return f"known here: {', '.join(known)}"


def _find_elsewhere(model: type[BaseModel], name: str) -> Iterator[KeyPath]:
    """Yield where in ``model`` a setting is called ``name``, nearest to the top first."""
    blocks: list[tuple[KeyPath, type[BaseModel]]] = [((), model)]
    for at, block in blocks:  # grows while it is read: breadth first
        for key, field in block.model_fields.items():
            if key == name:
                yield (*at, key)
            inner = _settings_in(field.annotation)
            if inner is not None:
                many = typing.get_origin(field.annotation) is tuple
                blocks.append(((*at, key, 0) if many else (*at, key), inner))


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fields_at(model: type[BaseModel], loc: KeyPath) -> Mapping[str, FieldInfo]:
    """Return the fields that may stand at ``loc`` (empty where it is no settings block)."""
    blocks = [model]
    for key in loc:
        if not isinstance(key, str):
            continue
        named = [block for block in blocks if key in _list_tags(block)]
        if named:
            blocks = named
        elif blocks and key in blocks[0].model_fields:
            blocks = _all_settings_in(blocks[0].model_fields[key].annotation)
    return blocks[0].model_fields if blocks else {}


def _list_names(model: type[BaseModel], loc: KeyPath) -> list[str]:
    """Return the names of the blocks that may stand at ``loc``."""
    blocks = [model]
    for key in loc:
        if isinstance(key, str) and blocks and key in blocks[0].model_fields:
            blocks = _all_settings_in(blocks[0].model_fields[key].annotation)
    return [name for block in blocks for name in _list_tags(block)]


def _list_tags(block: type[BaseModel]) -> tuple[str, ...]:
    """Return the names that tell a block from others in its place."""
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
