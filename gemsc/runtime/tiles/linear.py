"""A tile's share of a product with a weight whose columns belong to all tiles.

    whole value (N, C, H, W), flattened          weight (K, C * H * W)
      tile 0: columns of its (c, h, w)     @     the same columns      = part (N, K)

The parts of all tiles add up to the product. Each tile keeps all of the weight; its
gradient is zero but for the tile's own columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gemsc.base.boxes import Box
from gemsc.base.dtypes import lowered
from gemsc.runtime.tiles.collectives import TileGrid, all_reduce, applied

__all__ = ["linear", "lowered"]


def linear(
    grid: TileGrid,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    shape: tuple[int, ...],
    box: Box,
    among: tuple[int, ...] = (),
) -> Tensor:
    """Return `F.linear` of the flattened value of all tiles.

    The features are the last dimensions, flattened: `shape` of the whole value, `box`
    of this tile. It multiplies their columns of the weight, which all tiles have as a
    whole; the products are added up, and the bias once.
    """
    factors = lowered(value), lowered(weight)
    result = all_reduce(grid, applied(_Multiplied, *factors, shape, box), among)
    return result if bias is None else result + lowered(bias)


class _Multiplied(torch.autograd.Function):
    """Keeps value and weight, no copy of the columns."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor, shape: tuple[int, ...], box: Box
    ) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.shape, ctx.box = shape, box
        columns = _columns(weight, shape, box).flatten(1)
        return F.linear(value.flatten(-len(box)), columns)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        value, weight = ctx.saved_tensors
        value_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            columns = _columns(weight, ctx.shape, ctx.box).flatten(1)
            value_gradient = (gradient @ columns).reshape(value.shape)
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.zeros_like(weight)
            mine = _columns(weight_gradient, ctx.shape, ctx.box)
            features = value.reshape(-1, mine[0].numel())
            product = gradient.reshape(-1, mine.shape[0]).t() @ features
            mine.copy_(product.view(mine.shape))
        return value_gradient, weight_gradient, None, None


def _columns(weight: Tensor, shape: tuple[int, ...], box: Box) -> Tensor:
    """Return the part of a weight that meets the box, as a view."""
    rows = tuple(slice(start, stop) for start, stop in box)
    return weight.view(weight.shape[0], *shape)[(slice(None), *rows)]
