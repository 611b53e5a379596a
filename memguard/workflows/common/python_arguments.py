"""Functions for programs: arguments checked by their annotations, quiet libraries, our errors.

@python_call       the decorator; the one place where pydantic's errors of arguments become ours
Name, Place, Seed  annotations of arguments
"""

import errno
import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, validate_call

from memguard.errors import MAX_PATH, ConfigError, ModelError, shorten
from memguard.runtime import quieted_advice

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PLACES = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
)


def _read_whole(value: Any) -> Any:
    """Return a whole number of numpy as one of Python."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


Name = Annotated[str, Field(min_length=1)]
Place = Name | Path
"""A path, or the name of a shipped file or a model."""
Whole = Annotated[int, BeforeValidator(_read_whole)]
Seed = Annotated[Whole, Field(ge=0, le=2**63 - 1)]


def python_call(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that checks its arguments, and silences libraries while it runs.

    It raises a `ConfigError` for arguments that its annotations do not allow, one line each, and
    for a place that cannot be created, written or read.
    """

    def bind(*args: Any, **named: Any) -> Callable[[], _R]:
        return functools.partial(function, *args, **named)

    functools.update_wrapper(bind, function)
    # What is checked are arguments; the type of the result may not be imported yet.
    bind.__annotations__ = {k: v for k, v in function.__annotations__.items() if k != "return"}
    check = validate_call(config=ConfigDict(arbitrary_types_allowed=True, strict=True))(bind)

    @functools.wraps(function)
    def call(*args: _P.args, **named: _P.kwargs) -> _R:
        try:
            # Run below: an error of pydantic in the function itself is not one of its arguments.
            run = check(*args, **named)
        except ValidationError as error:
            raise ConfigError(*_explain(error, [*inspect.signature(function).parameters])) from None
        with quieted_advice(), refusing_places():
            return run()

    return call


def _explain(error: ValidationError, parameters: list[str]) -> Iterator[str]:
    """Yield a line for each wrong argument: its name, what it should be and what was got."""
    wrong: dict[str, dict[str, list[Any]]] = {}
    for found in error.errors(include_url=False):
        first, *rest = found["loc"]
        is_positional = isinstance(first, int) and first < len(parameters)
        name = parameters[first] if is_positional else str(first)  # type: ignore[index]
        item = "".join(f"[{part}]" for part in rest if isinstance(part, int))
        wrong.setdefault(name, {}).setdefault(f"{name}{item}", []).append(found)
    for places in wrong.values():
        # Of the types that an argument may have, the one that was meant failed deepest inside.
        place = max(places, key=len)
        # And a value out of range says more than another type.
        failures = places[place]
        by_value = [one for one in failures if not one["type"].endswith(("_type", "_of"))]
        problems = [one["msg"] for one in by_value or failures]
        rules = dict.fromkeys(re.sub(r"^\w+ should ", "", problem) for problem in problems)
        if problems[0] in rules:  # That an argument is missing or not known.
            yield f"'{shorten(place)}': {problems[0].lower()}"
        else:
            got = describe(places[place][0]["input"])
            yield f"'{shorten(place)}' should {', or '.join(rules)}; got {got}"


def describe(value: Any) -> str:
    """Return what was got, for the end of a message: ``the text 'merged'``, ``5 (int)``."""
    if isinstance(value, str):
        return f"the text {shorten(repr(value))}"
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float):
        return f"{shorten(repr(value))} ({type(value).__name__})"
    return f"an object of type {type(value).__name__}"


def write_overrides(overrides: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the settings to change as the command line's KEY=VALUE."""
    written = []
    for key, value in (overrides or {}).items():
        try:
            written.append(f"{key}={json.dumps(value)}")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"'overrides': the value of '{shorten(key)}' must be a number, text, list or "
                f"dict; got {describe(value)}"
            ) from error
    return tuple(written)


def check_tokenizer(tokenizer: Any) -> None:
    """Check the tokenizer of a model in memory; imports transformers."""
    from transformers import PreTrainedTokenizerBase

    if tokenizer is None or isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    way_out = ""
    if isinstance(tokenizer, str | Path):
        way_out = f": load it with AutoTokenizer.from_pretrained({shorten(repr(str(tokenizer)))})"
    elif isinstance(getattr(tokenizer, "tokenizer", None), PreTrainedTokenizerBase):
        way_out = ": give its '.tokenizer'"
    raise ModelError(
        f"'tokenizer' must be a transformers tokenizer; got {describe(tokenizer)}{way_out}"
    )


@contextmanager
def refusing_places() -> Iterator[None]:
    """Report a place that cannot be created, written or read as a mistake in the arguments."""
    try:
        yield
    except OSError as error:
        if error.filename is None or error.errno not in _PLACES:
            raise
        path = shorten(str(error.filename), MAX_PATH)
        raise ConfigError(
            f"'{path}' cannot be created, written or read ({os.strerror(error.errno)}): choose "
            "another folder ('out', 'output_dir', or that of save())"
        ) from error
