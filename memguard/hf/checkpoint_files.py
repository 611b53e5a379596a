"""Checks a checkpoint's folder by its file names, index and headers, in a second, without torch.

This module selects the files to read, for one process, for a mesh and for the model's hash:
`model.safetensors` if it exists, otherwise the files in the index, as in transformers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from memguard.errors import ModelError, list_first
from memguard.hf.config_fields import check_fields

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
GENERATION = "generation_config.json"
# Buffers that are recomputed from the configuration; older checkpoints still store them.
RECOMPUTED = (
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".position_ids",
)
NUM_SHOWN = 8
ADAPTER_CONFIG = "adapter_config.json"
SEPARATE_ADAPTER = (
    "Move adapter_config.json and adapter_model.safetensors to a folder of their own, and give that"
)
"""How an adapter in a folder with other weights can be used."""
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
_BUFFER_DTYPES = ("BOOL", "U8", "I32", "I64")
# The largest published files are less than a tenth of this; parsing takes at most seconds.
_MAX_JSON_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


@dataclass(frozen=True, slots=True)
class StoredShape:
    """A tensor as a file's header describes it."""

    dtype: str
    """Name in safetensors, such as ``BF16``."""
    shape: tuple[int, ...]


def is_missing(path: str) -> bool:
    """Return whether ``path`` is a local path that does not exist; False for a possible hub id."""
    looks_local = path.count("/") > 1 or path.startswith((".", "/", "~"))
    return looks_local and not Path(path).exists()


def check_folder(path: str) -> None:
    """Refuse a folder that has no checkpoint, or one that would be read incorrectly.

    A possible hub id is accepted.

    Raises:
        ModelError: there is no such folder; its configuration or its safetensors are missing or
            invalid; it has an adapter, quantised weights or files outside the folder.
    """
    folder = Path(path)
    if is_missing(path):
        raise ModelError(f"there is no folder '{path}'; correct the path of the model")
    if folder.exists():
        check_config(folder, name=path)
        check_weights(folder, name=path)


def check_config(folder: Path, *, name: str) -> None:
    """Check everything that can be checked before the weights are downloaded.

    ``folder`` may have the part that is downloaded so far; ``name`` is for messages.

    Raises:
        ModelError: the folder has an adapter, no configuration or an invalid one.
    """
    rule = ""
    if (folder / ADAPTER_CONFIG).is_file():
        rule = (
            f"must not have {ADAPTER_CONFIG} here: an adapter (peft) is read only from a local "
            f"folder without other weights. {SEPARATE_ADAPTER}"
        )
    elif folder.exists() and not folder.is_dir():
        rule = f"must be a folder with {CONFIG}; it is a file"
    elif not (folder / CONFIG).is_file():
        rule = f"has no {CONFIG}{point_to_adapter(folder)}"
    if rule:
        raise ModelError(f"model '{name}' {rule}")
    check_fields(read_fields(folder / CONFIG, name=name), place=f"model '{name}': {CONFIG}")
    if (folder / GENERATION).is_file():
        # transformers would do without a damaged one, and the export would not have its settings.
        read_fields(folder / GENERATION, name=name)


def point_to_adapter(folder: Path) -> str:
    """Return a clause on the sub-folder with an adapter that peft saved in it, "" if none."""
    try:
        inside = sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
    except OSError:
        return ""
    return f"; its folder {quote(inside[0])} has an adapter: give that folder" if inside else ""


def check_weights(folder: Path, *, name: str) -> None:
    """Refuse weights that are missing, outside the folder or quantised; see `read_headers`."""
    for _ in read_headers(folder, name=name):
        pass


def list_weight_files(folder: Path, *, name: str) -> list[str]:
    """Return the names of the files to read, in order; other files may have the same weights.

    Raises:
        ModelError: there are no weights, the index is invalid, or a file is missing or outside
            the folder.
    """
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if not (folder / INDEX).is_file():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        why = "only pickled ones, which are never read" if pickled else "none at all"
        if any(folder.glob("*.safetensors")):
            why = f"no {SINGLE} and no {INDEX}"
        raise ModelError(
            f"model '{name}' must store its weights as safetensors; it has {why}. Convert it "
            "with save_pretrained in an environment you trust."
        )
    names = list_indexed(folder, name=name)
    if missing := [file_name for file_name in names if not (folder / file_name).is_file()]:
        raise ModelError(
            f"model '{name}' cannot be loaded: it lacks {shorten(missing)}. Is the copy complete?"
        )
    return names


def list_indexed(folder: Path, *, name: str) -> list[str]:
    """Return the file names in the index of a folder, whether or not the files exist.

    Raises:
        ModelError: the index is invalid, or names a file that may not be read.
    """
    index = read_json(folder / INDEX, name=name)
    try:
        named = set(index["weight_map"].values())
        outside = [quote(file_name) for file_name in named if not _is_inside(file_name)]
        if not outside and isinstance(index.get("metadata"), dict):
            return sorted(named)
        wrong = "lacks 'metadata', which transformers needs: add \"metadata\": {} to it"
        if outside:
            wrong = f"names {outside[0]}; it must name safetensors files inside the model's folder"
    except (KeyError, TypeError, AttributeError):
        wrong = "is not an index of weights"
    raise ModelError(f"model '{name}' cannot be loaded: {INDEX} {wrong}")


def _is_inside(name: Any) -> bool:
    """Return whether a name refers to a safetensors file inside the folder.

    Symbolic links are accepted, as the hub's cache consists of them; their targets are hashed.
    """
    if not isinstance(name, str) or not name.endswith(".safetensors") or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name


def read_headers(folder: Path, *, name: str) -> Iterator[tuple[Path, Mapping[str, StoredShape]]]:
    """Yield each file to read and the tensors in it.

    Raises:
        ModelError: as `list_weight_files`; or a file is damaged, or a parameter is quantised.
    """
    for file_name in list_weight_files(folder, name=name):
        path = folder / file_name
        tensors = read_header(path, name=name)
        for key, stored in tensors.items():
            if not _may_be_read(key, stored.dtype):
                raise ModelError(
                    f"model '{name}' cannot be loaded: {quote(key)} is stored as "
                    f"{quote(stored.dtype)}; weights must be F64, F32, F16 or BF16, and quantised "
                    "ones are not supported: convert them to bfloat16 first"
                )
        yield path, tensors


def _may_be_read(name: str, dtype: str) -> bool:
    """Return whether a tensor may be read: it has plain weights or is a buffer, not quantised."""
    if dtype in PLAIN_DTYPES:
        return True
    if dtype in _BUFFER_DTYPES and name.endswith(RECOMPUTED):
        return True
    # Some families store tables and counters. No quantised format uses such names and dtypes.
    return dtype in ("I64", "BOOL") and name.rpartition(".")[2] not in ("weight", "bias")


def read_header(path: Path, *, name: str) -> dict[str, StoredShape]:
    """Return the tensors of a safetensors file of a model.

    Raises:
        ModelError: the file cannot be read, or is not a complete safetensors file.
    """
    try:
        header, num_data_bytes = _load_header(path)
        tensors, end = {}, 0
        try:
            for key, entry in header.items():
                if key == "__metadata__":
                    continue
                tensors[key] = StoredShape(str(entry["dtype"]), tuple(map(int, entry["shape"])))
                end = max(end, int(entry["data_offsets"][1]))
        except (AttributeError, KeyError, IndexError, TypeError):
            raise ValueError("its header does not describe tensors") from None
        if end == num_data_bytes:
            return tensors
        described = f"its header describes {end:,} bytes of tensors"
        raise ValueError(f"{described}, and it has {num_data_bytes:,}")
    except OSError as error:
        wrong = f"cannot be read: {error.strerror}"
    except (ValueError, OverflowError, RecursionError) as error:
        wrong = f"is not a complete safetensors file ({error})"
    raise ModelError(f"model '{name}' cannot be loaded: {path.name} {wrong}")


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the texts that a file stores beside its tensors; raises OSError or ValueError."""
    header, _ = _load_header(path)
    stored = header.get("__metadata__") if isinstance(header, dict) else None
    return stored if isinstance(stored, dict) else {}


def _load_header(path: Path) -> tuple[Any, int]:
    """Return the header of a safetensors file, and the bytes that follow it."""
    with path.open("rb") as file:
        file_bytes = file.seek(0, 2)
        file.seek(0)
        header_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise ValueError("its header length is invalid")
        try:
            return json.loads(file.read(header_bytes)), file_bytes - 8 - header_bytes
        except ValueError:
            raise ValueError("its header is not JSON") from None


def read_fields(path: Path, *, name: str, most_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the fields of a JSON file of a model; see `read_json`."""
    fields = read_json(path, name=name, most_bytes=most_bytes)
    if not isinstance(fields, dict):
        raise ModelError(f"model '{name}': {path.name} must be a JSON object")
    return fields


def read_json(path: Path, *, name: str, most_bytes: int = _MAX_JSON_BYTES) -> Any:
    """Return the content of a JSON file of a model.

    Raises:
        ModelError: the file is too large, not JSON, or nested too deeply; or the file system has an
            error.
        PermissionError: this user may not read it.
    """
    try:
        size = path.stat().st_size
        if size <= most_bytes:
            return json.loads(path.read_bytes())
        wrong = f"must be at most {most_bytes >> 20} MiB; it has {size >> 20}"
    except PermissionError:
        raise
    except OSError as error:
        wrong = f"cannot be read: {error.strerror}"
    except ValueError:
        wrong = "is not JSON"
    except RecursionError:
        wrong = "is nested too deeply"
    raise ModelError(f"model '{name}': {path.name} {wrong}")


def shorten(names: Sequence[str]) -> str:
    """Return a list of the first names of a file, each cut, and the number of the others."""
    return list_first([cut(name, 200) for name in names], NUM_SHOWN)


def quote(value: Any) -> str:
    """Return a value from a file for a message: quoted, on one line, at most 100 characters."""
    return f"'{cut(value if isinstance(value, str) else json.dumps(value))}'"


def cut(text: str, most: int = 100) -> str:
    """Return a text from a file for a message: on one line, cut after ``most`` characters."""
    text = text.encode("unicode_escape").decode()
    return text if len(text) <= most else f"{text[:most]}..."
