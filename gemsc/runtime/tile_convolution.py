"""Convolutions of a tile without a copy of it: what the halo adds comes afterwards.

A convolution is linear in its input. Where its result has the tile's own size, the tile
can be convolved with zeros around it while its halo travels; what the halo adds to the
outermost results is a convolution of a few rows.

    the tile, zeros around it      0 # # # # 0   ->   # # # #    while the halo travels
    the halo alone, zeros inside   h 0 0         ->   +          added to the first row

So no copy of the tile with its halo is made, neither now nor for the backward, which
goes the same way back: first what the halo's owners wait for, then the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gemsc.boxes import Box, intersection, shape_of
from gemsc.runtime.exchange import Exchange, Piece, View

if TYPE_CHECKING:
    from gemsc.runtime.tile_messages import Flight, TileMailbox

__all__ = ["convolved", "reach"]

Slices = tuple[slice, ...]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def reach(layer: nn.Module, view: View) -> tuple[int, ...]:
    """Return how many rows the halo has on either side, for each spatial axis.

    () if this is no convolution whose result has the tile's size, or the halo is wider
    than the tile.
    """
    if type(layer) not in CONVOLUTIONS or len(view.own) != 1:
        return ()
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if view.own[0].box != view.held or view.held[:2] != view.wanted[:2]:
        return ()
    rows = []
    for axis, (held, wanted) in enumerate(
        zip(view.held[2:], view.wanted[2:], strict=True)
    ):
        count = held[0] - wanted[0]
        window = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
        if count or held != wanted:
            same = wanted[1] - held[1] == count and window == 2 * count
            if not same or layer.stride[axis] != 1 or count > held[1] - held[0]:
                return ()
        rows.append(count)
    return tuple(rows) if any(rows) else ()


@dataclass(frozen=True, slots=True)
class _Border:
    """A side of the tile: the box of the whole value that is convolved for it.

    `place` is where the result is added, `padding` that of the convolution, `pieces`
    are (tile, what comes from it, the part in this box).
    """

    box: Box
    place: Slices
    padding: tuple[int, ...]
    pieces: tuple[tuple[int, Piece, Box], ...]


def _borders(
    view: View, rows: tuple[int, ...], padding: list[int]
) -> Iterator[_Border]:
    """Yield the sides to which other tiles contribute.

    Sides of an axis have the halo's corners of later axes; those of earlier axes are
    zeros around them.
    """
    for axis, count in enumerate(rows):
        if not count:
            continue
        dim = axis + 2
        start, stop = view.held[dim]
        later = [d for d in range(dim + 1, len(view.held)) if rows[d - 2]]
        outer = list(view.held)
        for each in later:
            outer[each] = view.wanted[each]
        around = [
            0 if a == axis or a + 2 in later else pad for a, pad in enumerate(padding)
        ]
        for halo, whole, part in (
            ((start - count, start), (start - count, start + 2 * count), (0, count)),
            (
                (stop, stop + count),
                (stop - 2 * count, stop + count),
                (stop - start - count, stop - start),
            ),
        ):
            outer[dim] = halo
            found = [
                (tile, piece, intersection(piece.box, tuple(outer)))
                for tile, (piece,) in view.received.items()
            ]
            pieces = tuple(each for each in found if min(shape_of(each[2])) > 0)
            if pieces:
                outer[dim] = whole
                place = (*(slice(None),) * dim, slice(*part))
                yield _Border(tuple(outer), place, tuple(around), pieces)


def convolved(
    mailbox: TileMailbox | None,
    view: View,
    value: Tensor,
    exchange: Exchange,
    layer: nn.Module,
    rows: tuple[int, ...],
) -> Tensor:
    """Return the layer's result on the wanted box; `rows` are those of `reach`.

    Without a mailbox there are no messages, and shapes are right.
    """
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    trip = _Trip(mailbox, view, exchange, layer, rows)
    result: Tensor = _Convolution.apply(value, layer.weight, layer.bias, trip)  # type: ignore[no-untyped-call]
    return result


class _Trip:
    """One exchange and its way back."""

    def __init__(
        self,
        mailbox: TileMailbox | None,
        view: View,
        exchange: Exchange,
        layer: nn.Conv1d | nn.Conv2d | nn.Conv3d,
        rows: tuple[int, ...],
    ) -> None:
        self.mailbox = mailbox
        self.view = view
        self.exchange = exchange
        self.dilation = list(layer.dilation)
        self.groups = layer.groups
        own = [0 if isinstance(pad, str) else pad for pad in layer.padding]
        self.padding = [
            count or pad for count, pad in zip(rows, own, strict=True)
        ]  # a layer on tiles has no padding where these are cut
        self.stride = list(layer.stride)
        self.borders = tuple(_borders(view, rows, self.padding))

    def post(self, held: Tensor) -> Flight | None:
        """Send what other tiles want."""
        if self.mailbox is None:
            return None
        return self.mailbox.depart(self.exchange, self.view, held)

    def post_back(self, gradients: dict[int, Tensor], like: Tensor) -> Flight | None:
        """Send gradients home."""
        if self.mailbox is None:
            return None
        sends = {tile: [gradient] for tile, gradient in gradients.items()}
        return self.mailbox.depart_back(self.exchange, self.view, sends, like.dtype)

    def convolution(
        self, value: Tensor, weight: Tensor, bias: Tensor | None, padding: list[int]
    ) -> Tensor:
        return torch.convolution(value, weight, bias, *self._settings(padding))

    def _settings(self, padding: list[int]) -> tuple[Any, ...]:
        """Return the operators' arguments after the tensors: none is transposed."""
        zeros = [0] * len(padding)
        return self.stride, padding, self.dilation, False, zeros, self.groups

    def backward(
        self,
        gradient: Tensor,
        value: Tensor,
        weight: Tensor,
        padding: list[int],
        wanted: list[bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of value, weight and bias, as far as they are wanted."""
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            gradient,
            value,
            weight,
            [weight.shape[0]] if wanted[2] else None,
            *self._settings(padding),
            wanted,
        )
        return result

    def outside(self, border: _Border, strips: dict[int, Tensor]) -> Tensor:
        """Return the border's input: strips of other tiles, zeros elsewhere."""
        (first, *_) = strips.values()
        result = first.new_zeros(shape_of(border.box))
        for tile, piece, both in border.pieces:
            result[_within(both, border.box)] = strips[tile][_within(both, piece.box)]
        return result


def _within(box: Box, outer: Box) -> Slices:
    return Piece(0, 0, box).within(outer)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, held: Tensor, weight: Tensor, bias: Tensor | None, trip: _Trip
    ) -> Tensor:
        flight = trip.post(held)
        result = trip.convolution(held, weight, bias, trip.padding)
        strips = {}
        for tile, (piece,) in trip.view.received.items():
            if flight is None:
                strips[tile] = held.new_empty(piece.shape)
            else:
                (strips[tile],) = flight.take(tile, keep=True)
        if flight is not None:
            flight.finish()
        for border in trip.borders:
            outside = trip.outside(border, strips)
            result[border.place] += trip.convolution(
                outside, weight, None, list(border.padding)
            )
        ctx.save_for_backward(held, weight, *strips.values())
        ctx.trip, ctx.has_bias = trip, bias is not None
        return result

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        trip: _Trip = ctx.trip
        held, weight, *received = ctx.saved_tensors
        needs_value, needs_weight, needs_bias, _ = ctx.needs_input_grad
        strips = dict(zip(trip.view.received, received, strict=True))
        weight_gradients = []
        totals = {tile: torch.zeros_like(strip) for tile, strip in strips.items()}
        for border in trip.borders:
            outside = trip.outside(border, strips)
            mine, part, _ = trip.backward(
                gradient[border.place],
                outside,
                weight,
                list(border.padding),
                [needs_value, needs_weight, False],
            )
            weight_gradients.append(part)
            for tile, piece, both in border.pieces if needs_value else ():
                totals[tile][_within(both, piece.box)] += mine[
                    _within(both, border.box)
                ]
        flight = trip.post_back(totals, gradient) if needs_value else None
        wanted = [needs_value, needs_weight, ctx.has_bias and needs_bias]
        result, total, bias = trip.backward(
            gradient, held, weight, trip.padding, wanted
        )
        for part in weight_gradients if needs_weight else ():
            total += part
        if flight is not None:
            for tile, (piece,) in trip.view.sent.items():
                (part,) = flight.take(tile, keep=False)
                result[piece.within(trip.view.held)] += part
            flight.finish()
        return result, total, bias, None
