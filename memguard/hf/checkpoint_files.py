"""What a checkpoint's folder holds, from its names, index and headers. No torch: told in a second.

Which files are read is decided here once, for one process, for a mesh and for the model's hash:
`model.safetensors` if it is there, else the files that the index names, as transformers does.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from memguard.errors import ModelError
from memguard.hf.config_fields import check_fields

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
# Recomputed from the configuration; older checkpoints store them nevertheless.
RECOMPUTED = (
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".position_ids",
)
_NUM_SHOWN = 8
_ADAPTER = "adapter_config.json"
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
_BUFFER_DTYPES = ("BOOL", "U8", "I32", "I64")
# The largest published ones have less than a tenth of it; parsing them takes no more than seconds.
_MAX_JSON_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


@dataclass(frozen=True, slots=True)
class StoredShape:
    """A tensor as a file's header describes it."""

    dtype: str
    """As safetensors writes it: ``BF16``."""
    shape: tuple[int, ...]


def is_missing(path: str) -> bool:
    """Tell whether ``path`` names a folder that is not there; what may be a hub id passes."""
    looks_local = path.count("/") > 1 or path.startswith((".", "/", "~"))
    return looks_local and not Path(path).exists()


def check_folder(path: str) -> None:
    """Refuse a folder that holds no checkpoint, or one that is not read as it is meant.

    What may be a hub id passes.

    Raises:
        ModelError: no such folder; no configuration or one that describes no model; no safetensors,
            files outside the folder, quantised weights; an adapter.
    """
    folder = Path(path)
    if not folder.exists():
        if is_missing(path):
            raise ModelError(f"there is no folder '{path}'; correct the path of the model")
        return
    if not folder.is_dir():
        raise ModelError(f"model '{path}' must be a folder with config.json; it is a file")
    check_config(folder, name=path)
    check_weights(folder, name=path)


def check_config(folder: Path, *, name: str) -> None:
    """Refuse what is known to be wrong before any weights are there.

    Args:
        folder: the checkpoint's, or the part of it that was got from the hub.
        name: path or hub id, for messages.

    Raises:
        ModelError: an adapter, no configuration, or one that describes no model.
    """
    if (folder / _ADAPTER).is_file():
        raise ModelError(
            f"model '{name}' has {_ADAPTER}: adapters (peft) are not read. Merge it into its base "
            "model (merge_and_unload, save_pretrained) and name that folder; or take the adapter's "
            "files out of this one"
        )
    if not (folder / CONFIG).is_file():
        raise ModelError(f"model '{name}' has no {CONFIG}")
    fields = _read_json(folder / CONFIG, name=name)
    if not isinstance(fields, dict):
        raise ModelError(f"model '{name}': {CONFIG} must hold settings by name; it does not")
    check_fields(fields, place=f"model '{name}': {CONFIG}")


def check_weights(folder: Path, *, name: str) -> None:
    """Refuse weights that are not there, lie outside the folder or are quantised.

    Args:
        folder: the checkpoint's.
        name: path or hub id, for messages.

    Raises:
        ModelError: the first of these.
    """
    if not any(folder.glob("*.safetensors")) and not (folder / INDEX).is_file():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        why = "only pickled ones, which are never read" if pickled else "none at all"
        raise ModelError(
            f"model '{name}' must hold its weights as safetensors; it has {why}. Convert it "
            "with save_pretrained in an environment you trust."
        )
    for _ in read_headers(folder, name=name):
        pass


def list_weight_files(folder: Path, *, name: str) -> list[str]:
    """Return the names of the files that are read, in order; others may hold the same weights.

    Args:
        folder: the checkpoint's.
        name: path or hub id, for messages.

    Raises:
        ModelError: no weights, no index of weights, or a file that is missing or outside.
    """
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if not (folder / INDEX).is_file():
        raise ModelError(f"model '{name}' cannot be loaded: it has no {SINGLE} and no {INDEX}")
    names = list_indexed(folder, name=name)
    if missing := [each for each in names if not (folder / each).is_file()]:
        raise ModelError(
            f"model '{name}' cannot be loaded: it lacks {shorten(missing)}. Was it wholly copied?"
        )
    return names


def list_indexed(folder: Path, *, name: str) -> list[str]:
    """Return the names that the index of a folder gives, whether the files are there or not.

    Raises:
        ModelError: it is no index, or names a file that is not read from this folder.
    """
    try:
        named = set(_read_json(folder / INDEX, name=name)["weight_map"].values())
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"model '{name}' cannot be loaded: {INDEX} is not an index of weights"
        ) from error
    for each in named:
        if not _is_inside(each):
            raise ModelError(
                f"model '{name}' cannot be loaded: {INDEX} names {_cut(each)}; it must name "
                "safetensors files inside the model's folder"
            )
    return sorted(named)


def _is_inside(name: Any) -> bool:
    """Tell whether a name leads to a safetensors file without leaving the folder.

    Links pass, as the hub's cache consists of them: what they lead to is hashed.
    """
    if not isinstance(name, str) or not name.endswith(".safetensors") or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name


def read_headers(folder: Path, *, name: str) -> Iterator[tuple[Path, Mapping[str, StoredShape]]]:
    """Yield each file that is read and the tensors in it.

    Args:
        folder: the checkpoint's.
        name: path or hub id, for messages.

    Raises:
        ModelError: as `list_weight_files`; a file is damaged, or a parameter is quantised.
    """
    for each in list_weight_files(folder, name=name):
        path = folder / each
        try:
            tensors = _read_header(path)
        except (ValueError, OSError, RecursionError) as error:
            raise ModelError(
                f"model '{name}' cannot be loaded: {each} is not a whole safetensors file ({error})"
            ) from error
        for key, stored in tensors.items():
            if not _may_be_read(key, stored.dtype):
                raise ModelError(
                    f"model '{name}' cannot be loaded: {_cut(key)} is stored as "
                    f"{_cut(stored.dtype)}; weights must be F64, F32, F16 or BF16, and quantised "
                    "ones are not read: convert them to bfloat16 first"
                )
        yield path, tensors


def _may_be_read(name: str, dtype: str) -> bool:
    """Tell numbers that are the weights themselves, or no weights, from those that need scales."""
    if dtype in _PLAIN_DTYPES:
        return True
    if dtype in _BUFFER_DTYPES and name.endswith(RECOMPUTED):
        return True
    # Tables and counters of some families. No format packs weights into them.
    return dtype in ("I64", "BOOL") and name.rpartition(".")[2] not in ("weight", "bias")


def _read_header(path: Path) -> dict[str, StoredShape]:
    """Return the tensors of a safetensors file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none, or not whole.
    """
    with path.open("rb") as file:
        file_bytes = file.seek(0, 2)
        file.seek(0)
        header_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise ValueError("it has no header of that length")
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError:
            raise ValueError("its header is not JSON") from None
    tensors, end = {}, 0
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            tensors[name] = StoredShape(str(entry["dtype"]), tuple(map(int, entry["shape"])))
            end = max(end, int(entry["data_offsets"][1]))
    except (AttributeError, KeyError, IndexError, TypeError):
        raise ValueError("its header does not describe tensors") from None
    if end != file_bytes - 8 - header_bytes:
        raise ValueError(
            f"its header describes {end:,} bytes of tensors, and it has "
            f"{file_bytes - 8 - header_bytes:,}"
        )
    return tensors


def _read_json(path: Path, *, name: str) -> Any:
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ModelError(
            f"model '{name}': {path.name} must be at most {_MAX_JSON_BYTES >> 20} MiB; it has "
            f"{path.stat().st_size >> 20}"
        )
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        why = "is not JSON" if isinstance(error, ValueError) else "is nested too deeply"
        raise ModelError(f"model '{name}': {path.name} {why}") from error


def shorten(names: Sequence[str]) -> str:
    """Write the first of many names."""
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return f"{', '.join(names[:_NUM_SHOWN])}{more}"


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = text.encode("unicode_escape").decode()
    return f"'{text}'" if len(text) <= 100 else f"'{text[:100]}...'"
