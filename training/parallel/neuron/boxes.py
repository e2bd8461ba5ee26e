"""A rank's boxes of a tensor, as torch's distributed checkpoint takes them.

What torch has for this, a DTensor, is cut by one rule in each dimension; a rank here has some rows
of each of several parts. The three methods are the protocol that the checkpoint asks tensors for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Box:
    """A box of a larger tensor: where it begins, and its values in the host's memory."""

    offsets: tuple[int, ...]
    value: Tensor  # the box's shape

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.value.shape)


class Boxes(torch.Tensor):
    """Stands for a whole tensor of which this rank has some boxes, which may be none."""

    boxes: Sequence[Box]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, boxes: Sequence[Box]) -> Boxes:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.boxes = tuple(boxes)
        return made  # type: ignore[no-any-return]

    def copied(self) -> Boxes:
        """Give the same with values of its own."""
        copies = [Box(one.offsets, one.value.clone()) for one in self.boxes]
        return Boxes(self.shape, self.dtype, copies)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{function}: Boxes hold what a checkpoint holds, no values")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Boxes({tuple(self.shape)}, {self.dtype}, {len(self.boxes)} here)"

    def __create_write_items__(self, name: str, tensor: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, one.chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(one.chunk, properties, self.shape),
            )
            for one in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [one.chunk for one in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(one.value for one in self.boxes if one.chunk.offsets == index.offset)
