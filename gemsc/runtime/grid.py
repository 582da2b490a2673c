"""Grid: the tiles of one stage, and what a generated stage asks of them.

Gradients are the honest transpose of what is computed forward: each tile's are partial,
and the true gradient is the sum over the tiles, of whole values too. So a sum over the
tiles has a sum over the tiles as its backward, a slice of a whole value has zeros
around the gradient, and what a tile received it sends home, to be added there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gemsc.boxes import Box, Interval, shape_of
from gemsc.runtime.exchange import Exchange, Piece
from gemsc.runtime.link import Incoming, Link
from gemsc.runtime.tile_losses import cross_entropy
from gemsc.runtime.tile_norms import normalize, normalize_channels, update_running
from gemsc.runtime.tile_saving import kept_of, remember, saved_in_parts
from gemsc.runtime.tile_windows import (
    AxisWindows,
    Resize,
    adaptive_pool,
    average_pool,
    resize,
    rows_read,
    taps,
)
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
]

FIRST_TAG = 16384  # below are the transfers between stages
NUM_INDICES = 8192  # with two tags each: values, and their gradients


class Grid:
    """One tile among those of its stage: what `self.grid` is in a generated stage.

    `ranks` are the transport's ranks of all tiles, in their order; `tile` is this one.
    All tiles call the same methods in the same order.
    """

    def __init__(self, link: Link, ranks: tuple[int, ...], tile: int) -> None:
        self.link = link
        self.ranks = ranks
        self.tile = tile
        self._group: Group | None = None

    @property
    def num_tiles(self) -> int:
        """How many tiles there are."""
        return len(self.ranks)

    def redistribute(self, value: Tensor, exchange: Exchange) -> Tensor:
        """Return this tile's wanted box of a value of which it gives its held box."""
        result: Tensor = _Redistribute.apply(value, self, exchange)  # type: ignore[no-untyped-call]
        return result

    def all_reduce(self, value: Tensor) -> Tensor:
        """Return the sum over the tiles, the same on all of them."""
        result: Tensor = _AllReduce.apply(value, self)  # type: ignore[no-untyped-call]
        return result

    # ------------------------------------------------- layers on tiles

    def batch_norm(self, value: Tensor, layer: _BatchNorm) -> Tensor:
        """Return the layer's result; its statistics are those of all tiles."""
        momentum = layer.momentum
        if layer.training and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if momentum is None:  # the plain mean of all batches
                momentum = 1.0 / float(layer.num_batches_tracked)
        return self.functional_batch_norm(
            value,
            layer.running_mean,
            layer.running_var,
            layer.weight,
            layer.bias,
            layer.training or layer.running_mean is None,
            momentum if momentum is not None else 0.0,
            layer.eps,
        )

    def functional_batch_norm(
        self,
        value: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Return `F.batch_norm` of all tiles' elements."""
        if not training:
            return F.batch_norm(value, running_mean, running_var, weight, bias, eps=eps)
        result, statistics = normalize_channels(self, value, weight, bias, eps)
        if running_mean is not None and running_var is not None:
            update_running(statistics, running_mean, running_var, momentum)
        return result

    def group_norm(self, value: Tensor, layer: nn.GroupNorm) -> Tensor:
        """Return the layer's result; its statistics are those of all tiles."""
        return self.functional_group_norm(
            value, layer.num_groups, layer.weight, layer.bias, layer.eps
        )

    def functional_group_norm(
        self,
        value: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """Return `F.group_norm` of all tiles' elements."""
        batch, channels, *rest = value.shape
        groups = value.reshape(batch, num_groups, channels // num_groups, *rest)
        dims = tuple(range(2, groups.dim()))
        shape = (1, num_groups, -1, *(1,) * len(rest))
        result, _ = normalize(
            self, groups, dims, _view(weight, shape), _view(bias, shape), eps
        )
        return result.view(value.shape)

    def instance_norm(self, value: Tensor, layer: _InstanceNorm) -> Tensor:
        """Return the layer's result; it must not keep running statistics."""
        return self.functional_instance_norm(value, layer.weight, layer.bias, layer.eps)

    def functional_instance_norm(
        self,
        value: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """Return `F.instance_norm` of all tiles' elements."""
        return self.functional_group_norm(value, value.shape[1], weight, bias, eps)

    def layer_norm(
        self, value: Tensor, layer: nn.LayerNorm, box: tuple[Interval, ...]
    ) -> Tensor:
        """Return the layer's result; the tile's values are `box` of the last dims."""
        return self.functional_layer_norm(
            value, box, layer.weight, layer.bias, layer.eps
        )

    def functional_layer_norm(
        self,
        value: Tensor,
        box: tuple[Interval, ...],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """Return `F.layer_norm` over the last dimensions, `box` of which are here."""
        part = tuple(slice(start, stop) for start, stop in box)
        dims = tuple(range(value.dim() - len(box), value.dim()))
        shape = (*(1,) * dims[0], *shape_of(box))
        weight = None if weight is None else weight[part].reshape(shape)
        bias = None if bias is None else bias[part].reshape(shape)
        return normalize(self, value, dims, weight, bias, eps)[0]

    def dropout(
        self,
        value: Tensor,
        layer: nn.Dropout,
        shape: tuple[int, ...],
        box: Box,
    ) -> Tensor:
        """Return the layer's result: see `functional_dropout`."""
        return self.functional_dropout(
            value, layer.p, layer.training, shape=shape, box=box
        )

    def functional_dropout(
        self,
        value: Tensor,
        p: float = 0.5,
        training: bool = True,
        *,
        shape: tuple[int, ...],
        box: Box,
    ) -> Tensor:
        """Return `F.dropout` with the tile's part of the mask of the whole value.

        Every tile draws the same mask of the whole shape: all have the stage's seed.
        """
        if not training:
            return value
        whole = torch.ones(shape, dtype=value.dtype, device=value.device)
        mask = F.dropout(whole, p)[tuple(slice(start, stop) for start, stop in box)]
        return value * mask.clone()

    # ------------------------------------------------- losses on tiles

    def cross_entropy(
        self, output: Tensor, target: Tensor, layer: nn.CrossEntropyLoss
    ) -> Tensor:
        """Return the loss of all tiles' pixels."""
        return self.functional_cross_entropy(
            output,
            target,
            layer.weight,
            ignore_index=layer.ignore_index,
            reduction=layer.reduction,
            label_smoothing=layer.label_smoothing,
        )

    def functional_cross_entropy(
        self,
        output: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return `F.cross_entropy` of all tiles' pixels."""
        return cross_entropy(
            self,
            output,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )

    # ------------------------------------- parts of pooling and resizing

    def average_pool(
        self, value: Tensor, windows: tuple[AxisWindows, ...], include_padding: bool
    ) -> Tensor:
        """Return means of windows some of which reach outside the whole value."""
        return average_pool(value, windows, include_padding=include_padding)

    def adaptive_pool(
        self, value: Tensor, kind: str, windows: tuple[tuple[Interval, ...], ...]
    ) -> Tensor:
        """Return "avg" or "max" of each local window."""
        return adaptive_pool(value, kind, windows)

    def resize(self, value: Tensor, how: Resize) -> Tensor:
        """Return the tile's part of a resized value."""
        return resize(value, how)

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
                result[piece.within(box)] = held[piece.within(held_box)]
        return result

    def _put(
        self, result: Tensor, exchange: Exchange, strips: Sequence[Tensor]
    ) -> None:
        """Put what other tiles sent into the wanted box."""
        box = exchange.wanted[self.tile]
        for piece, strip in zip(self._incoming(exchange), strips, strict=True):
            result[piece.within(box)] = strip

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
            (p.source, gradient[p.within(box)]) for p in mine if p.dest == self.tile
        )
        result = gradient.new_zeros(shape_of(held_box))
        for piece in mine:
            if piece.source == piece.dest:
                result[piece.within(held_box)] = gradient[piece.within(box)]
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
    """The messages of one exchange: all are under way at once, one for each peer."""

    def __init__(self, grid: Grid, tag: int, dtype: torch.dtype) -> None:
        self._grid = grid
        self._tag = tag
        self._dtype = dtype
        self._incoming: dict[int, Incoming] = {}
        self._outgoing: list[Request] = []

    def receive(self, pairs: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        for peer, shape in pairs:
            if peer != self._grid.tile:
                rank = self._grid.ranks[peer]
                self._incoming[peer] = self._grid.link.receive(
                    shape, self._dtype, rank, self._tag
                )

    def send(self, pairs: Iterable[tuple[int, Tensor]]) -> None:
        for peer, tensor in pairs:
            if peer != self._grid.tile:
                rank = self._grid.ranks[peer]
                self._outgoing.append(self._grid.link.send(tensor, rank, self._tag))

    def take(self, peer: int) -> Tensor:
        return self._incoming.pop(peer).take()

    def finish(self) -> None:
        self._grid.link.wait(*self._outgoing)


class ShapeGrid(Grid):
    """A tile alone, for fake tensors: shapes are right, and nothing is sent."""

    def __init__(self, tile: int = 0, num_tiles: int = 1) -> None:
        self.ranks = tuple(range(num_tiles))
        self.tile = tile

    def add_up(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def collect(self, held: Tensor, exchange: Exchange) -> Tensor:
        """Return a tensor of the wanted box's shape."""
        tile = self.tile % len(exchange.wanted)
        result = held.new_empty(shape_of(exchange.wanted[tile]))
        if len(exchange.held) == len(exchange.wanted):
            strips = [held.new_empty(p.shape) for p in self._incoming(exchange)]
            remember(result, (held, *strips), lambda *_: held)
        return result

    def give_back(self, gradient: Tensor, exchange: Exchange) -> Tensor:
        """Return a tensor of the held box's shape."""
        tile = self.tile % len(exchange.held)
        return gradient.new_empty(shape_of(exchange.held[tile]))


def _view(tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    return None if tensor is None else tensor.view(shape)


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
