"""Which files of a model go to the hub, and what in them and in the card names this machine.

    is_allowed    weights, configuration, tokenizer; a file with another name stays here
    clean_file    JSON without fields that name places; a local base becomes none, or its hub id
    list_places   texts that must not go out: paths and names of the files of the run's settings

Only what certainly is an id of the hub is named as one: a model or dataset that was downloaded from
there to this machine, or one that the user names. No torch.
"""

import json
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from memguard.config import RunConfig
from memguard.errors import ConfigError, ModelError
from memguard.hf.adapter_files import ADAPTER_WEIGHTS
from memguard.hf.checkpoint_files import ADAPTER_CONFIG, CONFIG, INDEX, SINGLE, quote, read_json
from memguard.pages.formatting import is_hub_id

_FIELDS = (
    *(CONFIG, ADAPTER_CONFIG, "generation_config.json", "tokenizer_config.json"),
    "special_tokens_map.json",
)
"""Small JSON files, whose fields are looked at."""
_ALLOWED = frozenset(
    {
        *_FIELDS,
        *(SINGLE, INDEX, ADAPTER_WEIGHTS, "chat_template.jinja", "chat_template.json"),
        *("tokenizer.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
        *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    }
)
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_OF_THIS_MACHINE = frozenset(
    ("_name_or_path", "name_or_path", "tokenizer_file", "local_files_only", "is_local")
)
"""Fields that say where a model or tokenizer was read from; loading does not need them."""
_SHORTEST = 6
"""Shorter texts occur anywhere (characters)."""
_LICENSE, _LINK = re.compile(r"[a-z0-9][a-z0-9.-]{0,40}"), re.compile(r"https://[\w./-]{1,200}")
_MOST_CARD_BYTES = 1 << 20


def is_allowed(name: str) -> bool:
    """Return whether a file of a model's folder may be sent.

    Args:
        name: of the file.
    """
    return name in _ALLOWED or _SHARD.fullmatch(name) is not None


def clean_file(path: Path, *, base: str | None, places: Collection[str]) -> bytes | None:
    """Return what is sent instead of a file; None sends the file itself.

    Args:
        path: of a file that may be sent.
        base: hub id of the base model; None if it is not named.
        places: from `list_places`.

    Raises:
        ModelError: a place of this machine is in it, where leaving it out may change the model.
    """
    if path.suffix == ".safetensors":
        return None
    content = path.read_bytes()
    if path.name in _FIELDS:
        fields = read_json(path, name=str(path.parent))
        cleaned = _drop(fields)
        if path.name == ADAPTER_CONFIG:
            cleaned["base_model_name_or_path"] = base
            cleaned["revision"] = cleaned.get("revision") if base else None
        for at, text in _list_texts(cleaned):
            if any(place in text for place in places) or _is_local_path(text):
                raise ModelError(
                    f"'{path}' names {quote(text)} in '{at}', a place of this machine: nothing is "
                    "sent. Only a model without it can be exported to the hub"
                )
        if cleaned == fields:
            return None
        return (json.dumps(cleaned, indent=2, ensure_ascii=False) + "\n").encode()
    # A vocabulary may have short paths as words of its own.
    for place in places:
        if place.startswith("/") and place.encode() in content:
            raise ModelError(
                f"'{path}' has {quote(place)}, a place of this machine: nothing is sent. Only a "
                "model without it can be exported to the hub"
            )
    return None


def _drop(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop(item) for key, item in value.items() if key not in _OF_THIS_MACHINE}
    return [_drop(item) for item in value] if isinstance(value, list) else value


def _list_texts(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in a JSON value, keys included, with its place."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield at or key, key
            yield from _list_texts(item, f"{at}.{key}" if at else key)
    elif isinstance(value, list):
        for item in value:
            yield from _list_texts(item, at)
    elif isinstance(value, str):
        yield at, value


def _is_local_path(text: str) -> bool:
    """Return whether a text is an absolute path that exists here, and no token like ``/root``."""
    try:
        return text.startswith("/") and text.count("/") > 1 and os.path.exists(text)
    except (OSError, ValueError):
        return False


def list_places(folder: Path, config: RunConfig, published: Collection[str]) -> frozenset[str]:
    """Return texts that must not go out: paths and names of files in the settings of a run.

    Args:
        folder: of the run.
        config: of the run.
        published: hub ids that the card names.
    """
    scratch, audit = config.model.scratch, config.audit
    sources = [source for given in config.data.list_sources().values() for source in given]
    files = [*sources, audit.suite, config.data.identity_key, *(t.task for t in audit.utility)]
    folders = [
        *(config.model.path, None if scratch is None else scratch.tokenizer, audit.reference),
        *(config.output_dir, *map(str, (folder, folder.resolve(), Path.cwd(), Path.home()))),
    ]
    places: set[str] = set()
    for text in filter(None, (*files, *folders)):
        if text in published or re.split("[:@]", text)[0] in published:
            continue
        places |= {place for place in (text, str(Path(text).absolute())) if "/" in place}
        if text in files and Path(text).suffix:
            places.add(Path(text).name)
    return frozenset(place for place in places if len(place) >= _SHORTEST)


def find_base_id(given: str | None, config: RunConfig) -> str | None:
    """Return the hub id of the model that a run started from; None if that is not certain.

    Args:
        given: by the user; a folder names none.
        config: of the run.

    Raises:
        ConfigError: what the user gave is neither a folder nor a hub id.
    """
    # Imports the hub's client.
    from memguard.hf.hub_upload import is_in_hub_cache

    if given is not None and not Path(given).exists():
        if not is_hub_id(given):
            raise ConfigError(f"'--base' must be a folder or a hub id; got {quote(given)}")
        return given
    path = config.model.path
    is_certain = path is not None and is_hub_id(path) and not Path(path).exists()
    return path if path is not None and is_certain and is_in_hub_cache(path) else None


def find_datasets(config: RunConfig) -> tuple[str, ...]:
    """Return the hub ids of the trained documents, without configuration and revision.

    Args:
        config: of the run.
    """
    from memguard.hf.hub_upload import is_in_hub_cache

    ids = dict.fromkeys(
        re.split("[:@]", source)[0] for source in config.data.train if not Path(source).exists()
    )
    return tuple(name for name in ids if is_hub_id(name) and is_in_hub_cache(name, "dataset"))


def read_license(base: str | None, config: RunConfig) -> dict[str, str]:
    """Return the entries on the license in the card of the base model; none if it is not known.

    Args:
        base: hub id of the base model, whose card may be in the local cache.
        config: of the run, which names the folder of a local one.
    """
    from memguard.hf.hub_upload import find_cached

    path = config.model.path
    card = Path(path) / "README.md" if path is not None else None
    if (card is None or not card.is_file()) and base is not None:
        card = find_cached(base, "README.md")
    if card is None or not card.is_file() or card.stat().st_size > _MOST_CARD_BYTES:
        return {}
    text = card.read_text(encoding="utf-8", errors="replace")
    header = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    try:
        entries = yaml.safe_load(header[1]) if header else None
    except (yaml.YAMLError, RecursionError):
        return {}
    if not isinstance(entries, dict):
        return {}
    rules = {"license": _LICENSE, "license_name": _LICENSE, "license_link": _LINK}
    found = {name: str(entries[name]) for name, rule in rules.items() if _fits(entries, name, rule)}
    return found if "license" in found else {}


def _fits(entries: dict[str, Any], name: str, rule: re.Pattern[str]) -> bool:
    value = entries.get(name)
    return isinstance(value, str) and rule.fullmatch(value) is not None
