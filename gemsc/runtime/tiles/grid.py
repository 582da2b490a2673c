"""Grid: the tiles of one stage, and how they reach each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, combinations
from math import prod

import torch
from torch import Tensor

from gemsc.base.boxes import Box, intersection, shape_of, volume
from gemsc.base.dtypes import HALF, empty, format_of
from gemsc.errors import InternalError
from gemsc.messages.exchange import Exchange, Piece, View, index_of
from gemsc.runtime.tiles.saving import remember
from gemsc.runtime.transport.device_transport import DeviceTransport, Operation
from gemsc.runtime.transport.transport import Group
from gemsc.runtime.transport.waiting import Request

__all__ = ["Grid"]

FIRST_TAG = 16384  # below are the transfers between stages
NUM_INDICES = 8192  # with two tags each: values, and their gradients


@dataclass(eq=False)
class Flight:
    """The messages of one exchange on their way; `shapes` of what comes from a tile.

    The pieces for one tile travel together.
    """

    transport: DeviceTransport
    shapes: Mapping[int, Sequence[tuple[int, ...]]]
    incoming: dict[int, Operation] = field(default_factory=dict)
    outgoing: list[Request] = field(default_factory=list)
    is_over: bool = False

    def take(self, tile: int) -> list[Tensor]:
        """Wait for the tensors that come from a tile. Call it once."""
        joined = self.incoming.pop(tile).take()
        shapes = self.shapes[tile]
        parts = torch.split(joined, [prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def finish(self) -> None:
        """Wait until all is sent: the next exchange may begin."""
        self.transport.wait(*self.outgoing)
        self.is_over = True


def tag_of(exchange: Exchange, *, back: bool) -> int:
    """Return the tag of an exchange's messages; `back` are those of its gradients."""
    return FIRST_TAG + 2 * (exchange.index % NUM_INDICES) + back


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
        self._flight: Flight | None = None  # the last exchange

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

    def connect(self, sums: Iterable[tuple[int, ...]]) -> None:
        """Make what sums over some of the tiles need, in the order of all tiles."""
        for tiles in sorted(sums):
            self.among(tiles)._members()

    def depart(self, exchange: Exchange, held: Tensor) -> Flight:
        """Start to send what other tiles want of the held box, and to receive."""
        view = exchange.seen_from(self.tile)
        sends = {
            tile: [held[piece.within(view.held)] for piece in pieces]
            for tile, pieces in view.sent.items()
        }
        return self.post(exchange, sends, view.received, held.dtype, back=False)

    def depart_back(
        self,
        exchange: Exchange,
        gradients: Mapping[int, Sequence[Tensor]],
        like: Tensor,
    ) -> Flight:
        """Start to send home the gradients of what came from each tile."""
        comes = exchange.seen_from(self.tile).sent
        return self.post(exchange, gradients, comes, like.dtype, back=True)

    def post(
        self,
        exchange: Exchange,
        sends: Mapping[int, Sequence[Tensor]],
        receives: Mapping[int, Sequence[Piece]],
        dtype: torch.dtype,
        *,
        back: bool,
    ) -> Flight:
        """Start to send tensors to tiles, and to receive pieces from tiles.

        `back` says that these are gradients, which go against the exchange.
        """
        if self._flight is not None and not self._flight.is_over:
            raise InternalError("an exchange begins before the last one ended")
        tag, link = tag_of(exchange, back=back), self.transport
        shapes = {n: [piece.shape for piece in row] for n, row in receives.items()}
        flight = self._flight = Flight(link, shapes)
        with link.as_one():
            for tile, sizes in shapes.items():
                count, rank = sum(map(prod, sizes)), self.ranks[tile]
                flight.incoming[tile] = link.receive((count,), dtype, rank, tag)
            for tile, tensors in sends.items():
                flat = [tensor.reshape(-1) for tensor in tensors]
                joined = torch.cat(flat) if len(flat) > 1 else flat[0]
                request = link.send(joined, self.ranks[tile], tag)
                flight.outgoing.append(request)
        return flight

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Put the sum over the tiles into the tensor; return it."""
        self.transport.wait(self.transport.all_reduce(self._members(), tensor))
        return tensor

    def _members(self) -> Group:
        if self._group is None:
            key = f"tiles of {self.ranks}"
            self._group = self.transport.group(tuple(sorted(self.ranks)), key)
        return self._group

    def collect(self, held: Tensor, exchange: Exchange) -> Tensor:
        """Return the wanted box. Local pieces are copied while the others arrive."""
        view = exchange.seen_from(self.tile)
        flight = self.depart(exchange, held)
        if exchange.adds:
            local = [(p.wish, held[p.within(view.held)]) for p in view.local]
            others = {n: [p.wish for p in row] for n, row in view.received.items()}
            return self._sum(held, view.wanted, local, others, flight, in_order=True)
        if view.is_handed_over:
            ((result,),) = map(flight.take, view.received)
            flight.finish()
            return result
        result = _begun(held, view, exchange.fill)
        strips = [s for tile in view.received for s in flight.take(tile)]
        _put(result, view, strips)
        flight.finish()
        remember(result, (held, *strips), _assembler(view, exchange.fill))
        return result

    def give_back(self, gradient: Tensor, exchange: Exchange) -> Tensor:
        """Return the gradient of the held box: the transpose of `collect`."""
        view = exchange.seen_from(self.tile)
        sends = {
            tile: [gradient[p.placed(view.wanted)] for p in pieces]
            for tile, pieces in view.received.items()
        }
        flight = self.depart_back(exchange, sends, gradient)
        local = [(p.box, gradient[p.placed(view.wanted)]) for p in view.local]
        others = {n: [p.box for p in row] for n, row in view.sent.items()}
        in_order = exchange.adds
        return self._sum(gradient, view.held, local, others, flight, in_order=in_order)

    def _sum(
        self,
        like: Tensor,
        outer: Box,
        local: Sequence[tuple[Box, Tensor]],
        others: Mapping[int, Sequence[Box]],
        flight: Flight,
        *,
        in_order: bool,
    ) -> Tensor:
        """Return the sum of local terms and of those that arrive, in a box.

        Local ones come first, and need not wait, unless all tiles must add alike.
        """
        tiles = (self.tile, *others)

        def terms() -> Iterator[tuple[Box, Tensor]]:
            for tile in sorted(tiles) if in_order else tiles:
                if tile == self.tile:
                    yield from local
                else:
                    yield from zip(others[tile], flight.take(tile), strict=True)

        boxes = (*(box for box, _ in local), *chain.from_iterable(others.values()))
        if not local and boxes == (outer,):
            ((result,),) = map(flight.take, others)
            flight.finish()
            return result
        result = _added(like, outer, boxes, terms())
        flight.finish()
        return result


def _added(
    like: Tensor,
    outer: Box,
    boxes: tuple[Box, ...],
    terms: Iterable[tuple[Box, Tensor]],
) -> Tensor:
    """Return the sum of terms, which have these boxes, in the order given.

    More than two of half precision are added in float32.
    """
    if _is_tiled(outer, boxes):
        result = _room(like, outer)
        for box, term in terms:
            result[index_of(box, outer)] = term
        return result
    half = like.dtype in HALF
    dtype = torch.float32 if half and len(boxes) > 2 else like.dtype
    total: Tensor | None = None
    for box, term in terms:
        if total is None and box == outer:
            total = _room(like, outer, dtype).copy_(term)
            continue
        if total is None:
            total = _room(like, outer, dtype).zero_()
        total[index_of(box, outer)] += term
    return _room(like, outer).zero_() if total is None else total.to(like.dtype)


def _room(like: Tensor, box: Box, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory for a box of a value, in the memory format of a part of it."""
    how = {"dtype": dtype or like.dtype, "device": like.device}
    return empty(shape_of(box), format_of(like), **how)


@lru_cache(maxsize=4096)
def _is_tiled(outer: Box, boxes: tuple[Box, ...]) -> bool:
    """Whether boxes inside a box cover it and do not overlap."""
    return sum(map(volume, boxes)) == volume(outer) and not any(
        volume(intersection(a, b)) for a, b in combinations(boxes, 2)
    )


def _begun(held: Tensor, view: View, fill: float) -> Tensor:
    """Return the wanted box with what the tile has itself, and what is filled."""
    result = _room(held, view.wanted)
    for part in view.outside:
        result[part] = fill
    for piece in view.local:
        result[piece.placed(view.wanted)] = held[piece.within(view.held)]
    return result


def _put(result: Tensor, view: View, strips: Sequence[Tensor]) -> None:
    """Put what other tiles sent into the wanted box."""
    pieces = chain.from_iterable(view.received.values())
    for piece, strip in zip(pieces, strips, strict=True):
        result[piece.placed(view.wanted)] = strip


def _assembler(view: View, fill: float) -> Callable[..., Tensor]:
    """Return the function that puts a wanted box together once more."""

    def assemble(held: Tensor, *strips: Tensor) -> Tensor:
        result = _begun(held, view, fill)
        _put(result, view, strips)
        return result

    return assemble
