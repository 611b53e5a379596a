"""A tensor of which a rank holds several rectangles, for torch's distributed checkpoint.

A DTensor is one rectangle on each rank. Of a parameter that is several projections a rank holds one
rectangle of each (`fused`). torch saves and loads any tensor with the three methods below.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class StoredPieces(Tensor):
    """The full shape, without storage, and this rank's rectangles by their first elements."""

    pieces: Mapping[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: torch.Size,
        pieces: Mapping[tuple[int, ...], Tensor],
        dtype: torch.dtype,
    ) -> Self:
        """Wrap rectangles, which are written and read in place."""
        # One element; tensors on the meta device are replaced by empty ones before loading.
        stored: Self = torch.empty((), dtype=dtype).expand(shape).as_subclass(cls)
        stored.pieces = pieces
        return stored

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """Return what this rank writes."""
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.dtype),
                    size=torch.Size(self.shape),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return this rank's rectangles."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(start), sizes=piece.shape)
            for start, piece in self.pieces.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the rectangle that begins at ``index.offset``."""
        assert index.offset is not None, "only rectangles are written and read"
        return self.pieces[tuple(index.offset)]
