"""Normalization whose statistics are those of all tiles, forward and backward.

Each tile brings count, mean and sum of squared deviations; they are merged by the
formula of Chan, Golub and LeVeque (1979), which does not cancel as E[x^2] - E[x]^2
does. With xhat = (x - mean) * rstd, h = gradient * weight and n elements in all:

    dx = rstd * (h - sum(h) / n - xhat * sum(h * xhat) / n)

whose two sums go over all tiles in one message.

A tile may compute rows beyond its own part again. _Statistics count every element once,
on the tile that owns it; but the copies were normalized by them too, so that the sums
of the backward go over all that tiles have, and what follows from them is subtracted
where the statistics came from: on the tile's own elements.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from gemsc.base.boxes import Box, Interval, shape_of
from gemsc.base.dtypes import widened
from gemsc.nn import BiasedBatchNorm
from gemsc.runtime.tiles.collectives import TileGrid, applied, rows

__all__ = [
    "batch_norm",
    "functional_batch_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "merged",
]

Rows = tuple[slice, ...] | EllipsisType  # an index of a tile's own elements


def batch_norm(
    grid: TileGrid,
    value: Tensor,
    layer: _BatchNorm,
    own: Box | None = None,
    *,
    among: tuple[int, ...] = (),
) -> Tensor:
    """Return the layer's result; its statistics are those of all tiles.

    `own` says where the tile's own elements are, if it has more: only these count. Here
    and below, `among` are the tiles that are meant, () for all.
    """
    momentum: float | Tensor = layer.momentum or 0.0
    if layer.training and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:  # the plain mean of all batches
            momentum = layer.num_batches_tracked.double().reciprocal()
    return functional_batch_norm(
        grid,
        value,
        layer.running_mean,
        layer.running_var,
        layer.weight,
        layer.bias,
        layer.training or layer.running_mean is None,
        momentum,
        layer.eps,
        own,
        correction=0 if isinstance(layer, BiasedBatchNorm) else 1,
        among=among,
    )


def functional_batch_norm(
    grid: TileGrid,
    value: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    own: Box | None = None,
    *,
    correction: int = 1,
    among: tuple[int, ...] = (),
) -> Tensor:
    """Return `F.batch_norm` of all tiles' elements.

    `correction` is that of `torch.var`, for the variances that are averaged.
    """
    if not training:
        return F.batch_norm(value, running_mean, running_var, weight, bias, eps=eps)
    grid, rows = grid.among(among), _rows(own)
    normalized = _NormalizeChannels.apply(value, weight, bias, grid, eps, rows)  # type: ignore[no-untyped-call]
    result: Tensor
    result, mean, variance, count = normalized
    if running_mean is not None and running_var is not None:
        averaged = variance * (count / (count - correction))
        with torch.no_grad():
            share = torch.as_tensor(momentum, dtype=torch.float64).to(running_mean)
            running_mean.lerp_(mean.to(running_mean.dtype), share)
            running_var.lerp_(averaged.to(running_var.dtype), share)
    return result


def group_norm(
    grid: TileGrid,
    value: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    own: Box | None = None,
    *,
    among: tuple[int, ...] = (),
) -> Tensor:
    """Return `F.group_norm` of all tiles' elements."""
    batch, channels, *sizes = value.shape
    groups = value.reshape(batch, num_groups, channels // num_groups, *sizes)
    dims = tuple(range(2, groups.dim()))
    shape = (1, num_groups, -1, *(1,) * len(sizes))
    if own is not None:
        own = (own[0], (0, num_groups), (0, groups.shape[2]), *own[2:])
    weight, bias = _view(weight, shape), _view(bias, shape)
    how = grid.among(among), dims, eps, _rows(own)
    return applied(_Normalize, groups, weight, bias, *how).reshape(value.shape)


def instance_norm(
    grid: TileGrid,
    value: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    own: Box | None = None,
    *,
    among: tuple[int, ...] = (),
) -> Tensor:
    """Return `F.instance_norm` of all tiles' elements."""
    groups = value.shape[1]
    return group_norm(grid, value, groups, weight, bias, eps, own, among=among)


def layer_norm(
    grid: TileGrid,
    value: Tensor,
    box: tuple[Interval, ...],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    among: tuple[int, ...] = (),
) -> Tensor:
    """Return `F.layer_norm` over the last dimensions, `box` of which are here."""
    part = tuple(slice(start, stop) for start, stop in box)
    dims = tuple(range(value.dim() - len(box), value.dim()))
    shape = (*(1,) * dims[0], *shape_of(box))
    weight = None if weight is None else weight[part].reshape(shape)
    bias = None if bias is None else bias[part].reshape(shape)
    return applied(_Normalize, value, weight, bias, grid.among(among), dims, eps, ...)


def _view(tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    return None if tensor is None else tensor.view(shape)


def _rows(box: Box | None) -> Rows:
    return ... if box is None else tuple(slice(start, stop) for start, stop in box)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        grid: TileGrid,
        dims: tuple[int, ...],
        eps: float,
        rows: Rows,
    ) -> Tensor:
        mean, variance, count = _merged_groups(grid, value[rows], dims)
        rstd = (variance + eps).rsqrt()
        scale = rstd if weight is None else rstd * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        result = torch.addcmul(shift, widened(value), scale).to(value.dtype)
        ctx.save_for_backward(value, weight, mean, rstd, count)
        ctx.grid, ctx.dims, ctx.owned = grid, dims, rows
        ctx.bias_shape = None if bias is None else bias.shape
        return result

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None, None]:
        value, weight, mean, rstd, count = ctx.saved_tensors
        gradient = widened(gradient)
        normal = (widened(value) - mean) * rstd
        weight_gradient = bias_gradient = None
        product = gradient * normal
        if ctx.needs_input_grad[1]:
            weight_gradient = product.sum_to_size(weight.shape).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            bias_gradient = gradient.sum_to_size(ctx.bias_shape)
        if weight is not None:
            gradient, product = gradient * weight, product * weight
        sums = torch.stack(
            [gradient.sum(ctx.dims, keepdim=True), product.sum(ctx.dims, keepdim=True)]
        )
        sums = ctx.grid.all_reduce(sums) / count.to(sums.dtype)
        result = gradient * rstd
        result[ctx.owned] -= (sums[0] + normal[ctx.owned] * sums[1]) * rstd
        result = result.to(value.dtype)
        return result, weight_gradient, bias_gradient, None, None, None, None


class _NormalizeChannels(torch.autograd.Function):
    """BatchNorm with given statistics, and what these add to the gradient.

    PyTorch's backward with fixed statistics gives h * rstd, and the sums of g and
    g * xhat as the gradients of bias and weight; the rest is linear in the value.
    """

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        grid: TileGrid,
        eps: float,
        rows: Rows,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, count = _merged_channels(grid, value[rows])
        scale, shift = (None if t is None else widened(t) for t in (weight, bias))
        result = torch.native_batch_norm(
            value, scale, shift, mean, variance, False, 0.0, eps
        )[0]
        ctx.save_for_backward(value, weight, mean, variance, count)
        ctx.grid, ctx.eps, ctx.owned = grid, eps, rows
        ctx.mark_non_differentiable(mean, variance, count)
        return result, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        saved, weight, mean, variance, count = ctx.saved_tensors
        # in half precision the mean would be subtracted from what is rounded already
        value = widened(saved)
        result, product, total = torch.ops.aten.native_batch_norm_backward(
            widened(gradient.contiguous()),
            value,
            None if weight is None else widened(weight),
            mean,
            variance,
            None,
            None,
            False,
            ctx.eps,
            [True, True, True],
        )
        rstd = (variance + ctx.eps).rsqrt()
        sums = torch.stack([total, product]).to(mean.dtype)
        if weight is not None:
            sums = sums * weight
        constant, slope = ctx.grid.all_reduce(sums) * (-rstd / count.to(mean.dtype))
        slope = slope * rstd
        constant = torch.addcmul(constant, slope, mean, value=-1)
        shape = (1, -1, *(1,) * (value.dim() - 2))
        part, its_value = result, value
        if ctx.owned is not ...:
            part, its_value = result[ctx.owned], value[ctx.owned]
        part.addcmul_(its_value, slope.view(shape)).add_(constant.view(shape))
        weight_gradient = product if ctx.needs_input_grad[1] else None
        bias_gradient = total if ctx.needs_input_grad[2] else None
        result = result.to(saved.dtype)
        return result, weight_gradient, bias_gradient, None, None, None


def merged(
    grid: TileGrid, value: Tensor, dims: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance over `dims` and all tiles, and the number of elements.

    Where all elements are equal the variance is exactly 0.
    """
    value = widened(value.detach())
    variance, mean = torch.var_mean(value, dims, correction=0, keepdim=True)
    return _merge(grid, mean, variance, value.numel() // mean.numel())


def _merged_groups(
    grid: TileGrid, value: Tensor, dims: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same, quicker, but for a variance of equal elements: almost 0."""
    mean, variance = _moments(widened(value), dims)
    return _merge(grid, mean, variance, value.numel() // mean.numel())


def _merged_channels(grid: TileGrid, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return that for BatchNorm: over all dimensions but 1, which are not kept."""
    value = widened(value)
    if value.is_cuda:
        mean, variance = torch.batch_norm_update_stats(value, None, None, 0.0)
    else:
        mean, variance = _moments(value, (0, *range(2, value.dim())))
        mean, variance = mean.reshape(-1), variance.reshape(-1)
    return _merge(grid, mean, variance, value.numel() // value.shape[1])


def _moments(value: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance, dimensions kept.

    On the CPU in two passes, many times as fast as PyTorch's kernels, which divide at
    every element (Welford). What the first pass rounds in the mean, the second one
    finds (Chan, Golub and LeVeque 1983, the corrected two-pass algorithm).
    """
    if value.is_cuda:
        variance, mean = torch.var_mean(value, dims, correction=0, keepdim=True)
        return mean, variance
    mean = value.mean(dims, keepdim=True)
    off = value - mean
    more = off.mean(dims, keepdim=True)
    variance = off.mul_(off).mean(dims, keepdim=True) - more.square()
    return mean + more, _not_negative(variance)


def _merge(
    grid: TileGrid, mean: Tensor, variance: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Put together what the tiles have.

    Each tile writes into its own row of a table that is added up: a gather in one
    message. The table is in float64: a count in float32 is exact to 2^24 only.
    """
    table = rows(grid, _row(mean, variance, count))
    size = mean.numel()
    counts, means, variances = torch.split(table, [1, size, size], dim=1)
    number = counts.sum()
    share = (counts / number).view(1, -1)
    first = means[:1]  # where all are equal, the mean is exactly that
    merged = first + share @ (means - first)
    off = means - merged
    spread = share @ torch.addcmul(variances, off, off)
    merged, spread = torch.cat([merged, spread]).to(mean.dtype)
    return merged.view_as(mean), spread.view_as(mean), number


def _row(mean: Tensor, variance: Tensor, count: int) -> Tensor:
    """Return (count, mean ..., variance ...) in one row."""
    number = mean.new_full((1,), count, dtype=torch.float64)
    return torch.cat([number, mean.reshape(-1), variance.reshape(-1)])


_here = threading.local()


@contextmanager
def nothing_rounds() -> Iterator[None]:
    """Let this thread compute over a finite field, where no number is negative."""
    _here.exact = True
    try:
        yield
    finally:
        _here.exact = False


def _not_negative(value: Tensor) -> Tensor:
    """Return what only rounding can make negative, in place, with 0 there."""
    return value if getattr(_here, "exact", False) else value.clamp_(min=0)
