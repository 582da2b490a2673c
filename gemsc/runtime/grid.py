"""Grid: the tiles of one stage, and what a generated stage asks of them.

Gradients are the honest transpose of what is computed forward: each tile's are partial,
and the true gradient is the sum over the tiles, of whole values too. So a sum over the
tiles has a sum over the tiles as its backward, a slice of a whole value has zeros
around the gradient, and what a tile received it sends home, to be added there.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gemsc.boxes import shape_of
from gemsc.runtime.exchange import Exchange, Piece
from gemsc.runtime.link import Incoming, Link
from gemsc.runtime.tile_layers import LayersOnTiles
from gemsc.runtime.tile_saving import kept_of, remember, saved_in_parts
from gemsc.runtime.tile_windows import AxisWindows, Resize, rows_read, taps
from gemsc.runtime.transport import Group, Request

__all__ = [
    "AxisWindows",
    "Exchange",
    "Grid",
    "Resize",
    "ShapeGrid",
    "kept_of",
    "rows_read",
    "saved_in_parts",
    "taps",
    "told_of_sums",
]

FIRST_TAG = 16384  # below are the transfers between stages
NUM_INDICES = 8192  # with two tags each: values, and their gradients


class Grid(LayersOnTiles):
    """One tile among those of its stage: what `self.grid` is in a generated stage.

    `ranks` are the transport's ranks of all tiles, in their order; `tile` is this one.
    All tiles call the same methods in the same order.
    """

    def __init__(self, link: Link, ranks: tuple[int, ...], tile: int) -> None:
        self.link = link
        self.ranks = ranks
        self.tile = tile
        self._group: Group | None = None
        self._among: dict[tuple[int, ...], Grid] = {}

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
            self._among[tiles] = Grid(self.link, ranks, tiles.index(self.tile))
        return self._among[tiles]

    def redistribute(self, value: Tensor, exchange: Exchange) -> Tensor:
        """Return this tile's wanted box of a value of which it gives its held box."""
        result: Tensor = _Redistribute.apply(value, self, exchange)  # type: ignore[no-untyped-call]
        return result

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
            self._group = self.link.transport.group(tuple(sorted(self.ranks)), key)
        self.link.wait(self.link.all_reduce(self._group, tensor))
        return tensor

    def collect(self, held: Tensor, exchange: Exchange) -> Tensor:
        """Return the wanted box. Own pieces are copied while the others arrive."""
        held_box = exchange.held[self.tile]
        mine = self._pieces(exchange)
        tag = FIRST_TAG + 2 * (exchange.index % NUM_INDICES)
        messages = _Messages(self, tag, held.dtype)
        messages.receive((p.source, p.shape) for p in mine if p.dest == self.tile)
        messages.send(
            (p.dest, held[p.within(held_box)]) for p in mine if p.source == self.tile
        )
        result = self._begun(held, exchange)
        strips = [messages.take(p.source) for p in self._incoming(exchange)]
        self._put(result, exchange, strips)
        messages.finish()
        remember(result, (held, *strips), self._assembler(exchange))
        return result

    def _begun(self, held: Tensor, exchange: Exchange) -> Tensor:
        """Return the wanted box with what the tile has itself, and what is filled."""
        held_box, box = exchange.held[self.tile], exchange.wanted[self.tile]
        result = held.new_empty(shape_of(box))
        for part in exchange.outside(self.tile):
            result[part] = exchange.fill
        for piece in self._pieces(exchange):
            if piece.source == piece.dest:
                result[piece.placed(box)] = held[piece.within(held_box)]
        return result

    def _put(
        self, result: Tensor, exchange: Exchange, strips: Sequence[Tensor]
    ) -> None:
        """Put what other tiles sent into the wanted box."""
        box = exchange.wanted[self.tile]
        for piece, strip in zip(self._incoming(exchange), strips, strict=True):
            result[piece.placed(box)] = strip

    def _assembler(self, exchange: Exchange) -> Callable[..., Tensor]:
        """Return the function that puts a wanted box together once more."""

        def assemble(held: Tensor, *strips: Tensor) -> Tensor:
            result = self._begun(held, exchange)
            self._put(result, exchange, strips)
            return result

        return assemble

    def give_back(self, gradient: Tensor, exchange: Exchange) -> Tensor:
        """Return the gradient of the held box: the transpose of `collect`.

        Added are the own piece, then those of the other tiles in ascending order.
        """
        held_box, box = exchange.held[self.tile], exchange.wanted[self.tile]
        mine = self._pieces(exchange)
        tag = FIRST_TAG + 2 * (exchange.index % NUM_INDICES) + 1
        messages = _Messages(self, tag, gradient.dtype)
        messages.receive((p.dest, p.shape) for p in mine if p.source == self.tile)
        messages.send(
            (p.source, gradient[p.placed(box)]) for p in mine if p.dest == self.tile
        )
        result = gradient.new_zeros(shape_of(held_box))
        for piece in mine:
            if piece.source == piece.dest:
                result[piece.within(held_box)] += gradient[piece.placed(box)]
        for piece in mine:
            if piece.dest != self.tile:
                result[piece.within(held_box)] += messages.take(piece.dest)
        messages.finish()
        return result

    def _incoming(self, exchange: Exchange) -> list[Piece]:
        return [
            piece
            for piece in exchange.pieces
            if piece.dest == self.tile and piece.source != self.tile
        ]

    def _pieces(self, exchange: Exchange) -> list[Piece]:
        return [p for p in exchange.pieces if self.tile in (p.source, p.dest)]


class _Messages:
    """The messages of one exchange: all are under way at once.

    Mostly there is one for each peer; of several, the first sent is the first taken.
    """

    def __init__(self, grid: Grid, tag: int, dtype: torch.dtype) -> None:
        self._grid = grid
        self._tag = tag
        self._dtype = dtype
        self._incoming: defaultdict[int, deque[Incoming]] = defaultdict(deque)
        self._outgoing: list[Request] = []

    def receive(self, pairs: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        for peer, shape in pairs:
            if peer != self._grid.tile:
                rank = self._grid.ranks[peer]
                self._incoming[peer].append(
                    self._grid.link.receive(shape, self._dtype, rank, self._tag)
                )

    def send(self, pairs: Iterable[tuple[int, Tensor]]) -> None:
        for peer, tensor in pairs:
            if peer != self._grid.tile:
                rank = self._grid.ranks[peer]
                self._outgoing.append(self._grid.link.send(tensor, rank, self._tag))

    def take(self, peer: int) -> Tensor:
        return self._incoming[peer].popleft().take()

    def finish(self) -> None:
        self._grid.link.wait(*self._outgoing)


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
        if len(exchange.held) == len(exchange.wanted):
            strips = [held.new_empty(p.shape) for p in self._incoming(exchange)]
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
