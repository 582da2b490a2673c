"""What a generated rank file says of the tensors that come in and go out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from gemsc.base.boxes import Box
from gemsc.base.dtypes import Format, lying_order, within
from gemsc.base.nests import named_place
from gemsc.base.units import show_some
from gemsc.errors import GemscError

ALIGNMENT = 64  # bytes; a cache line, so that every packed value starts on one


class same_for_all(cached_property[Any]):  # noqa: N801
    """A cached property whose value is the same object for all threads.

    A message is known by which object it is, and ranks may be threads. From Python 3.12
    on two threads that ask at once get an object each from `cached_property`.
    """

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        """Return the value that was there first."""
        if instance is None:
            return self
        return instance.__dict__.setdefault(self.attrname, self.func(instance))


@dataclass(frozen=True)
class Value:
    """One tensor of a message; `gradient` says whether its gradient travels back.

    Where the program runs in another floating-point type than the one it was traced in,
    its values are of that type, less those that keep their own (`x.float()`). Those
    that torch.autocast made, `in_autocast`, are of that type in float64 alone, which
    autocast leaves as it is. Its `memory_format` is that of the value when it was
    traced, or its dimensions as they lay in memory: so it travels, without a copy where
    it lies so, and so does its gradient. A `view` may work on no other.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool = False
    keeps_dtype: bool = False
    in_autocast: bool = False
    memory_format: Format = torch.contiguous_format

    @property
    def size(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def lying(self) -> tuple[int, ...]:
        """Its sizes in the order in which they lie in memory, and travel."""
        return tuple(self.shape[dim] for dim in self._order)

    @cached_property
    def _order(self) -> tuple[int, ...]:
        return lying_order(self.memory_format, len(self.shape))

    def laid(self, tensor: Tensor) -> Tensor:
        """Return the tensor's memory, of sizes `lying`; a copy if it lies otherwise."""
        if self.memory_format is torch.contiguous_format:
            return tensor
        return tensor.permute(self._order).contiguous()

    def stood(self, memory: Tensor) -> Tensor:
        """Return the tensor whose memory this is: the inverse of `laid`."""
        if self.memory_format is torch.contiguous_format:
            return memory
        return memory.movedim(tuple(range(memory.dim())), self._order)

    def check(self, tensor: Tensor) -> None:
        """Raise a GemscError unless a tensor has its shape."""
        if tensor.shape != self.shape:
            raise GemscError(
                f"'{self.name}' has shape {list(tensor.shape)} for this micro-batch, "
                f"but the program was compiled for {list(self.shape)}",
                help="make forward return the same shapes for all data",
            )

    def dtype_in(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype that it has where the program runs in `dtype`."""
        keeps = self.keeps_dtype or (self.in_autocast and dtype is not torch.float64)
        return self.dtype if keeps else within(self.dtype, dtype)


@dataclass(frozen=True, eq=False)
class Message:
    """Values that travel together, once for each micro-batch.

    `source` and `dest` are ranks of one copy of the model. Several values travel packed
    in one buffer of bytes, each aligned to 64 bytes.
    """

    tag: int
    source: int
    dest: int
    values: tuple[Value, ...]
    is_gradient: bool = False

    def __str__(self) -> str:
        """Return for example `'x'` or `the gradient of 'x'`, for reports."""
        return name_of(self.values, is_gradient=self.is_gradient)

    @property
    def is_local(self) -> bool:
        """Whether both stages are on the same rank: nothing travels."""
        return self.source == self.dest

    @property
    def gradients(self) -> tuple[bool, ...]:
        """For each value, whether its gradient travels back."""
        return tuple(value.gradient for value in self.values)

    @same_for_all
    def gradient(self) -> Message:
        """The message with which the gradients of these values travel back."""
        values = tuple(value for value in self.values if value.gradient)
        return Message(self.tag + 1, self.dest, self.source, values, is_gradient=True)

    def pack(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Return one tensor that holds all: the tensor itself if it is alone."""
        if len(tensors) == 1:
            return self.values[0].laid(tensors[0])
        sizes = [tensor.nbytes for tensor in tensors]
        starts, total = _offsets(sizes)
        packed = torch.empty(total, dtype=torch.uint8, device=tensors[0].device)
        for value, tensor, start, size in zip(
            self.values, tensors, starts, sizes, strict=True
        ):
            target = packed[start : start + size].view(tensor.dtype)
            value.stood(target.view(value.lying)).copy_(tensor.detach())
        return packed

    def unpack(self, buffer: Tensor, dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
        """Return the values in a received buffer, without a copy."""
        if len(self.values) == 1:
            return [self.values[0].stood(buffer)]
        sizes = self._sizes(dtypes)
        starts, _ = _offsets(sizes)
        return [
            value.stood(buffer[start : start + size].view(dtype).view(value.lying))
            for value, dtype, start, size in zip(
                self.values, dtypes, starts, sizes, strict=True
            )
        ]

    def buffer(
        self, dtypes: tuple[torch.dtype, ...]
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of the buffer that holds the values."""
        if len(self.values) == 1:
            return self.values[0].lying, dtypes[0]
        return (_offsets(self._sizes(dtypes))[1],), torch.uint8

    def _sizes(self, dtypes: tuple[torch.dtype, ...]) -> list[int]:
        return [
            value.size * dtype.itemsize
            for value, dtype in zip(self.values, dtypes, strict=True)
        ]


def name_of(values: Sequence[Any], *, is_gradient: bool) -> str:
    """Return what a message with these named values is called."""
    names = [f"'{value.name}'" for value in values]
    return "the gradient of " * is_gradient + show_some(names, 3, " and ")


@dataclass(frozen=True)
class Input:
    """A tensor of the batch: where it is in what the user feeds, and one micro-batch.

    `path` is ("input", 0), ("input", "mask"), ("target",), ("target", "boxes", 1), ...
    All micro-batches share an input that is not `batched`. `box` is the part that this
    rank reads where it computes one tile, () for all of it. The stage gets it in the
    `memory_format` of the example that was traced.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    batched: bool = True
    box: Box = ()
    memory_format: Format = torch.contiguous_format

    @property
    def name(self) -> str:
        """How a message to the user calls it."""
        return named_place(self.path)


@dataclass(frozen=True)
class Tiles:
    """The grid that a rank belongs to: its form, its ranks row by row, and its tile.

    The ranks are those of one copy of the model. `sums` are the tiles of each sum in
    which this one takes part: their connections are made at the start.
    """

    grid: tuple[int, ...]
    ranks: tuple[int, ...]
    tile: int
    sums: tuple[tuple[int, ...], ...] = ()


def _offsets(sizes: list[int]) -> tuple[list[int], int]:
    """Return where each value starts and the bytes of all."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, total
