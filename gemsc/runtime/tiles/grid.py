"""Grid: the tiles of one stage, and what a generated stage asks of them.

Gradients are the honest transpose of what is computed forward: each tile's are partial,
and the true gradient is the sum over the tiles, of whole values too. So a sum over the
tiles has a sum over the tiles as its backward, a slice of a whole value has zeros
around the gradient, and what a tile received it sends home, to be added there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gemsc.base.boxes import shape_of
from gemsc.messages.exchange import Exchange, View
from gemsc.runtime.tiles.convolution import Crossing, reach
from gemsc.runtime.tiles.layers import LayersOnTiles
from gemsc.runtime.tiles.messages import TileMailbox
from gemsc.runtime.tiles.saving import kept_of, remember, saved_in_parts
from gemsc.runtime.tiles.windows import AxisWindows, Resize, rows_read, taps
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.transport import Group

__all__ = [
    "AxisWindows",
    "Exchange",
    "Grid",
    "Resize",
    "ShapeGrid",
    "kept_of",
    "reach",
    "rows_read",
    "saved_in_parts",
    "taps",
    "told_of_sums",
]


class Grid(LayersOnTiles):
    """One tile among those of its stage: what `self.grid` is in a generated stage.

    `ranks` are the transport's ranks of all tiles, in their order; `tile` is this one.
    All tiles call the same methods in the same order.
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
        self._overlapped: dict[tuple[int, int], Crossing] = {}

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

    def redistribute(self, value: Tensor, exchange: Exchange) -> Tensor:
        """Return this tile's wanted box of a value of which it gives its held box."""
        result: Tensor = _Redistribute.apply(value, self, exchange)  # type: ignore[no-untyped-call]
        return result

    def overlapped(self, value: Tensor, exchange: Exchange, layer: nn.Module) -> Tensor:
        """Return `layer(redistribute(value, exchange))`.

        The layer is a convolution; what needs the tile's own part only is computed
        while the rest is on its way.
        """
        key = id(exchange), id(layer)
        if key not in self._overlapped:
            view = exchange.seen_from(self.tile)
            self._overlapped[key] = Crossing(self._mailbox, view, exchange, layer)
        return self._overlapped[key](value)

    def all_reduce(self, value: Tensor, among: tuple[int, ...] = ()) -> Tensor:
        """Return the sum over the tiles, or some of them, the same on all of these."""
        grid = self.among(among)
        result: Tensor = _AllReduce.apply(value, grid)  # type: ignore[no-untyped-call]
        return result

    # ------------------------------------------- without gradients

    def add_up(self, tensor: Tensor) -> Tensor:
        """Put the sum over the tiles into the tensor; return it."""
        if self._group is None:
            key = f"tiles of {self.ranks}"
            self._group = self.transport.host.group(tuple(sorted(self.ranks)), key)
        self.transport.wait(self.transport.all_reduce(self._group, tensor))
        return tensor

    def collect(self, held: Tensor, exchange: Exchange) -> Tensor:
        """Return the wanted box. Own pieces are copied while the others arrive."""
        view = exchange.seen_from(self.tile)
        flight = self._mailbox.depart(exchange, view, held)
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
        flight = self._mailbox.depart_back(exchange, view, sends, gradient.dtype)
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


_listener = threading.local()


@contextmanager
def told_of_sums(listen: Callable[[int, bool], None]) -> Iterator[None]:
    """Tell of each sum over the tiles that fake tensors go through in this thread.

    `listen` gets the bytes of a tile's part, and whether it is a row of a table that
    has one for each tile.
    """
    _listener.listen = listen
    try:
        yield
    finally:
        _listener.listen = None


def _tell(num_bytes: int, *, has_rows: bool) -> None:
    listen = getattr(_listener, "listen", None)
    if listen is not None:
        listen(num_bytes, has_rows)


class ShapeGrid(Grid):
    """A tile alone, for fake tensors: shapes are right, and nothing is sent."""

    def __init__(self, tile: int = 0, num_tiles: int = 1) -> None:
        self.ranks = tuple(range(num_tiles))
        self.tile = tile

    def among(self, tiles: tuple[int, ...]) -> Grid:
        """Return a tile alone that stands for some."""
        return ShapeGrid(0, len(tiles)) if tiles else self

    def overlapped(self, value: Tensor, exchange: Exchange, layer: nn.Module) -> Tensor:
        """Return a tensor of the result's shape."""
        view = exchange.seen_from(self.tile % len(exchange.wanted))
        return Crossing(None, view, exchange, layer)(value)

    def add_up(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        _tell(tensor.nbytes, has_rows=False)
        return tensor

    def rows(self, row: Tensor) -> Tensor:
        """Return a table with this tile's row."""
        if self.num_tiles > 1:  # as many as are known to take part
            _tell(row.nbytes * self.num_tiles, has_rows=False)
        else:
            _tell(row.nbytes, has_rows=True)
        return row.unsqueeze(0)

    def collect(self, held: Tensor, exchange: Exchange) -> Tensor:
        """Return a tensor of the wanted box's shape."""
        tile = self.tile % len(exchange.wanted)
        result = held.new_empty(shape_of(exchange.wanted[tile]))
        if not exchange.arrives:
            received = exchange.seen_from(tile).received
            shapes = [piece.shape for each in received.values() for piece in each]
            strips = [held.new_empty(shape) for shape in shapes]
            shape = result.shape
            remember(result, (held, *strips), lambda *_: held.new_empty(shape))
        return result

    def give_back(self, gradient: Tensor, exchange: Exchange) -> Tensor:
        """Return a tensor of the held box's shape."""
        tile = self.tile % len(exchange.held)
        return gradient.new_empty(shape_of(exchange.held[tile]))


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, grid: Grid, exchange: Exchange) -> Tensor:
        ctx.grid, ctx.exchange = grid, exchange
        return grid.collect(value, exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.grid.give_back(gradient, ctx.exchange), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, grid: Grid) -> Tensor:
        ctx.grid = grid
        return grid.add_up(value.detach().clone().contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.grid.add_up(gradient.clone().contiguous()), None
