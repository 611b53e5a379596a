"""Locations of a checkpoint's tensors, stored as JSON instead of torch's pickle.

    metadata.json   for each tensor its dtype, its size and its rectangles, as columns of numbers:
                    offset and size in each dimension; file, begin and length of the bytes that
                    torch.save wrote

torch's own reader unpickles `.metadata`, which can execute arbitrary code. This format describes
tensors only. Each tensor is in a file listed in the checkpoint's manifest, and torch.load reads it
with `weights_only`. A model of 405B parameters on 512 ranks has millions of rectangles: they are
arrays, and torch gets only those that overlap the rectangles of the rank that reads.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult

from memguard.errors import RecordError
from memguard.records import Record, load_record, write_atomically
from memguard.records.sealed import FileSum

METADATA = "metadata.json"

_Count = Annotated[int, Field(ge=0)]


def _read_column(value: Any) -> NDArray[np.int64]:
    column = np.asarray(value)
    if column.ndim != 1 or (column.size and column.dtype != np.int64):
        raise ValueError("must be a list of whole numbers")
    if (column < 0).any():
        raise ValueError("must not have negative numbers")
    return column.astype(np.int64, copy=False)


Column = Annotated[
    NDArray[np.int64],
    BeforeValidator(_read_column),
    PlainSerializer(lambda column: column.tolist(), return_type=list[int]),
]
"""One number for each rectangle of a tensor."""


class TensorPlaces(Record):
    """One tensor and the locations of its rectangles."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    dtype: str
    """Name of the dtype in torch."""
    size: tuple[_Count, ...]
    offsets: tuple[Column, ...]
    """In the tensor, for each dimension."""
    sizes: tuple[Column, ...]
    file: Column
    """Number in `CheckpointMetadata.files`."""
    begin: Column
    """Offset in the file (bytes)."""
    length: Column
    """Length in the file (bytes)."""

    def find_overlapping(self, rectangle: ChunkStorageMetadata) -> NDArray[np.bool_]:
        """Return which rectangles overlap one of a tensor."""
        overlaps = np.ones(len(self.file), dtype=bool)
        dimensions = zip(self.offsets, self.sizes, rectangle.offsets, rectangle.sizes, strict=True)
        for offsets, sizes, offset, size in dimensions:
            overlaps &= (offsets < offset + size) & (offsets + sizes > offset)
        return overlaps


class CheckpointMetadata(Record):
    """Content of `metadata.json`."""

    files: tuple[str, ...]
    tensors: dict[str, TensorPlaces]


class JsonWriter(FileSystemWriter):
    """Writes tensors as torch does, and their locations as JSON."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata.json; one rank calls this after all ranks have written."""
        places = {result.index: result.storage_data for part in results for result in part}
        files = sorted({place.relative_path for place in places.values()})
        numbers = {file: number for number, file in enumerate(files)}
        tensors = {
            name: _place_tensor(name, stored, places, numbers)
            for name, stored in metadata.state_dict_metadata.items()
        }
        text = CheckpointMetadata(files=tuple(files), tensors=tensors).model_dump_json()
        write_atomically(Path(self.path) / METADATA, text.encode())


def _place_tensor(
    name: str,
    stored: Any,
    places: Mapping[MetadataIndex, _StorageInfo],
    numbers: Mapping[str, int],
) -> TensorPlaces:
    assert isinstance(stored, TensorStorageMetadata), f"{name} is not a tensor"
    own = [places[MetadataIndex(name, chunk.offsets)] for chunk in stored.chunks]
    dimensions = range(len(stored.size))
    return TensorPlaces(
        dtype=str(stored.properties.dtype).removeprefix("torch."),
        size=tuple(stored.size),
        offsets=tuple([int(chunk.offsets[d]) for chunk in stored.chunks] for d in dimensions),
        sizes=tuple([int(chunk.sizes[d]) for chunk in stored.chunks] for d in dimensions),
        file=[numbers[place.relative_path] for place in own],
        begin=[place.offset for place in own],
        length=[place.length for place in own],
    )


class JsonReader(FileSystemReader):
    """Reads checkpoints that `JsonWriter` wrote."""

    def __init__(
        self, folder: Path, stored: CheckpointMetadata, tensors: Mapping[str, Tensor]
    ) -> None:
        """Read what ``tensors``, parts of whole ones, need of a checkpoint's folder."""
        super().__init__(str(folder))
        self._stored, self._tensors = stored, tensors

    # The signature has no keyword arguments, so torch does not try another metadata file.
    def read_metadata(self) -> Metadata:
        """Return the locations of the rectangles that this rank reads."""
        metadata = Metadata(
            state_dict_metadata={}, storage_data={}, storage_meta=StorageMeta(load_id=self.load_id)
        )
        for name, places in self._stored.tensors.items():
            chunks = []
            for number, row in enumerate(self._find_rows(name, places)):
                offsets = torch.Size(int(column[row]) for column in places.offsets)
                sizes = torch.Size(int(column[row]) for column in places.sizes)
                metadata.storage_data[MetadataIndex(name, offsets, number)] = _StorageInfo(
                    self._stored.files[places.file[row]],
                    int(places.begin[row]),
                    int(places.length[row]),
                )
                chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            metadata.state_dict_metadata[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, places.dtype)),
                size=torch.Size(places.size),
                chunks=chunks,
            )
        return metadata

    def _find_rows(self, name: str, places: TensorPlaces) -> Sequence[int]:
        tensor = self._tensors.get(name)
        # torch reports a tensor of another size.
        if tensor is None or tuple(tensor.shape) != places.size:
            return ()
        rectangles = _create_chunk_list(tensor)
        overlaps = [places.find_overlapping(rectangle) for rectangle in rectangles]
        return np.flatnonzero(np.any(overlaps, axis=0)).tolist() if overlaps else ()


def read_tensor(
    folder: Path, stored: CheckpointMetadata, name: str, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a whole tensor of a checkpoint on the CPU, whatever mesh wrote it.

    One of floating-point numbers is in ``dtype``; None: in the stored one.

    Raises:
        RecordError: the checkpoint has no tensor of this name.
    """
    if (places := stored.tensors.get(name)) is None:
        raise RecordError(f"'{folder}' lacks the tensor '{name}'")
    own = getattr(torch, places.dtype)
    whole = torch.empty(places.size, dtype=dtype if dtype and own.is_floating_point else own)
    alone = stored.model_copy(update={"tensors": {name: places}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load({name: whole}, storage_reader=JsonReader(folder, alone, {name: whole}), no_dist=True)
    return whole


def _read_tensor(values: dict[str, Any]) -> TensorPlaces | dict[str, Any]:
    """Read a tensor as soon as it is parsed: not all numbers of a file exist as objects at once."""
    return TensorPlaces.model_validate(values) if "dtype" in values else values


def load_metadata(folder: Path, files: Mapping[str, FileSum]) -> CheckpointMetadata:
    """Read metadata.json of a checkpoint, whose manifest lists ``files``.

    Raises:
        RecordError: metadata.json cannot be read, or refers to data outside the checkpoint.
    """
    path = folder / METADATA
    metadata = load_record(CheckpointMetadata, path, convert=_read_tensor)
    listed = [files.get(file) if Path(file).name == file else None for file in metadata.files]
    num_bytes = np.array([-1 if file is None else file.num_bytes for file in listed], np.int64)
    for name, tensor in metadata.tensors.items():
        if (fault := next(_list_faults(tensor, metadata.files, num_bytes), None)) is not None:
            raise RecordError(f"'{path}': '{name}' {fault}")
    return metadata


def _list_faults(
    tensor: TensorPlaces, files: Sequence[str], num_bytes: NDArray[np.int64]
) -> Iterator[str]:
    """Yield faults; ``num_bytes`` of each file, negative for one outside the checkpoint."""
    if not isinstance(getattr(torch, tensor.dtype, None), torch.dtype):
        yield f"has unknown dtype '{tensor.dtype[:40]}'"
    if not len(tensor.offsets) == len(tensor.sizes) == len(tensor.size):
        yield "has parts with another number of dimensions"
    columns = (*tensor.offsets, *tensor.sizes, tensor.file, tensor.begin, tensor.length)
    if len({len(column) for column in columns}) > 1:
        yield "has columns of different lengths"
    elif (tensor.file >= len(files)).any():
        yield f"is stored in a file that is none of the {len(files):,} in 'files'"
    else:
        # Without a sum, which could exceed the largest number.
        room = num_bytes[tensor.file] - tensor.begin
        for row in np.flatnonzero((room < 0) | (tensor.length > room)):
            yield (
                f"is stored in {tensor.length[row]:,} bytes from byte {tensor.begin[row]:,} of "
                f"'{files[tensor.file[row]][:80]}', which are not part of the checkpoint"
            )
