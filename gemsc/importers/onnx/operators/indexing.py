"""Operators that take or put elements by their places."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from torch import nn

from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.operators.text import at, axis_of, buffer, of_numbers
from gemsc.importers.onnx.static import Static, torch_type
from gemsc.importers.sheet import Symbol

_MOST_LISTED = 8
_REDUCES = {"mul": "prod", "min": "amin", "max": "amax"}


def _gather(node: Node) -> Symbol:
    table, places = node.operand(0), node.operand(1)
    assert table is not None
    rank = len(table.shape)
    axis = axis_of(node, node.attribute("axis", 0), rank)
    if isinstance(places, Static):
        return node.gives(f"{node.value(0)}{at(axis, _literal(node, places))}")
    indices = node.value(1)
    if isinstance(table, Static) and table.trained and rank == 2 and axis == 0:
        held = node.held(table, table.shape)
        if held is not None:  # a layer has it, such as the head of a language model
            return node.gives(f"F.embedding({indices}, {held})")
        embedding = nn.Embedding(
            table.shape[0], table.shape[1], dtype=torch_type(table.dtype)
        )
        return node.gives(f"{node.layer(embedding, weight=table)}({indices})")
    return node.gives(f"{node.value(0)}{at(axis, indices.text)}")


def _literal(node: Node, places: Static) -> str:
    """Return known places as an index: a number, a slice, a list, or a buffer."""
    array = places.array
    if array.ndim == 0:
        return str(int(array))
    if array.ndim == 1 and array.size <= _MOST_LISTED:
        return str([int(place) for place in array])
    if array.dtype == np.int64:
        return node.value(1).text
    return buffer(node, "index", array.astype(np.int64)).text


def _wrapped(node: Node, index: int, size: int) -> str:
    """Return places that are counted from the end, from the start."""
    places = node.operand(index)
    if isinstance(places, Static):
        array = places.array
        return buffer(node, "index", (array + (array < 0) * size).astype(np.int64)).text
    return f"{node.value(index)} % {size}"


def _gather_elements(node: Node) -> Symbol:
    x = node.value(0)
    axis = axis_of(node, node.attribute("axis", 0), len(x.shape))
    places = _wrapped(node, 1, x.shape[axis])
    places = f"({places}).long()" if " " in places else places
    return node.gives(f"{x}.gather({axis}, {places})")


def _gather_nd(node: Node) -> Symbol:
    x, places = node.value(0), node.value(1)
    batched = node.attribute("batch_dims", 0)
    shape = places.shape
    parts = []
    for axis in range(batched):
        ones = ", ".join("-1" if i == axis else "1" for i in range(len(shape) - 1))
        count = f"torch.arange({x}.shape[{axis}], device={x}.device)"
        parts.append(f"{count}.reshape({ones})")
    parts += [f"{places}[..., {i}].long()" for i in range(shape[-1])]
    return node.gives(f"{x}[{', '.join(parts)}]")


def _scatter_nd(node: Node) -> Symbol:
    x, places, updates = node.value(0), node.value(1), node.value(2)
    reduction = node.attribute("reduction", "none")
    depth = places.shape[-1]
    if reduction in ("none", "add"):
        parts = [f"{places}[..., {i}].long()" for i in range(depth)]
        add = ", accumulate=True" if reduction == "add" else ""
        return node.gives(f"{x}.index_put(({', '.join(parts)},), {updates}{add})")
    if reduction not in _REDUCES:
        raise node.refuse(f"reduces by {reduction!r}")
    rows = math.prod(x.shape[:depth])
    strides = [math.prod(x.shape[i + 1 : depth]) for i in range(depth)]
    terms = [f"{places}[..., {i}] % {x.shape[i]} * {strides[i]}" for i in range(depth)]
    row = node.sheet.line("row", f"({' + '.join(terms)}).reshape(-1).long()")
    flat = f"{x}.reshape({rows}, -1)"
    given = f"{updates}.reshape({row}.numel(), -1)"
    text = f'{flat}.index_reduce(0, {row}, {given}, "{_REDUCES[reduction]}")'
    return node.gives(f"{text}.reshape({x}.shape)")


def _scatter_elements(node: Node) -> Symbol:
    x, updates = node.value(0), node.value(2)
    axis = axis_of(node, node.attribute("axis", 0), len(x.shape))
    places = _wrapped(node, 1, x.shape[axis])
    places = f"({places}).long()" if " " in places else places
    reduction = node.attribute("reduction", "none")
    arguments = f"{axis}, {places}, {updates}"
    if reduction == "none":
        return node.gives(f"{x}.scatter({arguments})")
    if reduction == "add":
        return node.gives(f"{x}.scatter_add({arguments})")
    if reduction not in _REDUCES:
        raise node.refuse(f"reduces by {reduction!r}")
    return node.gives(f'{x}.scatter_reduce({arguments}, "{_REDUCES[reduction]}")')


def _compress(node: Node) -> Symbol:
    x, chosen = node.value(0), node.array(1)
    assert chosen is not None
    places = buffer(node, "index", np.flatnonzero(chosen))
    if node.attribute("axis") is None:
        return node.gives(f"{x}.reshape(-1)[{places}]")
    axis = axis_of(node, node.attribute("axis"), len(x.shape))
    return node.gives(f"{x}{at(axis, places.text)}")


def _one_hot(node: Node) -> Symbol:
    places, depth, values = node.value(0), node.array(1), node.operand(2)
    assert depth is not None
    count = int(depth.reshape(-1)[0])
    rank = len(places.shape) + 1
    axis = axis_of(node, node.attribute("axis", -1), rank)
    if isinstance(values, Static):
        off, on = (_scalar(values.array[i]) for i in (0, 1))
    else:
        off, on = (f"{node.value(2)}[{i}]" for i in (0, 1))
    shape = ", ".join("-1" if i == axis else "1" for i in range(rank))
    device = f"device={places}.device"
    counted = f"torch.arange({count}, {device}).reshape({shape})"
    row = node.sheet.line("places", f"{places}.unsqueeze({axis})")
    wrapped = f"torch.where({row} < 0, {row} + {count}, {row})"
    return node.gives(f"torch.where({wrapped} == {counted}, {on}, {off})")


def _scalar(value: np.generic) -> str:
    text = f"{float(value)!r}" if value.dtype.kind == "V" else repr(value.item())
    return f"torch.tensor({text}, dtype={torch_type(value.dtype)})"


def _reverse_sequence(node: Node) -> Symbol:
    x, lengths = node.value(0), node.array(1)
    assert lengths is not None
    time, batch = node.attribute("time_axis", 0), node.attribute("batch_axis", 1)
    if {time, batch} != {0, 1}:
        raise node.refuse(f"has its time in axis {time} and its batch in {batch}")
    steps = np.arange(x.shape[time])[:, None]
    table = np.where(steps < lengths, lengths - 1 - steps, steps)
    table = table if time == 0 else table.T
    shape = (*table.shape, *[1] * (len(x.shape) - 2))
    places = buffer(node, "index", table.reshape(shape))
    return node.gives(f"torch.take_along_dim({x}, {places}, dim={time})")


INDEXING: Mapping[str, Operator] = {
    "Compress": _compress,
    "Gather": _gather,
    "GatherND": _gather_nd,
    **of_numbers(
        {
            "GatherElements": _gather_elements,
            "OneHot": _one_hot,
            "ReverseSequence": _reverse_sequence,
            "Scatter": _scatter_elements,
            "ScatterElements": _scatter_elements,
            "ScatterND": _scatter_nd,
        }
    ),
}
