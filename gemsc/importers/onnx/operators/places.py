"""Operators that reduce axes, or take and put elements by their places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import nn

from gemsc.importers.onnx.operators.node import (
    Node,
    Number,
    Numbers,
    at,
    dim_of,
    operator,
)
from gemsc.importers.onnx.operators.parameters import Static, Value, torch_type
from gemsc.importers.sheet import Symbol

MOST_LISTED = 8
REDUCES = {"mul": "prod", "min": "amin", "max": "amax"}

# ------------------------------------------------------------------------ reductions


def _reduces(
    text: str, of_none: str, node: Node, x: Symbol, axes: Numbers | None
) -> Symbol:
    """An expression in {x} and {dims}, the other arguments; another one of no axes."""
    places = sorted({node.axis(a, x.rank) for a in axes or range(x.rank)})
    if not places or (node.attr.noop_with_empty_axes and not axes):
        return node.gives(of_none.format(x=x))
    if 0 in [x.shape[axis] for axis in places]:
        raise node.refuse("reduces an axis of no elements")
    keep = ", keepdim=True" * bool(node.attr.keepdims)
    is_float = x.tensor.is_floating_point()
    dtype = "" if is_float else f", dtype={x.tensor.dtype}"
    if "prod" in text:  # which is of one axis
        calls = [f".prod({axis}{keep}{dtype})" for axis in reversed(places)]
        return node.gives(x.text + "".join(calls))
    names = [dim_of(axis, x.rank) for axis in places]
    dims = f"dim={names[0] if len(names) == 1 else tuple(names)}{keep}"
    return node.gives(text.format(x=x, dims=dims + dtype * (".sum" in text)))


for _kind, _texts in {
    "ReduceL1": ("{x}.abs().sum({dims})", "{x}.abs()"),
    "ReduceL2": ("torch.linalg.vector_norm({x}, {dims})", "{x}.abs()"),
    "ReduceLogSum": ("{x}.sum({dims}).log()", "{x}.log()"),
    "ReduceLogSumExp": ("torch.logsumexp({x}, {dims})", "{x}.clone()"),
    "ReduceMax": ("{x}.amax({dims})", "{x}.clone()"),
    "ReduceMean": ("{x}.mean({dims})", "{x}.clone()"),
    "ReduceMin": ("{x}.amin({dims})", "{x}.clone()"),
    "ReduceProd": ("{x}.prod({dims})", "{x}.clone()"),
    "ReduceSum": ("{x}.sum({dims})", "{x}.clone()"),
    "ReduceSumSquare": ("{x}.square().sum({dims})", "{x}.square()"),
}.items():
    operator(_kind)(partial(_reduces, *_texts))


@operator("ArgMax", "ArgMin")
def _place_of(node: Node, x: Symbol) -> Symbol:
    """Where the largest or smallest element of an axis is: the first of equal ones."""
    place = node.axis(node.attr.axis, x.rank)
    keep = ", keepdim=True" * bool(node.attr.keepdims)
    call = f"{node.kind.lower()}(dim={dim_of(place, x.rank)}{keep})"
    if not node.attr.select_last_index:
        return node.gives(f"{x}.{call}")
    flip = f"flip({dim_of(place, x.rank)})"
    return node.gives(f"{x.shape[place] - 1} - {x}.{flip}.{call}")


@operator("TopK")
def _top_k(node: Node, x: Symbol, k: Number) -> Sequence[Symbol | None]:
    """Return the largest elements and where they are: of equal ones, the first."""
    place = node.axis(node.attr.axis, x.rank)
    dim, largest = dim_of(place, x.rank), node.attr.largest != 0
    names = [name or "_" for name in (*node.outputs, "", "")[:2]]
    if names[1] == "_":
        order = "" if largest else ", largest=False"
        text = f"{x}.topk({k}, dim={dim}{order})"
        return [node.sheet.unpack(names, text)[0], None]
    order = f"dim={dim}, descending={largest}, stable=True"
    values = node.sheet.unpack(names, f"{x}.sort({order})")
    return [
        None if name == "_" else node.sheet.line(name, f"{value}{at(place, f':{k}')}")
        for value, name in zip(values, names, strict=True)
    ]


# ------------------------------------------------------------------------- gathering


@operator("Gather")
def _gather(node: Node, table: Value, places: Value) -> Symbol:
    """Rows of a table: an Embedding if the table is a weight."""
    place = node.axis(node.attr.axis, table.rank)
    if isinstance(places, Static):
        return node.gives(f"{node.tensor(table)}{at(place, _literal(node, places))}")
    if isinstance(table, Static) and table.trained and table.rank == 2 and place == 0:
        held = node.parameters.held(table)
        if held is not None:  # a layer has it, such as the head of a language model
            return node.gives(f"F.embedding({places}, {held})")
        rows, width = table.shape
        embedding = nn.Embedding(rows, width, dtype=torch_type(table.dtype))
        return node.gives(f"{node.layer(embedding, weight=table)}({places})")
    return node.gives(f"{node.tensor(table)}{at(place, places.text)}")


def _literal(node: Node, places: Static) -> str:
    """Return known places as an index: a number, a slice, a list, or a buffer."""
    array = places.array
    if array.ndim == 0:
        return str(int(array))
    if array.ndim == 1 and array.size <= MOST_LISTED:
        return str([int(place) for place in array])
    if array.dtype == np.int64:
        return node.tensor(places).text
    return node.buffer("index", array.astype(np.int64)).text


def _wrapped(node: Node, places: Value, size: int) -> str:
    """Return places that are counted from the end, from the start."""
    if isinstance(places, Symbol):
        return f"({places} % {size}).long()"
    array = places.array
    return node.buffer("index", (array + (array < 0) * size).astype(np.int64)).text


@operator("GatherElements")
def _gather_elements(node: Node, x: Symbol, places: Value) -> Symbol:
    axis = node.axis(node.attr.axis, x.rank)
    return node.gives(f"{x}.gather({axis}, {_wrapped(node, places, x.shape[axis])})")


@operator("GatherND")
def _gather_nd(node: Node, x: Symbol, places: Symbol) -> Symbol:
    parts = []
    for axis in range(node.attr.batch_dims or 0):
        ones = ", ".join("-1" if i == axis else "1" for i in range(places.rank - 1))
        count = f"torch.arange({x}.shape[{axis}], device={x}.device)"
        parts.append(f"{count}.reshape({ones})")
    parts += [f"{places}[..., {i}].long()" for i in range(places.shape[-1])]
    return node.gives(f"{x}[{', '.join(parts)}]")


@operator("Compress")
def _compress(node: Node, x: Symbol, condition: Numbers) -> Symbol:
    places = node.buffer("index", np.flatnonzero(condition))
    if node.attr.axis is None:
        return node.gives(f"{x}.reshape(-1)[{places}]")
    return node.gives(f"{x}{at(node.axis(node.attr.axis, x.rank), places.text)}")


@operator("ReverseSequence")
def _reverse_sequence(node: Node, x: Symbol, sequence_lens: Numbers) -> Symbol:
    time_axis = node.attr.time_axis
    if {time_axis, node.attr.batch_axis} != {0, 1}:
        raise node.refuse(
            f"has its time in axis {time_axis} and its batch in {node.attr.batch_axis}"
        )
    steps, lengths = np.arange(x.shape[time_axis])[:, None], np.array(sequence_lens)
    table = np.where(steps < lengths, lengths - 1 - steps, steps)
    table = table if time_axis == 0 else table.T
    places = node.buffer("index", table.reshape(*table.shape, *[1] * (x.rank - 2)))
    return node.gives(f"torch.take_along_dim({x}, {places}, dim={time_axis})")


# ------------------------------------------------------------------------ scattering


@operator("ScatterND")
def _scatter_nd(node: Node, x: Symbol, places: Symbol, updates: Symbol) -> Symbol:
    reduction = node.attr.reduction or "none"
    depth = places.shape[-1]
    if reduction in ("none", "add"):
        parts = [f"{places}[..., {i}].long()" for i in range(depth)]
        add = ", accumulate=True" if reduction == "add" else ""
        return node.gives(f"{x}.index_put(({', '.join(parts)},), {updates}{add})")
    word = _reduction(node, reduction)
    rows = math.prod(x.shape[:depth])
    strides = [math.prod(x.shape[i + 1 : depth]) for i in range(depth)]
    terms = [f"{places}[..., {i}] % {x.shape[i]} * {strides[i]}" for i in range(depth)]
    row = node.sheet.line("row", f"({' + '.join(terms)}).reshape(-1).long()")
    flat = f"{x}.reshape({rows}, -1)"
    rows_of_updates = f"{updates}.reshape({row}.numel(), -1)"
    text = f'{flat}.index_reduce(0, {row}, {rows_of_updates}, "{word}")'
    return node.gives(f"{text}.reshape({x}.shape)")


@operator("Scatter", "ScatterElements")
def _scatter_elements(node: Node, x: Symbol, places: Value, updates: Symbol) -> Symbol:
    axis, reduction = node.axis(node.attr.axis, x.rank), node.attr.reduction or "none"
    arguments = f"{axis}, {_wrapped(node, places, x.shape[axis])}, {updates}"
    if reduction in ("none", "add"):
        method = "scatter" if reduction == "none" else "scatter_add"
        return node.gives(f"{x}.{method}({arguments})")
    word = _reduction(node, reduction)
    return node.gives(f'{x}.scatter_reduce({arguments}, "{word}")')


def _reduction(node: Node, reduction: str) -> str:
    if reduction not in REDUCES:
        raise node.refuse(f"reduces by {reduction!r}")
    return REDUCES[reduction]


@operator("OneHot")
def _one_hot(node: Node, places: Symbol, depth: Number, values: Value) -> Symbol:
    count, rank = int(depth), places.rank + 1
    place = node.axis(node.attr.axis, rank)
    if isinstance(values, Static):
        off, on = (_scalar(values.array[i]) for i in (0, 1))
    else:
        off, on = (f"{values}[{i}]" for i in (0, 1))
    shape = ", ".join("-1" if i == place else "1" for i in range(rank))
    counted = f"torch.arange({count}, device={places}.device).reshape({shape})"
    row = node.sheet.line("places", f"{places}.unsqueeze({place})")
    wrapped = f"torch.where({row} < 0, {row} + {count}, {row})"
    return node.gives(f"torch.where({wrapped} == {counted}, {on}, {off})")


def _scalar(value: np.generic) -> str:
    text = f"{float(value)!r}" if value.dtype.kind == "V" else repr(value.item())
    return f"torch.tensor({text}, dtype={torch_type(value.dtype)})"
