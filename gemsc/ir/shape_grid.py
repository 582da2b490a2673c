"""The grid that a lowered graph names: shapes are right, and nothing is sent.

    %amax = gemsc.runtime.tiles.amax(grid, %x, (2, 3))      # in the graph
    amax = tiles.amax(self.grid, x, (2, 3))                 # in a rank's file

Fake tensors go through the very function that a rank calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gemsc.base.boxes import shape_of
from gemsc.ir.fake import Listener
from gemsc.messages.exchange import Exchange, Piece
from gemsc.runtime.tiles.saving import remember

sums = Listener()  # hears of the bytes of each sum over tiles


@dataclass(frozen=True, repr=False)
class ShapeGrid:
    """A tile of a stage's grid, for fake tensors.

    `number` is the tile whose program this is: a stage with a smaller grid runs tile
    `number % num_tiles`.
    """

    number: int
    num_tiles: int

    def __repr__(self) -> str:
        """Return the same for every tile: their graphs look alike."""
        return "grid"

    @property
    def tile(self) -> int:
        """The number of this tile."""
        return self.number % self.num_tiles

    def among(self, tiles: tuple[int, ...]) -> ShapeGrid:
        """Return the grid of some tiles, of which this is one; () for all."""
        return ShapeGrid(tiles.index(self.tile), len(tiles)) if tiles else self

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        if sums.tell is not None:
            sums.tell(tensor.nbytes)
        return tensor

    def collect(self, held: Tensor, exchange: Exchange) -> Tensor:
        """Return a tensor of the wanted box's shape."""
        tile = self.number % len(exchange.wanted)
        result = held.new_empty(shape_of(exchange.wanted[tile]))
        if exchange.arrives or exchange.adds:
            return result
        if not exchange.seen_from(self.tile).is_handed_over:
            flight = self.depart(exchange, held)
            received = exchange.seen_from(tile).received
            strips = [strip for other in received for strip in flight.take(other)]
            shape = result.shape
            remember(result, (held, *strips), lambda *_: held.new_empty(shape))
        return result

    def give_back(self, gradient: Tensor, exchange: Exchange) -> Tensor:
        """Return a tensor of the held box's shape."""
        tile = self.number % len(exchange.held)
        return gradient.new_empty(shape_of(exchange.held[tile]))

    def depart(self, exchange: Exchange, held: Tensor) -> _Flight:
        """Return what tells the shapes of what comes."""
        return _Flight(held, exchange.seen_from(self.tile).received)

    def depart_back(
        self,
        exchange: Exchange,
        gradients: Mapping[int, Sequence[Tensor]],
        like: Tensor,
    ) -> _Flight:
        """Return what tells the shapes of the gradients that come home."""
        return _Flight(like, exchange.seen_from(self.tile).sent)


@dataclass(frozen=True)
class _Flight:
    like: Tensor
    pieces: Mapping[int, tuple[Piece, ...]]

    def take(self, tile: int) -> list[Tensor]:
        """Return tensors of the shapes that come from a tile."""
        return [self.like.new_empty(piece.shape) for piece in self.pieces[tile]]

    def finish(self) -> None:
        """Do nothing."""
