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

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gemsc.base.boxes import intersection, shape_of
from gemsc.base.dtypes import lowered
from gemsc.messages.exchange import Exchange, View, index_of
from gemsc.runtime.tiles.collectives import TileGrid, applied

__all__ = ["convolution", "reach"]

Slices = tuple[slice, ...]
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Window(NamedTuple):
    """The settings of a convolution."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def convolution(
    grid: TileGrid, value: Tensor, exchange: Exchange, layer: Convolution
) -> Tensor:
    """Return `layer(redistribute(grid, value, exchange))`, where `reach` says so.

    What needs the tile's own part only is computed while the rest is on its way.
    """
    way = _way(exchange, grid.tile, _window(layer))
    weight, bias = lowered(layer.weight), layer.bias
    bias = lowered(bias) if bias is not None else None
    return applied(_Convolution, lowered(value), weight, bias, grid, way)


def _window(layer: Convolution) -> _Window:
    padding = tuple(0 if isinstance(pad, str) else pad for pad in layer.padding)
    return _Window(
        layer.kernel_size, layer.stride, padding, layer.dilation, layer.groups
    )


def reach(layer: nn.Module, view: View) -> tuple[int, ...]:
    """Return how many rows the halo has on either side, for each spatial axis.

    () if this is no convolution whose result has the tile's size, or the halo is wider
    than the tile.
    """
    if type(layer) not in CONVOLUTIONS or len(view.local) != 1:
        return ()
    if view.local[0].box != view.held or view.held[:2] != view.wanted[:2]:
        return ()
    assert isinstance(layer, Convolution)
    return _rows(_window(layer), view)


def _rows(window: _Window, view: View) -> tuple[int, ...]:
    rows = []
    for axis, (held, wanted) in enumerate(
        zip(view.held[2:], view.wanted[2:], strict=True)
    ):
        count = held[0] - wanted[0]
        width = window.dilation[axis] * (window.kernel_size[axis] - 1)
        if count or held != wanted:
            same = wanted[1] - held[1] == count and width == 2 * count
            if not same or window.stride[axis] != 1 or count > held[1] - held[0]:
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
        for later_dim in later:
            outer[later_dim] = view.wanted[later_dim]
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
            overlaps = [
                (tile, piece, intersection(piece.box, tuple(outer)))
                for tile, (piece,) in view.received.items()
            ]
            outer[dim] = whole
            parts = tuple(
                _Part(
                    tile,
                    index_of(both, piece.box),
                    index_of(both, tuple(outer)),
                    both == piece.box,
                )
                for tile, piece, both in overlaps
                if min(shape_of(both)) > 0
            )
            if parts:
                place = (*(slice(None),) * dim, slice(*part))
                yield _Border(shape_of(tuple(outer)), place, around, parts)


@dataclass(frozen=True, slots=True)
class _Way:
    """How a tile convolves, and what it exchanges for that: the same at every call.

    `strips` are the shapes of what comes from each tile, `returns` where the gradients
    of what went to a tile are added.
    """

    exchange: Exchange
    window: _Window
    padding: list[int]
    borders: tuple[_Border, ...]
    strips: dict[int, tuple[int, ...]]
    returns: dict[int, Slices]

    def convolution(
        self, value: Tensor, weight: Tensor, bias: Tensor | None, padding: list[int]
    ) -> Tensor:
        """Return the convolution of any part."""
        return torch.convolution(value, weight, bias, *self._settings(padding))

    def _settings(self, padding: list[int]) -> tuple[Any, ...]:
        """Return the operators' arguments after the tensors: none is transposed."""
        window, zeros = self.window, [0] * len(padding)
        return window.stride, padding, window.dilation, False, zeros, window.groups

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


@functools.lru_cache(maxsize=4096)
def _way(exchange: Exchange, tile: int, window: _Window) -> _Way:
    view = exchange.seen_from(tile)
    rows = _rows(window, view)
    # a layer on tiles has no padding where these are cut
    padding = [count or pad for count, pad in zip(rows, window.padding, strict=True)]
    return _Way(
        exchange,
        window,
        padding,
        tuple(_borders(view, rows, padding)),
        {tile: piece.shape for tile, (piece,) in view.received.items()},
        {tile: piece.within(view.held) for tile, (piece,) in view.sent.items()},
    )


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        held: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        grid: TileGrid,
        way: _Way,
    ) -> Tensor:
        flight = grid.depart(way.exchange, held)
        result = way.convolution(held, weight, bias, way.padding)
        strips = {tile: flight.take(tile)[0] for tile in way.strips}
        flight.finish()
        for border in way.borders:
            outside = way.outside(border, strips)
            result[border.place] += way.convolution(
                outside, weight, None, border.padding
            )
        ctx.save_for_backward(held, weight, *strips.values())
        ctx.grid, ctx.way, ctx.has_bias = grid, way, bias is not None
        return result

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        way: _Way = ctx.way
        held, weight, *received = ctx.saved_tensors
        needs_value, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        strips = dict(zip(way.strips, received, strict=True))
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
        if needs_value:
            sends = {tile: [strip] for tile, strip in back.items()}
            flight = ctx.grid.depart_back(way.exchange, sends, gradient)
        wanted = [needs_value, needs_weight, ctx.has_bias and needs_bias]
        result, total, bias = way.backward(gradient, held, weight, way.padding, wanted)
        for term in weight_gradients if needs_weight else ():
            total += term
        if needs_value:
            for tile, place in way.returns.items():
                (mine,) = flight.take(tile)
                result[place] += mine
            flight.finish()
        return result, total, bias, None, None


def _add(back: dict[int, Tensor], part: _Part, gradient: Tensor, strip: Tensor) -> None:
    """Add what one border gives to the gradient of a strip."""
    if part.is_all and part.tile not in back:
        back[part.tile] = gradient
        return
    if part.tile not in back:
        back[part.tile] = torch.zeros_like(strip)
    back[part.tile][part.of] += gradient
