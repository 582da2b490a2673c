"""Pooling, resizing and dropout of a tile as a part of the whole value."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gemsc.base.boxes import Box, Interval, everything, shape_of
from gemsc.base.dtypes import widened
from gemsc.runtime.tiles.collectives import applied

__all__ = [
    "AxisWindows",
    "Resize",
    "adaptive_pool",
    "average_pool",
    "max_unpool",
    "resize",
    "rows_read",
    "taps",
    "whole_positions",
]

_AVERAGE: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_ADAPTIVE: dict[tuple[str, int], Any] = {
    ("avg", 1): F.adaptive_avg_pool1d,
    ("avg", 2): F.adaptive_avg_pool2d,
    ("avg", 3): F.adaptive_avg_pool3d,
    ("max", 1): F.adaptive_max_pool1d,
    ("max", 2): F.adaptive_max_pool2d,
    ("max", 3): F.adaptive_max_pool3d,
}


@dataclass(frozen=True, slots=True)
class AxisWindows:
    """The pooling windows of one axis that a tile computes: `first` to `last` - 1.

    `size` is that of the whole input along the axis.
    """

    first: int
    last: int
    size: int
    kernel: int
    stride: int
    padding: int

    def counts(self, *, include_padding: bool) -> list[int]:
        """Return the elements of each window, as PyTorch counts them."""
        result = []
        for index in range(self.first, self.last):
            start = index * self.stride - self.padding
            stop = min(start + self.kernel, self.size + self.padding)
            if not include_padding:
                start, stop = max(start, 0), min(stop, self.size)
            result.append(stop - start)
        return result


def average_pool(
    value: Tensor, windows: tuple[AxisWindows, ...], include_padding: bool
) -> Tensor:
    """Return the means over windows of which some reach outside the whole value.

    The tile has zeros there; each sum is divided by the window's own count.
    """
    kernel = [axis.kernel for axis in windows]
    stride = [axis.stride for axis in windows]
    means: Tensor = _AVERAGE[len(windows)](value, kernel, stride)
    for dim, axis in enumerate(windows, start=value.dim() - len(windows)):
        counts = axis.counts(include_padding=include_padding)
        factors = value.new_tensor([axis.kernel / count for count in counts])
        means = means * factors.view(-1, *(1,) * (value.dim() - 1 - dim))
    return means


def adaptive_pool(
    value: Tensor, kind: str, windows: tuple[tuple[Interval, ...], ...]
) -> Tensor:
    """Return "avg" or "max" of each window; `windows` are local, for each axis."""
    pool = _ADAPTIVE[kind, len(windows)]
    return _pooled(value, pool, windows, value.dim() - len(windows))


def whole_positions(
    pooled: tuple[Tensor, Tensor], box: Box, size: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return values and indices, which count in `box`, as positions in all of `size`.

    Where a window holds -inf alone it may have found padding: it then has its first
    element, as for the whole value.
    """
    values, indices = pooled
    return values, _moved(indices, box, everything(size))


def max_unpool(
    value: Tensor, indices: Tensor, size: tuple[int, ...], box: Box
) -> Tensor:
    """Return `box` of the whole value, in which all indices are: zeros but for them."""
    places = _moved(indices, everything(size), box)
    columns = (t.flatten(-len(size)).unsqueeze(-1) for t in (value, places))
    shape = shape_of(box)
    flat = torch.ops.aten.max_unpool2d(*columns, (math.prod(shape), 1))
    result: Tensor = flat.view(*value.shape[: -len(size)], *shape)
    return result


def _moved(indices: Tensor, old: Box, new: Box) -> Tensor:
    """Return flat positions in one box as positions in another one."""
    result = torch.zeros_like(indices)
    step = 1
    for (begin, stop), (start, end) in zip(reversed(old), reversed(new), strict=True):
        place = indices % (stop - begin) + (begin - start)
        result += place.clamp_(min=0) * step
        indices = indices // (stop - begin)
        step *= end - start
    return result


def _pooled(
    value: Tensor, pool: Any, windows: tuple[tuple[Interval, ...], ...], dim: int
) -> Tensor:
    if not windows:
        result: Tensor = pool(value, 1)
        return result
    first, *inner = windows
    parts = [
        _pooled(value.narrow(dim, start, stop - start), pool, tuple(inner), dim + 1)
        for start, stop in first
    ]
    return torch.cat(parts, dim)


@dataclass(frozen=True, slots=True)
class Resize:
    """`F.interpolate` along some axes, and the part of it that a tile computes.

    For each resized axis: `sizes` are the lengths of the whole input and output,
    `inputs` the part of the input that the tile has, `outputs` the part that it
    computes. `scales` are what the user gave as scale factors, None for sizes.
    """

    mode: str
    sizes: tuple[tuple[int, int], ...]
    inputs: tuple[Interval, ...]
    outputs: tuple[Interval, ...]
    scales: tuple[float | None, ...]
    align_corners: bool | None = None
    antialias: bool = False


def resize(value: Tensor, how: Resize) -> Tensor:
    """Return the tile's part of the resized value, one axis after the other.

    Each output is a weighted sum of a few inputs; the weights are those of PyTorch,
    found by resizing basis vectors; for a fake value, too, they are real.
    """
    wide = widened(value)
    with unset_fake_temporarily():
        for axis in range(len(how.sizes)):
            taps(how, axis, wide.dtype, wide.device)
    for axis in range(len(how.sizes)):
        wide = applied(_WeightedSum, wide, how, axis)
    return wide.to(value.dtype)


class _WeightedSum(torch.autograd.Function):
    """Resizing along one axis; it saves nothing: `taps` are kept anyway."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, how: Resize, axis: int) -> Tensor:
        dim = value.dim() - len(how.sizes) + axis
        ctx.how, ctx.axis, ctx.shape, ctx.dim = how, axis, value.shape, dim
        terms = [
            value.index_select(dim, column) * weight
            for column, weight in _taps_along(dim, value, how, axis)
        ]
        return functools.reduce(torch.add, terms)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        result = gradient.new_zeros(ctx.shape)
        for column, weight in _taps_along(ctx.dim, gradient, ctx.how, ctx.axis):
            result.index_add_(ctx.dim, column, gradient * weight)
        return result, None, None


def _taps_along(
    dim: int, like: Tensor, how: Resize, axis: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield columns, and weights that can be multiplied with `like` along `dim`."""
    ones = (1,) * (like.dim() - 1 - dim)
    for column, weight in zip(*taps(how, axis, like.dtype, like.device), strict=True):
        yield column, weight.view(-1, *ones)


@functools.lru_cache(maxsize=256)
def taps(
    how: Resize, axis: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return columns and weights: output i sums weights[k][i] * x[columns[k][i]]."""
    with torch.no_grad():
        matrix = weight_rows(how, axis, dtype, device)
        used = matrix != 0
        count = max(int(used.sum(1).max()), 1)
        order = used.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        columns = order[:, :count]
        weights = matrix.gather(1, columns)
        begin, end = how.inputs[axis]
        local = (columns - begin).clamp(0, end - begin - 1)
    return tuple(local.unbind(1)), tuple(weights.unbind(1))


def rows_read(how: Resize, axis: int) -> Interval:
    """Return which inputs the outputs of a tile read along an axis."""
    with torch.no_grad():
        used = [
            weight_rows(how, axis, dtype, torch.device("cpu")) != 0
            for dtype in (torch.float32, torch.float64)
        ]
        columns = torch.cat(used).any(0).nonzero().flatten().tolist()
    return (columns[0], columns[-1] + 1) if columns else (0, 1)


def weight_rows(
    how: Resize, axis: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the rows of the weight matrix (outputs x whole input) of a tile's axis.

    The other axes have two equal rows, so that the kernel of the whole value runs: with
    a single one PyTorch smooths nothing.
    """
    rank = len(how.sizes)
    in_size, out_size = how.sizes[axis]
    others = [2] * rank
    basis = torch.eye(in_size, dtype=dtype, device=device)
    shape = [1] * rank
    shape[axis] = in_size
    inputs = basis.view(in_size, 1, *shape).repeat(1, 1, *_but(others, axis, 1))
    target: dict[str, Any] = {"size": _but(others, axis, out_size)}
    if any(scale is not None for scale in how.scales):
        target = {"scale_factor": _but([1.0] * rank, axis, how.scales[axis])}
    options: dict[str, Any] = {"align_corners": how.align_corners}
    if how.antialias:
        options["antialias"] = True
    full = F.interpolate(inputs, mode=how.mode, **target, **options)
    for dim in range(rank, 0, -1):
        if dim - 1 != axis:
            full = full.select(dim + 1, 0)
    start, stop = how.outputs[axis]
    return full.reshape(in_size, out_size)[:, start:stop].t().contiguous()


def _but(values: list[Any], axis: int, value: Any) -> list[Any]:
    """Return the values with another one at `axis`."""
    return [*values[:axis], value, *values[axis + 1 :]]
