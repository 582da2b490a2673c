"""Convolutions and poolings: a window moves over the last dimensions.

Along a dimension that is cut, the input comes with its halo, which holds the padding
too, and the operation runs without padding. Along the others it stays as it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from gemsc.base.boxes import Box, Interval, everything, hull, intersection
from gemsc.ir import meta
from gemsc.ir.operators.calls import Call, call_of
from gemsc.passes.spatial import need
from gemsc.passes.spatial.cuts import Axes, fits
from gemsc.passes.spatial.emit import call_again, crop, weighted_sum
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.padding import pad_like
from gemsc.passes.spatial.values import Local, Refused, last_axes
from gemsc.runtime import tiles
from gemsc.runtime.tiles.windows import AxisWindows


def numbers(value: Any, rank: int) -> tuple[int, ...]:
    """Return one number per dimension of `3`, `(3,)` or `(3, 3)`."""
    if isinstance(value, int):
        return (value,) * rank
    values = tuple(int(item) for item in value)
    return values * rank if len(values) == 1 else values


def spatial_axes(low: Lowering, source: fx.Node, rank: int) -> Axes:
    """Return how the input of an operation over its last dimensions is cut.

    A whole one is cut as the stage is.

    Raises:
        Refused: another dimension is cut, or the grid has other dimensions.
    """
    axes = low.axes(source)
    dims = len(low.shape(source))
    if axes is None:
        axes = last_axes(dims, low.pictures)
        if axes is None or len(low.pictures) != rank:
            raise Refused("the grid has other dimensions")
    if any(axis is not None for axis in axes[: dims - rank]):
        raise Refused("it is cut along batch or channels")
    return axes


def result_axes(low: Lowering, call: Call, axes: Axes) -> Axes:
    """Return the axes of the result, if every tile gets a part of it."""
    if not fits(_result_shape(call), axes, low.grid):
        raise Refused("the result is smaller than the grid")
    return axes


def _result_shape(call: Call) -> tuple[int, ...]:
    """Return the shape of the result; of several tensors, that of the first."""
    return tuple(pytree.tree_leaves(meta.value(call.node))[0].shape)


@dataclass(frozen=True, slots=True)
class _Window:
    """A window's settings along each of the last dimensions."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]  # rows of padding before the first one
    after: tuple[int, ...]

    def need(self, dim: int, out: Interval) -> Interval:
        return need.window(
            out,
            kernel=self.kernel[dim],
            stride=self.stride[dim],
            dilation=self.dilation[dim],
            before=self.before[dim],
        )

    def reaching(self, dim: int, rows: Interval) -> Interval:
        """Return the outputs whose windows meet these rows of the input."""
        start, stop = (row + self.before[dim] for row in rows)
        reach = self.dilation[dim] * (self.kernel[dim] - 1)
        stride = self.stride[dim]
        return -(-(start - reach) // stride), (stop - 1) // stride + 1

    @property
    def is_symmetric(self) -> bool:
        return self.before == self.after


def _wanted(
    low: Lowering,
    call: Call,
    axes: Axes,
    rule: Callable[[int, Interval], Interval],
    explicit: tuple[bool, ...],
) -> tuple[Box, ...]:
    """Return what each tile needs: by the rule for explicit dimensions, all of others.

    `rule(i, out)` and `explicit[i]` are for the i-th of the last dimensions.
    """
    source = low.shape(call.input)
    first = len(axes) - len(explicit)
    is_tensor = isinstance(meta.value(call.node), Tensor)
    results = (
        low.result(call.node, axes)
        if is_tensor
        else low.owned(_result_shape(call), axes)
    )
    return tuple(
        tuple(
            rule(dim - first, interval)
            if dim >= first and explicit[dim - first]
            else (0, source[dim])
            for dim, interval in enumerate(box)
        )
        for box in results
    )


def _explicit(axes: Axes, rank: int) -> tuple[bool, ...]:
    """Return which of the last dimensions are cut."""
    return tuple(axis is not None for axis in axes[len(axes) - rank :])


def _kept(values: tuple[int, ...], explicit: tuple[bool, ...]) -> tuple[int, ...]:
    """Return a setting that is 0 where the padding is in the halo."""
    return tuple(0 if cut else v for v, cut in zip(values, explicit, strict=True))


# Convolutions


def convolution(low: Lowering, call: Call) -> Local:
    """Run a convolution on the tile with its halo."""
    rank = call.rank
    window = _convolution_window(low, call)
    source = call.input
    axes = spatial_axes(low, source, rank)
    axes = result_axes(low, call, axes)
    mode = call.get("padding_mode", "zeros")
    explicit = _explicit(axes, rank)
    changes: dict[str, Any] = {}
    if mode != "zeros":
        explicit = (True,) * rank
        changes["padding_mode"] = "zeros"
    elif not window.is_symmetric:
        explicit = (True,) * rank
    wanted = _wanted(low, call, axes, window.need, explicit)
    if mode == "zeros":
        part = low.part(source, wanted)
    else:
        part = pad_like(low, source, axes, wanted, mode, call)
    padding = _kept(window.before, explicit)
    changes |= _padding(call, padding, rank)
    return call_again(low, call, axes, {source: part}, changes)


def _convolution_window(low: Lowering, call: Call) -> _Window:
    rank = call.rank
    kernel = _kernel(low, call)
    dilation = numbers(call.get("dilation", 1), rank)
    padding = call.get("padding", 0)
    if padding == "same":  # the odd row goes to the end
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        before = tuple(n // 2 for n in total)
        after = tuple(n - n // 2 for n in total)
    else:
        before = (0,) * rank if padding == "valid" else numbers(padding, rank)
        after = before
    stride = numbers(call.get("stride", 1), rank)
    return _Window(kernel, stride, dilation, before, after)


def _kernel(low: Lowering, call: Call) -> tuple[int, ...]:
    if call.layer is not None:
        weight: Any = call.layer.weight
        shape = tuple(weight.shape)
    else:
        shape = low.shape(call["weight"])
    return shape[-call.rank :]


def _padding(call: Call, padding: tuple[int, ...], rank: int) -> dict[str, Any]:
    """Return the settings that say this padding."""
    given = call.get("padding", 0)
    if not isinstance(given, str) and numbers(given, rank) == padding:
        return {}
    if call.layer is None:
        return {"padding": padding}
    repeated = [n for n in reversed(padding) for _ in range(2)]
    before = getattr(call.layer, "_reversed_padding_repeated_twice", repeated)
    return {
        "padding": padding,
        "_reversed_padding_repeated_twice": type(before)(repeated),
    }


def transposed_convolution(low: Lowering, call: Call) -> Local:
    """Run a transposed convolution on what reaches the tile, and crop."""
    rank, source = call.rank, call.input
    axes = spatial_axes(low, source, rank)
    result_axes(low, call, axes)
    explicit = _explicit(axes, rank)
    kernel = _kernel(low, call)
    stride = numbers(call.get("stride", 1), rank)
    dilation = numbers(call.get("dilation", 1), rank)
    padding = numbers(call.get("padding", 0), rank)
    sizes, results = low.shape(source)[-rank:], low.shape(call.node)[-rank:]
    least = (
        (size - 1) * step - 2 * pad + d * (k - 1) + 1
        for size, step, pad, d, k in zip(
            sizes, stride, padding, dilation, kernel, strict=True
        )
    )
    extra = [size - given for size, given in zip(results, least, strict=True)]

    def rule(dim: int, out: Interval) -> need.Transposed:
        return need.transposed(
            out,
            size=sizes[dim],
            kernel=kernel[dim],
            stride=stride[dim],
            dilation=dilation[dim],
            padding=padding[dim],
        )

    wanted = _wanted(low, call, axes, lambda i, out: rule(i, out).need, explicit)
    part = low.part(source, wanted)
    box = low.result(call.node, axes)[low.place][-rank:]
    ours = [
        rule(dim, box[dim]) if cut else need.Transposed((0, 0), pad, pad, more)
        for dim, (cut, pad, more) in enumerate(
            zip(explicit, padding, extra, strict=True)
        )
    ]
    cropped = tuple(min(part.left, part.right) for part in ours)
    changes = _padding(call, cropped, rank)
    added = tuple(part.extra for part in ours)
    if added != numbers(call.get("output_padding", 0), rank):
        changes["output_padding"] = added
    if call.get("output_size") is not None:  # the padding says it
        changes["output_size"] = None
    uneven = [
        (part.left - both, part.right - both)
        for part, both in zip(ours, cropped, strict=True)
    ]
    partial = any(before or after for before, after in uneven)
    local = call_again(low, call, axes, {source: part}, changes, partial=partial)
    return crop(low, call, local, uneven)


# Poolings


def max_pooling(low: Lowering, call: Call) -> Local:
    """Run a maximum on the tile with its halo; outside the value is -inf.

    Indices that it returns become positions in the whole value.
    """
    has_indices = not isinstance(meta.value(call.node), Tensor)
    if not meta.spec(call.input).dtype.is_floating_point:
        raise Refused("it is not floating point")
    window = _pooling_window(call)
    if not has_indices and _covers_everything(low, call, window):
        return largest_of_everything(low, call)
    axes = result_axes(low, call, spatial_axes(low, call.input, call.rank))
    explicit = _explicit(axes, call.rank)
    wanted = _wanted(low, call, axes, window.need, explicit)
    inputs = {call.input: low.part(call.input, wanted, fill=-math.inf)}
    padding = _kept(window.before, explicit)
    changes = _changed_padding(call, padding)
    local = call_again(low, call, axes, inputs, changes, partial=has_indices)
    if not has_indices:
        return local
    size = low.shape(call.input)[-call.rank :]
    args = (local.node, wanted[low.place][-call.rank :], size)
    function = tiles.whole_positions
    return low.create(call.node, "call_function", function, args, {}, axes)


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

    wanted = _wanted(low, call, axes, reaching, _explicit(axes, rank))
    box = low.result(call.node, axes)[low.place][-rank:]
    rows = wanted[low.place][-rank:]
    reached = tuple(window.need(dim, interval) for dim, interval in enumerate(rows))
    region = hull(box, intersection(reached, everything(size)))
    parts = low.part(source, wanted), low.part(call["indices"], wanted)
    local = low.create(
        call.node,
        "call_function",
        tiles.max_unpool,
        (*parts, size, region),
        {},
        axes,
        partial=region != box,
    )
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


def _pooling_window(call: Call) -> _Window:
    rank = call.rank
    kernel = numbers(call["kernel_size"], rank)
    stride = call.get("stride", ())
    padding = numbers(call.get("padding", 0), rank)
    return _Window(
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
        explicit = _explicit(axes, rank)
        wanted = _wanted(low, call, axes, window.need, explicit)
        changes = _changed_padding(call, _kept(window.before, explicit))
        return call_again(low, call, axes, {source: low.part(source, wanted)}, changes)
    wanted = _wanted(low, call, axes, window.need, (True,) * rank)
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
    return low.create(
        call.node,
        "call_function",
        tiles.average_pool,
        (part, windows, include),
        {},
        axes,
    )


def _covers_everything(low: Lowering, call: Call, window: _Window) -> bool:
    """Whether one window takes the mean of all rows and columns."""
    rank = call.rank
    return (
        window.kernel == low.shape(call.input)[-rank:]
        and low.shape(call.node)[-rank:] == (1,) * rank
        and not any(window.before)
        and call.get("divisor_override") is None
        and low.axes(call.input) is not None
    )


def _counts_are_equal(low: Lowering, call: Call, window: _Window) -> bool:
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
    source = call.input
    axes = low.axes(source)
    assert axes is not None
    dims = tuple(range(-call.rank, 0))
    among = low.among(axis for axis in axes if axis is not None)
    local = low.create(
        call.node,
        "call_method",
        "mean",
        (low.get(source).node, dims),
        {"keepdim": True},
        None,
        partial=True,
    )
    share = low.share(low.shape(source), axes)
    return weighted_sum(low, call, local, share, None, among)


def largest_of_everything(low: Lowering, call: Call) -> Local:
    """Take the largest of the tiles' largest elements."""
    source, rank = call.input, call.rank
    axes = spatial_axes(low, source, rank)
    shape = low.shape(source)
    box = low.owned(shape, axes)[low.place][-rank:]
    among = low.among(axis for axis in axes if axis is not None)
    args = (low.here, low.get(source).node, shape[-rank:], box)
    options = {"among": among} if among else {}
    function = tiles.global_max
    return low.create(call.node, "call_function", function, args, options, None)


def lp_pooling(low: Lowering, call: Call) -> Local:
    """Run a power mean, which has no padding, on the tile with its halo."""
    window = _pooling_window(call)
    axes = result_axes(low, call, spatial_axes(low, call.input, call.rank))
    if not _counts_are_equal(low, call, window):
        raise Refused("its last window is not full")
    wanted = _wanted(low, call, axes, window.need, _explicit(axes, call.rank))
    return call_again(low, call, axes, {call.input: low.part(call.input, wanted)})
