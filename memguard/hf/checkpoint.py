"""What a checkpoint's folder or hub id says before its weights are read.

Remote code is never run, whoever made the folder.
"""

from pathlib import Path
from typing import Any

import huggingface_hub
import transformers

from memguard.errors import ModelError
from memguard.hf.checkpoint_files import (
    INDEX,
    SINGLE,
    check_config,
    check_folder,
    check_weights,
    is_missing,
    list_indexed,
)
from memguard.hf.config_fields import check_fields

_MAX_REASON = 300
"""Characters of another library's message that are passed on; some list every model there is."""


def load_config(path: str, *, revision: str | None = None) -> Any:
    """Return a checkpoint's configuration.

    Raises:
        ModelError: no such checkpoint, or no configuration transformers knows.
    """
    check_folder(path)
    try:
        config = transformers.AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
    except Exception as error:  # Each family checks its fields in its own way.
        said = f"model '{path}' is neither a folder here nor got from the hub"
        if Path(path).exists():
            said = f"'{path}' has no usable configuration"
        raise ModelError(f"{said}: {say_in_one_line(error)}") from error
    if not Path(path).exists():  # Of a hub id it is seen here first.
        check_fields(config.to_dict(), place=f"model '{path}': config.json")
    return config


def load_tokenizer(path: str, *, revision: str | None = None) -> Any:
    """Load a tokenizer from a folder or hub id.

    Raises:
        ModelError: there is none, or it needs remote code.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
    except Exception as error:  # A broken file raises what its parser raises.
        raise ModelError(f"no usable tokenizer in {path}: {say_in_one_line(error)}") from error


def max_positions(path: str, *, revision: str | None = None) -> int | None:
    """Return the most tokens a checkpoint has positions for; None where it does not say.

    Raises:
        ModelError: no such checkpoint, or no configuration transformers knows.
    """
    config = load_config(path, revision=revision)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def check_positions(model: Any, seq_len: int, setting: str) -> None:
    """Refuse rows longer than the model has positions for.

    Raises:
        ModelError: ``seq_len`` (tokens) is above the configuration's ``max_position_embeddings``.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < seq_len:
        raise ModelError(
            f"'{setting}' must be at most {limit}, the model's max_position_embeddings; "
            f"got {seq_len}"
        )


def get_folder(path: str, revision: str | None) -> Path:
    """Return the checked folder of a checkpoint; a hub id's files are got into the hub's cache.

    Raises:
        ModelError: see `check_folder`; of a hub id also that it cannot be got.
    """
    if Path(path).exists() or is_missing(path):
        check_folder(path)
        return Path(path)
    # Weights come last: what is refused is not waited for.
    folder = _fetch(path, revision, ["*.json"])
    check_config(folder, name=path)
    folder = _fetch(path, revision, [SINGLE])
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        folder = _fetch(path, revision, list_indexed(folder, name=path))
    check_weights(folder, name=path)
    return folder


def _fetch(path: str, revision: str | None, names: list[str]) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(path, revision=revision, allow_patterns=names)
        )
    except Exception as error:  # The hub's client raises its own, the network's and the system's.
        raise ModelError(
            f"model '{path}' cannot be got from the hub: {say_in_one_line(error)}"
        ) from error


def say_in_one_line(error: BaseException) -> str:
    """Return another library's message, short enough to be read."""
    if "trust_remote_code" in str(error):
        return "it needs code of its own, and remote code is never run"
    text = " ".join(str(error).split()).rstrip(".:") or type(error).__name__
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + " ..."
