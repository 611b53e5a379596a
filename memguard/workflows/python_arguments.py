"""Types and ranges of the arguments that Python programs give to `memguard.api`.

The command line parses its arguments; these come as any object. Each check raises one line that
names the argument, its rule and what was got.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

from memguard.errors import MAX_PATH, ConfigError, ModelError, shorten

MAX_SEED = 2**63 - 1
_PLACES = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
)


def describe(value: Any) -> str:
    """Return what was got, for the end of a message: ``the text 'merged'``, ``5 (int)``."""
    if isinstance(value, str):
        return f"the text {shorten(repr(value))}"
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float):
        return f"{shorten(repr(value))} ({type(value).__name__})"
    return f"an object of type {type(value).__name__}"


def check_path(name: str, value: Any) -> None:
    """Check an argument that is a path, a name or None.

    Raises:
        ConfigError: it is neither, or an empty text.
    """
    if value is None or isinstance(value, Path):
        return
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"'{name}' must be a path or a name (str or pathlib.Path); got {describe(value)}"
        )


def check_text(name: str, value: Any) -> None:
    """Check an argument that is a text.

    Raises:
        ConfigError: it is no text, or empty.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(f"'{name}' must be a text (str); got {describe(value)}")


def check_count(name: str, value: Any, *, low: int = 1, high: int) -> int:
    """Return an argument that is a whole number, also one of numpy.

    Raises:
        ConfigError: it is no whole number, or outside of the range.
    """
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or not low <= int(value) <= high:
        upper = "2**63 - 1" if high == MAX_SEED else f"{high:,}"
        raise ConfigError(
            f"'{name}' must be a whole number from {low} to {upper}; got {describe(value)}"
        )
    return int(value)


def check_overrides(overrides: Any) -> dict[str, Any]:
    """Return the settings to change, by dotted name.

    Raises:
        ConfigError: not a dict whose keys are names; the names of the command line's KEY=VALUE.
    """
    if overrides is None:
        return {}
    rule = "'overrides' must be a dict of dotted names, e.g. {'optim.lr': 1e-4}"
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"{rule}; got {describe(overrides)}")
    for key in overrides:
        if not isinstance(key, str) or not key.strip("[]. "):
            raise ConfigError(f"{rule}; got {describe(key)} as a name")
    return dict(overrides)


def write_overrides(overrides: Any) -> tuple[str, ...]:
    """Return the settings to change as the command line's KEY=VALUE.

    Raises:
        ConfigError: as `check_overrides`; or a value that JSON cannot hold.
    """
    written = []
    for key, value in check_overrides(overrides).items():
        try:
            written.append(f"{key}={json.dumps(value)}")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"'overrides': the value of '{shorten(key)}' must be a number, text, list or "
                f"dict; got {describe(value)}"
            ) from error
    return tuple(written)


def check_runs(sweep: Any) -> tuple[str | Path, ...]:
    """Return a sweep alone, or the folders of runs.

    Raises:
        ConfigError: neither a path nor a list of paths; an empty list.
    """
    rule = (
        "'sweep' must be a sweep's YAML, or a list of the folders of finished runs, e.g. "
        "['runs/a', 'runs/b']"
    )
    paths = (sweep,) if isinstance(sweep, str | Path) else sweep
    if not isinstance(paths, Sequence) or isinstance(paths, bytes):
        raise ConfigError(f"{rule}; got {describe(sweep)}")
    if not paths:
        raise ConfigError(f"{rule}; got an empty list")
    for path in paths:
        if not isinstance(path, str | Path) or not str(path).strip():
            raise ConfigError(f"{rule}; got {describe(path)}")
    return tuple(paths)


def check_config(config: Any) -> None:
    """Check the settings of a run: a path, a name or nested dicts.

    Raises:
        ConfigError: it is something else, or has a name that is no text.
    """
    rule = "'config' must be a run's YAML, the name of a shipped one, or its settings as a dict"
    if not isinstance(config, str | Path | Mapping) or config == "":
        raise ConfigError(f"{rule}; got {describe(config)}")
    if isinstance(config, Mapping):
        for name in config:
            if not isinstance(name, str):
                raise ConfigError(f"{rule}; got {describe(name)} as a name")


def check_tokenizer(tokenizer: Any) -> None:
    """Check the tokenizer of a model in memory; imports transformers.

    Raises:
        ModelError: it is no tokenizer of transformers.
    """
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
    """Report a place that cannot be created, written or read as a mistake in the arguments.

    Raises:
        ConfigError: names the place.
    """
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
