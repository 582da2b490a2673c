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

from gemsc.base.boxes import Box, intersection, shape_of
from gemsc.messages.exchange import Exchange, Piece, View

if TYPE_CHECKING:
    from gemsc.runtime.tiles.messages import Flight, TileMailbox

__all__ = ["Crossing", "reach"]

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
class _Part:
    """What comes from a tile for a border: its strip, `of` that, and where it goes."""

    tile: int
    of: Slices
    into: Slices
    is_all: bool  # of the strip


@dataclass(frozen=True, slots=True)
class _Border:
    """A side of the tile: the shape of what is convolved for it, and its parts.

    `place` is where the result is added, `padding` that of the convolution.
    """

    shape: tuple[int, ...]
    place: Slices
    padding: list[int]
    parts: tuple[_Part, ...]


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
            outer[dim] = whole
            parts = tuple(
                _Part(
                    tile,
                    _within(both, piece.box),
                    _within(both, tuple(outer)),
                    both == piece.box,
                )
                for tile, piece, both in found
                if min(shape_of(both)) > 0
            )
            if parts:
                place = (*(slice(None),) * dim, slice(*part))
                yield _Border(shape_of(tuple(outer)), place, around, parts)


class Crossing:
    """A convolution on a tile: its exchange with other tiles, and the way back.

    Without a mailbox there are no messages, and shapes are right. It is made once and
    serves every call.
    """

    def __init__(
        self,
        mailbox: TileMailbox | None,
        view: View,
        exchange: Exchange,
        layer: nn.Module,
    ) -> None:
        assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        rows = reach(layer, view)
        self.mailbox = mailbox
        self.view = view
        self.exchange = exchange
        self.layer = layer
        self.dilation = list(layer.dilation)
        self.groups = layer.groups
        own = [0 if isinstance(pad, str) else pad for pad in layer.padding]
        self.padding = [
            count or pad for count, pad in zip(rows, own, strict=True)
        ]  # a layer on tiles has no padding where these are cut
        self.stride = list(layer.stride)
        self.borders = tuple(_borders(view, rows, self.padding))
        self.shapes = {tile: piece.shape for tile, (piece,) in view.received.items()}
        self.returns = {
            tile: piece.within(view.held) for tile, (piece,) in view.sent.items()
        }

    def __call__(self, value: Tensor) -> Tensor:
        """Return the layer's result on the wanted box."""
        weight, bias = self.layer.weight, self.layer.bias
        result: Tensor = _Convolution.apply(value, weight, bias, self)  # type: ignore[no-untyped-call]
        return result

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
        """Return the convolution of any part."""
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
        result = first.new_zeros(border.shape)
        for part in border.parts:
            strip = strips[part.tile]
            result[part.into] = strip if part.is_all else strip[part.of]
        return result


def _within(box: Box, outer: Box) -> Slices:
    return Piece(0, 0, box).within(outer)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, held: Tensor, weight: Tensor, bias: Tensor | None, way: Crossing
    ) -> Tensor:
        flight = way.post(held)
        result = way.convolution(held, weight, bias, way.padding)
        strips = {}
        for tile, shape in way.shapes.items():
            if flight is None:
                strips[tile] = held.new_empty(shape)
            else:
                (strips[tile],) = flight.take(tile)
        if flight is not None:
            flight.finish()
        for border in way.borders:
            outside = way.outside(border, strips)
            result[border.place] += way.convolution(
                outside, weight, None, border.padding
            )
        ctx.save_for_backward(held, weight, *strips.values())
        ctx.way, ctx.has_bias = way, bias is not None
        return result

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        way: Crossing = ctx.way
        held, weight, *received = ctx.saved_tensors
        needs_value, needs_weight, needs_bias, _ = ctx.needs_input_grad
        strips = dict(zip(way.shapes, received, strict=True))
        weight_gradients = []
        back: dict[int, Tensor] = {}
        for border in way.borders:
            outside = way.outside(border, strips)
            mine, total, _ = way.backward(
                gradient[border.place],
                outside,
                weight,
                border.padding,
                [needs_value, needs_weight, False],
            )
            weight_gradients.append(total)
            for part in border.parts if needs_value else ():
                _add(back, part, mine[part.into], strips[part.tile])
        flight = way.post_back(back, gradient) if needs_value else None
        wanted = [needs_value, needs_weight, ctx.has_bias and needs_bias]
        result, total, bias = way.backward(gradient, held, weight, way.padding, wanted)
        for each in weight_gradients if needs_weight else ():
            total += each
        if flight is not None:
            for tile, place in way.returns.items():
                (mine,) = flight.take(tile)
                result[place] += mine
            flight.finish()
        return result, total, bias, None


def _add(back: dict[int, Tensor], part: _Part, gradient: Tensor, strip: Tensor) -> None:
    """Add what one border gives to the gradient of a strip."""
    if part.is_all and part.tile not in back:
        back[part.tile] = gradient
        return
    if part.tile not in back:
        back[part.tile] = torch.zeros_like(strip)
    back[part.tile][part.of] += gradient
