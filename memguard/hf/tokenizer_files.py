"""Checks the files of a tokenizer, so that an error names the file. No torch.

    any of them               a folder without one has no tokenizer
    tokenizer.model           of SentencePiece: without tokenizer.json it needs two libraries
    tokenizer_config.json     a JSON object; 'model_max_length' is a number
    special_tokens_map.json   role -> token: a text or the fields of a token, or a list of them
    added_tokens.json         token -> id

transformers reads them without a check and reports damage as an error of Python, without the file.
Where there are none, it makes up an empty tokenizer for some families.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memguard.errors import ModelError
from memguard.hf.checkpoint_files import quote, read_json

_ANY = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
"""Patterns of the files of which every folder with a tokenizer has one."""
_LIBRARIES = {"sentencepiece": "sentencepiece", "protobuf": "google"}
"""Packages with which transformers reads a model of SentencePiece, and their modules."""


def check_tokenizer_files(folder: Path, *, name: str) -> None:
    """Refuse files that transformers would read and cannot use; those that are missing are right.

    Args:
        folder: with the tokenizer.
        name: path of the model, for messages.

    Raises:
        ModelError: names the file and what must be in it.
        PermissionError: this user may not read a file.
    """
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _ANY):
        raise ModelError(
            f"no usable tokenizer in {name}: it has none of a tokenizer's files, such as "
            "tokenizer.json. Copy those of the original model into it"
        )
    _check_sentencepiece(folder, name)
    for file, check in _CHECKS.items():
        path = folder / file
        if not path.exists():
            continue
        fields = read_json(path, name=name)
        if not isinstance(fields, dict):
            raise ModelError(f"model '{name}': {file} must be a JSON object")
        for field, value in fields.items():
            if rule := check(field, value):
                raise ModelError(
                    f"model '{name}': {file}: {quote(field)} must be {rule}; got {quote(value)}"
                )


def _check_sentencepiece(folder: Path, name: str) -> None:
    path = folder / "tokenizer.model"
    if not path.is_file() or (folder / "tokenizer.json").is_file():
        return
    with path.open("rb") as file:
        if file.read(1) != b"\n":  # With its first field; tiktoken's files begin with Base64.
            return
    missing = [package for package, module in _LIBRARIES.items() if find_spec(module) is None]
    if missing:
        raise ModelError(
            f"no usable tokenizer in {name}: tokenizer.model is of SentencePiece, for which "
            f"transformers needs {' and '.join(missing)}: pip install {' '.join(missing)}, or save "
            "the tokenizer as tokenizer.json elsewhere"
        )


def _check_setting(field: str, value: Any) -> str:
    is_right = field != "model_max_length" or value is None or isinstance(value, int | float)
    return "" if is_right else "a number of tokens"


def _check_role(field: str, value: Any) -> str:
    is_right = value is None or isinstance(value, str | dict | list)
    return "" if is_right else "a token, as a text or as its fields"


def _check_id(token: str, value: Any) -> str:
    return "" if isinstance(value, int) else "the id of the token, a whole number"


_CHECKS: dict[str, Callable[[str, Any], str]] = {
    "tokenizer_config.json": _check_setting,
    "special_tokens_map.json": _check_role,
    "added_tokens.json": _check_id,
}
"""The rule that a field of each file breaks; "" if it breaks none."""
