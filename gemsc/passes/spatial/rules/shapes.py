"""Operations on every element, along other dimensions than those cut, and views."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from gemsc.base.boxes import Box
from gemsc.ir import meta
from gemsc.ir.mutation import elements
from gemsc.ir.operators.calls import Call, numbered
from gemsc.passes.spatial import need
from gemsc.passes.spatial.cuts import Axes, cut, fits, or_whole
from gemsc.passes.spatial.emit import add_call, alike, call_again, meeting
from gemsc.passes.spatial.flattened import join, runs_of
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.rules.windows import numbers
from gemsc.passes.spatial.values import Local, Refused

_WITH_SIZES = frozenset(
    [
        "view",
        "reshape",
        "unflatten",
        "expand",
        "broadcast_to",
        "squeeze",
    ]
)
_EXPANDING = frozenset({"expand", "broadcast_to"})


def elementwise(low: Lowering, node: fx.Node) -> Local:
    """Compute each tile's elements; what is whole or cut otherwise is cut to fit."""
    shape = low.shape(node)
    axes = _broadcast_axes(low, node, shape)
    boxes = low.result(node, axes)
    inputs = {
        source: _fitted(low, source, shape, axes, boxes) for source in elements(node)
    }
    return low.copy(node, axes, inputs=inputs)


def _broadcast_axes(low: Lowering, node: fx.Node, shape: tuple[int, ...]) -> Axes:
    """Return how the inputs cut the result, each where those before it do not."""
    result: list[int | None] = [None] * len(shape)
    for source in elements(node):
        axes = low.axes(source) if low.shape(source) else None
        for dim, axis in enumerate(axes or (), len(shape) - len(axes or ())):
            if result[dim] is None and axis not in result:
                result[dim] = axis
    out_axes = or_whole(tuple(result))
    if out_axes is None or not fits(shape, out_axes, low.grid):
        raise Refused("no input is cut like the result")
    return out_axes


def _fitted(
    low: Lowering,
    source: fx.Node,
    shape: tuple[int, ...],
    axes: Axes,
    boxes: tuple[Box, ...],
) -> fx.Node:
    """Return the part of an input that meets the tile's part of the result."""
    sizes = low.shape(source)
    if not sizes or not meta.is_one_tensor(source):
        return low.get(source).node
    ahead = len(shape) - len(sizes)
    first = or_whole(
        tuple(
            axis if size == shape[dim + ahead] else None
            for dim, (size, axis) in enumerate(zip(sizes, axes[ahead:], strict=True))
        )
    )
    if first is None:
        return low.whole(source)
    return meeting(low, source, first, (box[ahead:] for box in boxes))


def view(low: Lowering, node: fx.Node) -> Local | None:
    """Return a view that keeps the dimensions that are cut; None if it is no view."""
    source, *others = elements(node)
    if others:
        return None
    kept = low.probe.kept_dims(node, source)
    if kept is None:
        return None
    name = node.target if node.op == "call_method" else ""
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
    name = str(name)
    axes = low.cut_axes(source)
    are_cut = [dim for dim, axis in enumerate(axes) if axis is not None]
    if name == "unfold" and any(kept.get(dim) != dim for dim in are_cut):
        return None  # its one window is as long as all tiles
    if not all(dim in kept for dim in are_cut):
        return _regrouped(low, node, source, axes) or join(low, node, source)
    result: list[int | None] = [None] * meta.tensors(node)[0].dim()
    for dim in are_cut:
        result[kept[dim]] = axes[dim]
    if name not in _WITH_SIZES:
        return low.copy(node, tuple(result))
    target = "expand" if name in _EXPANDING else "reshape"
    args = (low.get(source).node, *low.sizes(node, tuple(result)))
    return add_call(low, node, target, *args, axes=tuple(result))


def _regrouped(
    low: Lowering, node: fx.Node, source: fx.Node, axes: Axes
) -> Local | None:
    """Return a view that joins or splits what is cut, if each tile keeps its memory.

    That it does where the outermost of the dimensions that are joined is cut: rows 0 to
    4 of 8 x 8 are elements 0 to 32 of 64.
    """
    shape, result = low.shape(source), low.shape(node)
    if not low.probe.is_reshape(node):
        return None
    out_axes: list[int | None] = [None] * len(result)
    for before, after in runs_of(shape, result):
        inside = [dim for dim in before if axes[dim] is not None]
        if not inside:
            continue
        first = next(dim for dim in before if shape[dim] > 1)
        to = next(dim for dim in after if result[dim] > 1)
        axis = axes[first]
        if inside != [first] or axis is None:
            return None
        edges = [
            prod(sizes[dim + 1 : run.stop]) * row
            for sizes, dim, run in ((shape, first, before), (result, to, after))
            for rows in cut(sizes[dim], low.grid[axis])
            for row in rows
        ]
        if edges[: len(edges) // 2] != edges[len(edges) // 2 :]:
            return None
        out_axes[to] = axis
    cut_alike = tuple(out_axes)
    args = (low.get(source).node, *low.sizes(node, cut_alike))
    return add_call(low, node, "reshape", *args, axes=cut_alike)


def subscript(low: Lowering, node: fx.Node) -> Local | None:
    """Return a part of a tuple, or a slice along a dimension that is cut.

    None for what is a plain view.
    """
    source, index = node.args
    assert isinstance(source, fx.Node)
    if not meta.is_one_tensor(source):
        return low.copy(node, low.axes(source))
    axes = low.axes(source)
    entries = _entries(index, len(low.shape(source)))
    if axes is None or entries is None:
        return None
    touched = [
        entries[dim] != slice(None) for dim, axis in enumerate(axes) if axis is not None
    ]
    if not any(touched):
        return None
    return _slice(low, node, source, entries)


def _entries(index: Any, dims: int) -> list[Any] | None:
    """Return one slice or number per dimension; None for anything else in the index."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(e is ... or isinstance(e, (slice, int)) for e in entries):
        return None
    if any(isinstance(e, bool) for e in entries):  # x[True] has one more dimension
        return None
    if ... in entries:
        at = entries.index(...)
        missing = dims - (len(entries) - 1)
        entries[at : at + 1] = [slice(None)] * missing
    return entries + [slice(None)] * (dims - len(entries))


def _slice(low: Lowering, node: fx.Node, source: fx.Node, entries: list[Any]) -> Local:
    axes = low.cut_axes(source)
    if 0 in low.shape(node):
        raise Refused("its result is empty")
    shape, sizes = low.shape(source), iter(low.shape(node))
    result: list[int | None] = []
    ranges: dict[int, range] = {}  # of the dimensions that are cut
    for dim, (axis, entry) in enumerate(zip(axes, entries, strict=True)):
        size = 1 if isinstance(entry, int) else next(sizes)
        if axis is not None and isinstance(entry, int):
            first = entry % shape[dim]
            ranges[dim] = range(first, first + 1)
        elif axis is not None:
            ranges[dim] = range(*entry.indices(shape[dim]))
        if not isinstance(entry, int):  # all tiles want what is too small to be cut
            result.append(axis if axis is None or size >= low.grid[axis] else None)
    cut_alike = tuple(result)
    out_axes = or_whole(cut_alike)
    places = [dim for dim, entry in enumerate(entries) if not isinstance(entry, int)]
    wanted = []
    for box in low.owned(low.shape(node), out_axes):
        by_dim = dict(zip(places, box, strict=True))
        wanted.append(
            tuple(
                need.strided(by_dim.get(dim, (0, 1)), start=rows.start, step=rows.step)
                if (rows := ranges.get(dim)) is not None
                else (0, size)
                for dim, size in enumerate(shape)
            )
        )
    part = low.part(source, tuple(wanted))
    index = tuple(_rest_of(entry, ranges.get(dim)) for dim, entry in enumerate(entries))
    if out_axes is not None and all(entry == slice(None) for entry in index):
        return low.stands_for(part, node, out_axes)
    return add_call(low, node, operator.getitem, part, index, axes=out_axes)


def _rest_of(entry: Any, rows: range | None) -> Any:
    """Return what is left of an index once the tile has the rows from the first on."""
    if rows is None:
        return entry
    if isinstance(entry, int):
        return 0
    return slice(None) if rows.step == 1 else slice(None, None, rows.step)


def narrow(low: Lowering, call: Call) -> Local:
    """Take consecutive rows."""
    source = call.input
    dims = len(low.shape(source))
    dim = int(call["dim"]) % dims
    axes = low.axes(source)
    if axes is None or axes[dim] is None:
        return low.copy(call.node, axes)
    if not isinstance(call["start"], int):
        raise Refused("the row that it starts at is not a number")
    start = call["start"] % max(low.shape(source)[dim], 1)
    entries: list[Any] = [slice(None)] * dims
    entries[dim] = slice(start, start + int(call["length"]))
    return _slice(low, call.node, source, entries)


def concatenation(low: Lowering, call: Call) -> Local:
    """Join what each tile has, along a dimension that is cut or not."""
    tensors = list(call["tensors"])
    dims = max(len(low.shape(tensor)) for tensor in tensors)
    tensors = [t for t in tensors if len(low.shape(t)) == dims]  # but torch.tensor([])
    dim = int(call.get("dim", 0))
    all_axes = [axes for tensor in tensors if (axes := low.axes(tensor)) is not None]
    axes = max(all_axes, key=lambda axes: sum(axis is not None for axis in axes))
    if call.kind == "stack":
        dim %= dims + 1
        result = (*axes[:dim], None, *axes[dim:])
    else:
        dim %= dims
        result = axes
    if call.kind == "stack":
        inputs = {tensor: low.spread(tensor, axes) for tensor in tensors}
    elif axes[dim] is not None:
        inputs = _own_rows(low, call, tensors, dim, axes)
    else:
        inputs = {tensor: alike(low, call, tensor, axes) for tensor in tensors}
    return call_again(low, call, result, inputs)


def _own_rows(
    low: Lowering, call: Call, tensors: list[fx.Node], dim: int, axes: Axes
) -> dict[fx.Node, fx.Node]:
    """Return of each value the rows that are in the tile's part of all in a row.

    That may be none: of a class token before 64 others, on the second of two tiles.
    """
    if len(set(tensors)) < len(tensors):
        raise Refused("it joins a value to itself")
    boxes, start = low.result(call.node, axes), 0
    inputs = {}
    for tensor in tensors:
        size = low.shape(tensor)[dim]
        rows = [
            tuple(min(max(row - start, 0), size) for row in box[dim]) for box in boxes
        ]
        wanted = (
            (*box[:dim], (first, last), *box[dim + 1 :])
            for box, (first, last) in zip(boxes, rows, strict=True)
        )
        inputs[tensor] = low.part(tensor, wanted)
        start += size
    return inputs


def channels(low: Lowering, call: Call) -> Local:
    """Run an operation that mixes channels only, on each tile."""
    axes = low.axes(call.input)
    if axes is None or any(axis is not None for axis in axes[:2]):
        raise Refused("it is cut along batch or channels")
    return call_again(low, call, axes, {call.input: alike(low, call, call.input, axes)})


def repeat(low: Lowering, call: Call) -> Local:
    """Repeat tiles along dimensions that are not cut."""
    source, axes = call.input, low.axes(call.input)
    counts = pytree.tree_leaves((call.node.args[1:], call.node.kwargs))
    if axes is None or not all(isinstance(count, int) for count in counts):
        raise Refused("its counts are not numbers")
    counts = [1] * (len(axes) - len(counts)) + counts
    result = (*(None,) * (len(counts) - len(axes)), *axes)
    if any(
        axis is not None and count != 1
        for axis, count in zip(result, counts, strict=True)
    ):
        raise Refused("it repeats along a dimension that is cut")
    return call_again(low, call, result, {source: low.get(source).node})


def roll(low: Lowering, call: Call) -> Local:
    """Let each tile want the rows that come to it, around the edge."""
    source, node = call.input, call.node
    axes = low.axes(source)
    given, shifts = call.get("dim", call.get("dims")), call["shifts"]
    if axes is None or numbered(given, len(axes)) is None:
        raise Refused("it goes over all elements")
    by = dict.fromkeys(range(len(axes)), 0)
    dims = [given] if isinstance(given, int) else list(given)
    for dim, shift in zip(dims, numbers(shifts, len(dims)), strict=True):
        by[dim % len(axes)] += shift
    if all(axes[dim] is None for dim, shift in by.items() if shift):
        return call_again(low, call, axes, {source: low.get(source).node})
    wanted = tuple(
        tuple(
            (start - by[dim], stop - by[dim]) for dim, (start, stop) in enumerate(box)
        )
        for box in low.owned(low.shape(node), axes)
    )
    return low.stands_for(low.part(source, wanted, wraps=True), node, axes)


def flip(low: Lowering, call: Call) -> Local:
    """Let each tile want what lies opposite to it, and turn that around."""
    source = call.input
    shape, axes = low.shape(source), low.axes(source)
    given = pytree.tree_leaves((call.node.args[1:], call.node.kwargs))  # x.flip(2, 3)
    dims = numbered(given, len(shape))
    if axes is None or dims is None:
        raise Refused("its dimensions are not numbers")
    wanted = tuple(
        tuple(
            (size - stop, size - start) if dim in dims else (start, stop)
            for dim, (size, (start, stop)) in enumerate(zip(shape, box, strict=True))
        )
        for box in low.owned(shape, axes)
    )
    return call_again(low, call, axes, {source: low.part(source, wanted)})


def along(low: Lowering, call: Call) -> Local:
    """Run an operation along dimensions that are not cut."""
    source = call.input
    axes = low.axes(source)
    dims = len(low.shape(source))
    along_dims = numbered(call.get("dim", call.get("dims")), dims)
    if axes is None or along_dims is None:
        raise Refused("it goes over all elements")
    if low.flattened(source) is not None:
        raise Refused("it needs a value flattened")
    if any(axes[dim] is not None for dim in along_dims):
        raise Refused("it goes along a dimension that is cut")
    if any(
        low.axes(n) is not None for n in call.node.all_input_nodes if n is not source
    ):
        raise Refused("it takes several values that are cut")
    rank = meta.tensors(call.node)[0].dim()
    if rank == dims:
        result = axes
    elif rank == dims - len(along_dims):
        result = tuple(a for dim, a in enumerate(axes) if dim not in along_dims)
    else:
        raise Refused("its result has other dimensions")
    return call_again(low, call, result, {source: low.get(source).node})
