"""Extremes, variances and softmax over all tiles, with their gradients.

Each tile brings what it found in one row of a table that is added up: one message.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gemsc.base.boxes import Box
from gemsc.base.dtypes import widened
from gemsc.runtime.tiles.collectives import TileGrid, all_reduce, applied, rows
from gemsc.runtime.tiles.norms import merged

__all__ = ["amax", "amin", "cumsum", "global_max", "softmax", "std", "var"]


def amax(
    grid: TileGrid,
    value: Tensor,
    dims: tuple[int, ...],
    keepdim: bool = False,
    among: tuple[int, ...] = (),
) -> Tensor:
    """Return `value.amax(dims, keepdim)` over the tiles.

    Those that are equal to it share the gradient evenly, as in `torch.amax`.
    """
    result = applied(_Extreme, value, grid.among(among), dims, True)
    return result if keepdim else result.squeeze(dims)


def amin(
    grid: TileGrid,
    value: Tensor,
    dims: tuple[int, ...],
    keepdim: bool = False,
    among: tuple[int, ...] = (),
) -> Tensor:
    """Return `value.amin(dims, keepdim)` over the tiles."""
    result = applied(_Extreme, value, grid.among(among), dims, False)
    return result if keepdim else result.squeeze(dims)


def global_max(
    grid: TileGrid,
    value: Tensor,
    shape: tuple[int, ...],
    box: Box,
    among: tuple[int, ...] = (),
) -> Tensor:
    """Return the largest element over the last dimensions (kept) and all tiles.

    The whole value has `shape` there, the tile `box` of it. Of equal elements the first
    in row-major order gets the gradient, as in `F.adaptive_max_pool2d`.
    """
    return applied(_GlobalMax, value, grid.among(among), shape, box)


def var(
    grid: TileGrid,
    value: Tensor,
    dims: tuple[int, ...],
    keepdim: bool = False,
    correction: float = 1,
    among: tuple[int, ...] = (),
) -> Tensor:
    """Return `value.var(dims, correction=..., keepdim=...)` over the tiles."""
    result = applied(_Variance, value, grid.among(among), dims, correction, False)
    return result if keepdim else result.squeeze(dims)


def std(
    grid: TileGrid,
    value: Tensor,
    dims: tuple[int, ...],
    keepdim: bool = False,
    correction: float = 1,
    among: tuple[int, ...] = (),
) -> Tensor:
    """Return `value.std(dims, correction=..., keepdim=...)` over the tiles."""
    result = applied(_Variance, value, grid.among(among), dims, correction, True)
    return result if keepdim else result.squeeze(dims)


def softmax(
    grid: TileGrid,
    value: Tensor,
    dims: tuple[int, ...],
    log: bool = False,
    among: tuple[int, ...] = (),
) -> Tensor:
    """Return `value.softmax(dims)` over the tiles, or `log_softmax`."""
    return applied(_Softmax, value, grid.among(among), dims, log)


def cumsum(
    grid: TileGrid, value: Tensor, dims: tuple[int, ...], among: tuple[int, ...] = ()
) -> Tensor:
    """Return `value.cumsum(dim)` over the tiles, on top of what those before have."""
    (dim,), tiles = dims, grid.among(among)
    total = value.sum(dim, keepdim=True)
    rows = [total if t == tiles.tile else total * 0 for t in range(tiles.num_tiles)]
    totals = all_reduce(tiles, torch.stack(rows))
    return value.cumsum(dim) + totals[: tiles.tile].sum(0)


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        grid: TileGrid,
        dims: tuple[int, ...],
        largest: bool,
    ) -> Tensor:
        best_of = torch.amax if largest else torch.amin
        tile_best = best_of(value, dims, keepdim=True)
        count = (value == tile_best).sum(dims, keepdim=True)
        bests, counts = _table(grid, tile_best, count)
        best = best_of(bests, 0)
        count = torch.where(bests == best, counts, 0).sum(0)
        result = best.to(value.dtype)
        ctx.save_for_backward(value, result, count.to(value.dtype))
        ctx.grid = grid
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        value, result, count = ctx.saved_tensors
        gradient = ctx.grid.all_reduce(gradient.clone().contiguous())
        return (value == result) * (gradient / count), None, None, None


class _GlobalMax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, grid: TileGrid, shape: tuple[int, ...], box: Box
    ) -> Tensor:
        tile_best, index = value.flatten(-len(box)).max(-1)
        rows = tuple(slice(start, stop) for start, stop in box)
        places = torch.arange(prod(shape), device=value.device).view(shape)[rows]
        place = places.flatten()[index]
        bests, firsts = _table(grid, tile_best, place)
        best = bests.amax(0)
        first = torch.where(bests == best, firsts, float(prod(shape))).amin(0)
        ctx.save_for_backward(index, place == first)
        ctx.grid, ctx.shape = grid, value.shape
        return best.to(value.dtype).view(*tile_best.shape, *(1,) * len(box))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        index, is_here = ctx.saved_tensors
        gradient = ctx.grid.all_reduce(gradient.clone().contiguous()).view(index.shape)
        result = gradient.new_zeros((*index.shape, prod(ctx.shape[index.dim() :])))
        mine = torch.where(is_here, gradient, 0)
        result.scatter_(-1, index.unsqueeze(-1), mine.unsqueeze(-1))
        return result.view(ctx.shape), None, None, None


class _Variance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        grid: TileGrid,
        dims: tuple[int, ...],
        correction: float,
        root: bool,
    ) -> Tensor:
        mean, biased, count = merged(grid, value, dims)
        freedom = (count - correction).to(mean.dtype)
        result = biased * (count.to(mean.dtype) / freedom)
        result = result.sqrt() if root else result
        ctx.save_for_backward(value, mean, result, freedom)
        ctx.grid, ctx.root = grid, root
        return result.to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        value, mean, result, freedom = ctx.saved_tensors
        gradient = ctx.grid.all_reduce(gradient.clone().contiguous()).to(mean.dtype)
        if ctx.root:  # as in torch, where all are equal there is no gradient
            gradient = (gradient / (2 * result)).masked_fill(result == 0, 0)
        of_value = (2 / freedom) * gradient * (value - mean)
        return of_value.to(value.dtype), None, None, None, None


class _Softmax(torch.autograd.Function):
    """Each tile brings its largest element m and its sum of exp(value - m)."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        grid: TileGrid,
        dims: tuple[int, ...],
        log: bool,
    ) -> Tensor:
        wide = widened(value)
        top = wide.amax(dims, keepdim=True)
        shift = top.masked_fill(top == -torch.inf, 0)  # a tile without any
        largest, sums = _table(grid, top, (wide - shift).exp().sum(dims, keepdim=True))
        most = largest.amax(0)
        total = (sums * (largest - most).exp()).sum(0)
        if log:
            result = wide - (most + total.log()).to(wide.dtype)
        else:
            result = (wide - most.to(wide.dtype)).exp() / total.to(wide.dtype)
        result = result.to(value.dtype)
        ctx.save_for_backward(result)
        ctx.grid, ctx.dims, ctx.log = grid, dims, log
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (result,) = ctx.saved_tensors
        part = gradient if ctx.log else gradient * result
        total = ctx.grid.all_reduce(part.sum(ctx.dims, keepdim=True).contiguous())
        if ctx.log:
            return gradient - result.exp() * total, None, None, None
        return part - result * total, None, None, None


def _table(grid: TileGrid, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return two numbers of each tile, by tile, in float64: counts stay exact."""
    row = torch.stack([first.detach().double(), second.double()])
    firsts, seconds = rows(grid, row).unbind(1)
    return firsts, seconds
