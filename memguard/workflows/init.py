"""A commented YAML with every setting, to begin a run from."""

import json
from pathlib import Path

from memguard.config import RunConfig, render_template
from memguard.errors import ConfigError
from memguard.records import write_atomically


def write_settings(path: Path | None, *, schema: bool) -> str:
    """Return a run's settings with their defaults and units, written to a file if one is given.

    Args:
        path: of the file; None writes none.
        schema: return the JSON Schema of a run instead.

    Raises:
        ConfigError: the file exists already.
    """
    text = render_template()
    if schema:
        text = json.dumps(RunConfig.model_json_schema(), indent=2) + "\n"
    if path is not None:
        if path.exists():
            raise ConfigError(f"'{path}' exists already; choose another name or delete it")
        write_atomically(path, text.encode())
    return text
