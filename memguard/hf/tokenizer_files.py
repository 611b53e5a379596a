"""Checks the small JSON files of a tokenizer, so that an error names the file. No torch.

    tokenizer_config.json     a JSON object; 'model_max_length' is a number
    special_tokens_map.json   role -> token: a text or the fields of a token, or a list of them
    added_tokens.json         token -> id

transformers reads them without a check and reports damage as an error of Python, without the file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from memguard.errors import ModelError
from memguard.hf.checkpoint_files import quote, read_json


def check_tokenizer_files(folder: Path, *, name: str) -> None:
    """Refuse files that transformers would read and cannot use; those that are missing are right.

    Args:
        folder: with the tokenizer.
        name: path of the model, for messages.

    Raises:
        ModelError: names the file and what must be in it.
        PermissionError: this user may not read a file.
    """
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
