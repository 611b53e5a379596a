"""Rectangles of tensors read from a folder of safetensors or from memory; files written.

reading
    names and shapes  ->  compared with what the model needs, all differences in one table
    rectangle         ->  read straight into the shard; no rank ever holds a full tensor

writing: files of bounded size, byte for byte what safetensors' own writer writes, which needs all
tensors of a file at once; here a writer holds one

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
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from torch import Tensor

from memguard.errors import ModelError
from memguard.hf.checkpoint_files import RECOMPUTED, read_headers, shorten
from memguard.parallel.layout import Rectangle

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


class WeightSource(Protocol):
    """Where weights come from."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and full shape of every tensor."""
        ...

    def read(self, name: str, rectangle: Rectangle) -> Tensor:
        """Return a rectangle of a tensor, on the CPU, in the dtype it is stored in."""
        ...


class ModuleWeights:
    """The weights of a module in memory, for models drawn at random."""

    def __init__(self, model: Any) -> None:
        self._tensors = dict(model.named_parameters(remove_duplicate=False))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and full shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, rectangle: Rectangle) -> Tensor:
        """Return a rectangle of a tensor."""
        piece: Tensor = self._tensors[name].detach()[rectangle.slices]
        return piece


class FolderWeights:
    """The safetensors files of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Raises:
            ModelError: a file is missing or damaged, or weights are quantised.
        """
        self._folder = folder
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open: tuple[Path, Any] | None = None
        for path, tensors in read_headers(folder, name=str(folder)):
            for name, stored in tensors.items():
                self._file_of[name] = path
                self._shapes[name] = stored.shape

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and full shape of every tensor."""
        return self._shapes

    def read(self, name: str, rectangle: Rectangle) -> Tensor:
        """Return a rectangle of a tensor; only its bytes are read."""
        path = self._file_of[name]
        if self._open is None or self._open[0] != path:
            # Tensors come file by file; one stays open, mapped rather than read.
            self._open = (path, safe_open(path, framework="pt"))
        content = self._open[1].get_slice(name)
        piece: Tensor = content[rectangle.slices] if rectangle.shape else content[...]
        return piece


def match_names(
    wanted: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, str],
    found: Mapping[str, tuple[int, ...]],
    *,
    prefix: str,
    model: str,
) -> tuple[dict[str, str], list[str]]:
    """Say under which name each parameter is stored.

    Args:
        wanted: shapes of the model's parameters, tied ones once.
        aliases: other names of tied parameters -> the one in ``wanted``.
        found: shapes of what is stored.
        prefix: of the body (``model``); checkpoints of a body alone are stored without.
        model: for messages.

    Returns:
        Parameter -> stored name, and stored names that nothing wants.

    Raises:
        ModelError: parameters that are missing or have other shapes, as one table.
    """
    other_names: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        other_names.setdefault(name, []).append(alias)
    stored: dict[str, str] = {}
    used: set[str | None] = {*aliases}
    wrong = []
    for name, shape in wanted.items():
        names = [name, name.removeprefix(f"{prefix}."), *other_names.get(name, ())]
        stored_name = next((each for each in names if each in found), None)
        used.add(stored_name)
        if stored_name is None:
            wrong.append(f"missing {name}")
        elif found[stored_name] != shape:
            wrong.append(f"{name} {list(found[stored_name])} instead of {list(shape)}")
        else:
            stored[name] = stored_name
    unexpected = sorted(
        name for name in found if name not in used and not name.endswith(RECOMPUTED)
    )
    if wrong:
        refuse_weights(model, [*wrong, *(f"unexpected {name}" for name in unexpected)], len(wrong))
    return stored, unexpected


def refuse_weights(model: str, table: list[str], num_wrong: int) -> None:
    """Raise the error for weights that do not fit.

    Args:
        model: path or id.
        table: what is missing, has another shape or is not expected.
        num_wrong: how many of the model's weights would be random.

    Raises:
        ModelError: always.
    """
    raise ModelError(
        f"model '{model}': {num_wrong} weights are not in its files as its configuration has them "
        f"({shorten(table)}); they would be random. Is it a causal language model, wholly copied?"
    )


def warn_unexpected(model: str, names: Sequence[str]) -> None:
    """Say which stored weights are not read: the model is complete without them."""
    if names:
        warnings.warn(
            f"model '{model}': {len(names)} weights in its files have no place in the model its "
            f"configuration describes and are not read ({shorten(names)})",
            stacklevel=3,
        )


def stores_different(source: WeightSource, one: str, other: str) -> bool:
    """Whether both tensors are stored, with the same shape and different values.

    Read in blocks of rows: no rank holds a full tensor.
    """
    shape = source.shapes.get(one)
    if shape is None or source.shapes.get(other) != shape:
        return False
    for row in range(0, shape[0], _BLOCK_ROWS):
        block = Rectangle(
            start=(row, *(0 for _ in shape[1:])),
            shape=(min(_BLOCK_ROWS, shape[0] - row), *shape[1:]),
        )
        if not torch.equal(source.read(one, block), source.read(other, block)):
            return True
    return False


def copy_rectangle(source: WeightSource, name: str, rectangle: Rectangle, target: Tensor) -> None:
    """Read a rectangle into ``target``, which has its shape, casting where dtypes differ."""
    assert tuple(target.shape) == rectangle.shape, f"{name} has the shape of its rectangle"
    if rectangle.num_elements:
        with torch.no_grad():
            target.copy_(source.read(name, rectangle))


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor as it will be stored."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsFile:
    """One file of a folder."""

    name: str
    tensors: tuple[StoredTensor, ...]
    """In the order in which they lie in it."""


def plan_files(tensors: Sequence[StoredTensor], max_file_bytes: int) -> list[WeightsFile]:
    """Spread tensors over files, named and filled as by `save_pretrained`.

    Args:
        tensors: in the model's order.
        max_file_bytes: of a file's tensors; a larger tensor gets a file of its own.
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
            # Wide dtypes first keeps every tensor aligned to its dtype.
            tensors=tuple(
                sorted(
                    (by_name[each] for each in names),
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
    """Writes one planned file, tensor after tensor; what it returns from is on the disk."""

    def __init__(self, folder: Path, file: WeightsFile) -> None:
        """Create the file and write its header.

        Raises:
            OSError: the folder is not there, not writable or full.
        """
        self._left = list(file.tensors)
        self._content = (folder / file.name).open("wb")
        try:
            self._content.write(_build_header(file.tensors))
        except BaseException:
            self._content.close()
            raise

    def write(self, tensor: Tensor) -> None:
        """Append the next tensor of the plan, which is on the CPU."""
        planned = self._left.pop(0)
        assert (tensor.shape, tensor.dtype) == (planned.shape, planned.dtype), planned.name
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._content.write(raw.numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._content:
            if error is None:
                assert not self._left, "every planned tensor was written"
                self._content.flush()
                # Some file systems tell of a full disk only here.
                os.fsync(self._content.fileno())


def _build_header(tensors: Sequence[StoredTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    first = 0
    for tensor in tensors:
        last = first + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [first, last],
        }
        first = last
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
