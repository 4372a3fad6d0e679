"""Pieces of parameters in a checkpoint, each as a part of the tensor that it belongs to.

``torch.distributed.checkpoint`` keeps a tensor as boxes: offsets and sizes. A run of elements of a row-major tensor is
a few boxes: in each dimension the rest of a row that it begins in, whole rows, and the part of a row that it ends in.
So a checkpoint says nothing of cells, and any other layout reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


class TensorPart(Tensor):
    """Elements [start, start + values.numel()) of a flattened tensor of this shape, in the memory of ``values``.

    A tensor for ``torch.distributed.checkpoint`` alone, by torch's protocol ``_Checkpointable``: it has no operations.
    """

    values_here: Tensor
    start: int

    @staticmethod
    def __new__(cls, values: Tensor, shape: tuple[int, ...], start: int) -> TensorPart:
        part: TensorPart = Tensor._make_wrapper_subclass(cls, shape, dtype=values.dtype, device=values.device)
        part.values_here, part.start = values, start
        return part

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} on a part of a tensor in a checkpoint")

    def _boxes(self) -> list[tuple[Box, Tensor]]:
        flat, at = self.values_here.detach().view(-1), 0
        boxes = []
        for offsets, sizes in boxes_of(tuple(self.shape), self.start, self.start + flat.numel()):
            count = math.prod(sizes)
            boxes.append(((offsets, sizes), flat[at : at + count].view(sizes)))
            at += count
        return boxes

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.values_here)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    properties=properties,
                    size=self.size(),
                ),
            )
            for (offsets, sizes), _ in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for (offsets, sizes), _ in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for (offsets, _), values in self._boxes():
            if torch.Size(offsets) == index.offset:
                return values
        raise ValueError(f"no part of {index.fqn} at {index.offset}")


def boxes_of(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Boxes that hold elements [start, end) of a row-major tensor, in order, each contiguous there."""
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = start // row, end // row
    if start % row or first == last:  # begins inside a row, or ends in the one that it begins in
        stop = min(end, (first + 1) * row)
        for offsets, sizes in boxes_of(shape[1:], start - first * row, stop - first * row):
            yield (first, *offsets), (1, *sizes)
        yield from boxes_of(shape, stop, end)
        return
    yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from boxes_of(shape, last * row, end)
