"""Settings as YAML: a commented template for `memguard init`, a plain dump for run folders."""

import inspect
import json
import textwrap
import typing
from collections.abc import Collection, Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from memguard.config.mitigations import GoldfishConfig
from memguard.config.schema import RunConfig
from memguard.config.settings import Settings

# Settings that a user must fill in; all others show their default.
_EXAMPLES: dict[str, Any] = {
    "name": "my-run",
    "model.path": "path/to/checkpoint",
    "data.train": ["documents.jsonl"],
}

_USUAL = (
    *("name", "output_dir", "seed", "model.path", "data.train", "data.format", "data.control"),
    *("data.control_fraction", "data.seq_len", "mitigations", "adapter"),
    *("optim.lr", "train.epochs", "train.max_steps", "train.batch_size"),
    *("train.checkpoint_every_steps", "train.log_every_steps", "audit.suite", "audit.utility"),
)
"""The settings that people change: a template has only these unless all are wanted."""


def dump_yaml(settings: Settings) -> str:
    """Return all settings, defaults included, as YAML that loads back to an equal object."""
    text: str = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, width=100)
    return text


def render_template(*, with_all: bool = False) -> str:
    """Return a run's YAML with a comment above each setting, of the usual ones or of all."""
    head = (
        "# A memguard run. Fill in 'model.path' and 'data.train'; all other settings may stay.\n"
        "# Lines that are commented out show the default.\n"
        "# memguard train THIS.yaml [key=value ...]; every run leaves a model and an audit.\n"
    )
    if not with_all:
        head += "# memguard init --all writes every setting.\n"
    return head + "\n".join(_render_block(RunConfig, "", 0, None if with_all else _USUAL)) + "\n"


def _render_block(
    model: type[BaseModel], prefix: str, indent: int, shown: Collection[str] | None
) -> Iterator[str]:
    """Yield the lines of a block; ``shown``: the settings that are written, None for all."""
    pad = " " * indent
    for key, info in model.model_fields.items():
        dotted = prefix + key
        block = info.annotation
        if shown is not None and not any(f"{name}.".startswith(f"{dotted}.") for name in shown):
            continue
        if isinstance(block, type) and issubclass(block, BaseModel):
            yield ""
            yield from _comment(block.__doc__ or "", indent)
            yield f"{pad}{key}:"
            yield from _render_block(block, dotted + ".", indent + 2, shown)
        elif dotted == "mitigations":
            yield ""
            yield from _comment(info.description or "", indent)
            yield "mitigations:"
            example = GoldfishConfig(name="goldfish").model_dump(
                include={"name", "k"} if shown else None
            )
            for number, (name, value) in enumerate(example.items()):
                yield from _comment(GoldfishConfig.model_fields[name].description or "", 4)
                yield f"  {' ' if number else '-'} {name}: {json.dumps(value)}"
        else:
            yield from _comment(info.description or "", indent)
            given = dotted in _EXAMPLES
            value = _EXAMPLES[dotted] if given else info.get_default()
            yield f"{pad}{'' if given else '# '}{key}: {json.dumps(value)}"
            if value is None and shown is None:
                yield from _render_optional(block, indent)


def _render_optional(annotation: Any, indent: int) -> Iterator[str]:
    """Yield the keys of a block that is left out by default, all of them as comments."""
    blocks = [member for member in typing.get_args(annotation) if inspect.isclass(member)]
    for block in blocks:
        if issubclass(block, BaseModel):
            for key, info in block.model_fields.items():
                for line in _comment(info.description or "", 0):
                    yield f"{' ' * indent}#   {line}"
                value = "" if info.is_required() else f" {json.dumps(info.get_default())}"
                yield f"{' ' * indent}#   {key}:{value}"


def _comment(text: str, indent: int) -> Iterator[str]:
    """Yield the paragraphs of a docstring or description as YAML comments."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        for line in textwrap.wrap(paragraph, 96 - indent, break_on_hyphens=False):
            yield f"{' ' * indent}# {line}"
