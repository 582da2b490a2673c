"""Overlap: compute the inner part of a layer's result while its halo is on its way.

Convolutions that keep the size of their input have a way of their own, without copies:
see `tile_convolution`. Others, and pooling, are computed in parts.

Example, a 3 x 3 convolution on a tile that wants one row more on both sides:

    start to send and receive rows          . . . .   on their way
    inner rows of the result, of own rows   # # # #
    wait
    the first and the last row              - - - -   each of three rows
    put the rows together

Backward goes the same way back: the outer parts first; their gradients travel home
while the inner part is computed, and are added at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gemsc.base.boxes import Box, intersection, shape_of
from gemsc.messages.exchange import Exchange, Piece, View
from gemsc.runtime.tiles.convolution import Crossing, reach

if TYPE_CHECKING:
    from gemsc.runtime.tiles.messages import Flight, TileMailbox

__all__ = ["Split", "overlapped", "split"]

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """The result of a layer on one tile, in parts.

    `inner` is (where it is in the result, where its input is in the held box), None
    where no result needs own elements only. `outer` are (where it is in the result,
    the box of the whole value that it needs).
    """

    inner: tuple[Slices, Slices] | None
    outer: tuple[tuple[Slices, Box], ...]


def split(layer: Any, view: View) -> Split:
    """Return the parts of a layer's result: a window that moves over the wanted box.

    Along a dimension where the tile holds all that it wants nothing is split, and the
    layer may pad; along others it does not.
    """
    num_dims = len(view.wanted)
    rank = num_dims - 2
    if len(view.own) != 1:
        return Split(None, (((slice(None),) * num_dims, view.wanted),))
    own = view.own[0].box
    part: list[slice] = [slice(None)] * num_dims  # of the result, so far
    box = list(view.wanted)  # that it needs
    outer: list[tuple[Slices, Box]] = []
    for dim in range(num_dims):
        (start, stop), (first, last) = view.wanted[dim], own[dim]
        if (start, stop) == (first, last):
            continue
        kernel, stride, dilation = (
            _setting(layer, name, dim - num_dims + rank, rank)
            for name in ("kernel_size", "stride", "dilation")
        )
        reach = dilation * (kernel - 1) + 1
        count = (stop - start - reach) // stride + 1
        low = -((start - first) // stride)  # the first that needs no row before
        high = (last - start - reach) // stride + 1
        cuts = [(0, low), (high, count)] if low < high else [(0, count)]
        for begin, end in cuts:
            if begin < end:
                rows = (start + begin * stride, start + (end - 1) * stride + reach)
                here = (*part[:dim], slice(begin, end), *part[dim + 1 :])
                outer.append((here, (*box[:dim], rows, *box[dim + 1 :])))
        if low >= high:
            return Split(None, tuple(outer))
        part[dim] = slice(low, high)
        box[dim] = (start + low * stride, start + (high - 1) * stride + reach)
    return Split((tuple(part), _within(tuple(box), view.held)), tuple(outer))


def _setting(layer: Any, name: str, dim: int, rank: int) -> int:
    value = getattr(layer, name, 1)
    return int(value if isinstance(value, int) else value[dim % rank])


def _within(box: Box, outer: Box) -> Slices:
    return Piece(0, 0, box).within(outer)


def overlapped(
    mailbox: TileMailbox | None, view: View, exchange: Exchange, layer: nn.Module
) -> Callable[[Tensor], Tensor]:
    """Return what computes the layer's result on the wanted box, at each call.

    Without a mailbox there are no messages.
    """
    if rows := reach(layer, view):
        return Crossing(mailbox, view, exchange, layer, rows)
    parts = split(layer, view)

    def run(value: Tensor) -> Tensor:
        return _in_parts(layer, value, _Trip(mailbox, view, exchange, parts))

    return run


def _in_parts(layer: nn.Module, value: Tensor, trip: _Trip) -> Tensor:
    parts = trip.parts
    held: Tensor = _Start.apply(value, trip)  # type: ignore[no-untyped-call]
    results = []
    if parts.inner is not None:
        results.append(layer(held[parts.inner[1]]))
    borders = _Arrive.apply(held, trip)  # type: ignore[no-untyped-call]
    results += [layer(border) for border in borders]
    places = [parts.inner[0]] if parts.inner is not None else []
    places += [place for place, _ in parts.outer]
    if len(results) == 1:
        only: Tensor = results[0]
        return only
    joined: Tensor = _Join.apply(places, *results)  # type: ignore[no-untyped-call]
    return joined


class _Trip:
    """One exchange and its way back."""

    def __init__(
        self, mailbox: TileMailbox | None, view: View, exchange: Exchange, parts: Split
    ) -> None:
        self.mailbox = mailbox
        self.view = view
        self.exchange = exchange
        self.parts = parts
        self.flight: Flight | None = None
        self.is_back = False
        self.gradients: tuple[Tensor, ...] = ()  # of the outer parts' inputs

    def start(self, held: Tensor) -> None:
        """Send what other tiles want."""
        if self.mailbox is not None:
            self.flight = self.mailbox.depart(self.exchange, self.view, held)

    def borders(self, held: Tensor) -> tuple[Tensor, ...]:
        """Wait; return the inputs of the outer parts."""
        sources: list[tuple[Box, Piece, Tensor]] = []
        for piece in self.view.own:
            own = held[piece.within(self.view.held)]
            sources.append((piece.box, piece, own))
        for tile, (piece,) in self.view.received.items():
            (strip,) = (
                [held.new_empty(piece.shape)]
                if self.flight is None
                else self.flight.take(tile)
            )
            sources.append((piece.box, piece, strip))
        found = []
        for _, box in self.parts.outer:
            border = held.new_full(shape_of(box), self.exchange.fill)
            for given, _, tensor in sources:
                both = intersection(given, box)
                if min(shape_of(both)) > 0:
                    border[_within(both, box)] = tensor[_within(both, given)]
            found.append(border)
        self._finish()
        return tuple(found)

    def start_back(self, gradients: tuple[Tensor, ...], like: Tensor) -> None:
        """Send the gradients of what came home, zeros of what was not needed."""
        self.gradients = gradients
        self.is_back = True
        sends = {}
        for tile, (piece,) in self.view.received.items():
            total = like.new_zeros(piece.shape)
            self.add_to(total, piece.box)
            sends[tile] = [total]
        if self.mailbox is not None:
            self.flight = self.mailbox.depart_back(
                self.exchange, self.view, sends, like.dtype
            )

    def add_to(self, total: Tensor, box: Box) -> None:
        """Add what the outer parts' gradients have inside a box."""
        for (_, border), gradient in zip(self.parts.outer, self.gradients, strict=True):
            both = intersection(box, border)
            if min(shape_of(both)) > 0:
                total[_within(both, box)] += gradient[_within(both, border)]

    def end(self, gradient: Tensor) -> Tensor:
        """Add to the inner part's gradient what is missing: own parts, then others."""
        if not self.is_back:  # no outer part here, but others may have sent
            self.start_back((), gradient)
        result = gradient.clone()
        for piece in self.view.own:
            mine = result[piece.within(self.view.held)]
            self.add_to(mine, piece.box)
        for tile, (piece,) in self.view.sent.items() if self.flight is not None else ():
            assert self.flight is not None
            (part,) = self.flight.take(tile)
            result[piece.within(self.view.held)] += part
        self._finish()
        self.gradients = ()
        return result

    def _finish(self) -> None:
        if self.flight is not None:
            self.flight.finish()
            self.flight = None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.start(value)
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.end(gradient), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: Tensor, trip: _Trip) -> tuple[Tensor, ...]:
        ctx.trip = trip
        ctx.is_all = trip.parts.inner is None
        ctx.shape = tuple(held.shape)
        return trip.borders(held)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        ctx.trip.start_back(gradients, gradients[0])
        zero = gradients[0].new_zeros(()).expand(ctx.shape) if ctx.is_all else None
        return zero, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, places: list[Slices], *parts: Tensor) -> Tensor:
        ctx.places = places
        sizes = [
            max(
                (
                    part.shape[dim] if place[dim].stop is None else place[dim].stop
                    for place, part in zip(places, parts, strict=True)
                ),
            )
            for dim in range(parts[0].dim())
        ]
        whole = parts[0].new_empty(sizes)
        for place, part in zip(places, parts, strict=True):
            whole[place] = part
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient[place] for place in ctx.places)
