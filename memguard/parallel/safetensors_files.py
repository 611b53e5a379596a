"""Lays tensors out in safetensors files of bounded size and writes them one at a time.

    8 bytes   length of the header, little-endian
    header    JSON: name -> dtype, shape, first and last byte; padded with spaces to 8 bytes
    data      the tensors, C order, without gaps, by name

safetensors' own writer wants all tensors of a file at once; here a writer holds one. The bytes are
the same.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

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
