"""Messages between two stages of which one at least is split over a grid of ranks.

A source tile sends each destination tile what it holds of what that one wants:

    held by tiles 0 1 2 3      wanted by 4      wanted by 4 5
      +---+---+                 +-------+        +-------+
      | 0 | 1 |     0 1 2 3     |       |   0 1  |   4   |
      +---+---+    -------->    |   4   |  --->  +-------+
      | 2 | 3 |                 |       |   2 3  |   5   |
      +---+---+                 +-------+        +-------+

Gradients go the same ways back; where they meet they are added, in the order of tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gemsc.base.boxes import Box, shape_of
from gemsc.base.dtypes import Format, empty
from gemsc.messages.exchange import Exchange, Piece
from gemsc.messages.message import Message, Value, name_of, same_for_all


@dataclass(frozen=True)
class TileValue:
    """One tensor of a message: the boxes that source tiles hold and dest tiles want.

    `shape` is that of the whole tensor. Without `wanted` each tile sends the tile of
    the same number all that it holds. What is wanted outside the tensor is `fill`;
    `owned` are the parts that tiles give where what they hold overlaps.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    held: tuple[Box, ...]
    wanted: tuple[Box, ...] = ()
    gradient: bool = False
    fill: float = 0.0
    owned: tuple[Box, ...] = ()
    keeps_dtype: bool = False
    in_autocast: bool = False
    memory_format: Format = torch.contiguous_format

    def part(self, shape: tuple[int, ...]) -> Value:
        """Return a part of it, of a shape, as one tensor of a message."""
        return Value(
            self.name,
            shape,
            self.dtype,
            self.gradient,
            self.keeps_dtype,
            self.in_autocast,
            self.memory_format,
        )

    @cached_property
    def exchange(self) -> Exchange:
        """What goes from where to where."""
        wanted = self.wanted or self.held
        return Exchange(0, self.shape, self.held, wanted, self.fill, self.owned)


@dataclass(frozen=True, eq=False)
class RankMessage:
    """What one rank sends another: `message` carries a piece of some of the values.

    `pieces` are (index of the value, piece), in the order of the message's values.
    """

    source: int
    dest: int
    message: Message
    pieces: tuple[tuple[int, Piece], ...]

    @same_for_all
    def gradient(self) -> RankMessage:
        """What travels back."""
        values = self.message.values
        pairs = zip(self.pieces, values, strict=True)
        kept = tuple(piece for piece, value in pairs if value.gradient)
        return RankMessage(self.dest, self.source, self.message.gradient, kept)


@dataclass(frozen=True, eq=False)
class GridMessage:
    """Values that travel together from grid to grid, once for each micro-batch.

    `sources` and `dests` are ranks of one copy of the model, by tile.
    """

    tag: int
    sources: tuple[int, ...]
    dests: tuple[int, ...]
    values: tuple[TileValue, ...]
    is_gradient: bool = False

    def __str__(self) -> str:
        """Return for example `'x'` or `the gradient of 'x'`, for reports."""
        return name_of(self.given, is_gradient=self.is_gradient)

    @property
    def is_local(self) -> bool:
        """Whether both stages are on the same ranks: nothing travels."""
        return self.sources == self.dests

    @same_for_all
    def gradient(self) -> GridMessage:
        """The message with which the gradients of these values travel back."""
        return GridMessage(self.tag + 1, self.sources, self.dests, self.values, True)

    @property
    def given(self) -> tuple[TileValue, ...]:
        """The values that this message has: for gradients those that have one."""
        return tuple(v for v in self.values if v.gradient or not self.is_gradient)

    @property
    def gradients(self) -> tuple[bool, ...]:
        """For each value, whether its gradient travels back."""
        return tuple(value.gradient for value in self.given)

    @same_for_all
    def parts(self) -> tuple[RankMessage, ...]:
        """What travels between each two ranks; empty parts do not."""
        parts = tuple(self._all_parts())
        if not self.is_gradient:
            return parts
        back = (part.gradient for part in parts)
        return tuple(part for part in back if part.pieces)

    def _all_parts(self) -> Iterator[RankMessage]:
        tag = self.tag - self.is_gradient
        between = {
            (piece.source, piece.dest, index): piece
            for index, value in enumerate(self.values)
            for piece in value.exchange.pieces
        }
        for a, source in enumerate(self.sources):
            for b, dest in enumerate(self.dests):
                pieces = tuple(
                    (index, between[a, b, index])
                    for index in range(len(self.values))
                    if (a, b, index) in between
                )
                values = tuple(self.values[i].part(p.shape) for i, p in pieces)
                if pieces:
                    message = Message(tag, source, dest, values)
                    yield RankMessage(source, dest, message, pieces)

    def cut(self, part: RankMessage, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the pieces of this rank's tensors that a part carries.

        Raises:
            GemscError: a tensor has another shape than at compile time.
        """
        place = {value.name: index for index, value in enumerate(self.given)}
        cuts = []
        for index, piece in part.pieces:
            value = self.values[index]
            box = self._here(value, part.source, sends=True)
            tensor = tensors[place[value.name]]
            value.part(shape_of(box)).check(tensor)
            cuts.append(tensor[piece.within(box)])
        return tuple(cuts)

    def join(
        self,
        rank: int,
        received: Sequence[tuple[RankMessage, Sequence[Tensor]]],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> list[Tensor]:
        """Return this rank's tensors from the pieces that came, in order of tiles."""
        result = []
        for value, dtype in zip(self.given, dtypes, strict=True):
            box = self._here(value, rank, sends=False)
            pieces = [
                (piece, tensor)
                for part, tensors in received
                for (index, piece), tensor in zip(part.pieces, tensors, strict=True)
                if self.values[index] is value
            ]
            if [piece.box for piece, _ in pieces] == [box]:  # it came in one
                result.append(pieces[0][1])
                continue
            fill = (
                -0.0 if self.is_gradient else value.fill
            )  # see gemsc/runtime/worker/backward.py
            whole = empty(
                shape_of(box), value.memory_format, dtype=dtype, device=device
            ).fill_(fill)
            for piece, tensor in pieces:
                if self.is_gradient:
                    whole[piece.within(box)] += tensor
                else:
                    whole[piece.within(box)] = tensor
            result.append(whole)
        return result

    def _here(self, value: TileValue, rank: int, *, sends: bool) -> Box:
        """Return the box of a value that a rank has at its end of the message."""
        if sends != self.is_gradient:
            return value.exchange.held[self.sources.index(rank)]
        return value.exchange.wanted[self.dests.index(rank)]
