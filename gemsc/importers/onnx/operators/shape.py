"""Operators that move elements: reshape, cut, join, repeat, cast."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gemsc.importers.onnx.operators.node import (
    Node,
    Number,
    Numbers,
    dim_of,
    operator,
)
from gemsc.importers.sheet import Symbol, filled

# ----------------------------------------------------------------------------- axes


@operator("Reshape")
def _reshape(node: Node, x: Symbol, shape: Numbers) -> Symbol:
    """The same elements in another shape; 0 is a size that stays, -1 what is left."""
    if not node.attr.allowzero:
        if 0 in shape[x.rank :]:
            raise node.refuse(f"keeps an axis that {x.shape} has not")
        shape = [size or x.shape[axis] for axis, size in enumerate(shape)]
    return node.gives(f"{x}.{_reshaped(x, filled(shape, math.prod(x.shape)))}")


def _reshaped(x: Symbol, shape: Sequence[int]) -> str:
    """Return the call of a method; where it can be, for every batch."""
    if not shape:
        return "reshape(())"
    if 0 in shape:
        return f"reshape{tuple(shape)}"
    open_axis = _axis_of_batch(x, shape)
    if open_axis == 0 and len(shape) == 2 < x.rank and shape[0] == x.shape[0]:
        return "flatten(1)"
    sizes = [-1 if axis == open_axis else size for axis, size in enumerate(shape)]
    return f"reshape({', '.join(map(str, sizes))})"


def _axis_of_batch(x: Symbol, shape: Sequence[int]) -> int:
    """Return the axis of a new shape that grows with the batch: the first, mostly.

    Not so where attention has (steps, batch * heads, features). It is the axis whose
    elements are as far from each other as those of the batch are.
    """
    if x.other is None or len(x.batch_axes) != 1:
        return 0
    (axis,) = x.batch_axes
    more = x.other.shape[axis] - x.shape[axis]  # elements for each sample
    if x.shape[axis] % more:
        return 0
    batch, inside = x.shape[axis] // more, math.prod(x.shape[axis + 1 :])
    fitting = []
    for place, size in enumerate(shape):
        step = math.prod(shape[place + 1 :])
        if size == x.shape[axis] and step == inside:
            return place
        fits = any(
            step <= distance and step * size >= distance * batch
            for distance in (inside * more, inside)
        )
        if fits and size % batch == 0:
            fitting.append(place)
    exact = [place for place in fitting if shape[place] == batch]
    return next(iter(exact if more > 1 and exact else fitting), 0)


@operator("Flatten")
def _flatten(node: Node, x: Symbol) -> Symbol:
    """A matrix: the axes before one, and the others."""
    axis = node.attr.axis
    axis += x.rank if axis < 0 else 0
    if axis == 1 and x.rank > 1:
        return node.gives(f"{x}.flatten(1)")
    is_fixed = axis == 0 or 0 in x.shape
    rows = math.prod(x.shape[:axis]) if is_fixed else -1
    return node.gives(f"{x}.reshape({rows}, {math.prod(x.shape[axis:])})")


@operator("Transpose")
def _transpose(node: Node, x: Symbol) -> Symbol:
    """The axes in another order, backwards if none is given."""
    order = list(node.attr.perm or reversed(range(x.rank)))
    moved = [axis for axis in range(x.rank) if order[axis] != axis]
    if not moved:
        return x
    if len(moved) == 2:
        return node.gives(f"{x}.transpose({moved[0]}, {moved[1]})")
    return node.gives(f"{x}.permute({', '.join(map(str, order))})")


@operator("Squeeze")
def _squeeze(node: Node, x: Symbol, axes: Numbers | None) -> Symbol:
    """Without axes of size 1: all of them if none is named."""
    if axes is None:
        axes = [axis for axis, size in enumerate(x.shape) if size == 1]
    places = sorted({node.axis(axis, x.rank) for axis in axes})
    if any(x.shape[axis] != 1 for axis in places):
        raise node.refuse(f"squeezes axes {places} of {x.shape}")
    if not places:
        return x
    dims = dim_of(places[0], x.rank) if len(places) == 1 else tuple(places)
    return node.gives(f"{x}.squeeze({dims})")


@operator("Unsqueeze")
def _unsqueeze(node: Node, x: Symbol, axes: Numbers) -> Symbol:
    places = sorted(node.axis(axis, x.rank + len(axes)) for axis in axes)
    return node.gives(x.text + "".join(f".unsqueeze({axis})" for axis in places))


@operator("Expand")
def _expand(node: Node, x: Symbol, shape: Numbers) -> Symbol:
    wide = np.broadcast_shapes(x.shape, tuple(shape))
    padded = (None,) * (len(wide) - x.rank) + x.shape
    sizes = [-1 if old == new else new for old, new in zip(padded, wide, strict=True)]
    if set(sizes) <= {-1}:
        return x
    texts = [str(size) for size in sizes]
    batch = node.batch
    if sizes[0] != -1 and batch is not None and sizes[0] == batch.shape[0]:
        texts[0] = f"{batch}.shape[0]"  # a token for each sample
    return node.gives(f"{x}.expand({', '.join(texts)})")


@operator("Tile")
def _tile(node: Node, x: Symbol, repeats: Numbers) -> Symbol:
    return node.gives(f"{x}.repeat({', '.join(map(str, repeats))})")


@operator("DepthToSpace")
def _depth_to_space(node: Node, x: Symbol) -> Symbol:
    blocksize = node.attr.blocksize
    text = x.text
    if node.attr.mode != "CRD":
        parts = (blocksize * blocksize, x.shape[1] // blocksize**2)
        text = f"{x}.unflatten(1, {parts}).transpose(1, 2).flatten(1, 2)"
    return node.gives(f"F.pixel_shuffle({text}, {blocksize})")


@operator("SpaceToDepth")
def _space_to_depth(node: Node, x: Symbol) -> Symbol:
    blocksize = node.attr.blocksize
    text = f"F.pixel_unshuffle({x}, {blocksize})"
    if node.attr.mode != "CRD":
        parts = (x.shape[1], blocksize * blocksize)
        text += f".unflatten(1, {parts}).transpose(1, 2).flatten(1, 2)"
    return node.gives(text)


# -------------------------------------------------------------------- joined and cut


@operator("Concat")
def _concat(node: Node, *values: Symbol) -> Symbol:
    rank = values[0].rank
    dim = dim_of(node.axis(node.attr.axis, rank), rank)
    return node.gives(f"torch.cat([{', '.join(map(str, values))}], dim={dim})")


@operator("Split")
def _split(node: Node, x: Symbol, split: Numbers | None) -> Sequence[Symbol | None]:
    """Parts of an axis, in these sizes or alike."""
    names = [name or "_" for name in node.outputs]
    place = node.axis(node.attr.axis, x.rank)
    if split is None:
        count = node.attr.num_outputs or len(names)
        part = -(-x.shape[place] // count)
        split = [*[part] * (count - 1), x.shape[place] - part * (count - 1)]
    text = f"{x}.split({split}, dim={dim_of(place, x.rank)})"
    if len(set(split)) == 1 and split[0]:
        text = f"{x}.chunk({len(split)}, dim={dim_of(place, x.rank)})"
    if len(names) != len(split):
        raise node.refuse(f"splits into {len(split)}, and names {len(names)}")
    if len(names) == 1:
        return [node.gives(f"{text}[0]")]
    return node.sheet.unpack(names, text)


@operator("Slice")
def _slice(
    node: Node,
    x: Symbol,
    starts: Numbers,
    ends: Numbers,
    axes: Numbers | None,
    steps: Numbers | None,
) -> Symbol:
    parts, backwards = [":"] * x.rank, []
    places = axes or range(len(starts))
    steps = steps or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, places, steps, strict=True):
        place = node.axis(axis, x.rank)
        if step == 0:
            raise node.refuse("has the step 0")
        parts[place] = _part(start, end, step, x.shape[place])
        if step < 0:
            backwards.append(place)
    while parts and parts[-1] == ":":
        parts.pop()
    text = f"{x}[{', '.join(parts)}]" if parts else x.text
    if backwards:
        text += f".flip({', '.join(map(str, sorted(backwards)))})"
    return node.gives(text) if text != x.text else x


def _part(start: int, end: int, step: int, size: int) -> str:
    """Return the slice of an axis, forwards; one with a negative step is flipped."""
    if step < 0:  # from the last element at most, to before the first
        start = min(max(start + size * (start < 0), 0), size - 1)
        end = min(max(end + size * (end < 0), -1), size - 1)
        places = range(start, end, step)
        if not places:
            return "0:0"
        start, end, step = places[-1], places[0] + 1, -step
    first = "" if start == 0 or start <= -size else str(start)
    last = "" if end >= size else str(max(end, -size - 1))
    if last and end < -size:
        return "0:0"
    return f"{first}:{last}" + (f":{step}" if step != 1 else "")


@operator("Where")
def _where(node: Node, condition: Symbol, x: Symbol, y: Symbol) -> Symbol:
    return node.gives(f"torch.where({condition}, {x}, {y})")


@operator("Trilu")
def _triangle(node: Node, x: Symbol, k: Number | None) -> Symbol:
    return node.gives(f"{x}.{'triu' if node.attr.upper else 'tril'}({k or ''})")


# ----------------------------------------------------------------------------- types


@operator("Cast")
def _cast(node: Node, x: Symbol) -> Symbol:
    dtype = node.dtype(node.attr.to)
    return x if x.tensor.dtype == dtype else node.gives(f"{x}.to({dtype})")


@operator("BitCast")
def _bit_cast(node: Node, x: Symbol) -> Symbol:
    dtype = node.dtype(node.attr.to)
    if dtype.itemsize != x.tensor.element_size():
        raise node.refuse(f"sees {x.tensor.dtype} as another type")
    return node.gives(f"{x}.view({dtype})")


@operator("EyeLike")
def _eye_like(node: Node, x: Symbol) -> Symbol:
    kind = x.tensor.dtype if node.attr.dtype is None else node.dtype(node.attr.dtype)
    ones = f"torch.ones({x.shape}, dtype={kind}, device={x}.device)"
    return node.gives(f"{ones}.tril({node.attr.k}).triu({node.attr.k})")
