"""Writes all of an export but the weights, before the first step, to a folder that is deleted.

generation settings   transformers refuses to save some that it reads: see `_REPAIRS`
configuration         written and read, as is the tokenizer; of adapters peft's configuration
stored tensors        of a mesh: their names and shapes in the files (`StoredForm`)
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from memguard.errors import ModelError
from memguard.hf.adapter_export import write_adapter
from memguard.hf.checkpoint import explained, say_in_one_line
from memguard.hf.export import find_stored_form, write_surroundings

_FAILS = "the model could not be exported after training, because of its {}"
_REPAIRS = {"do_sample": True, "early_stopping": None, "length_penalty": None, "pad_token_id": None}
"""Values of generation settings, tried in this order. Published files have sampling values such as
`temperature` without `do_sample`, and values for beams without beams."""


def repair_generation(model: Any) -> str | None:
    """Change generation settings that transformers refuses to save; return a sentence about it.

    None: nothing was changed.

    Raises:
        ModelError: they cannot be repaired.
    """
    if not model.can_generate() or (first := _find_problem(model.generation_config)) is None:
        return None
    problem, changed = first, []
    for name, value in _REPAIRS.items():
        tried = copy.deepcopy(model.generation_config)
        setattr(tried, name, value)
        now = _find_problem(tried)
        if now == problem:
            continue
        model.generation_config, problem = tried, now or ""
        changed.append(f"{name} to {'null' if value is None else 'true'}")
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
    """Write what `export_model` or `export_stored` would; return what `repair_generation` does.

    Raises:
        ModelError: the export would fail; names the part.
    """
    repaired = repair_generation(model)
    with tempfile.TemporaryDirectory() as folder:
        if is_sharded:
            with explained(_FAILS.format("weights")):
                find_stored_form(model, dtype=dtype)
        with explained(_FAILS.format("configuration or tokenizer")):
            write_surroundings(model, tokenizer, Path(folder), dtype=dtype, card="")
            transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return repaired


def rehearse_adapter(make_config: Callable[[], dict[str, Any]], tokenizer: Any) -> None:
    """Write what `write_adapter` would, without the adapters; see `rehearse_export`."""
    with tempfile.TemporaryDirectory() as name, explained(_FAILS.format("adapters or tokenizer")):
        folder = Path(name) / "adapter"
        write_adapter({}, make_config(), tokenizer, folder, card="")
        transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
