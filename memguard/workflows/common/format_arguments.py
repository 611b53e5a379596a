"""The format of an audit's documents: options of the command line and arguments of a call.

--format alpaca --columns instruction=question,output=answer --template chat --tags user=me
format="alpaca", columns={"instruction": "question"}, template="chat", tags={"user": "me"}
"""

from collections.abc import Mapping, Sequence
from typing import Any

from memguard.config import Document, FormatConfig, validate
from memguard.errors import ConfigError, shorten

FORMER = "text_column"
"""What named the column of texts before there were formats."""


def read_format_options(
    format: str | None,
    columns: Sequence[str] | None,
    template: str | None,
    tags: Sequence[str] | None,
    text_column: str | None = None,
) -> FormatConfig:
    """Return the settings of the options of `memguard audit`.

    Args:
        format: value of ``--format``.
        columns: values of ``--columns``, each ``NAME=COLUMN`` or several with commas.
        template: value of ``--template``.
        tags: values of ``--tags``, like ``columns``.
        text_column: value of an option that was replaced.

    Raises:
        ConfigError: a wrong value, a value that is no ``NAME=COLUMN``, or the former option.
    """
    if text_column is not None:
        column = shorten(text_column)
        raise ConfigError(f"'--text-column' is not an option; use --columns text={column}")
    values = {
        "format": format,
        "columns": _split(columns, "--columns"),
        "template": template,
        "tags": _split(tags, "--tags"),
    }
    return _validate(values, "memguard audit", {name: f"--{name}" for name in values})


def read_format_arguments(
    format: Any = None, columns: Any = None, template: Any = None, tags: Any = None
) -> FormatConfig:
    """Return the settings of the arguments of a call.

    Raises:
        ConfigError: a wrong value.
    """
    values = {"format": format, "columns": columns, "template": template, "tags": tags}
    for name in ("columns", "tags"):
        value = values[name]
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(
                f"'{name}' must be a dict, e.g. {{'text': 'body'}}; got {type(value).__name__}"
            )
    return _validate(values, "argument", {})


def refuse_former(arguments: Mapping[str, Any]) -> None:
    """Refuse the argument that was replaced by ``columns``.

    Raises:
        ConfigError: it was given.
    """
    if FORMER in arguments:
        column = arguments[FORMER]
        raise ConfigError(f"'{FORMER}' is no argument; use columns={{'text': {column!r}}}")


def _validate(values: Mapping[str, Any], path: str, places: Mapping[str, str]) -> FormatConfig:
    given = {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }
    origin = Document(path=path, values={}, places={(name,): at for name, at in places.items()})
    return validate(FormatConfig, given, origin)


def _split(given: Sequence[str] | None, option: str) -> dict[str, str] | None:
    pairs: dict[str, str] = {}
    for text in (part for value in given or () for part in value.split(",")):
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(
                f"'{option}' must be NAME=VALUE, several separated by commas; got "
                f"'{shorten(ascii(text)[1:-1])}'"
            )
        pairs[name.strip()] = value
    return pairs or None
