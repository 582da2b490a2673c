"""Exchanges and sums over the tiles of a grid: what all other operations are made of.

Gradients are the honest transpose of what is computed forward: each tile's are partial,
and the true gradient is the sum over the tiles, of whole values too. So a sum over the
tiles has a sum over the tiles as its backward, a slice of a whole value has zeros
around the gradient, and what a tile received it sends home, to be added there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gemsc.base import dtypes
from gemsc.messages.exchange import Exchange

__all__ = ["InFlight", "TileGrid", "all_reduce", "laid", "redistribute", "rows"]


class InFlight(Protocol):
    """The messages of one exchange on their way."""

    def take(self, tile: int) -> list[Tensor]:
        """Wait for the tensors that come from a tile. Call it once."""

    def finish(self) -> None:
        """Wait until all is sent: the next exchange may begin."""


class TileGrid(Protocol):
    """One tile among those of its stage, as operations see it.

    In a rank that is a `Grid`; in a lowered graph a `gemsc.ir.shape_grid.ShapeGrid`,
    which sends nothing. All tiles call the same operations in the same order.
    """

    @property
    def tile(self) -> int:
        """The number of this tile."""

    @property
    def num_tiles(self) -> int:
        """How many tiles there are."""

    def among(self, tiles: tuple[int, ...]) -> TileGrid:
        """Return the grid of some tiles, of which this is one; () for all."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Put the sum over the tiles into the tensor; return it."""

    def collect(self, held: Tensor, exchange: Exchange) -> Tensor:
        """Return the box that this tile wants of a value."""

    def give_back(self, gradient: Tensor, exchange: Exchange) -> Tensor:
        """Return the gradient of the held box: the transpose of `collect`."""

    def depart(self, exchange: Exchange, held: Tensor) -> InFlight:
        """Start to send what other tiles want of the held box, and to receive."""

    def depart_back(
        self,
        exchange: Exchange,
        gradients: Mapping[int, Sequence[Tensor]],
        like: Tensor,
    ) -> InFlight:
        """Start to send home the gradients of what came from each tile."""


def applied(kind: Any, *given: Any) -> Tensor:
    """Return what a function of autograd, which has no types, gives."""
    result: Tensor = kind.apply(*given)
    return result


def redistribute(grid: TileGrid, value: Tensor, exchange: Exchange) -> Tensor:
    """Return this tile's wanted box of a value of which it gives its held box."""
    return applied(_Redistribute, value, grid, exchange)


def all_reduce(grid: TileGrid, value: Tensor, among: tuple[int, ...] = ()) -> Tensor:
    """Return the sum over the tiles, or some of them, the same on all of these."""
    return applied(_AllReduce, value, grid.among(among))


def laid(value: Tensor, form: dtypes.Format) -> Tensor:
    """Return a value as it lay when it was traced, for a call that goes by strides."""
    plain = form is torch.contiguous_format
    return value.contiguous() if plain else dtypes.lying_as(value, form)


def rows(grid: TileGrid, row: Tensor) -> Tensor:
    """Return a table with a row from each tile: one sum, without gradients."""
    table = row.new_zeros((grid.num_tiles, *row.shape))
    table[grid.tile] = row
    return grid.all_reduce(table)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, grid: TileGrid, exchange: Exchange) -> Tensor:
        ctx.grid, ctx.exchange = grid, exchange
        return grid.collect(value, exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.grid.give_back(gradient, ctx.exchange), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, grid: TileGrid) -> Tensor:
        ctx.grid = grid
        return grid.all_reduce(value.detach().clone().contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.grid.all_reduce(gradient.clone().contiguous()), None
