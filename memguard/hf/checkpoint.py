"""Configuration, tokenizer and files of a checkpoint, from a folder or hub id, before its weights.

A path may also be a local folder with an adapter (peft); its configuration is then that of its base
model. Remote code is never run, regardless of where the folder comes from.

The files of a tokenizer are checked, so that an error names the file: transformers reports damage
as an error of Python, without the file, and makes up an empty tokenizer for some families.

    any of them               a folder without one has no tokenizer
    tokenizer.model           of SentencePiece: without tokenizer.json it needs two libraries
    tokenizer_config.json     a JSON object; 'model_max_length' is a number
    special_tokens_map.json   role -> token: a text or the fields of a token, or a list of them
    added_tokens.json         token -> id
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub
import transformers
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from memguard.errors import MemguardError, ModelError, is_out_of_memory
from memguard.hf.adapter_config import say_where_base_is
from memguard.hf.adapter_files import AdapterFolder, check_model, is_adapter, read_adapter
from memguard.hf.checkpoint_files import (
    CONFIG,
    INDEX,
    SINGLE,
    check_config,
    check_weights,
    is_missing,
    list_indexed,
    quote,
    read_fields,
)
from memguard.hf.config_fields import DROPOUTS, check_fields

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_PANIC = "PanicException"
"""A failed check of a library in Rust, such as that of tokenizers; it is no `Exception`."""
_MAX_REASON = 300
"""Maximum length of another library's message (characters); some list every known model."""


def load_config(path: str, *, revision: str | None = None, base: str | None = None) -> Any:
    """Return a checkpoint's configuration.

    ``path`` is a folder or hub id, with its ``revision``; ``base`` the folder or hub id of an
    adapter's base, None locates it.

    Raises:
        ModelError: there is no such checkpoint, or transformers does not know its configuration.
    """
    check_model(path, base=base)
    if is_adapter(path):
        adapter = read_adapter(path, base=base)
        with _about_base(adapter):
            return load_config(adapter.base, revision=adapter.revision)
    problem = f"model '{path}' is not a local folder and cannot be downloaded from the hub"
    if Path(path).exists():
        problem = f"'{path}' has no usable configuration"
    with explained(problem):
        check_reachable(path, revision)
        config = transformers.AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
    place = f"model '{path}': config.json"
    if not Path(path).exists():  # `check_model` has checked a local folder, but not a hub id.
        check_fields(config.to_dict(), place=place)
    with explained(place):
        _normalise_config(config)
    return config


def _normalise_config(config: Any) -> None:
    """Replace, in place, values of fields that published configurations have and a run cannot use.

    A model returns its outputs by name, without attentions and hidden states; a dropout of null is
    none. ValueError is raised if a part is only fields, since the family has no such part.
    """
    text_config = config.get_text_config()
    if not isinstance(text_config, transformers.PreTrainedConfig):
        raise ValueError(
            f"a model of the family '{config.model_type}' has no configuration inside its own. "
            "Remove 'text_config', 'decoder' or 'generator'"
        )
    for part in (config, text_config):
        part.return_dict = True
        part.output_attentions = part.output_hidden_states = False
        for name in DROPOUTS:
            if getattr(part, name, 0.0) is None:
                setattr(part, name, 0.0)


def read_config_fields(fields: Mapping[str, Any], *, place: str) -> Any:
    """Return the transformers configuration with the fields of a config.json.

    Raises:
        ModelError: transformers does not know the ``model_type``, or refuses a field.
    """
    with explained(f"{place} does not describe a model"):
        family = fields.get("model_type")
        if family not in transformers.CONFIG_MAPPING:
            version = transformers.__version__
            raise ValueError(
                f"'model_type' must be one that transformers {version} has; got {family!r}"
            )
        config = transformers.CONFIG_MAPPING[family].from_dict(dict(fields))
        _normalise_config(config)
        return config


def load_tokenizer(path: str, *, revision: str | None = None, base: str | None = None) -> Any:
    """Load a tokenizer from a folder or hub id; that of the base if an adapter has none.

    See `load_config` for the arguments.

    Raises:
        ModelError: there is no usable tokenizer, or it needs remote code.
    """
    if is_adapter(path) and not has_tokenizer(Path(path)):
        adapter = read_adapter(path, base=base)
        with _about_base(adapter):
            return load_tokenizer(adapter.base, revision=adapter.revision)
    with explained(f"no usable tokenizer in {path}"):
        check_reachable(path, revision)
        _check_tokenizer_files(Path(path), name=path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
        if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
            # transformers makes up an empty one for families such as GPT-2.
            raise ValueError(
                "the file of its vocabulary is missing, such as tokenizer.json. Copy it from the "
                "original model"
            )
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer; transformers makes up one for some without."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def find_positions(config: Any) -> int | None:
    """Return a configuration's maximum number of positions (tokens); None if it has no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def get_folder(path: str, revision: str | None, *, base: str | None = None) -> Path:
    """Return the checked folder of a checkpoint or adapter; a hub id's files are downloaded.

    See `load_config` for the arguments.

    Raises:
        ModelError: see `check_model`; or a hub id cannot be downloaded.
    """
    if Path(path).exists() or is_missing(path):
        check_model(path, base=base)
        return Path(path)
    # Weights come last, so that an unusable model is refused before the long download.
    folder = _fetch(path, revision, ["*.json"])
    check_config(folder, name=path)
    folder = _fetch(path, revision, [SINGLE])
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        folder = _fetch(path, revision, list_indexed(folder, name=path))
    check_weights(folder, name=path)
    return folder


def get_base_folder(adapter: AdapterFolder) -> Path:
    """Return the checked folder of an adapter's base; see `get_folder`."""
    with _about_base(adapter):
        return get_folder(adapter.base, adapter.revision)


@contextlib.contextmanager
def _about_base(adapter: AdapterFolder) -> Iterator[None]:
    """Name the adapter in an error about its base, and the way out if this is a hub id."""
    try:
        yield
    except ModelError as error:
        way_out = ""
        if not Path(adapter.base).is_dir():
            way_out = f". Download the base, or {say_where_base_is(adapter.folder)}"
        text = f"adapter '{adapter.folder}': its base model: {error}{way_out}"
        raise ModelError(text) from error


def _fetch(path: str, revision: str | None, names: list[str]) -> Path:
    with explained(f"model '{path}' cannot be downloaded from the hub"):
        check_reachable(path, revision)
        return Path(
            huggingface_hub.snapshot_download(path, revision=revision, allow_patterns=names)
        )


@contextlib.contextmanager
def explained(problem: str) -> Iterator[None]:
    """Convert any error of another library to a ModelError of one line, begun with ``problem``.

    Each family raises its own errors for its fields, each parser for a damaged file, and the hub's
    client those of the network and the system.
    """
    try:
        yield
    except MemguardError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{problem}: {say_in_one_line(error)}") from error


def say_in_one_line(error: BaseException) -> str:
    """Return another library's message as one short line."""
    if "trust_remote_code" in str(error):
        return "it needs custom code, and remote code is never run"
    text = " ".join(str(error).split()).rstrip(".:") or type(error).__name__
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + " ..."


def check_reachable(path: str, revision: str | None) -> None:
    """Request the configuration of a hub id once; one in the local cache is not requested.

    huggingface_hub repeats the first request for a file five times: without a network a command
    would end after half a minute only. What the hub answers is left to the download, which explains
    it.

    Raises:
        ConnectionError: the hub does not answer.
    """
    if Path(path).exists():
        return
    try:
        cached = huggingface_hub.try_to_load_from_cache(path, CONFIG, revision=revision)
        if not isinstance(cached, str):
            url = huggingface_hub.hf_hub_url(path, CONFIG, revision=revision)
            huggingface_hub.get_hf_file_metadata(url)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled):
        return
    except Exception as error:  # Of the HTTP client, which differs between versions of the library.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConnectionError(
            f"it does not answer ({reason}). Check the connection, or download the model elsewhere "
            "and give its folder"
        ) from error


_ANY = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
"""Patterns of the files of which every folder with a tokenizer has one."""
_LIBRARIES = {"sentencepiece": "sentencepiece", "protobuf": "google"}
"""Packages with which transformers reads a model of SentencePiece, and their modules."""


def _check_tokenizer_files(folder: Path, *, name: str) -> None:
    """Refuse files that transformers would read and cannot use; it does without missing ones."""
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _ANY):
        raise ValueError(
            "it has none of a tokenizer's files, such as tokenizer.json. Copy those of the "
            "original model into it"
        )
    _check_sentencepiece(folder)
    for file, (is_right, rule) in _CHECKS.items():
        if not (folder / file).exists():
            continue
        for field, value in read_fields(folder / file, name=name).items():
            if not is_right(field, value):
                raise ValueError(f"{file}: {quote(field)} must be {rule}; got {quote(value)}")


def _check_sentencepiece(folder: Path) -> None:
    path = folder / "tokenizer.model"
    if not path.is_file() or (folder / "tokenizer.json").is_file():
        return
    with path.open("rb") as file:
        if file.read(1) != b"\n":  # With its first field; tiktoken's files begin with Base64.
            return
    missing = [package for package, module in _LIBRARIES.items() if find_spec(module) is None]
    if missing:
        raise ValueError(
            "tokenizer.model is of SentencePiece, for which transformers needs "
            f"{' and '.join(missing)}: pip install {' '.join(missing)}, or save the tokenizer as "
            "tokenizer.json elsewhere"
        )


_CHECKS: Mapping[str, tuple[Callable[[str, Any], bool], str]] = {
    "tokenizer_config.json": (
        lambda name, value: name != "model_max_length" or isinstance(value, int | float | None),
        "a number of tokens",
    ),
    "special_tokens_map.json": (
        lambda _, value: isinstance(value, str | dict | list | None),
        "a token, as a text or as its fields",
    ),
    "added_tokens.json": (
        lambda _, value: isinstance(value, int),
        "the id of the token, a whole number",
    ),
}
"""What holds for each field and its value in a file, and the rule in words."""
