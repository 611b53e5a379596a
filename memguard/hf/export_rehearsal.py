"""Writes all of an export but the weights, before the first step, to a folder that is deleted.

    generation settings   transformers refuses to save some that it reads: repaired, see `_REPAIRS`
    configuration         written and read
    tokenizer             written and read
    stored tensors        of a mesh: their names and shapes in the files (`StoredForm`)
    adapters              peft's configuration is written

What fails here would fail after the last step.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from memguard.errors import ModelError
from memguard.hf.adapter_export import write_adapter
from memguard.hf.checkpoint import explained, say_in_one_line
from memguard.hf.export import find_stored_form, write_surroundings

_REPAIRS: tuple[tuple[str, Any], ...] = (
    ("do_sample", True),
    ("early_stopping", None),
    ("length_penalty", None),
    ("pad_token_id", None),
)
"""Fields of the generation settings, in the order in which they are changed. Published files have
sampling values such as `temperature` without `do_sample`, and values for beams without beams."""


def repair_generation(model: Any) -> str | None:
    """Change a model's generation settings so that transformers saves them.

    Returns:
        What was changed, in one sentence; None if nothing had to be.

    Raises:
        ModelError: they cannot be repaired.
    """
    if not model.can_generate() or (problem := _find_problem(model.generation_config)) is None:
        return None
    first, changed = problem, []
    for name, value in _REPAIRS:
        tried = copy.deepcopy(model.generation_config)
        setattr(tried, name, value)
        now = _find_problem(tried)
        if now == problem:
            continue
        model.generation_config, problem = tried, now
        changed.append(f"{name} to {str(value).lower() if value is not None else 'null'}")
        if now is None:
            return (
                "transformers refuses to save the base's generation_config.json: the export sets "
                f"{', '.join(changed)} in it"
            )
    raise ModelError(
        f"the model's generation_config.json cannot be exported: {first}. Correct it, or delete it"
    )


def _find_problem(settings: Any) -> str | None:
    """Return why generation settings cannot be saved; None if they can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            settings.save_pretrained(folder)
        except (ValueError, TypeError, AttributeError) as error:
            return say_in_one_line(error)
    return None


def rehearse_export(
    model: Any, tokenizer: Any, *, dtype: torch.dtype, is_sharded: bool
) -> str | None:
    """Write what `export_model` or `export_sharded` would write, without the weights.

    Returns:
        What was repaired in the model's generation settings, in one sentence.

    Raises:
        ModelError: the export would fail; names the part.
    """
    repaired = repair_generation(model)
    if is_sharded:
        with _tried("weights"):
            find_stored_form(model, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        with _tried("configuration or tokenizer"):
            write_surroundings(model, tokenizer, Path(folder), dtype=dtype, card="")
        with _tried("configuration"):
            transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        _read_tokenizer(folder)
    return repaired


def rehearse_adapter(make_config: Callable[[], dict[str, Any]], tokenizer: Any) -> None:
    """Write what `write_adapter` would write, without the adapters; see `rehearse_export`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "adapter"
        with _tried("adapters or tokenizer"):
            write_adapter({}, make_config(), tokenizer, folder, card="")
        _read_tokenizer(str(folder))


def _read_tokenizer(folder: str) -> None:
    with _tried("tokenizer"):
        transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


@contextmanager
def _tried(part: str) -> Iterator[None]:
    try:
        with explained(f"the model could not be exported after training, because of its {part}"):
            yield
    except ModelError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno is not None:
            raise error.__cause__ from None  # Of the system, such as a full disk.
        raise
