"""Reads rectangles of tensors from safetensors or from memory, and writes safetensors files.

reading
    names and shapes  ->  compared with the model's parameters, all differences in one message
    rectangle         ->  read directly into the shard; no rank ever holds a full tensor

writing: files of bounded size, byte for byte as from safetensors' own writer. That writer needs all
tensors of a file in memory; this one needs one at a time

    8 bytes   length of the header, little-endian
    header    JSON: name -> dtype, shape, first and last byte; padded with spaces to 8 bytes
    data      the tensors, C order, without gaps, by name
"""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from torch import Tensor

from memguard.errors import ModelError, list_first
from memguard.hf.checkpoint_files import NUM_SHOWN, RECOMPUTED, cut, read_headers, shorten
from memguard.parallel.layout import ShardSlice

_BLOCK_ROWS = 1024
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
"""Dtypes by their names in safetensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """How the tensors of a checkpoint became those of a model's modules."""

    names: Mapping[str, tuple[str, ...]]
    """Stored names of the tensors that each tensor of the model is made of."""
    conversions: tuple[Any, ...]
    """transformers' rules that changed a name or a layout, in order."""

    def describe(self, name: str) -> str:
        """Return a tensor's name, and the stored names if they differ."""
        stored = self.names.get(name, (name,))
        return cut(name) if stored == (name,) else f"{cut(name)} (stored as {shorten(stored)})"


class WeightSource(Protocol):
    """A source of weights."""

    @property
    def origin(self) -> Origin | None:
        """How a checkpoint stores the tensors; None if they have their names and layouts."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and full shape of every tensor."""
        ...

    def read(self, name: str, rectangle: ShardSlice) -> Tensor:
        """Return a rectangle of a tensor, on the CPU, in the dtype it is stored in."""
        ...


class ModuleWeights:
    """The weights and persistent buffers of a module in memory, for models with random weights."""

    def __init__(self, model: Any) -> None:
        self._tensors: dict[str, Tensor] = model.state_dict()
        self.origin = None
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, rectangle: ShardSlice) -> Tensor:
        """Return a rectangle of a tensor."""
        piece: Tensor = self._tensors[name].detach()[rectangle.slices]
        return piece


class FolderWeights:
    """The safetensors files of a Hugging Face folder; their tensors have their own names."""

    def __init__(self, folder: Path) -> None:
        """Read the headers; see `read_headers` for the errors."""
        self._folder = folder
        self._file_of: dict[str, Path] = {}
        self.origin = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._open: tuple[Path, Any] | None = None
        for path, tensors in read_headers(folder, name=str(folder)):
            for name, stored in tensors.items():
                self._file_of[name] = path
                self.shapes[name] = stored.shape

    def read(self, name: str, rectangle: ShardSlice) -> Tensor:
        """Return a rectangle of a tensor; only its bytes are read."""
        path = self._file_of[name]
        if self._open is None or self._open[0] != path:
            # Tensors are read file by file; one file stays open, memory-mapped.
            self._open = (path, safe_open(path, framework="pt"))
        content = self._open[1].get_slice(name)
        piece: Tensor = content[rectangle.slices] if rectangle.shape else content[...]
        return piece


def match_names(
    wanted: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, str],
    source: WeightSource,
    *,
    model: str,
) -> tuple[dict[str, str], list[str]]:
    """Find the name in a source of each parameter and persistent buffer.

    ``wanted`` has the shapes of the model's tensors, tied ones once; ``aliases`` the other names of
    tied parameters -> the name in ``wanted``; ``model`` is a path or id, for messages.

    Returns:
        Name in the source of each tensor of the model, and the names that the model does not use.

    Raises:
        ModelError: tensors are missing or have other shapes; the message lists all of them.
    """
    found, origin = source.shapes, source.origin
    other_names: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        other_names.setdefault(name, []).append(alias)
    stored: dict[str, str] = {}
    used: set[str | None] = {*aliases}
    wrong = []
    for name, shape in wanted.items():
        names = [name, *other_names.get(name, ())]
        stored_name = next((candidate for candidate in names if candidate in found), None)
        used.add(stored_name)
        if stored_name is None:
            wrong.append(f"missing {cut(name)}")
        elif found[stored_name] != shape:
            shown = cut(name) if origin is None else origin.describe(stored_name)
            wrong.append(f"{shown} {list(found[stored_name])} instead of {list(shape)}")
        else:
            stored[name] = stored_name
    unexpected = sorted(
        name for name in found if name not in used and not name.endswith(RECOMPUTED)
    )
    if wrong:
        refuse_weights(model, [*wrong, *(f"unexpected {cut(n)}" for n in unexpected)], len(wrong))
    return stored, unexpected


def refuse_weights(model: str, table: list[str], num_wrong: int) -> None:
    """Raise ModelError for weights that do not match the model, of which a number would be random.

    The table describes missing, mismatched and unexpected weights, with `cut` names.
    """
    raise ModelError(
        f"model '{model}': {num_wrong} weights are missing from its files or do not match its "
        f"configuration ({list_first(table, NUM_SHOWN)}); they would be random. Is it a causal "
        "language model, and is the copy complete?"
    )


def warn_unexpected(model: str, names: Sequence[str]) -> None:
    """Warn about stored weights that are not read; the model is complete without them."""
    if names:
        warnings.warn(
            f"model '{model}': {len(names)} weights in its files are not part of the model that "
            f"its configuration describes and are not read ({shorten(names)})",
            stacklevel=3,
        )


def stores_different(source: WeightSource, one: str, other: str) -> bool:
    """Return whether both tensors are stored, with the same shape and different values.

    They are read in blocks of rows, so that no rank holds a full tensor.
    """
    shape = source.shapes.get(one)
    if shape is None or source.shapes.get(other) != shape:
        return False
    for row in range(0, shape[0], _BLOCK_ROWS):
        block = ShardSlice(
            start=(row, *(0 for _ in shape[1:])),
            shape=(min(_BLOCK_ROWS, shape[0] - row), *shape[1:]),
        )
        if not torch.equal(source.read(one, block), source.read(other, block)):
            return True
    return False


def copy_rectangle(source: WeightSource, name: str, rectangle: ShardSlice, target: Tensor) -> None:
    """Read a rectangle into ``target``, which has its shape, and cast to its dtype."""
    assert tuple(target.shape) == rectangle.shape, f"{name} has the shape of its rectangle"
    if rectangle.num_elements:
        with torch.no_grad():
            piece = source.read(name, rectangle)
            if piece.itemsize < target.itemsize:  # A copy to another device casts before it.
                piece = piece.to(target.device)
            target.copy_(piece)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Name, shape and dtype of a tensor to be stored."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the data (bytes)."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsFile:
    """One weights file of a folder."""

    name: str
    tensors: tuple[StoredTensor, ...]
    """The tensors in the order in which they are stored."""


def plan_files(tensors: Sequence[StoredTensor], max_file_bytes: int) -> list[WeightsFile]:
    """Distribute tensors over files, with the names and contents that `save_pretrained` chooses.

    A tensor larger than ``max_file_bytes`` gets its own file.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    return [
        WeightsFile(
            name=name,
            # Wide dtypes come first, which keeps every tensor aligned to its dtype.
            tensors=tuple(
                sorted(
                    (by_name[tensor_name] for tensor_name in names),
                    key=lambda tensor: (-tensor.dtype.itemsize, tensor.name),
                )
            ),
        )
        for name, names in split.filename_to_tensors.items()
    ]


def build_index(files: Sequence[WeightsFile], *, num_parameters: int) -> dict[str, Any]:
    """Return the content of `model.safetensors.index.json`."""
    num_bytes = sum(tensor.num_bytes for file in files for tensor in file.tensors)
    return {
        "metadata": {"total_parameters": num_parameters, "total_size": num_bytes},
        "weight_map": {tensor.name: file.name for file in files for tensor in file.tensors},
    }


class FileWriter:
    """Writes one planned file, tensor by tensor; on a normal exit the file is flushed to disk.

    The tensors may be written in any order: each has its place.
    """

    def __init__(self, folder: Path, file: WeightsFile) -> None:
        """Create the file and write its header; raises OSError."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._left: dict[str, tuple[int, StoredTensor]] = {}
        first = 0
        for tensor in file.tensors:
            self._left[tensor.name] = (first, tensor)
            last = first + tensor.num_bytes
            entries[tensor.name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [first, last],
            }
            first = last
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        self._data_start = len(header)
        self._content = (folder / file.name).open("wb")
        try:
            self._content.write(header)
        except BaseException:
            self._content.close()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of the plan; it must be on the CPU."""
        first, planned = self._left.pop(name)
        assert (tensor.shape, tensor.dtype) == (planned.shape, planned.dtype), name
        if self._content.tell() != self._data_start + first:
            self._content.seek(self._data_start + first)
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._content.write(raw.numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        with self._content:
            if error is None:
                assert not self._left, "every planned tensor was written"
                self._content.flush()
                # Some file systems report a full disk only here.
                os.fsync(self._content.fileno())
