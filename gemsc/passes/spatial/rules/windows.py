"""Windows: convolutions move one over the last dimensions, as poolings do.

Along a dimension that is cut, the input comes with its halo, which holds the padding
too, and the operation runs without padding. Along the others it stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import fx

from gemsc.base.boxes import Box, Interval
from gemsc.ir import meta
from gemsc.ir.operators.calls import Call
from gemsc.passes.spatial import need
from gemsc.passes.spatial.cuts import Axes, fits
from gemsc.passes.spatial.emit import add_call, call_again, crop
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.values import Local, Refused, last_axes

Rule = Callable[[int, Interval], Interval]


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
    return tuple(meta.tensors(call.node)[0].shape)


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """A window's settings along each of the last dimensions."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]  # rows of padding before the first one
    after: tuple[int, ...]

    def need(self, dim: int, out: Interval) -> Interval:
        """Return what an interval of the output reads along a dimension."""
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


def wanted_boxes(
    low: Lowering,
    call: Call,
    axes: Axes,
    rule: Rule,
    explicit: tuple[bool, ...],
) -> tuple[Box, ...]:
    """Return what each tile needs: by the rule for explicit dimensions, all of others.

    `rule(i, out)` and `explicit[i]` are for the i-th of the last dimensions.
    """
    source = low.shape(call.input)
    first = len(axes) - len(explicit)
    if meta.is_one_tensor(call.node):
        results = low.result(call.node, axes)
    else:
        results = low.owned(_result_shape(call), axes)
    return tuple(
        tuple(
            rule(dim - first, interval)
            if dim >= first and explicit[dim - first]
            else (0, source[dim])
            for dim, interval in enumerate(box)
        )
        for box in results
    )


def explicit_padding(axes: Axes, rank: int) -> tuple[bool, ...]:
    """Return which of the last dimensions are cut."""
    return tuple(axis is not None for axis in axes[len(axes) - rank :])


def kept(values: tuple[int, ...], explicit: tuple[bool, ...]) -> tuple[int, ...]:
    """Return a setting that is 0 where the padding is in the halo."""
    return tuple(0 if cut else v for v, cut in zip(values, explicit, strict=True))


def convolution(low: Lowering, call: Call) -> Local:
    """Run a convolution on the tile with its halo."""
    rank = call.rank
    window = _convolution_window(low, call)
    source = call.input
    axes = spatial_axes(low, source, rank)
    axes = result_axes(low, call, axes)
    mode = call.get("padding_mode", "zeros")
    explicit = explicit_padding(axes, rank)
    changes: dict[str, Any] = {}
    if mode != "zeros":
        explicit = (True,) * rank
        changes["padding_mode"] = "zeros"
    elif window.before != window.after:
        explicit = (True,) * rank
    wanted = wanted_boxes(low, call, axes, window.need, explicit)
    if mode == "zeros":
        part = low.part(source, wanted)
    else:
        part = pad_like(low, source, axes, wanted, mode, call)
    padding = kept(window.before, explicit)
    changes |= _padding(call, padding, rank)
    return call_again(low, call, axes, {source: part}, changes)


def _convolution_window(low: Lowering, call: Call) -> WindowSettings:
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
    return WindowSettings(kernel, stride, dilation, before, after)


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
    explicit = explicit_padding(axes, rank)
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

    wanted = wanted_boxes(low, call, axes, lambda i, out: rule(i, out).need, explicit)
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


def pad(low: Lowering, call: Call) -> Local:
    """Let each tile want its part of the padded value; negative padding crops."""
    source, node = call.input, call.node
    axes = low.cut_axes(source)
    if not fits(low.shape(node), axes, low.grid):
        raise Refused("the result is smaller than the grid")
    before = _before(call["pad"], len(axes))
    wanted = tuple(
        tuple((a - n, b - n) for (a, b), n in zip(box, before, strict=True))
        for box in low.owned(low.shape(node), axes)
    )
    mode = call.detail or call.get("mode", "constant")
    if mode == "circular" and min(call["pad"]) < 0:
        raise Refused("it crops what it wraps around")
    if mode == "constant":
        part = low.part(source, wanted, float(call.get("value", 0.0)))
    else:
        part = pad_like(low, source, axes, wanted, mode, call)
    return low.stands_for(part, node, axes)


def _before(padding: Any, dims: int) -> tuple[int, ...]:
    """Return the rows before each dimension; PyTorch begins with the last one."""
    starts = [int(n) for n in tuple(padding)[::2]]
    return (*(0,) * (dims - len(starts)), *reversed(starts))


def pad_like(
    low: Lowering,
    source: fx.Node,
    axes: Axes,
    wanted: tuple[Box, ...],
    mode: str,
    call: Call,
) -> fx.Node:
    """Return the node of the wanted boxes; outside the value they follow the mode.

    Each tile takes what is mirrored or repeated, from the edge on, pads it there, and
    crops what it took too much.
    """
    if mode == "circular":
        return low.part(source, wanted, wraps=True)
    if mode not in ("reflect", "replicate"):
        raise Refused(f"no rule for padding mode {mode}")
    shape = low.shape(source)
    taken = tuple(
        tuple(
            need.mirrored(interval, size=size, before=0, mode=mode)
            for interval, size in zip(box, shape, strict=True)
        )
        for box in wanted
    )
    part = low.part(source, taken)
    rank = len(call["pad"]) // 2 if call.kind == "pad" else call.rank
    ours = list(zip(taken[low.place], wanted[low.place], shape, strict=True))
    pads: list[tuple[int, int]] = []
    rows: list[tuple[int, int]] = []
    for (first, last), (start, stop), size in ours[len(shape) - rank :]:
        left, right = max(-start, 0), max(stop - size, 0)
        pads.append((left, right))
        rows.append((start - first + left, last + right - stop))
    local = Local(part, axes)
    if any(left or right for left, right in pads):
        amounts = tuple(n for pair in reversed(pads) for n in pair)
        how: dict[str, Any] = {"axes": axes, "partial": True, "mode": mode}
        local = add_call(low, call.node, F.pad, part, amounts, **how)
    return crop(low, call, local, rows, partial=True).node
