"""Reductions: sums, extremes, variances, softmax and losses over what is cut.

Each tile reduces what it has. Then the tiles that differ only along the axes reduced
put theirs together, so that a mean over rows of a 2 x 2 grid leaves columns cut:

    tile 0 + tile 2 = left columns, on both        tile 1 + tile 3 = right columns
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor, fx

from gemsc.ir import meta
from gemsc.ir.operators.calls import Call, numbered
from gemsc.passes.spatial.cuts import Axes, or_whole
from gemsc.passes.spatial.emit import add_call, call_again, on_tiles, weighted_sum
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.rules.shapes import along, elementwise
from gemsc.passes.spatial.values import Flattened, Local, Refused
from gemsc.runtime import tiles

_OVER_TILES: dict[str, Callable[..., Tensor]] = {
    "max": tiles.amax,
    "min": tiles.amin,
    "amax": tiles.amax,
    "amin": tiles.amin,
    "var": tiles.var,
    "std": tiles.std,
}


def extreme(low: Lowering, call: Call) -> Local:
    """Lower max and min: of two values, along a dimension, or of everything."""
    if isinstance(call.get("dim", call.get("other")), fx.Node):
        return elementwise(low, call.node)
    if low.axes(call.input) is None:
        raise Refused("no input is cut")
    if call.get("dim") is None:
        return reduction(low, call)
    return along(low, call)


def reduction(low: Lowering, call: Call) -> Local:
    """Reduce over some dimensions: on each tile, and over tiles if they are cut."""
    source = call.input
    shape, axes = low.shape(source), low.cut_axes(source)
    flattened = low.flattened(source)
    if any(
        low.axes(n) is not None for n in call.node.all_input_nodes if n is not source
    ):
        raise Refused("it takes several values that are cut")
    groups = (1,) * len(shape) if flattened is None else flattened.groups
    over = _dims(call, len(groups))
    keepdim = bool(call.get("keepdim", False))
    dims, kept, result_groups = _held(shape, axes, groups, over, keepdim)
    result = tuple(axis for _, axis in kept)
    if flattened is None and all(axes[dim] is None for dim in dims):
        inputs = {source: low.get(source).node}
        return call_again(low, call, result, inputs)
    if any(count > 1 for count in result_groups):
        held = tuple(size for size, _ in kept)
        low.hold(call.node, Flattened(held, result_groups))
    return _over_tiles(low, call, dims, or_whole(result))


def along_tiles(
    low: Lowering, call: Call, function: Callable[..., Tensor], **options: Any
) -> Local:
    """Lower what needs all elements along some dimensions: over tiles if they are cut.

    `function(grid, value, dims, **options)` is the operation on tiles; with `among`,
    the tiles that differ in these dimensions.
    """
    source = call.input
    shape, axes = low.shape(source), low.cut_axes(source)
    flattened = low.flattened(source)
    groups = (1,) * len(shape) if flattened is None else flattened.groups
    over = numbered(call.get("dim"), len(groups))
    if over is None or call.get("dtype") is not None:
        return along(low, call)
    dims, _, _ = _held(shape, axes, groups, over, True)
    if all(axes[dim] is None for dim in dims):
        if flattened is not None:
            raise Refused("it needs a value flattened")
        return along(low, call)
    if flattened is not None:
        low.hold(call.node, flattened)
    if among := low.among(axes[dim] for dim in dims):
        options["among"] = among
    args = (low.here, low.get(source).node, dims)
    return add_call(low, call.node, function, *args, axes=axes, **options)


def _dims(call: Call, count: int) -> set[int]:
    """Return over which dimensions of the value a call goes."""
    given = call.get("dim")
    if isinstance(given, bool):  # x.var(False): an older name of the correction
        given = None
    if given is None or given in ((), []):
        return set(range(count))
    if (dims := numbered(given, count)) is None:
        raise Refused("its dimensions are not numbers")
    return dims


def _held(
    shape: tuple[int, ...],
    axes: Axes,
    groups: tuple[int, ...],
    over: set[int],
    keepdim: bool,
) -> tuple[tuple[int, ...], list[tuple[int, int | None]], tuple[int, ...]]:
    """Return the dimensions reduced as they are held, and (size, axis) of the others.

    The last are how many of these each dimension of the result joins.
    """
    dims: list[int] = []
    kept: list[tuple[int, int | None]] = []
    result_groups = []
    first = 0
    for place, count in enumerate(groups):
        inside = range(first, first + count)
        first += count
        if place in over:
            dims += inside
            kept += [(1, None)] * count if keepdim else []
        else:
            kept += [(shape[dim], axes[dim]) for dim in inside]
        if place not in over or keepdim:
            result_groups.append(count)
    return tuple(dims), kept, tuple(result_groups)


def _over_tiles(
    low: Lowering, call: Call, dims: tuple[int, ...], result: Axes | None
) -> Local:
    """Reduce on the tile, then put together what the tiles found."""
    node, source = call.node, call.input
    shape, axes = low.shape(source), low.cut_axes(source)
    part = low.get(source).node
    among = low.among(axes[dim] for dim in dims)
    options: dict[str, Any] = {}
    if call.get("keepdim", False):
        options["keepdim"] = True
    if call.kind in ("sum", "mean"):
        if call.get("dtype") is not None:
            options["dtype"] = call["dtype"]
        over = dims if len(dims) > 1 else dims[0]
        args = (part, over) if len(dims) < len(shape) or options else (part,)
        local = add_call(low, node, call.kind, *args, partial=True, **options)
        if call.kind == "sum":
            return low.all_reduce(node, local.node, result, among)
        reduced = tuple(a if d in dims else None for d, a in enumerate(axes))
        return weighted_sum(low, call, local, reduced, result)
    if not meta.spec(source).dtype.is_floating_point:
        raise Refused("it is not floating point")
    if call.kind in ("var", "std"):
        options["correction"] = _correction(call)
    if among:
        options["among"] = among
    function, given = _OVER_TILES[call.kind], (low.here, part, dims)
    return add_call(low, node, function, *given, axes=result, **options)


def _correction(call: Call) -> float:
    """Return what a variance subtracts from the number of elements."""
    given = call.get("dim")
    unbiased = given if isinstance(given, bool) else call.get("unbiased")
    if unbiased is not None:
        return int(bool(unbiased))
    correction: float = call.get("correction", 1)
    return correction


# Losses: tile sums, divided by the count of all tiles


def elementwise_loss(low: Lowering, call: Call) -> Local:
    """Add up the tiles' sums of a loss that has one term per element."""
    reduction = _reduction(call)
    weights = [call.get(name) for name in ("weight", "pos_weight")]
    if any(isinstance(w, Tensor) and w.dim() > 0 for w in weights):
        raise Refused("it has weights")
    for weight in weights:
        if isinstance(weight, fx.Node):
            raise Refused("it has weights")
    axes, inputs = _cut_alike(low, call)
    if reduction == "none":
        return call_again(low, call, axes, inputs)
    changes = {} if reduction == "sum" else {"reduction": "sum"}
    partial = call_again(low, call, None, inputs, changes, partial=True)
    total = low.all_reduce(call.node, partial.node, None, low.among(axes))
    if reduction == "sum":
        return total
    count = prod(low.shape(call.input))
    return add_call(low, call.node, operator.truediv, total.node, count)


def _reduction(call: Call) -> str:
    if call.get("size_average") is not None or call.get("reduce") is not None:
        raise Refused("it uses size_average or reduce")
    return str(call.get("reduction", "mean"))


def _cut_alike(low: Lowering, call: Call) -> tuple[Axes, dict[fx.Node, fx.Node]]:
    """Return output and target, cut alike."""
    output, target = call["input"], call["target"]
    if low.shape(output) != low.shape(target):
        raise Refused("output and target have different shapes")
    axes = low.axes(output) or low.axes(target)
    assert axes is not None
    return axes, {node: low.spread(node, axes) for node in (output, target)}


def cross_entropy(low: Lowering, call: Call) -> Local:
    """Add up the tiles' pixels and their weights in one message."""
    reduction = _reduction(call)
    output, target = call["input"], call["target"]
    axes = low.axes(output)
    if axes is None or len(axes) < 2 or axes[1] is not None:
        raise Refused("it is cut along classes")
    pixels = axes
    if not meta.spec(target).dtype.is_floating_point:
        pixels = (axes[0], *axes[2:])
    inputs = {
        output: low.get(output).node,
        target: low.spread(target, pixels),
    }
    if reduction == "none":
        return call_again(low, call, (axes[0], *axes[2:]), inputs)
    args = (low.here, *inputs.values())
    among = low.among(axes)
    return on_tiles(low, call, tiles.cross_entropy, args, None, among=among)
