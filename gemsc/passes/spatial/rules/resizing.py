"""Operations that change the resolution: interpolation, adaptive pools, pixel shuffles.

An enlargement by a whole factor runs PyTorch's own kernel on the rows that it reads,
and crops. Whatever else there is becomes a weighted sum of rows, with the weights that
PyTorch has for the whole value.
"""

from __future__ import annotations

from typing import Any

from gemsc.base.boxes import Box, Interval, everything
from gemsc.ir.operators.calls import Call
from gemsc.passes.spatial import need
from gemsc.passes.spatial.cuts import Axes
from gemsc.passes.spatial.emit import add_call, call_again, crop, weighted_sum
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.rules.pooling import largest_of_everything
from gemsc.passes.spatial.rules.windows import (
    Rule,
    explicit_padding,
    result_axes,
    spatial_axes,
    wanted_boxes,
)
from gemsc.passes.spatial.values import Local, Refused
from gemsc.runtime import tiles
from gemsc.runtime.tiles.windows import Resize, rows_read

_LINEAR = ("linear", "bilinear", "trilinear")
_REACH = {
    **dict.fromkeys(("nearest", "nearest-exact"), (0, 0)),
    **dict.fromkeys(_LINEAR, (0, 1)),
    "bicubic": (1, 2),
}


# Interpolation


def interpolation(low: Lowering, call: Call) -> Local:
    """Resize the rows that the tile's part of the result reads."""
    source, node = call.input, call.node
    rank = len(low.shape(source)) - 2
    axes = spatial_axes(low, source, rank)
    mode = call.get("mode", "nearest")
    if mode == "area":
        return _pool(low, call, axes, "avg", low.shape(node)[2:])
    axes = result_axes(low, call, axes)
    if call.get("antialias") and low.shape(node)[-1] == 1:
        raise Refused("PyTorch smooths differently where a single column is left")
    factors = _whole_factors(low, call)
    if factors is None:
        return _weighted_rows(low, call, axes, mode)
    sizes = low.shape(source)[2:]

    def rule(dim: int, out: Interval) -> Interval:
        factor = factors[dim]
        if factor == 1:
            return out
        if mode.startswith("nearest"):
            return out[0] // factor, -(-out[1] // factor)
        return need.support(out, size=sizes[dim], factor=factor, reach=_REACH[mode])

    return _enlarged(low, call, axes, factors, rule)


def _enlarged(
    low: Lowering, call: Call, axes: Axes, factors: tuple[int, ...], rule: Rule
) -> Local:
    """Run PyTorch's own kernel on the rows that are read, and crop."""
    rank = len(factors)
    inputs = wanted_boxes(low, call, axes, rule, (True,) * rank)
    part = low.part(call.input, inputs)
    read = inputs[low.place][-rank:]
    box = low.result(call.node, axes)[low.place][-rank:]
    rows = [
        (start - first * factor, last * factor - stop)
        for (first, last), (start, stop), factor in zip(read, box, factors, strict=True)
    ]
    changes: dict[str, Any] = {}
    if call.get("size") is not None:
        changes["size"] = tuple(
            (last - first) * factor
            for (first, last), factor in zip(read, factors, strict=True)
        )
    partial = any(before or after for before, after in rows)
    local = call_again(low, call, axes, {call.input: part}, changes, partial=partial)
    return crop(low, call, local, rows)


def _whole_factors(low: Lowering, call: Call) -> tuple[int, ...] | None:
    """Return by what each dimension grows, if PyTorch's own kernel does it on a part.

    That it does not where corners are aligned, where it smooths, and where the factor
    is not a whole number.
    """
    if call.get("align_corners", False) or call.get("antialias", False):
        return None
    pairs = zip(low.shape(call.input)[2:], low.shape(call.node)[2:], strict=True)
    factors = []
    scales = _scales(call, len(low.shape(call.input)) - 2)
    for (size, out_size), scale in zip(pairs, scales, strict=True):
        factor, remainder = divmod(out_size, size)
        if remainder or (scale is not None and scale != factor):
            return None
        factors.append(factor)
    return tuple(factors)


def _scales(call: Call, rank: int) -> tuple[float | None, ...]:
    """Return the scale factors with which PyTorch computes, None for sizes' own."""
    scale = call.get("scale_factor")
    if scale is None or call.get("recompute_scale_factor", False):
        return (None,) * rank
    if isinstance(scale, (int, float)):
        return (float(scale),) * rank
    return tuple(float(factor) for factor in scale)


def _weighted_rows(low: Lowering, call: Call, axes: Axes, mode: str) -> Local:
    source, node = call.input, call.node
    sizes = tuple(zip(low.shape(source)[2:], low.shape(node)[2:], strict=True))
    rank = len(sizes)
    scales = _scales(call, rank)

    def how(inputs: Box, outputs: Box) -> Resize:
        settings = call.get("align_corners"), bool(call.get("antialias", False))
        return Resize(mode, sizes, inputs, outputs, scales, *settings)

    def rule(dim: int, out: Interval) -> Interval:
        return rows_read(how(everything(low.shape(source)[2:]), (out,) * rank), dim)

    inputs = wanted_boxes(low, call, axes, rule, explicit_padding(axes, rank))
    part = low.part(source, inputs)
    ours = how(inputs[low.place][2:], low.result(node, axes)[low.place][2:])
    return add_call(low, node, tiles.resize, part, ours, axes=axes)


# Adaptive pools


def adaptive_pooling(low: Lowering, call: Call, kind: str) -> Local:
    """Pool to a fixed size; to one value by adding up the tiles' means."""
    source, rank = call.input, call.rank
    if call.get("return_indices", False):
        raise Refused("it returns indices")
    axes = spatial_axes(low, source, rank)
    out_sizes = low.shape(call.node)[-rank:]
    if out_sizes == (1,) * rank and low.axes(source) is not None:
        if kind == "max":
            return largest_of_everything(low, call)
        part = {source: low.get(source).node}
        mean = call_again(low, call, None, part, partial=True)
        return weighted_sum(low, call, mean, axes)
    return _pool(low, call, axes, kind, out_sizes)


def _pool(
    low: Lowering, call: Call, axes: Axes, kind: str, out_sizes: tuple[int, ...]
) -> Local:
    source, node = call.input, call.node
    rank = len(out_sizes)
    axes = result_axes(low, call, axes)
    sizes = low.shape(source)[-rank:]

    def rule(dim: int, out: Interval) -> Interval:
        return need.adaptive_window(out, size=sizes[dim], out_size=out_sizes[dim])

    inputs = wanted_boxes(low, call, axes, rule, (True,) * rank)
    part = low.part(source, inputs)
    box = low.result(node, axes)[low.place][-rank:]
    windows = tuple(
        tuple(
            (first - begin, last - begin)
            for first, last in (rule(dim, (i, i + 1)) for i in range(*out))
        )
        for dim, (out, (begin, _)) in enumerate(
            zip(box, inputs[low.place][-rank:], strict=True)
        )
    )
    return add_call(low, node, tiles.adaptive_pool, part, kind, windows, axes=axes)


# Pixel shuffles


def pixel_shuffle(low: Lowering, call: Call) -> Local:
    """Move channels into rows and columns of the tile, and crop."""
    factor = int(call["upscale_factor"])
    axes = result_axes(low, call, spatial_axes(low, call.input, 2))

    def rule(_: int, out: Interval) -> Interval:
        return out[0] // factor, -(-out[1] // factor)

    return _enlarged(low, call, axes, (factor, factor), rule)


def pixel_unshuffle(low: Lowering, call: Call) -> Local:
    """Move rows and columns of the tile into channels."""
    factor = int(call["downscale_factor"])
    axes = result_axes(low, call, spatial_axes(low, call.input, 2))

    def rule(_: int, out: Interval) -> Interval:
        return out[0] * factor, out[1] * factor

    inputs = wanted_boxes(low, call, axes, rule, (True, True))
    return call_again(low, call, axes, {call.input: low.part(call.input, inputs)})
