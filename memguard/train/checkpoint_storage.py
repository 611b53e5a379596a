"""Locations of a checkpoint's tensors, stored as JSON instead of torch's pickle.

    metadata.json   for each tensor its dtype, its size and its rectangles: offsets and sizes in
                    the tensor; file, begin and length of the bytes that torch.save wrote

torch's own reader unpickles `.metadata`, which can execute arbitrary code. This format describes
tensors only. Each tensor is in a file listed in the checkpoint's manifest, and torch.load reads it
with `weights_only`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from memguard.errors import RecordError
from memguard.records import Record, load_record, write_atomically
from memguard.records.sealed import FileSum

METADATA = "metadata.json"

_Count = Annotated[int, Field(ge=0)]


class StoredChunk(Record):
    """A rectangle of a tensor."""

    offsets: tuple[_Count, ...]
    sizes: tuple[_Count, ...]
    file: str
    begin: _Count
    """Offset in the file (bytes)."""
    length: _Count
    """Length in the file (bytes)."""


class TensorPlaces(Record):
    """One tensor and the locations of its rectangles."""

    dtype: str
    """Name of the dtype in torch."""
    size: tuple[_Count, ...]
    chunks: tuple[StoredChunk, ...]


class CheckpointMetadata(Record):
    """Content of `metadata.json`."""

    tensors: dict[str, TensorPlaces]


class JsonWriter(FileSystemWriter):
    """Writes tensors as torch does, and their locations as JSON."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata.json; one rank calls this after all ranks have written."""
        places = {result.index: result.storage_data for part in results for result in part}
        tensors = {
            name: _place_tensor(name, stored, places)
            for name, stored in metadata.state_dict_metadata.items()
        }
        text = CheckpointMetadata(tensors=tensors).model_dump_json()
        write_atomically(Path(self.path) / METADATA, text.encode())


class JsonReader(FileSystemReader):
    """Reads checkpoints that `JsonWriter` wrote."""

    def __init__(self, folder: Path, files: Mapping[str, FileSum]) -> None:
        """Read from the files of a checkpoint's folder that are listed in ``files``."""
        super().__init__(str(folder))
        self._folder, self._files = folder, files

    # The signature has no keyword arguments, so torch does not try another metadata file.
    def read_metadata(self) -> Metadata:
        """Return the locations of the tensors."""
        stored = load_metadata(self._folder, self._files)
        metadata = Metadata(
            state_dict_metadata={}, storage_data={}, storage_meta=StorageMeta(load_id=self.load_id)
        )
        for name, tensor in stored.tensors.items():
            chunks = []
            for number, chunk in enumerate(tensor.chunks):
                index = MetadataIndex(name, chunk.offsets, number)
                info = _StorageInfo(chunk.file, chunk.begin, chunk.length)
                metadata.storage_data[index] = info
                offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
                chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            metadata.state_dict_metadata[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, tensor.dtype)),
                size=torch.Size(tensor.size),
                chunks=chunks,
            )
        return metadata


def load_metadata(folder: Path, files: Mapping[str, FileSum]) -> CheckpointMetadata:
    """Read metadata.json of a checkpoint.

    Raises:
        RecordError: metadata.json cannot be read, or refers to data outside the checkpoint.
    """
    path = folder / METADATA
    metadata = load_record(CheckpointMetadata, path)
    for name, tensor in metadata.tensors.items():
        if (fault := next(_list_faults(tensor, files), None)) is not None:
            raise RecordError(f"'{path}': '{name}' {fault}")
    return metadata


def _list_faults(tensor: TensorPlaces, files: Mapping[str, FileSum]) -> Iterator[str]:
    if not isinstance(getattr(torch, tensor.dtype, None), torch.dtype):
        yield f"has unknown dtype '{tensor.dtype[:40]}'"
    for chunk in tensor.chunks:
        file = files.get(chunk.file) if Path(chunk.file).name == chunk.file else None
        end = chunk.begin + chunk.length
        if file is None or end > file.num_bytes:
            yield (
                f"is stored in bytes {chunk.begin:,} to {end:,} of '{chunk.file[:80]}', which are "
                "not part of the checkpoint"
            )
        if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.size):
            yield "has parts with another number of dimensions"


def _place_tensor(
    name: str, stored: Any, places: Mapping[MetadataIndex, _StorageInfo]
) -> TensorPlaces:
    assert isinstance(stored, TensorStorageMetadata), f"{name} is not a tensor"
    chunks = []
    for chunk in stored.chunks:
        place = places[MetadataIndex(name, chunk.offsets)]
        chunks.append(
            StoredChunk(
                offsets=tuple(map(int, chunk.offsets)),
                sizes=tuple(map(int, chunk.sizes)),
                file=place.relative_path,
                begin=place.offset,
                length=place.length,
            )
        )
    dtype = str(stored.properties.dtype).removeprefix("torch.")
    return TensorPlaces(dtype=dtype, size=tuple(stored.size), chunks=tuple(chunks))
