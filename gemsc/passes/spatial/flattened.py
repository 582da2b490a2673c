"""Flattened values: tiles hold all dimensions until somebody needs them flat.

Example, N x C x H x W cut along H and W, flattened to N x F. What a tile has of F is no
interval, so that it stays a box of C x H x W:

    flatten(1)        nothing to do
    relu, dropout     of the box
    linear            the tile's columns of the weight; one sum over the tiles
    mean, max, ...    over the dimensions that were joined
    softmax           over those; the result is held like the value
    anything else     exchange columns for whole rows, which are intervals of F

The weight is not cut: every tile keeps all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from torch import fx

from gemsc.ir import meta
from gemsc.ir.mutation import elements
from gemsc.ir.operators.calls import Call
from gemsc.ir.operators.table import operator_of
from gemsc.passes.spatial.cuts import fits, or_whole
from gemsc.passes.spatial.emit import call_again, on_tiles
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.values import Flattened, Local, Refused, whole_shape
from gemsc.runtime import tiles


def join(low: Lowering, node: fx.Node, source: fx.Node) -> Local:
    """Hold a view that joins dimensions of its source as the source.

    Raises:
        Refused: it does something else.
    """
    shape, is_reshape = low.shape(source), low.probe.is_reshape(node)
    groups = _groups(shape, whole_shape(node)) if is_reshape else None
    if groups is None:
        raise Refused("it joins or splits a dimension that is cut")
    how = Flattened(shape, groups)
    low.hold(node, how)
    return replace(low.get(source), parts=low.parts_of(node), flattened=how)


def _groups(shape: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return how many dimensions each of the result joins, in order; None if not so."""
    groups: list[int] = []
    for before, after in runs_of(shape, result):
        if groups and not after:  # further ones of size 1
            groups[-1] += len(before)
        elif len(after) == 1 and before:
            groups.append(len(before))
        else:
            return None
    return tuple(groups)


def runs_of(
    shape: tuple[int, ...], result: tuple[int, ...]
) -> Iterator[tuple[range, range]]:
    """Yield the dimensions of two shapes that have as many elements, the least runs."""
    first = second = 0
    while first < len(shape) or second < len(result):
        stop, end = min(first + 1, len(shape)), min(second + 1, len(result))
        while (one := prod(shape[first:stop])) != (two := prod(result[second:end])):
            if end == len(result) or (one < two and stop < len(shape)):
                stop += 1
            else:
                end += 1
        yield range(first, stop), range(second, end)
        first, second = stop, end


def check(low: Lowering, call: Call, elementwise: bool) -> None:
    """Let what is computed of flattened values be held like them.

    Raises:
        Refused: no rule computes it of values that are held with all dimensions.
    """
    node = call.node
    reduces = operator_of(call).does == "reduction"
    if reduces or call.kind in ("linear", "softmax", "log_softmax"):
        return
    if call.kind not in ("dropout", "loss") and (call.kind or not elementwise):
        raise Refused("it needs a value flattened")
    tensors = [n for n in elements(node) if whole_shape(n)]
    held = low.flattened(tensors[0])
    forms = {(low.flattened(n), low.axes(n)) for n in tensors}
    if held is None or len(forms) > 1:
        raise Refused("its values are flattened in different ways")
    if whole_shape(node) == whole_shape(tensors[0]):
        low.hold(node, held)


def linear(low: Lowering, call: Call) -> Local:
    """Multiply along the last dimension; if that is cut, add up the tiles' products."""
    source, node = call.input, call.node
    shape, axes = low.shape(source), low.cut_axes(source)
    flattened = low.flattened(source)
    groups = (1,) * len(shape) if flattened is None else flattened.groups
    first = len(shape) - groups[-1]
    inner = axes[first:]
    if any(low.axes(n) is not None for n in node.all_input_nodes if n is not source):
        raise Refused("its weight is cut")
    size = whole_shape(node)[-1]
    if any(count > 1 for count in groups[:-1]):
        low.hold(node, Flattened((*shape[:first], size), (*groups[:-1], 1)))
    if inner == (None,):
        return call_again(low, call, axes, {source: low.get(source).node})
    result = or_whole((*axes[:first], None))
    sizes, parts = list(shape), low.local(source).held_parts
    box = list(low.owned(shape, axes)[low.place])
    if parts:  # the rank's weight has columns of its own units alone
        dim = parts[low.place].dim
        sizes[dim] = parts[low.place].local_shape[dim]
        box[dim] = 0, sizes[dim]
    columns: dict[str, Any] = {"shape": tuple(sizes[first:]), "box": tuple(box[first:])}
    if among := low.among(inner):
        columns["among"] = among
    if low.is_addend:
        columns["bias"] = None
    args = (low.here, low.get(source).node)
    local = on_tiles(low, call, tiles.linear, args, result, **columns)
    if low.is_addend:
        meta.layout.set(local.node, None)
    return local


def in_rows(low: Lowering, source: fx.Node) -> Local:
    """Return a flattened value as one that is cut along its own dimensions.

    Where the columns of pictures are cut, tiles exchange them for whole rows: these lie
    in a row when they are flattened.

    Raises:
        Refused: there are fewer rows than tiles.
    """
    local = low.local(source)
    assert local.flattened is not None
    assert local.axes is not None
    held = local.flattened.shape
    by_rows: list[int | None] = [None] * len(held)
    axes: list[int | None] = []
    inner, first = [], 0
    for count in local.flattened.groups:
        run = range(first, first + count)
        first += count
        cut = [local.axes[dim] for dim in run if local.axes[dim] is not None]
        outermost = next((dim for dim in run if held[dim] > 1), run.start)
        axes.append(cut[0] if cut else None)
        if cut:
            by_rows[outermost] = cut[0]
        inner.append((outermost, prod(held[outermost + 1 : run.stop])))
    if not fits(held, tuple(by_rows), low.grid):
        raise Refused("it has fewer rows than tiles")
    rows = low.owned(held, tuple(by_rows))
    boxes = tuple(
        tuple((box[dim][0] * size, box[dim][1] * size) for dim, size in inner)
        for box in rows
    )
    return low.laid_flat(source, rows, boxes, tuple(axes))
