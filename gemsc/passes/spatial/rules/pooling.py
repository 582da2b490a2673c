"""Poolings: windows without weights, and their mean or largest value."""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import fx

from gemsc.base.boxes import Interval, everything, hull, intersection
from gemsc.ir import meta
from gemsc.ir.operators.calls import Call, call_of
from gemsc.passes.spatial.emit import add_call, call_again, crop, weighted_sum
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.rules.windows import (
    WindowSettings,
    explicit_padding,
    kept,
    numbers,
    result_axes,
    spatial_axes,
    wanted_boxes,
)
from gemsc.passes.spatial.values import Local, Refused
from gemsc.runtime import tiles
from gemsc.runtime.tiles.windows import AxisWindows


def max_pooling(low: Lowering, call: Call) -> Local:
    """Run a maximum on the tile with its halo; outside the value is -inf.

    Indices that it returns become positions in the whole value.
    """
    has_indices = not meta.is_one_tensor(call.node)
    if not meta.spec(call.input).dtype.is_floating_point:
        raise Refused("it is not floating point")
    window = _pooling_window(call)
    if not has_indices and _covers_everything(low, call, window):
        return largest_of_everything(low, call)
    axes = result_axes(low, call, spatial_axes(low, call.input, call.rank))
    explicit = explicit_padding(axes, call.rank)
    wanted = wanted_boxes(low, call, axes, window.need, explicit)
    inputs = {call.input: low.part(call.input, wanted, fill=-math.inf)}
    padding = kept(window.before, explicit)
    changes = _changed_padding(call, padding)
    local = call_again(low, call, axes, inputs, changes, partial=has_indices)
    if not has_indices:
        return local
    size = low.shape(call.input)[-call.rank :]
    args = (local.node, wanted[low.place][-call.rank :], size)
    return add_call(low, call.node, tiles.whole_positions, *args, axes=axes)


def max_unpooling(low: Lowering, call: Call) -> Local:
    """Put the values back whose windows reach into the tile, and crop."""
    rank, source = call.rank, call.input
    pooling = _pooling_of(low, call["indices"])
    size = low.shape(pooling.input)[-rank:]
    if low.shape(call.node)[-rank:] != size:
        raise Refused("its result differs in size from what was pooled")
    axes = result_axes(low, call, spatial_axes(low, source, rank))
    window, pooled = _pooling_window(pooling), low.shape(source)[-rank:]

    def reaching(dim: int, out: Interval) -> Interval:
        """Return the pooled rows whose windows meet these rows, one at least."""
        first, last = window.reaching(dim, out)
        first = min(max(first, 0), pooled[dim] - 1)
        return first, max(min(last, pooled[dim]), first + 1)

    wanted = wanted_boxes(low, call, axes, reaching, explicit_padding(axes, rank))
    box = low.result(call.node, axes)[low.place][-rank:]
    rows = wanted[low.place][-rank:]
    reached = tuple(window.need(dim, interval) for dim, interval in enumerate(rows))
    region = hull(box, intersection(reached, everything(size)))
    parts = low.part(source, wanted), low.part(call["indices"], wanted)
    how: dict[str, Any] = {"axes": axes, "partial": region != box}
    local = add_call(low, call.node, tiles.max_unpool, *parts, size, region, **how)
    uneven = [
        (start - first, last - stop)
        for (start, stop), (first, last) in zip(box, region, strict=True)
    ]
    return crop(low, call, local, uneven)


def _pooling_of(low: Lowering, indices: fx.Node) -> Call:
    """Return the pooling that found these indices.

    Raises:
        Refused: where they come from is not known.
    """
    if indices.target is operator.getitem and indices.args[1] == 1:
        pooling = indices.args[0]
        assert isinstance(pooling, fx.Node)
        call = call_of(pooling, low.program.module)
        if call.kind == "max_pool":
            return call
    raise Refused("its indices are not those of a max pooling")


def _pooling_window(call: Call) -> WindowSettings:
    rank = call.rank
    kernel = numbers(call["kernel_size"], rank)
    stride = call.get("stride", ())
    padding = numbers(call.get("padding", 0), rank)
    return WindowSettings(
        kernel,
        numbers(stride, rank) if stride not in ((), []) else kernel,
        numbers(call.get("dilation", 1), rank),
        padding,
        padding,
    )


def _changed_padding(call: Call, padding: tuple[int, ...]) -> dict[str, Any]:
    given = numbers(call.get("padding", 0), call.rank)
    return {} if given == padding else {"padding": _short(padding)}


def _short(values: tuple[int, ...]) -> int | tuple[int, ...]:
    return values[0] if len(set(values)) == 1 else values


def average_pooling(low: Lowering, call: Call) -> Local:
    """Run a mean on the tile with its halo; divide by the counts of the whole value."""
    window = _pooling_window(call)
    source, rank = call.input, call.rank
    axes = spatial_axes(low, source, rank)
    if _covers_everything(low, call, window):
        return mean_of_everything(low, call)
    result_axes(low, call, axes)
    if _counts_are_equal(low, call, window):
        explicit = explicit_padding(axes, rank)
        wanted = wanted_boxes(low, call, axes, window.need, explicit)
        changes = _changed_padding(call, kept(window.before, explicit))
        return call_again(low, call, axes, {source: low.part(source, wanted)}, changes)
    wanted = wanted_boxes(low, call, axes, window.need, (True,) * rank)
    part = low.part(source, wanted)
    box = low.result(call.node, axes)[low.place][-rank:]
    windows = tuple(
        AxisWindows(start, stop, size, kernel, stride, before)
        for (start, stop), size, kernel, stride, before in zip(
            box,
            low.shape(source)[-rank:],
            window.kernel,
            window.stride,
            window.before,
            strict=True,
        )
    )
    include = bool(call.get("count_include_pad", True))
    args = (part, windows, include)
    return add_call(low, call.node, tiles.average_pool, *args, axes=axes)


def _covers_everything(low: Lowering, call: Call, window: WindowSettings) -> bool:
    """Whether one window takes the mean of all rows and columns."""
    rank = call.rank
    return (
        window.kernel == low.shape(call.input)[-rank:]
        and low.shape(call.node)[-rank:] == (1,) * rank
        and not any(window.before)
        and call.get("divisor_override") is None
        and low.axes(call.input) is not None
    )


def _counts_are_equal(low: Lowering, call: Call, window: WindowSettings) -> bool:
    """Whether every window divides by the same number."""
    if call.get("divisor_override") is not None:
        return True
    rank = call.rank
    sizes = zip(
        low.shape(call.input)[-rank:], low.shape(call.node)[-rank:], strict=True
    )
    for dim, (size, out_size) in enumerate(sizes):
        _, stop = window.need(dim, (out_size - 1, out_size))
        padding = window.before[dim]
        if stop > size + padding:
            return False
        if padding and not call.get("count_include_pad", True):
            return False
    return True


def mean_of_everything(low: Lowering, call: Call) -> Local:
    """Add up the tiles' means, each by its share of the elements."""
    source, axes = call.input, low.cut_axes(call.input)
    dims = tuple(range(-call.rank, 0))
    args = (low.get(source).node, dims)
    local = add_call(low, call.node, "mean", *args, keepdim=True, partial=True)
    return weighted_sum(low, call, local, axes)


def largest_of_everything(low: Lowering, call: Call) -> Local:
    """Take the largest of the tiles' largest elements."""
    source, rank = call.input, call.rank
    axes = spatial_axes(low, source, rank)
    shape = low.shape(source)
    box = low.owned(shape, axes)[low.place][-rank:]
    among = low.among(axes)
    args = (low.here, low.get(source).node, shape[-rank:], box)
    options: dict[str, Any] = {"among": among} if among else {}
    return add_call(low, call.node, tiles.global_max, *args, **options)


def lp_pooling(low: Lowering, call: Call) -> Local:
    """Run a power mean, which has no padding, on the tile with its halo."""
    window = _pooling_window(call)
    axes = result_axes(low, call, spatial_axes(low, call.input, call.rank))
    if not _counts_are_equal(low, call, window):
        raise Refused("its last window is not full")
    explicit = explicit_padding(axes, call.rank)
    wanted = wanted_boxes(low, call, axes, window.need, explicit)
    return call_again(low, call, axes, {call.input: low.part(call.input, wanted)})
