"""Operators that move elements: reshape, cut, join, pad."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import torch

from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.operators.text import axis_of, dim_of, of_numbers, tuple_of
from gemsc.importers.sheet import Symbol


def _reshape(node: Node) -> Symbol:
    x = node.value(0)
    target = [int(size) for size in node.settings("shape", 1)]
    if not node.attribute("allowzero", 0):
        if any(size == 0 for size in target[len(x.shape) :]):
            raise node.refuse(f"keeps an axis that {x.shape} has not")
        target = [size or x.shape[axis] for axis, size in enumerate(target)]
    if -1 in target:
        rest = math.prod(size for size in target if size != -1)
        target[target.index(-1)] = math.prod(x.shape) // max(rest, 1)
    return node.gives(f"{x}.{_reshaped(x, target)}")


def _reshaped(x: Symbol, target: list[int]) -> str:
    """Return the call of a method; where it can be, for every batch."""
    if not target:
        return "reshape(())"
    if 0 in target:
        return f"reshape{tuple_of(target)}"
    open_axis = _axis_of_batch(x, target)
    if open_axis == 0 and len(target) == 2 < len(x.shape) and target[0] == x.shape[0]:
        return "flatten(1)"
    sizes = [-1 if axis == open_axis else size for axis, size in enumerate(target)]
    return f"reshape({', '.join(map(str, sizes))})"


def _axis_of_batch(x: Symbol, target: Sequence[int]) -> int:
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
    found = []
    for place, size in enumerate(target):
        step = math.prod(target[place + 1 :])
        if size == x.shape[axis] and step == inside:
            return place
        fits = any(
            step <= distance and step * size >= distance * batch
            for distance in (inside * more, inside)
        )
        if fits and size % batch == 0:
            found.append(place)
    exact = [place for place in found if target[place] == batch]
    return next(iter(exact if more > 1 and exact else found), 0)


def _flatten(node: Node) -> Symbol:
    x = node.value(0)
    rank = len(x.shape)
    axis = node.attribute("axis", 1)
    axis += rank if axis < 0 else 0
    if axis == 1 and rank > 1:
        return node.gives(f"{x}.flatten(1)")
    size = math.prod(x.shape[axis:])
    if axis == 0 or 0 in x.shape:
        return node.gives(f"{x}.reshape({math.prod(x.shape[:axis])}, {size})")
    return node.gives(f"{x}.reshape(-1, {size})")


def _transpose(node: Node) -> Symbol:
    x = node.value(0)
    rank = len(x.shape)
    order = list(node.attribute("perm") or reversed(range(rank)))
    moved = [axis for axis in range(rank) if order[axis] != axis]
    if not moved:
        return x
    if len(moved) == 2:
        return node.gives(f"{x}.transpose({moved[0]}, {moved[1]})")
    return node.gives(f"{x}.permute({', '.join(map(str, order))})")


def _concat(node: Node) -> Symbol:
    values = [node.value(index) for index in range(len(node.operands))]
    rank = len(values[0].shape)
    axis = dim_of(axis_of(node, node.attribute("axis", 1), rank), rank)
    return node.gives(f"torch.cat([{', '.join(map(str, values))}], dim={axis})")


def _split(node: Node) -> list[Symbol | None]:
    x = node.value(0)
    rank = len(x.shape)
    axis = axis_of(node, node.attribute("axis", 0), rank)
    sizes = node.setting("split", 1)
    count = node.attribute("num_outputs") or len(node.outputs)
    if sizes is None:
        part = -(-x.shape[axis] // count)
        full = [part] * (count - 1)
        sizes = [*full, x.shape[axis] - sum(full)]
    dim = dim_of(axis, rank)
    text = f"{x}.split({[int(size) for size in sizes]}, dim={dim})"
    if len(set(sizes)) == 1 and sizes[0]:
        text = f"{x}.chunk({len(sizes)}, dim={dim})"
    names = [name or "_" for name in node.outputs]
    if len(names) != len(sizes):
        raise node.refuse(f"splits into {len(sizes)}, and names {len(names)}")
    if len(names) == 1:
        return [node.gives(f"{text}[0]")]
    return list(node.sheet.unpack(names, text))


def _slice(node: Node) -> Symbol:
    x = node.value(0)
    rank = len(x.shape)
    starts, ends = node.settings("starts", 1), node.settings("ends", 2)
    axes = node.setting("axes", 3) or range(len(starts))
    steps = node.setting("steps", 4) or [1] * len(starts)
    parts, backwards = [":"] * rank, []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        place = axis_of(node, axis, rank)
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


def _squeeze(node: Node) -> Symbol:
    x = node.value(0)
    rank = len(x.shape)
    axes = node.setting("axes", 1)
    if axes is None:
        axes = [axis for axis, size in enumerate(x.shape) if size == 1]
    places = sorted({axis_of(node, axis, rank) for axis in axes})
    if any(x.shape[axis] != 1 for axis in places):
        raise node.refuse(f"squeezes axes {places} of {x.shape}")
    if not places:
        return x
    dims = dim_of(places[0], rank) if len(places) == 1 else tuple(places)
    return node.gives(f"{x}.squeeze({dims})")


def _unsqueeze(node: Node) -> Symbol:
    x = node.value(0)
    axes = node.settings("axes", 1)
    rank = len(x.shape) + len(axes)
    places = sorted(axis_of(node, axis, rank) for axis in axes)
    calls = [f".unsqueeze({axis})" for axis in places]
    return node.gives(x.text + "".join(calls))


def _expand(node: Node) -> Symbol:
    x = node.value(0)
    target = tuple(int(size) for size in node.settings("shape", 1))
    shape = np.broadcast_shapes(x.shape, target)
    padded = (None,) * (len(shape) - len(x.shape)) + x.shape
    sizes = [-1 if old == new else new for old, new in zip(padded, shape, strict=True)]
    if set(sizes) <= {-1}:
        return x
    texts = [str(size) for size in sizes]
    batch = node.batch
    if sizes[0] != -1 and batch is not None and sizes[0] == batch.shape[0]:
        texts[0] = f"{batch}.shape[0]"  # a token for each sample
    return node.gives(f"{x}.expand({', '.join(texts)})")


def _tile(node: Node) -> Symbol:
    x = node.value(0)
    return node.gives(f"{x}.repeat({', '.join(map(str, node.settings('repeats', 1)))})")


def _cast(node: Node) -> Symbol:
    x, kind = node.value(0), node.attribute("to")
    return _to(x, torch_type_of(node, kind), node)


def _cast_like(node: Node) -> Symbol:
    like = node.operand(1)
    assert like is not None
    if isinstance(like, Symbol):
        return _to(node.value(0), like.tensor.dtype, node)
    kind = onnx.helper.np_dtype_to_tensor_dtype(like.dtype)
    return _to(node.value(0), torch_type_of(node, kind), node)


_TORCH: Mapping[int, torch.dtype] = {
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
    onnx.TensorProto.BOOL: torch.bool,
    onnx.TensorProto.DOUBLE: torch.float64,
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.INT16: torch.int16,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.INT8: torch.int8,
    onnx.TensorProto.UINT16: torch.uint16,
    onnx.TensorProto.UINT32: torch.uint32,
    onnx.TensorProto.UINT64: torch.uint64,
    onnx.TensorProto.UINT8: torch.uint8,
}


def torch_type_of(node: Node, kind: int) -> torch.dtype:
    """Return the type that a file names by a number.

    Raises:
        GemscError: PyTorch does not compute with it.
    """
    if kind not in _TORCH:
        name = onnx.helper.tensor_dtype_to_string(kind)
        raise node.refuse(
            f"makes numbers of type {name}", help="export the model without them"
        )
    return _TORCH[kind]


def _to(x: Symbol, dtype: torch.dtype, node: Node) -> Symbol:
    return x if x.tensor.dtype == dtype else node.gives(f"{x}.to({dtype})")


def _bit_cast(node: Node) -> Symbol:
    dtype = torch_type_of(node, node.attribute("to"))
    x = node.value(0)
    if dtype.itemsize != x.tensor.element_size():
        raise node.refuse(f"sees {x.tensor.dtype} as another type")
    return node.gives(f"{x}.view({dtype})")


def _depth_to_space(node: Node) -> Symbol:
    x, block = node.value(0), node.attribute("blocksize")
    if node.attribute("mode", "DCR") == "CRD":
        return node.gives(f"F.pixel_shuffle({x}, {block})")
    parts = (block * block, x.shape[1] // block**2)
    text = f"{x}.unflatten(1, {parts}).transpose(1, 2).flatten(1, 2)"
    return node.gives(f"F.pixel_shuffle({text}, {block})")


def _space_to_depth(node: Node) -> Symbol:
    x, block = node.value(0), node.attribute("blocksize")
    text = f"F.pixel_unshuffle({x}, {block})"
    if node.attribute("mode", "DCR") == "CRD":
        return node.gives(text)
    parts = (x.shape[1], block * block)
    return node.gives(f"{text}.unflatten(1, {parts}).transpose(1, 2).flatten(1, 2)")


def _trilu(node: Node) -> Symbol:
    x = node.value(0)
    found = node.array(1)
    diagonal = 0 if found is None else int(found.reshape(-1)[0])
    method = "triu" if node.attribute("upper", 1) else "tril"
    return node.gives(f"{x}.{method}({diagonal or ''})")


def _identity(node: Node) -> Symbol:
    return node.value(0)


def _eye_like(node: Node) -> Symbol:
    x = node.value(0)
    dtype = x.tensor.dtype
    if node.attribute("dtype") is not None:
        dtype = torch_type_of(node, node.attribute("dtype"))
    k = node.attribute("k", 0)
    ones = f"torch.ones({x.shape}, dtype={dtype}, device={x}.device)"
    return node.gives(f"{ones}.tril({k}).triu({k})")


def _where(node: Node) -> Symbol:
    values = [node.value(index) for index in range(3)]
    return node.gives(f"torch.where({', '.join(map(str, values))})")


SHAPES: Mapping[str, Operator] = {
    "BitCast": _bit_cast,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Concat": _concat,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "Flatten": _flatten,
    "Identity": _identity,
    "Reshape": _reshape,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
    **of_numbers({"EyeLike": _eye_like, "Trilu": _trilu}),
}
