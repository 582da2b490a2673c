"""Buckets: tensors that travel as one, and the rows of tensors that each rank has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemsc.base.boxes import Interval
from gemsc.messages.rows import Rows
from gemsc.runtime.transport.waiting import Request

BUCKET_BYTES = 8 * 2**20


@dataclass(slots=True)
class Bucket:
    """What some tensors become: their values lie in `values` once `request` is done."""

    tensors: list[Tensor]
    values: Tensor
    request: Request

    def unpack(self) -> None:
        """Put the values into the tensors."""
        sizes = [tensor.numel() for tensor in self.tensors]
        pairs = zip(torch.split(self.values, sizes), self.tensors, strict=True)
        parts = [part.view_as(tensor) for part, tensor in pairs]
        torch._foreach_copy_(self.tensors, parts)


def buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group the numbers of tensors of one dtype up to the size of a bucket."""
    by_dtype: dict[torch.dtype, list[list[int]]] = defaultdict(lambda: [[]])
    room: dict[torch.dtype, int] = defaultdict(lambda: BUCKET_BYTES)  # in the last one
    for number, tensor in enumerate(tensors):
        found, dtype = by_dtype[tensor.dtype], tensor.dtype
        if found[-1] and tensor.nbytes > room[dtype]:
            found.append([])
            room[dtype] = BUCKET_BYTES
        found[-1].append(number)
        room[dtype] -= tensor.nbytes
    return [bucket for found in by_dtype.values() for bucket in found]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors, one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def parts_like(tensors: Sequence[Tensor], values: Tensor) -> list[Tensor]:
    """Return parts of a flat tensor as views of the shapes and formats of these."""
    found, start = [], 0
    for tensor in tensors:
        part = values[start : start + tensor.numel()]
        if _is_dense(tensor):
            part = values.as_strided(tensor.size(), tensor.stride(), start)
        found.append(part.view_as(tensor))
        start += tensor.numel()
    return found


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in any order of the dimensions."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != size:
            return False
        size *= length
    return True


def rows_of(tensor: Tensor, rows: Interval) -> Tensor:
    """Return some rows of a tensor as a view; a number is one row."""
    start, stop = rows
    return (tensor if tensor.dim() else tensor.view(1))[start:stop]


def shares(tensors: Sequence[Tensor], rows: Sequence[Rows]) -> list[list[Tensor]]:
    """Return, for each rank, its rows of all tensors, as views."""
    pairs = [*zip(tensors, rows, strict=True)]
    return [
        [rows_of(tensor, of_ranks[rank]) for tensor, of_ranks in pairs]
        for rank in range(len(rows[0]))
    ]
