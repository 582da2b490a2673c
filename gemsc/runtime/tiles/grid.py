"""Grid: the tiles of one stage, and how they reach each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gemsc.base.boxes import shape_of
from gemsc.messages.exchange import Exchange, View
from gemsc.runtime.tiles.messages import Flight, TileMailbox
from gemsc.runtime.tiles.saving import remember
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.transport import Group

__all__ = ["Grid"]


class Grid:
    """One tile among those of its stage: what `self.grid` is in a generated stage.

    `ranks` are the transport's ranks of all tiles, in their order; `tile` is this one.
    """

    def __init__(
        self, transport: DeviceTransport, ranks: tuple[int, ...], tile: int
    ) -> None:
        self.transport = transport
        self.ranks = ranks
        self.tile = tile
        self._group: Group | None = None
        self._among: dict[tuple[int, ...], Grid] = {}
        self._mailbox = TileMailbox(transport, ranks)

    @property
    def num_tiles(self) -> int:
        """How many tiles there are."""
        return len(self.ranks)

    def among(self, tiles: tuple[int, ...]) -> Grid:
        """Return the grid of some tiles, of which this is one; () for all."""
        if not tiles:
            return self
        if tiles not in self._among:
            ranks = tuple(self.ranks[tile] for tile in tiles)
            self._among[tiles] = Grid(self.transport, ranks, tiles.index(self.tile))
        return self._among[tiles]

    def depart(self, exchange: Exchange, held: Tensor) -> Flight:
        """Start to send what other tiles want of the held box, and to receive."""
        return self._mailbox.depart(exchange, exchange.seen_from(self.tile), held)

    def depart_back(
        self,
        exchange: Exchange,
        gradients: Mapping[int, Sequence[Tensor]],
        like: Tensor,
    ) -> Flight:
        """Start to send home the gradients of what came from each tile."""
        view = exchange.seen_from(self.tile)
        return self._mailbox.depart_back(exchange, view, gradients, like.dtype)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Put the sum over the tiles into the tensor; return it."""
        if self._group is None:
            key = f"tiles of {self.ranks}"
            self._group = self.transport.host.group(tuple(sorted(self.ranks)), key)
        self.transport.wait(self.transport.all_reduce(self._group, tensor))
        return tensor

    def collect(self, held: Tensor, exchange: Exchange) -> Tensor:
        """Return the wanted box. Own pieces are copied while the others arrive."""
        view = exchange.seen_from(self.tile)
        flight = self.depart(exchange, held)
        result = _begun(held, view, exchange.fill)
        strips = [s for tile in view.received for s in flight.take(tile)]
        _put(result, view, strips)
        flight.finish()
        remember(result, (held, *strips), _assembler(view, exchange.fill))
        return result

    def give_back(self, gradient: Tensor, exchange: Exchange) -> Tensor:
        """Return the gradient of the held box: the transpose of `collect`.

        Added are the own piece, then those of the other tiles in ascending order.
        """
        view = exchange.seen_from(self.tile)
        sends = {
            tile: [gradient[p.placed(view.wanted)] for p in pieces]
            for tile, pieces in view.received.items()
        }
        flight = self.depart_back(exchange, sends, gradient)
        if len(view.own) == 1 and view.own[0].box == view.held:
            result = gradient[view.own[0].placed(view.wanted)].clone(
                memory_format=torch.contiguous_format
            )
        else:
            result = gradient.new_zeros(shape_of(view.held))
            for piece in view.own:
                result[piece.within(view.held)] += gradient[piece.placed(view.wanted)]
        for tile, pieces in view.sent.items():
            parts = flight.take(tile)
            for piece, part in zip(pieces, parts, strict=True):
                result[piece.within(view.held)] += part
        flight.finish()
        return result


def _begun(held: Tensor, view: View, fill: float) -> Tensor:
    """Return the wanted box with what the tile has itself, and what is filled."""
    result = held.new_empty(shape_of(view.wanted))
    for part in view.outside:
        result[part] = fill
    for piece in view.own:
        result[piece.placed(view.wanted)] = held[piece.within(view.held)]
    return result


def _put(result: Tensor, view: View, strips: Sequence[Tensor]) -> None:
    """Put what other tiles sent into the wanted box."""
    pieces = [piece for each in view.received.values() for piece in each]
    for piece, strip in zip(pieces, strips, strict=True):
        result[piece.placed(view.wanted)] = strip


def _assembler(view: View, fill: float) -> Callable[..., Tensor]:
    """Return the function that puts a wanted box together once more."""

    def assemble(held: Tensor, *strips: Tensor) -> Tensor:
        result = _begun(held, view, fill)
        _put(result, view, strips)
        return result

    return assemble
